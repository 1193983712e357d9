"""Build and install Horovod from a shell: `python -m course_utils.horovod_build [--cache FOLDER]`."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence

from . import HorovodBuildFailed, ensure_horovod


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 when Horovod is there, 1 when it cannot be built, 130 when interrupted."""
    parser = argparse.ArgumentParser(prog="python -m course_utils.horovod_build", description=__doc__)
    parser.add_argument("--cache", metavar="FOLDER", help="where wheels are looked for, and kept")
    options = parser.parse_args(arguments)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    try:
        wheel = ensure_horovod(cache=options.cache)
    except HorovodBuildFailed as failure:
        print(failure, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Interrupted: nothing is left of this build, and the next one starts anew.", file=sys.stderr)
        return 130
    if wheel:
        print(f"Its wheel is kept as {wheel}")
    return 0


def _leave(number: int, frame: object) -> None:
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
