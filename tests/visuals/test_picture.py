"""A picture comes with its words, is the same each time, and leaves matplotlib as it was."""

from __future__ import annotations

import io

import pytest
from PIL import Image

from course_utils.visuals import Picture, time_against_size
from course_utils.visuals.picture import COLOURS, INK, PAPER

MEASURED = {"ring": {1_000: 0.01, 1_000_000: 0.02}}


def test_the_same_figure_gives_the_same_bytes() -> None:
    assert time_against_size(MEASURED).png() == time_against_size(MEASURED).png()


def test_the_words_are_the_images_alternative_text_and_the_plain_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COURSE_PLAIN", raising=False)
    figure = time_against_size(MEASURED).figure
    bundle = Picture(figure, 'a "ring" & more')._repr_mimebundle_()
    assert 'alt="a &quot;ring&quot; &amp; more"' in bundle["text/html"]
    assert bundle["text/plain"] == 'a "ring" & more'
    assert repr(Picture(figure, "words")) == "words"


def test_a_plain_execution_stores_no_html(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COURSE_PLAIN", "1")
    assert set(time_against_size(MEASURED)._repr_mimebundle_()) == {"image/png", "text/plain"}


def test_the_paper_is_opaque_so_that_a_dark_page_does_not_show_through() -> None:
    image = Image.open(io.BytesIO(time_against_size(MEASURED).png())).convert("RGBA")
    assert image.getpixel((2, 2)) == (*bytes.fromhex(PAPER[1:]), 255)


def test_every_colour_stands_out_from_the_paper() -> None:
    def luminance(colour: str) -> float:
        parts = [value / 255 for value in bytes.fromhex(colour[1:])]
        red, green, blue = (p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    for colour in (*COLOURS, INK):  # WCAG asks 3:1 of graphics
        assert (luminance(PAPER) + 0.05) / (luminance(colour) + 0.05) >= 3.0, colour


def test_drawing_leaves_matplotlibs_global_state_alone() -> None:
    import matplotlib as mpl
    import matplotlib.pyplot as plt

    before = dict(mpl.rcParams)
    time_against_size(MEASURED).png()
    assert dict(mpl.rcParams) == before
    assert plt.get_fignums() == []
