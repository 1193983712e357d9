"""What a check, a hint or a prediction shows: one display, as HTML with a text twin.

Under COURSE_PLAIN=1, and outside a notebook, the text alone is printed: one output, the same at every execution.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..front_end import in_a_notebook, is_plain

# A colour says the state at a glance; the words beside it say it again.
COLOURS = {
    "passed": "#2a9d5c",
    "failed": "#d1495b",
    "stopped": "#d17a22",
    "not attempted": "#7a7f87",
    "answer needed": "#7a7f87",
    "hint": "#3066be",
    "prediction": "#7a4fa3",
    "table": "#7a7f87",
}
MAX_TEXT = 4_000


@dataclass(frozen=True)
class Panel:
    """One panel: a headline, rows of (label, text), a table, sentences below, and text that the answer printed.

    `kind` is a key of COLOURS. Every part is plain text; nothing in it is read as HTML.
    """

    kind: str
    headline: str
    rows: Sequence[tuple[str, str]] = ()
    table: Sequence[Sequence[str]] = ()
    sentences: Sequence[str] = ()
    folded: Sequence[tuple[str, str]] = field(default=())

    def text(self) -> str:
        """Return the panel as plain text."""
        lines = [self.headline]
        width = max((len(label) for label, _ in self.rows), default=0)
        for label, value in self.rows:
            first, *more = _cut(value).splitlines() or [""]
            lines.append(f"  {label:<{width}}  {first}".rstrip())
            lines += [f"  {'':<{width}}  {line}".rstrip() for line in more]
        if self.table:
            widths = [max(len(row[column]) for row in self.table) for column in range(len(self.table[0]))]
            for row in self.table:
                cells = (f"{cell:<{size}}" for cell, size in zip(row, widths, strict=True))
                lines.append(f"  {'  '.join(cells)}".rstrip())
        lines += [f"  {sentence}" for sentence in self.sentences]
        for title, body in self.folded:
            lines.append(f"  {title}")
            lines += [f"    {line}".rstrip() for line in _cut(body).splitlines()]
        return "\n".join(lines)

    def html(self) -> str:
        """Return the panel as self-contained HTML that reads well on a light and on a dark page."""
        colour = COLOURS[self.kind]
        parts = [f'<div style="font-weight:600;color:{colour}">{_safe(self.headline)}</div>']
        if self.rows:
            cells = "".join(
                f'<tr style="background:none"><td style="{_CELL};opacity:.7;white-space:nowrap">{_safe(label)}</td>'
                f'<td style="{_CELL};white-space:pre-wrap;font-family:monospace">{_safe(_cut(value))}</td></tr>'
                for label, value in self.rows
            )
            parts.append(f'<table style="{_TABLE}">{cells}</table>')
        if self.table:
            head, *body = self.table
            top = "".join(f'<th style="{_CELL};font-weight:600">{_safe(cell)}</th>' for cell in head)
            below = "".join(
                '<tr style="background:none">'
                + "".join(f'<td style="{_CELL}">{_safe(cell)}</td>' for cell in row)
                + "</tr>"
                for row in body
            )
            parts.append(f'<table style="{_TABLE}"><tr style="background:none">{top}</tr>{below}</table>')
        parts += [f'<div style="margin-top:4px">{_safe(sentence)}</div>' for sentence in self.sentences]
        for title, body_text in self.folded:
            parts.append(
                f'<details style="margin-top:4px"><summary>{_safe(title)}</summary>'
                f'<pre style="margin:4px 0;white-space:pre-wrap">{_safe(_cut(body_text))}</pre></details>'
            )
        style = f"border-left:4px solid {colour};padding:6px 12px;margin:4px 0;max-width:100ch;line-height:1.45"
        return f'<div style="{style}">{"".join(parts)}</div>'


_TABLE = "border-collapse:collapse;margin:4px 0 0 0;background:none;color:inherit;font-size:inherit"
_CELL = "text-align:left;vertical-align:top;padding:1px 14px 1px 0;border:none"


def show(panel: Panel) -> None:
    """Show a panel in the running cell, or print it where there is no notebook."""
    if is_plain() or not in_a_notebook():
        print(panel.text())
        return
    from IPython.display import display

    display({"text/html": panel.html(), "text/plain": panel.text()}, raw=True)


def _safe(text: str) -> str:
    return html.escape(text, quote=True)


def _cut(text: str) -> str:
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]} ... ({len(text)} characters)"
