"""Tests of ranks that need a framework besides torch; they have nothing to do with the kernel's age and run once."""

from __future__ import annotations

import cloudpickle

from . import ends, meetings

for shared in (ends, meetings):
    cloudpickle.register_pickle_by_value(shared)  # no rank imports the tests
