"""A drawn figure with its description in words, and the canvas that all figures of the course share."""

from __future__ import annotations

import base64
import html
import io
from typing import TYPE_CHECKING, Any

from ..front_end import is_plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PAPER = "#fbfbf9"  # opaque: ink on it reads the same on a light and on a dark page
INK = "#2b2f36"
FAINT = "#c9ccd1"
# Okabe and Ito's palette, told apart also by those who see fewer colours; darkened where it was too light for PAPER.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#b0579a", "#8c6d00", "#2b8cc4", "#7f3c00", "#444a55")
DOTS_PER_INCH = 110


class Picture:
    """A figure and `words`, a sentence or two that say what it shows. Notebooks show both forms.

    Example: `Picture(figure, "Two lines that cross at 1 MB.").png()` gives the bytes of a PNG.
    """

    def __init__(self, figure: Figure, words: str) -> None:
        self.figure = figure
        self.words = words

    def png(self) -> bytes:
        """Return the figure as the bytes of a PNG file, without dates or versions in it."""
        from PIL import Image

        drawn, small = io.BytesIO(), io.BytesIO()
        self.figure.savefig(drawn, format="png", dpi=DOTS_PER_INCH)
        # a few flat colours and their edges: a palette of 128 looks the same and is a third of the size
        Image.open(drawn).convert("RGB").quantize(128).save(small, format="png", optimize=True)
        return small.getvalue()

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        encoded = base64.b64encode(self.png()).decode()
        bundle = {"image/png": encoded, "text/plain": self.words}
        if not is_plain():  # a stored PNG is not compared, HTML would be
            words = html.escape(self.words, quote=True)
            style = "max-width:100%;border-radius:4px"
            bundle["text/html"] = f'<img alt="{words}" style="{style}" src="data:image/png;base64,{encoded}">'
        return bundle

    def __repr__(self) -> str:
        return self.words


def canvas(width: float, height: float, columns: int = 1) -> tuple[Figure, list[Axes]]:
    """Return a new figure of that size in inches, and its axes side by side."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", facecolor=PAPER)
    row = figure.subplots(1, columns, squeeze=False)[0]
    for axes in row:
        axes.set_facecolor(PAPER)
        axes.tick_params(colors=INK, labelsize=9)
        for side, spine in axes.spines.items():
            spine.set_visible(side in ("left", "bottom"))
            spine.set_color(INK)
        axes.xaxis.label.set_color(INK)
        axes.yaxis.label.set_color(INK)
        axes.title.set_color(INK)
    return figure, list(row)
