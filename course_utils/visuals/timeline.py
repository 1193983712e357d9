"""Figures of what each rank did when: lanes of recorded spans, compute above communication."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .picture import COLOURS, FAINT, INK, PAPER, Picture, canvas

Span = tuple[str, float, float]  # what, and from when to when, in seconds
_HEIGHT = 0.74  # of a lane, of which 1 is the distance to the next


def step_timeline(panels: Mapping[str, Mapping[str, Sequence[Span]]]) -> Picture:
    """Draw spans in lanes, panel under panel over one axis of milliseconds.

    Args:
        panels: title -> {name of the lane: spans (what, start, end) in seconds}. Spans of one kind ("forward",
            "all-reduce") have one colour in all panels. A dotted line marks where a panel's last span ends.

    Raises ValueError where there is no span, or where one ends before it starts.

    Example: `step_timeline({"one bucket": {"rank 0 compute": [("backward", 0.0, 0.02)],
    "rank 0 network": [("all-reduce", 0.02, 0.06)]}})`.
    """
    from matplotlib.patches import Patch

    spans = [span for lanes in panels.values() for lane in lanes.values() for span in lane]
    if not spans:
        raise ValueError("there is nothing to draw: no lane has a span")
    for what, start, end in spans:
        if end < start:
            raise ValueError(f"{what!r} ends at {end:g} s, before it starts at {start:g} s")
    colours = dict(zip(dict.fromkeys(what for what, *_ in spans), COLOURS, strict=False))
    rows = sum(len(lanes) + 1.1 for lanes in panels.values())
    figure, (axes,) = canvas(8.6, 1.1 + 0.34 * rows)
    place, places, names, told = 0.0, [], [], []
    latest = max(end for *_, end in spans)
    for title, lanes in panels.items():
        axes.text(0, place - 0.15, title, fontsize=10.5, color=INK, va="bottom", weight="bold")
        top = place
        for lane, drawn in lanes.items():
            place += 1
            places.append(place - 0.5)
            names.append(lane)
            for what, start, end in drawn:
                axes.broken_barh(
                    [(1e3 * start, 1e3 * (end - start))],
                    (place - 0.5 - _HEIGHT / 2, _HEIGHT),
                    facecolor=colours[what],
                    edgecolor=PAPER,  # a seam between messages that follow each other at once
                    linewidth=0.8,
                )
        last = max((end for drawn in lanes.values() for *_, end in drawn), default=0.0)
        axes.plot([1e3 * last] * 2, [top, place], color=INK, linewidth=1.2, linestyle=(0, (1.2, 1.4)))
        right = last < 0.85 * latest
        axes.annotate(
            f"{1e3 * last:.0f} ms",
            (1e3 * last, top),
            xytext=(0, 2),
            textcoords="offset points",
            ha="left" if right else "right",
            va="bottom",
            fontsize=9,
            color=INK,
        )
        told.append(f"{title}: the last span ends after {1e3 * last:.0f} ms")
        place += 1.1
    axes.set_yticks(places, names)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set(xlabel="milliseconds", ylim=(place - 1.0, -0.75), xlim=(0, 1.02e3 * latest))
    axes.grid(axis="x", color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    figure.legend(
        handles=[Patch(color=colour, label=what) for what, colour in colours.items()],
        loc="outside lower center",
        ncols=len(colours),
        frameon=False,
        fontsize=9,
        labelcolor=INK,
    )
    return Picture(figure, f"Lanes of {', '.join(colours)} over milliseconds. {'; '.join(told)}.")
