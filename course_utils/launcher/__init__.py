"""A function in a cell -> ranks -> a Run.

The way of one launch: `requests` looks at the call, `sending` packs the function by value, `client` finds or starts the
`server`, which forks a process a rank; `rank` is the life of that process, `watching` what it notes of its messages.
`run` listens to all ranks at once; `output` shows and keeps what they print; `failures` and `tracing` make sense of
what they report. `links` slows
messages down. Where answers are
judged, `relay` carries the messages of `relayed` groups, and `plain` the results. `protocol` and `processes` are what
the sides have in common.
"""

from .client import server_pid, shutdown, warm
from .links import Link
from .run import Run, launch, launch_judged

__all__ = ["Link", "Run", "launch", "launch_judged", "server_pid", "shutdown", "warm"]
