"""What shows our output: a notebook or something else, whether it has to be the same every time, what stays out."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator


def is_plain() -> bool:
    """Whether outputs must be plain text and the same at every execution (COURSE_PLAIN=1, set by builder and tests)."""
    return os.environ.get("COURSE_PLAIN") == "1"


def in_a_notebook() -> bool:
    """Whether this is a notebook's kernel."""
    ipython = sys.modules.get("IPython")
    return hasattr(ipython.get_ipython() if ipython else None, "kernel")


def prints_to_a_notebook() -> bool:
    """Whether this is a notebook's kernel, and what is printed now goes to it: nobody has redirected sys.stdout."""
    return in_a_notebook() and type(sys.stdout).__module__ == "ipykernel.iostream"


@contextlib.contextmanager
def nothing_printed() -> Iterator[None]:
    """Keep what compiled code says while it is imported, such as that there is no GPU, from the cell."""
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)
