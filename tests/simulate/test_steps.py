"""A run round by round: who sent what to whom, and how the chunks looked after it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from course_utils.simulate import run_simulated
from course_utils.simulate.steps import as_plain, states_by_round
from tests.simulate.algorithms import halving_doubling, ring


def gather_scatter(rounds: int) -> torch.Tensor:
    """Passes a growing sum around; the variable is bound anew each time."""
    rank, world = dist.get_rank(), dist.get_world_size()
    held = torch.tensor([float(rank)])
    for _ in range(rounds):
        arrived = torch.empty(1)
        dist.batch_isend_irecv([dist.P2POp(dist.isend, held, (rank + 1) % world)])
        request = dist.irecv(arrived, (rank - 1) % world)
        request.wait()
        held = arrived + 10
    return held


def test_a_step_shows_what_moved_and_what_changed() -> None:
    run = run_simulated(ring, 4, nprocs=2, watch="chunks")
    assert len(run.steps) == 3
    assert str(run.steps) == "\n".join(
        [
            "before the first round",
            "  rank  chunks",
            "  0     [0 1] [2 3]",
            "  1     [0 2] [4 6]",
            "",
            "round 1 of 2",
            "  rank  sends       receives      chunks",
            "  0     [0 1] to 1  [4 6] from 1  [0 1] [6 9]*",
            "  1     [4 6] to 0  [0 1] from 0  [0 3]* [4 6]",
            "",
            "round 2 of 2",
            "  rank  sends       receives      chunks",
            "  0     [6 9] to 1  [0 3] from 1  [0 3]* [6 9]",
            "  1     [0 3] to 0  [6 9] from 0  [0 3] [6 9]*",
        ]
    )


@pytest.mark.parametrize("how", ["rendezvous", "buffered"])
def test_states_are_those_after_the_round_however_far_ranks_ran_ahead(how: str) -> None:
    run = run_simulated(gather_scatter, 3, nprocs=4, watch="held", send=how)
    assert run.rounds == 3
    states = [run.steps[number].states for number in range(4)]
    assert states == [[[(rank - number) % 4 + 10.0 * number] for rank in range(4)] for number in range(4)]
    assert states[3] == [result.tolist() for result in run.results]


def test_the_last_state_is_what_a_rank_returned_with_in_a_tree_of_exchanges_too() -> None:
    run = run_simulated(halving_doubling, 8, nprocs=4, watch="tensor")
    assert [torch.tensor(state) for state in run.steps[-1].states or []] == [pytest.approx(one) for one in run.results]
    assert run.steps[1].states != run.steps[0].states
    assert [len(step.messages) for step in run.steps] == [0, 4, 4, 4, 4]


def test_a_variable_of_the_caller_is_found_and_a_missing_one_is_left_empty() -> None:
    def outer() -> torch.Tensor:
        carried = [dist.get_rank()]
        return torch.cat([ring(2), torch.tensor(carried)])

    run = run_simulated(outer, nprocs=2, watch="carried")
    assert [step.states for step in run.steps] == [[[0], [1]]] * 3
    assert [step.states for step in run_simulated(ring, 2, nprocs=2, watch="nowhere").steps] == [[None, None]] * 3


def test_without_a_watched_variable_the_messages_alone_are_shown() -> None:
    step = run_simulated(ring, 4, nprocs=2).steps[1]
    assert step.states is None
    assert step.text().splitlines()[1] == "  rank  sends       receives"


def test_a_table_stays_readable_with_many_ranks_rounds_and_numbers() -> None:
    run = run_simulated(ring, 1200, nprocs=40)
    assert run.steps[1].text().count("30 elements") == 32
    assert "and 24 more ranks" in run.steps[1].text()
    assert "and 58 more rounds" in str(run.steps)
    assert len(str(run.steps).splitlines()) < 500


def test_a_cell_gets_html_unless_outputs_must_be_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COURSE_PLAIN", raising=False)
    run = run_simulated(ring, 4, nprocs=2, watch="chunks")
    table = run.steps[1]._repr_html_()
    assert table is not None
    assert "<b>[6 9]</b>" in table
    assert table in str(run.steps._repr_html_())
    monkeypatch.setenv("COURSE_PLAIN", "1")
    assert run.steps[1]._repr_html_() is None
    assert run.steps._repr_html_() is None
    assert repr(run.steps[1]) == run.steps[1].text()


def test_text_from_a_learner_is_never_read_as_html(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COURSE_PLAIN", raising=False)

    def tagged() -> None:
        label = "<script>"
        dist.barrier()
        assert label

    run = run_simulated(tagged, nprocs=1, watch="label")
    assert "<script>" in run.steps[0].text()
    assert "<script>" not in str(run.steps[0]._repr_html_())


def test_there_is_no_step_after_the_last() -> None:
    steps = run_simulated(ring, 4, nprocs=2).steps
    assert steps[-1].number == 2
    with pytest.raises(IndexError, match="0 to 2"):
        steps[3]


def test_the_state_after_a_round_is_the_last_one_seen_before_a_later_message() -> None:
    assert states_by_round([(0, "a"), (2, "b"), (2, "c")], 3) == ["a", "a", "c", "c"]
    assert states_by_round([(1, "a")], 1) == [None, "a"]
    assert states_by_round([], 1) == [None, None]


def test_a_watched_value_is_copied_as_plain_data() -> None:
    tensor = torch.tensor([1, 2])
    copied = as_plain([tensor, (tensor, None), {"a": tensor}, torch.zeros(10, 100), range(2)])
    tensor += 1
    assert copied == [[1, 2], [[1, 2], None], ["a: [1 2]"], "1,000 elements", "range(0, 2)"]
