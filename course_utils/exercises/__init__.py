"""What a learner does with exercises: check an answer, take a hint, make a prediction, see the progress.

`registry` knows the exercises, described in one module a lesson (`lesson_00`, ...); `judging` runs an answer in fresh
ranks (`inside` is the part that runs there) and finds a verdict; `answers` and `guesses` show it, as `panels`;
`standins` take the place of missing answers; `telling` and `models` are what the checks of several lessons share;
`record` keeps what was done, `tally` adds it up.
"""

from __future__ import annotations

from .answers import check, hint
from .guesses import compare, predict
from .own import answered
from .standins import answer_needed
from .tally import progress

__all__ = ["answer_needed", "answered", "check", "compare", "hint", "predict", "progress"]
