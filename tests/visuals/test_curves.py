"""Curves show every value that can be shown, tell curves that coincide apart, and say their ends in words."""

from __future__ import annotations

import math

import pytest

from course_utils.visuals import lines_over_steps, share_bars

SERIES = {"one process": [2.0, 1.0, 0.5], "4 ranks": [2.0, 1.0, 0.5]}


def test_every_value_is_a_point_of_its_curve() -> None:
    (axes,) = lines_over_steps({"loss": SERIES}).figure.axes
    drawn = {line.get_label(): [list(map(float, part)) for part in line.get_data()] for line in axes.lines}
    assert drawn == {name: [[0.0, 1.0, 2.0], values] for name, values in SERIES.items()}


def test_curves_that_coincide_have_other_colours_and_other_strokes() -> None:
    (axes,) = lines_over_steps({"loss": SERIES}).figure.axes
    first, second = axes.lines
    assert first.get_color() != second.get_color()
    assert not first.is_dashed()
    assert second.is_dashed()


def test_a_legend_of_long_names_stays_inside_the_figure() -> None:
    names = [f"a name that is much longer than a legend likes, number {number}" for number in range(5)]
    figure = lines_over_steps({"loss": {name: [1.0, 2.0] for name in names}}).figure
    figure.draw_without_rendering()
    box = figure.legends[0].get_window_extent()
    assert 0 <= box.x0 < box.x1 <= figure.bbox.width


def test_steps_are_whole_numbers() -> None:
    (axes,) = lines_over_steps({"loss": SERIES}).figure.axes
    assert all(tick == int(tick) for tick in axes.get_xticks())


def test_panels_share_names_colours_and_one_legend() -> None:
    figure = lines_over_steps({"loss": SERIES, "distance": {"4 ranks": [1.0, 1.0]}}, log=["distance"]).figure
    left, right = figure.axes
    assert left.lines[1].get_color() == right.lines[0].get_color()
    assert (left.get_yscale(), right.get_yscale()) == ("linear", "log")
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["one process", "4 ranks"]


def test_what_cannot_be_drawn_leaves_a_gap() -> None:
    (axes,) = lines_over_steps({"gap": {"a": [1.0, math.inf, 0.0, 1e-9]}}, log=["gap"]).figure.axes
    values = list(axes.lines[0].get_ydata())
    assert [math.isnan(value) for value in values] == [False, True, True, False]


def test_x_can_double() -> None:
    (axes,) = lines_over_steps({"": {"a": {16: 1.0, 32: 0.9, 64: 0.7}}}, doubling=True).figure.axes
    assert axes.get_xscale() == "log"
    assert [text.get_text() for text in axes.get_xticklabels()] == ["16", "32", "64"]


def test_words_say_where_each_curve_begins_and_ends() -> None:
    words = lines_over_steps({"loss": {"a": [2.0, 0.5]}}, ylabel="cross-entropy").words
    assert words == "cross-entropy against the step. loss: a from 2 to 0.5."


def test_nothing_to_draw_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to draw"):
        lines_over_steps({"loss": {}})


def test_bars_carry_their_values() -> None:
    picture = share_bars(
        {"one order": [0, 100], "an order each": [31.64, 42.2]}, ["nobody", "one rank"], "seen by", "percent"
    )
    (axes,) = picture.figure.axes
    assert [bar.get_height() for bar in axes.patches] == [0, 100, 31.64, 42.2]
    assert {text.get_text() for text in axes.texts} == {"0", "100", "31.6", "42.2"}
    assert picture.words == (
        "seen by (percent). one order: nobody 0, one rank 100; an order each: nobody 31.6, one rank 42.2."
    )


def test_bars_without_a_value_for_each_label_are_refused() -> None:
    with pytest.raises(ValueError, match="1 values for 2 labels"):
        share_bars({"a": [1.0]}, ["x", "y"])
