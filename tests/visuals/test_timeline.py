"""A timeline draws every span where it was recorded, one colour a kind, and says in words when it ends."""

from __future__ import annotations

import itertools

import pytest

from course_utils.visuals import step_timeline

PANELS = {
    "after backward": {
        "rank 0 compute": [("forward", 0.0, 0.01), ("backward", 0.01, 0.03)],
        "rank 0 network": [("all-reduce", 0.03, 0.07)],
    },
    "during backward": {
        "rank 0 compute": [("forward", 0.0, 0.01), ("backward", 0.01, 0.03)],
        "rank 0 network": [("all-reduce", 0.02, 0.03), ("all-reduce", 0.03, 0.045)],
    },
}


def bars(picture):
    (axes,) = picture.figure.axes
    for collection in axes.collections:
        (path,) = collection.get_paths()
        xs, ys = path.vertices[:, 0], path.vertices[:, 1]
        yield (min(xs), max(xs), min(ys), max(ys), tuple(collection.get_facecolor()[0]))


def test_every_span_lies_where_it_was_recorded_in_milliseconds() -> None:
    wanted = [
        (1e3 * start, 1e3 * end) for lanes in PANELS.values() for lane in lanes.values() for _, start, end in lane
    ]
    assert [pytest.approx(one) for one in wanted] == [bar[:2] for bar in bars(step_timeline(PANELS))]


def test_a_kind_has_one_colour_in_all_panels_and_kinds_differ() -> None:
    kinds = [what for lanes in PANELS.values() for lane in lanes.values() for what, *_ in lane]
    colours: dict[str, set[tuple[float, ...]]] = {}
    for what, bar in zip(kinds, bars(step_timeline(PANELS)), strict=True):
        colours.setdefault(what, set()).add(bar[4])
    assert all(len(some) == 1 for some in colours.values())
    assert len(set.union(*colours.values())) == 3


def test_lanes_do_not_touch_each_other_and_carry_their_names() -> None:
    picture = step_timeline(PANELS)
    (axes,) = picture.figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["rank 0 compute", "rank 0 network"] * 2
    heights = sorted({bar[2:4] for bar in bars(picture)})
    assert len(heights) == 4
    assert all(lower[1] < upper[0] for lower, upper in itertools.pairwise(heights))


def test_the_end_of_each_panel_stands_there_and_in_words() -> None:
    picture = step_timeline(PANELS)
    texts = [text.get_text() for text in picture.figure.axes[0].texts]
    assert {"after backward", "during backward", "70 ms", "45 ms"} <= set(texts)
    assert "after backward: the last span ends after 70 ms" in picture.words


def test_nothing_to_draw_and_spans_that_run_backwards_are_refused() -> None:
    with pytest.raises(ValueError, match="nothing to draw"):
        step_timeline({"empty": {"rank 0": []}})
    with pytest.raises(ValueError, match="'backward' ends at 1 s, before it starts at 2 s"):
        step_timeline({"": {"rank 0": [("backward", 2.0, 1.0)]}})
