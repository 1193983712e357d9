"""What `import course_utils` adds to a bare interpreter's start, in turns with it; `make bench` runs it."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

ROUNDS = 7
TARGET = 0.15  # seconds
BARE = "pass"
OURS = "import sys, course_utils; sys.exit(any(heavy in sys.modules for heavy in ('torch', 'tensorflow')))"


def start(program: str) -> float:
    """Seconds that an interpreter takes for `program`, start to end; CalledProcessError if it fails."""
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", program], check=True)
    return time.perf_counter() - begin


def main() -> int:
    start(BARE), start(OURS)  # the first import compiles
    seconds = [(start(BARE), start(OURS)) for _ in range(ROUNDS)]
    bare, ours = (statistics.median(taken) for taken in zip(*seconds, strict=True))
    print(f"import course_utils adds {ours - bare:.3f} s to a bare interpreter's {bare:.3f} s (medians of {ROUNDS}).")
    if ours - bare >= TARGET:
        print(f"MISSED: the target is under {TARGET} s")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
