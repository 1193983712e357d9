"""What shows our output: a notebook or something else, and whether it has to be the same at every execution."""

from __future__ import annotations

import os
import sys


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
