"""Horovod, built once for the frameworks that are installed here: `ensure_horovod()`, or this module with `python -m`.

Horovod's last release is from 2023 and its source package does not build against today's frameworks; `recipe` holds
what it takes. A wheel fits one exact torch, TensorFlow and Python only, so each is kept under a name of its own and
used again wherever the same versions are installed.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from ..showing import Progress
from . import building, wheels
from .recipe import HOROVOD, HorovodBuildFailed, Recipe
from .wanted import is_installed, wanted

__all__ = ["HorovodBuildFailed", "ensure_horovod"]


def ensure_horovod(
    show: bool = True, cache: str | os.PathLike[str] | None = None, *, recipe: Recipe = HOROVOD
) -> Path | None:
    """Make `import horovod` work for the installed torch and TensorFlow; return the wheel it took, None for none.

    Where that Horovod is installed already, nothing happens. Else a wheel for the same versions is taken from `cache`
    (a folder; without it COURSE_HOROVOD_CACHE, or the user's cache folder; on Kaggle also the attached data sets), or
    one is built, which takes minutes, and kept there. With `show` the progress is shown. TensorFlow may be absent:
    then Horovod is built for torch alone. A second call, in another process too, waits for the first. `recipe` says
    what to build, and how.

    Raises HorovodBuildFailed, which says why and where the log is. After an interruption nothing half is left.

    Example:
        >>> wheel = ensure_horovod()  # doctest: +SKIP
        Horovod 0.28.1 is ready.
    """
    build = wanted(recipe)
    progress = Progress(show)
    ready = f"Horovod {build.version} is ready."
    if is_installed(build):
        progress.say(ready)
        return None
    imported = "horovod" in sys.modules
    places = wheels.folders(cache)
    own = wheels.writable(places)
    with wheels.one_at_a_time(own, lambda: progress.say("Another build of Horovod is running: waiting for it.")):
        if is_installed(build):  # by the process that was waited for
            progress.say(ready)
            return None
        wheel = wheels.find(places, build)
        try:
            if wheel is None:
                progress.say(f"Building {build}, once: this takes some minutes.")
                wheel = building.build(recipe, build, own, progress)
            progress.step("Installing it")
            wheels.install(wheel, recipe.requires)
        finally:
            progress.close()
    if not is_installed(build):
        raise HorovodBuildFailed(
            f"{wheel.name} was installed, but this Python does not see it: restart the kernel, then run this again."
        )
    progress.say(f"{ready} Restart the kernel: another Horovod is imported here." if imported else ready)
    return wheel
