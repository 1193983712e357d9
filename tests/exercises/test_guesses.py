"""Predictions are kept before the result, shown beside it afterwards, and never stand in the way."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from course_utils import predict
from course_utils.exercises import compare


def test_without_a_value_it_shows_how_to_give_one(capsys, progress_file):
    predict("lost_updates")
    said = capsys.readouterr().out
    assert "None made yet. Put a value in place of None" in said
    assert not progress_file.exists()


def test_a_prediction_is_kept_with_its_unit(capsys, progress_file):
    predict("lost_updates", 4, unit="on the counter")
    assert capsys.readouterr().out.startswith("Your prediction: 4 on the counter\n")
    assert json.loads(progress_file.read_text())["predictions"] == {
        "lost_updates": {"value": 4, "unit": "on the counter"}
    }


def test_an_earlier_prediction_is_shown_again_and_a_new_one_replaces_it(capsys):
    predict("lost_updates", 4)
    predict("lost_updates")
    assert capsys.readouterr().out.count("Your prediction: 4\n") == 2
    predict("lost_updates", 1)
    predict("lost_updates")
    assert capsys.readouterr().out.count("Your prediction: 1\n") == 2


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        (1.5, 1.5),
        (0, 0),
        (False, False),
        ("both", "both"),
        (np.int64(3), 3),
        (np.float32(0.5), 0.5),
        (torch.tensor(3), "tensor(3)"),
        ([1, 2], "[1, 2]"),
    ],
)
def test_any_value_is_kept_as_json_can_keep_it(value, kept, progress_file):
    predict("lost_updates", value)
    assert json.loads(progress_file.read_text())["predictions"]["lost_updates"]["value"] == kept


def test_a_value_whose_repr_raises_does_not_stop_the_cell(capsys):
    class Broken:
        def __repr__(self):
            raise RuntimeError

    predict("lost_updates", Broken())
    assert "Your prediction: a Broken" in capsys.readouterr().out


def test_an_unknown_prediction_is_answered_with_the_closest_one(capsys):
    predict("lost_update", 4)
    assert "There is no 'lost_update' here. Did you mean 'lost_updates'?" in capsys.readouterr().out
    predict("assign_rank", 4)
    assert "There is no 'assign_rank' here." in capsys.readouterr().out


def test_compare_sets_predictions_beside_what_was_computed(capsys):
    predict("lost_updates", 4, unit="on the counter")
    predict("group_keys", 4.1)
    compare(lost_updates=1, group_keys=4, finishers=0, chain_messages=None)
    lines = capsys.readouterr().out.splitlines()[-5:]
    assert lines[0].split("  ")[1:] != []
    assert lines[1].split()[-6:] == ["on", "the", "counter", "1", "a", "surprise"]
    assert lines[2].split()[-4:] == ["4.1", "4", "as", "computed"]
    assert lines[3].split()[-3:] == ["none", "made", "0"]
    assert lines[4].endswith("none made         needs your answers above")


def test_compare_counts_the_predictions_made_and_names_unknown_ones(capsys):
    predict("lost_updates", 4)
    capsys.readouterr()
    compare(lost_updates=1, finishers=0, finisher=1)
    said = capsys.readouterr().out
    assert said.startswith("Predictions: 1 of 2 made\n")
    assert "There is no 'finisher' here. Did you mean 'finishers'?" in said


def test_texts_and_truth_values_are_compared_as_they_are(capsys):
    predict("lost_updates", "one")
    predict("finishers", True)
    compare(lost_updates="one", finishers=1)
    rows = capsys.readouterr().out.splitlines()[-2:]
    assert rows[0].endswith("as computed")
    assert rows[1].endswith("as computed")
