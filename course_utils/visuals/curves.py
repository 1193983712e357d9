"""Figures of what changes step by step (losses, distances between replicas), and bars of shares side by side."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any

from .picture import COLOURS, FAINT, INK, Picture, canvas

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# lines that lie on each other can be told apart: the first is broad and whole, later ones are broken
STYLES = ("-", (0, (5, 2)), (0, (1.2, 1.4)), (0, (6, 2, 1, 2)), (0, (2.5, 2.5)), (0, (8, 2, 1, 2, 1, 2)))
WIDTHS = (3.6, 2.0, 2.2, 1.8, 2.0, 1.6)
Values = Sequence[float] | Mapping[float, float]


def lines_over_steps(
    panels: Mapping[str, Mapping[str, Values]],
    xlabel: str = "step",
    ylabel: str = "",
    log: Collection[str] = (),
    doubling: bool = False,
    marked: bool = False,
) -> Picture:
    """Draw named curves, in panels side by side that share names and colours.

    Args:
        panels: title -> {name of the curve: values by step, or {x: value}}. What is not finite, and on a logarithmic
            axis what is not positive, leaves a gap.
        xlabel, ylabel: what the axes are.
        log: titles of the panels whose values are on a logarithmic axis.
        doubling: whether x is on a logarithmic axis of base 2.
        marked: whether each value gets a point.

    Raises ValueError where there is no curve.

    Example: `lines_over_steps({"loss": {"one process": [2.3, 1.1], "4 ranks": [2.3, 1.1]}}, ylabel="cross-entropy")`.
    """
    from matplotlib.ticker import MaxNLocator

    names = list(dict.fromkeys(name for series in panels.values() for name in series))
    if not names:
        raise ValueError("there is nothing to draw: no panel has a curve")
    figure, row = canvas(7.6 if len(panels) == 1 else 4.3 * len(panels), 3.8, columns=len(panels))
    looks = dict(zip(names, islice(_looks(), len(names)), strict=True))
    handles = {}
    for axes, (title, series) in zip(row, panels.items(), strict=True):
        for name, values in series.items():
            colour, style, width = looks[name]
            xs, ys = _points(values, title in log)
            (handles[name],) = axes.plot(
                xs,
                ys,
                linestyle=style,
                color=colour,
                linewidth=width,
                marker="o" if marked else None,
                markersize=5,
                label=name,
            )
        axes.set_title(title, fontsize=11, loc="left")
        axes.set(xlabel=xlabel, ylabel=ylabel, yscale="log" if title in log else "linear")
        axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))  # there is no step 2.5
        if doubling:
            _double(axes, sorted({x for values in series.values() for x in _points(values, False)[0]}))
        axes.grid(color=FAINT, linewidth=0.6)
        axes.set_axisbelow(True)
    if len(names) > 1:
        figure.legend(
            handles.values(),
            handles,
            loc="outside lower center",
            ncols=_columns(names, figure.get_figwidth()),
            frameon=False,
            fontsize=9,
            labelcolor=INK,
            handlelength=3,
        )
    told = "; ".join(
        f"{title}: {', '.join(_ends(*pair) for pair in series.items())}" for title, series in panels.items()
    )
    return Picture(figure, f"{ylabel or 'Curves'} against the {xlabel}. {told}.")


def share_bars(
    groups: Mapping[str, Sequence[float]], labels: Sequence[str], title: str = "", ylabel: str = ""
) -> Picture:
    """Draw bars side by side: for each label one bar of each group, with its value written above it.

    Raises ValueError where a group does not have a value for each label.

    Example: `share_bars({"one order": [0, 100], "an order each": [32, 42]}, ["nobody", "one rank"], ylabel="percent")`.
    """
    for name, values in groups.items():
        if len(values) != len(labels):
            raise ValueError(f"{name!r} has {len(values)} values for {len(labels)} labels")
    figure, (axes,) = canvas(7.6, 3.6)
    width = 0.8 / max(1, len(groups))
    for number, (name, values) in enumerate(groups.items()):
        places = [place + (number - (len(groups) - 1) / 2) * width for place in range(len(labels))]
        drawn = axes.bar(places, values, 0.92 * width, color=COLOURS[number % len(COLOURS)], label=name)
        axes.bar_label(
            drawn,
            [f"{value:.3g}" if value >= 1 else f"{value:.1g}" for value in values],
            fontsize=9,
            color=INK,
            padding=2,
        )
    axes.set_xticks(range(len(labels)), labels)
    axes.tick_params(axis="x", length=0)
    axes.set(ylabel=ylabel)
    axes.set_title(title, fontsize=11, loc="left")
    axes.margins(y=0.12)
    if len(groups) > 1:
        axes.legend(frameon=False, fontsize=9, labelcolor=INK)
    pairs = "; ".join(
        f"{name}: " + ", ".join(f"{label} {value:.3g}" for label, value in zip(labels, values, strict=True))
        for name, values in groups.items()
    )
    return Picture(figure, f"{title or 'Bars'} ({ylabel}). {pairs}." if ylabel else f"{title or 'Bars'}. {pairs}.")


def _looks() -> Iterator[tuple[str, Any, float]]:
    return zip(cycle(COLOURS), cycle(STYLES), cycle(WIDTHS))


def _columns(names: Sequence[str], inches: float) -> int:
    """How many columns of a legend fit beside each other, with its strokes."""
    return max(1, min(len(names), 4, int(inches / (0.75 + 0.072 * max(map(len, names))))))


def _points(values: Values, positive: bool) -> tuple[list[float], list[float]]:
    pairs = values.items() if isinstance(values, Mapping) else enumerate(values)
    xs, ys = [], []
    for x, y in pairs:
        xs.append(float(x))
        ys.append(float(y) if math.isfinite(y) and (y > 0 or not positive) else math.nan)
    return xs, ys


def _double(axes: Axes, places: list[float]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(places, [f"{place:g}" for place in places])
    axes.minorticks_off()


def _ends(name: str, values: Values) -> str:
    numbers = list(values.values()) if isinstance(values, Mapping) else list(values)
    return f"{name} from {numbers[0]:.3g} to {numbers[-1]:.3g}" if numbers else f"{name} without values"
