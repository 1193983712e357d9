"""A panel says the same in HTML and in text, and nothing that a learner wrote becomes HTML."""

from __future__ import annotations

import re

from course_utils.exercises import panels
from course_utils.exercises.panels import MAX_TEXT, Panel

PANEL = Panel(
    "failed",
    "Not right yet: shift",
    rows=[("input", "2 ranks"), ("expected", "[1]\n[2]")],
    table=[("a", "b"), ("long one", "2")],
    sentences=["Wait for every request."],
    folded=[("What it printed", "[rank 0] <b>bold</b>")],
)


def test_text_is_aligned_and_has_every_part():
    assert PANEL.text().splitlines() == [
        "Not right yet: shift",
        "  input     2 ranks",
        "  expected  [1]",
        "            [2]",
        "  a         b",
        "  long one  2",
        "  Wait for every request.",
        "  What it printed",
        "    [rank 0] <b>bold</b>",
    ]


def test_html_has_every_part_and_escapes_all_of_it():
    shown = PANEL.html()
    assert "<b>bold" not in shown
    assert "&lt;b&gt;bold" in shown
    words = re.sub(r"<[^>]+>", " ", shown)
    for part in ("Not right yet: shift", "input", "2 ranks", "long one", "Wait for every request.", "What it printed"):
        assert part in words


def test_html_stands_alone():
    assert not re.search(r"https?:|<script|<link|class=", PANEL.html())


def test_a_text_of_any_length_is_cut():
    long = Panel("failed", "x", rows=[("received", "y" * 10_000_000)])
    assert len(long.text()) < 2 * MAX_TEXT
    assert "(10000000 characters)" in long.text()
    assert len(long.html()) < 2 * MAX_TEXT


def test_in_a_notebook_it_is_one_display_of_two_forms(monkeypatch):
    import IPython.display

    shown = []
    monkeypatch.delenv("COURSE_PLAIN")
    monkeypatch.setattr(panels, "in_a_notebook", lambda: True)
    monkeypatch.setattr(IPython.display, "display", lambda data, raw: shown.append((sorted(data), raw)))
    panels.show(PANEL)
    assert shown == [(["text/html", "text/plain"], True)]


def test_under_course_plain_it_is_printed_text_alone(monkeypatch, capsys):
    monkeypatch.setattr(panels, "in_a_notebook", lambda: True)
    panels.show(PANEL)
    assert capsys.readouterr().out == PANEL.text() + "\n"
