"""Static figures of the lessons: what moved between ranks, and what it costs.

Every function returns a `Picture`, which a notebook shows when it is a cell's last value: a PNG, with words for those
who cannot see it. The colours hold on a light and on a dark page, and no figure touches matplotlib's global state.
"""

from __future__ import annotations

from .costs import time_against_size
from .curves import lines_over_steps, share_bars
from .messages import chunk_movement, message_rounds
from .picture import Picture
from .timeline import step_timeline

__all__ = [
    "Picture",
    "chunk_movement",
    "lines_over_steps",
    "message_rounds",
    "share_bars",
    "step_timeline",
    "time_against_size",
]
