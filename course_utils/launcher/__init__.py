"""A function in a cell -> ranks -> a Run.

The way of one launch: `run` takes the call, `requests` looks at it, `sending` packs the function by value, `client`
finds or starts the `server`, which forks a process a rank; `rank` is the life of that process. `session` listens to all
ranks at once, for one call or, under `ranks`, for several; `output` shows and keeps what they print; `failures` and
`tracing` make sense of what they report. `frameworks` holds what differs between torch, TensorFlow and Horovod, on both
sides; for torch, `watching` notes each message and `links` slows it down. Where answers are judged, `relay` carries the
messages of `relayed` groups, and `plain` the results. `protocol` and `processes` are what the sides have in common.
"""

from .client import server_pid, shutdown, warm
from .links import Link
from .ranks import Ranks
from .run import Run, launch, launch_judged

__all__ = ["Link", "Ranks", "Run", "launch", "launch_judged", "server_pid", "shutdown", "warm"]
