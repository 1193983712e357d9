"""Figures of measured times against the size of what was reduced, with the model that was fitted to them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from .picture import COLOURS, FAINT, Picture, canvas

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MARKERS = "osD^vPX*"


def time_against_size(
    measured: Mapping[str, Mapping[int, float]],
    model: Mapping[str, Callable[[float], float]] | None = None,
    title: str = "",
    emulated: bool = False,
) -> Picture:
    """Draw seconds against bytes on logarithmic axes: measured points, and lines for what a model says.

    Args:
        measured: name of the algorithm -> {bytes: seconds}.
        model: name -> function from bytes to seconds; a name without one gets a thin line through its points.
        emulated: whether the times come from an emulated link; the figure then says so.

    Raises ValueError where nothing was measured.

    Example: `time_against_size({"ring": {1000: 0.01, 10**6: 0.02}}, {"ring": lambda size: 0.01 + size / 1e8})`.
    """
    if not any(measured.values()):
        raise ValueError("there is nothing to draw: `measured` holds no times")
    figure, (axes,) = canvas(7.6, 4.0)
    ends = []
    for number, (name, times) in enumerate(measured.items()):
        colour = COLOURS[number % len(COLOURS)]
        sizes = sorted(times)
        if model and name in model:
            low, high = sizes[0], sizes[-1]
            grid = [low * (high / low) ** (step / 60) for step in range(61)] if high > low else [float(low)]
            axes.plot(grid, [1e3 * model[name](size) for size in grid], color=colour, linewidth=1.4)
        else:
            axes.plot(sizes, [1e3 * times[size] for size in sizes], color=colour, linewidth=0.8)
        axes.plot(
            sizes, [1e3 * times[size] for size in sizes], MARKERS[number % len(MARKERS)], color=colour, markersize=6
        )
        ends.append((1e3 * times[sizes[-1]], sizes[-1], name, colour))
    axes.set(xscale="log", yscale="log", ylabel="milliseconds" + (" (emulated link)" if emulated else ""))
    _name_at_the_ends(axes, ends)
    axes.set_xlabel("size of the tensor, points measured" + (", lines from the model" if model else ""))
    every = sorted({size for times in measured.values() for size in times})
    axes.set_xticks(every, [_size(size) for size in every])
    axes.minorticks_off()
    bottom, top = axes.get_ylim()
    marks = (mark * 10.0**power for power in range(-4, 7) for mark in (1, 2, 5))
    ticks = [mark for mark in marks if bottom <= mark <= top]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.grid(color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_title(title, fontsize=11, loc="left")
    words = f"{title}: " if title else ""
    span = f"{_size(every[0])} to {_size(every[-1])}"
    words += f"milliseconds against the size of the tensor, from {span}, for {_listed(measured)}"
    return Picture(figure, words + (", on an emulated link." if emulated else "."))


def _name_at_the_ends(axes: Axes, ends: list[tuple[float, int, str, str]]) -> None:
    """Put names beside the last points (milliseconds, bytes, name, colour), apart from each other."""
    low, high = (math.log10(limit) for limit in axes.get_ylim())
    gap = 0.065 * (high - low)
    ends = sorted(ends)
    points = [math.log10(milliseconds) for milliseconds, *_ in ends]
    places: list[float] = []
    for point in points:
        places.append(max(point, places[-1] + gap) if places else point)
    down = sum(places) / len(places) - sum(points) / len(points)  # as far above their points as below
    down = max(down, places[-1] - high)
    for place, (_, size, name, colour) in zip(places, ends, strict=True):
        axes.annotate(
            name,
            (size, 10 ** (place - down)),
            xytext=(10, 0),
            textcoords="offset points",
            color=colour,
            fontsize=10,
            va="center",
            annotation_clip=False,
        )


def _size(size: float) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size:.3g} B"


def _listed(names: Mapping[str, object]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last
