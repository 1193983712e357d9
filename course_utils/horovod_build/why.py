"""Why a build failed, read from its log: the last errors, and what to do about them."""

from __future__ import annotations

import re
from pathlib import Path

LINES = 8  # of the log, shown in a message
_HEADLINES = {
    "fetch": "Horovod's source or its build tools could not be fetched",
    "compile": "Horovod could not be compiled",
    "try": "Horovod was compiled but cannot be imported",
}
_ADVICE = (  # the first one that fits the log
    (
        r"DO NOT MATCH THE HASHES",
        "What pip found is not Horovod's published source package: look at where pip is told to fetch packages from.",
    ),
    (r"No space left on device", "The disk is full: make room, or name a folder elsewhere with COURSE_HOROVOD_CACHE."),
    (
        r"Killed signal terminated|internal compiler error: Killed|Error 137\b",
        "The compiler was killed, most likely for want of memory: end other programs and notebooks, then try again.",
    ),
    (r"Python\.h: No such file", "Python's headers are missing. On Debian and Ubuntu: apt install python3-dev"),
    (
        r"No CMAKE_CXX_COMPILER could be found|is not able to compile a simple test program",
        "The C++ compiler does not work. On Debian and Ubuntu: apt install g++",
    ),
)
_NO_NETWORK = (
    "Is the network there? On Kaggle, turn on Internet in the notebook's settings, or attach a data set that "
    "holds a wheel which was built there before."
)
_NEW_TROUBLE = "Show the log to the course's maintainers: these versions may need a change of the recipe."


def explain(step: str, log: Path) -> str:
    """Return one message for a build that failed in `step`: what, the last errors, what to do, where the log is."""
    # what ran last failed; a line that begins with "$ " is a command
    text = log.read_text(encoding="utf-8", errors="replace").rpartition("\n$ ")[2]
    shown = "\n".join(f"  {line}" for line in last_errors(text))
    advice = next(
        (advice for pattern, advice in _ADVICE if re.search(pattern, text)),
        _NO_NETWORK if step == "fetch" else _NEW_TROUBLE,
    )
    return f"{_HEADLINES[step]}:\n{shown}\n{advice}\nEverything that was printed: {log}"


def last_errors(text: str) -> list[str]:
    """Return the last lines that name an error, with those around them, or the last lines where none does."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    named = re.compile(r"\berror\b[: ]|^\w*Error:", re.IGNORECASE)
    follows = re.compile(r"make.*\*\*\*|CalledProcessError")
    causes = [index for index, line in enumerate(lines) if named.search(line) and not follows.search(line)]
    first = max(0, causes[-3:][0] - 2) if causes else -LINES  # a linker says what it misses before it says "error"
    return lines[first:][:LINES]
