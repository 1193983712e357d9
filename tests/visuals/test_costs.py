"""The figure of times against sizes shows every measurement, the model, and whether a link was emulated."""

from __future__ import annotations

import pytest

from course_utils.visuals import time_against_size

MEASURED = {"ring": {4_000: 0.03, 4_000_000: 0.1}, "naive": {4_000: 0.01, 4_000_000: 0.18}}


def test_every_measurement_is_a_point_in_milliseconds() -> None:
    (axes,) = time_against_size(MEASURED).figure.axes
    points = {tuple(zip(*line.get_data(), strict=True)) for line in axes.lines if line.get_marker() != "None"}
    assert points == {((4_000, 30.0), (4_000_000, 100.0)), ((4_000, 10.0), (4_000_000, 180.0))}


def test_the_models_line_is_drawn_between_the_points() -> None:
    (axes,) = time_against_size(MEASURED, {"ring": lambda size: 0.03 + size / 5e7}).figure.axes
    (line,) = [line for line in axes.lines if len(line.get_xdata()) > 2]
    assert line.get_ydata()[0] == pytest.approx(30.08)
    assert line.get_ydata()[-1] == pytest.approx(110.0)


def test_names_stand_beside_the_last_points_in_their_order_and_inside_the_figure() -> None:
    close = {name: {1_000: 0.01, 16_000_000: 0.04 + number / 1e4} for number, name in enumerate("abcdef")}
    (axes,) = time_against_size(close).figure.axes
    heights = {text.get_text(): text.xy[1] for text in axes.texts}
    assert sorted(heights, key=heights.get) == list("abcdef")
    assert max(heights.values()) <= axes.get_ylim()[1] * 1.001


def test_an_emulated_link_is_named_in_the_figure_and_in_its_words() -> None:
    picture = time_against_size(MEASURED, title="4 ranks", emulated=True)
    assert "emulated" in picture.figure.axes[0].get_ylabel()
    assert picture.words == (
        "4 ranks: milliseconds against the size of the tensor, from 4 KB to 4 MB, for ring and naive, "
        "on an emulated link."
    )
    assert "emulated" not in time_against_size(MEASURED).figure.axes[0].get_ylabel()


def test_nothing_measured_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to draw"):
        time_against_size({"ring": {}})
