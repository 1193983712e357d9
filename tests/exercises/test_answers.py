"""check and hint: every outcome has its verdict, nothing raises or hangs, and the lesson always goes on."""

from __future__ import annotations

import contextlib
import functools
import json
import sys
import threading
import time

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from course_utils import check, hint, launch
from course_utils.errors import AnswerNeeded, BadRequest
from course_utils.exercises import answer_needed, inside, judging, registry
from course_utils.simulate import run_simulated
from tests.exercises import answers_00, answers_01
from tests.exercises.judged import text_of, verdict_on

cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(answers_00)
cloudpickle.register_pickle_by_value(answers_01)


def untouched(tensor):
    raise NotImplementedError("your turn")


def test_a_right_answer_is_returned_itself(capsys):
    answer = answers_00.with_an_f_string
    assert check("introduce", answer) is answer
    assert capsys.readouterr().out == "Passed: introduce (1 point)\n  3 cases, on 1 to 4 ranks.\n"


def test_an_untouched_answer_is_not_attempted_and_no_mistake(capsys):
    check("average_by_hand", untouched)
    said = capsys.readouterr().out
    assert said.startswith("Not attempted yet: average_by_hand (5 points)\n")
    assert "received" not in said


def test_what_torch_has_not_implemented_is_a_failure_and_not_a_missing_answer():
    def copies_from_nowhere(tensor):
        return tensor.to("meta").cpu()

    verdict = verdict_on("average_by_hand", copies_from_nowhere)
    assert verdict.state == "failed"
    assert verdict.finding.received.startswith("NotImplementedError: Cannot copy out of meta tensor")


def test_while_there_is_no_answer_the_frameworks_own_version_does_the_work():
    average = check("average_by_hand", untouched)

    def mean():
        import torch

        return average(torch.tensor([float(dist.get_rank())])).item()

    assert launch(mean, nprocs=3).results == [1.0, 1.0, 1.0]


def test_the_frameworks_own_version_also_runs_in_simulated_ranks():
    ring = check("ring_all_reduce", untouched)
    assert [total.tolist() for total in run_simulated(ring, torch.arange(3.0), nprocs=2).results] == [
        [0.0, 2.0, 4.0]
    ] * 2


def test_the_frameworks_own_version_is_called_with_the_arguments_of_the_exercise():
    ring = check("ring_all_reduce", untouched)
    with pytest.raises(BadRequest, match=r"ring_all_reduce\(tensor"):
        launch(ring, 1, 2, nprocs=2)


def test_the_rendezvous_that_stands_in_for_register_gives_ranks_and_names_and_notices_who_is_missing():
    register = check("register", lambda store, name, world_size, timeout: None)
    board = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def meet(port, world_size):
        import os

        store = dist.PrefixStore(str(world_size), dist.TCPStore("127.0.0.1", port, is_master=False))
        try:
            return register(store, "ab"[int(os.environ["RANK"])], world_size, 3.0)
        except TimeoutError as error:
            return str(error)

    (rank, names), (other_rank, other_names) = launch(meet, board.port, 2, nprocs=2, init=False).results
    assert {rank, other_rank} == {0, 1}
    assert names == other_names == (["a", "b"] if rank == 0 else ["b", "a"])
    missing = launch(meet, board.port, 3, nprocs=2, init=False).results
    assert missing == ["fewer than 3 workers came within 3 s"] * 2


def test_where_the_framework_has_no_version_a_stand_in_asks_for_the_answer(capsys):
    stand_in = check("shift", untouched)
    with pytest.raises(AnswerNeeded, match="'shift'"):
        stand_in(1)
    with pytest.raises(AnswerNeeded, match="'shift'"):
        launch(lambda: stand_in(1), nprocs=2)
    capsys.readouterr()
    after = []
    with answer_needed():
        launch(stand_in, 1, nprocs=2)
        after.append("not reached")
    assert after == []
    assert capsys.readouterr().out.startswith("Answer needed\n  This cell needs your answer to the exercise 'shift'")


def test_answer_needed_lets_every_other_exception_through():
    with pytest.raises(ZeroDivisionError), answer_needed():
        _ = 1 / 0


def test_answer_needed_also_understands_a_stand_in_that_was_called_in_a_rank(capsys):
    def calls_it_there():
        from course_utils.exercises.standins import StandIn

        StandIn("shift")()

    with answer_needed():
        launch(calls_it_there, nprocs=1, framework="python")
    assert "'shift'" in capsys.readouterr().out


def test_an_answer_that_uses_another_missing_answer_says_which(capsys):
    assign_rank = check("assign_rank", lambda store, name: None)

    def register(store, name, world_size, timeout):
        return assign_rank(store, name), []

    capsys.readouterr()
    check("register", register)
    said = capsys.readouterr().out
    assert said.startswith("Not attempted yet: register")
    assert "It uses 'assign_rank', which has no right answer yet." in said


@pytest.mark.parametrize("exercise", ["shift", "average_by_hand"])
def test_checking_what_check_returned_is_not_an_attempt(exercise, capsys):
    going_on = check(exercise, untouched)
    capsys.readouterr()
    check(exercise, going_on)
    said = capsys.readouterr().out
    assert said.startswith(f"Not attempted yet: {exercise}")
    assert "Run the cell that defines your version first" in said


def test_a_called_function_in_place_of_the_function_is_explained(capsys):
    check("introduce", "rank 0 of 1")
    said = capsys.readouterr().out
    assert "expected  the function itself: check('introduce', introduce)" in said
    assert "without parentheses" in said


def test_a_function_with_other_parameters_is_explained(capsys):
    check("assign_rank", lambda store: 0)
    said = capsys.readouterr().out
    assert "expected  a function that takes (store, name)" in said
    assert "received  one that takes (store)" in said


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("asign_rank", "There is no 'asign_rank' here. Did you mean 'assign_rank'?"),
        ("qqq", "There is no 'qqq' here. There are 'introduce'"),
        (3, "The name of an exercise is a text such as 'introduce', not an int."),
    ],
)
def test_an_unknown_name_is_answered_with_the_closest_one(name, said, capsys):
    answer = object()
    assert check(name, answer) is answer
    assert said in capsys.readouterr().out
    hint(name)
    assert said in capsys.readouterr().out


def test_an_exception_is_shown_with_its_input_its_rank_and_the_line(capsys):
    def fails_on_one_rank(tensor):
        if dist.get_rank() == 1:
            raise LookupError("no such neighbour")
        return tensor

    check("average_by_hand", fails_on_one_rank)
    said = capsys.readouterr().out
    assert "input     2 ranks, a float32 tensor of shape (2,)" in said
    assert "received  LookupError: no such neighbour" in said
    assert "on        rank 1" in said
    assert 'raise LookupError("no such neighbour")' in said


def test_an_endless_loop_that_prints_is_stopped_all_the_same(monkeypatch, capsys):
    def talks_for_ever():
        while True:
            print("still here")
            time.sleep(0.01)

    monkeypatch.setattr(judging, "LIMIT", 1.5)
    before = time.monotonic()
    check("introduce", talks_for_ever)
    assert time.monotonic() - before < 30
    said = capsys.readouterr().out
    assert said.startswith("Stopped: introduce")
    assert "  input   a launch with nprocs=1\n  rank 0  is running, test_answers.py, line" in said
    assert "\n  It was still running after 1.5 seconds.\n" in said
    assert "[rank 0] still here" in said
    assert inside.MARK not in said


def test_an_endless_loop_that_is_silent_is_stopped_with_its_line(monkeypatch, capsys):
    def thinks_for_ever():
        while True:
            pass

    monkeypatch.setattr(judging, "PATIENCE", 2.0)
    monkeypatch.setattr(judging, "SECOND_PATIENCE", 2.0)
    check("introduce", thinks_for_ever)
    said = capsys.readouterr().out
    assert "An endless wait: no rank made progress for 4 seconds" in said
    assert "rank 0  is running, test_answers.py, line" in said


def test_an_answer_that_was_only_slow_is_tried_again_with_more_patience(monkeypatch):
    def takes_its_time():
        time.sleep(2.5)
        return answers_00.with_an_f_string()

    monkeypatch.setattr(judging, "PATIENCE", 1.5)
    monkeypatch.setattr(judging, "SECOND_PATIENCE", 20.0)
    assert verdict_on("introduce", takes_its_time).state == "passed"


def test_a_case_whose_begin_follows_half_a_line_is_known_all_the_same(capsys):
    def leaves_a_line_open(tensor):
        print("no line feed", end="", flush=True)
        if tensor.dim() > 1:
            raise LookupError
        return answers_01.up_and_down_the_chain(tensor)

    check("average_by_hand", leaves_a_line_open)
    said = capsys.readouterr().out
    assert "input     2 ranks, a float32 tensor of shape (3, 4)" in said
    assert inside.MARK not in said


def test_that_all_ranks_had_returned_is_said_and_not_called_an_endless_wait(monkeypatch):
    monkeypatch.setattr(judging, "PATIENCE", 2.0)

    def one_rank_meets_the_judge_instead_of_its_peer(tensor):
        if tensor.dim() > 1:
            return tensor.clone()
        mean = answers_01.up_and_down_the_chain(tensor)
        if len(tensor) == 5 and dist.get_rank() == 0:
            dist.barrier()
        return mean

    verdict = verdict_on("average_by_hand", one_rank_meets_the_judge_instead_of_its_peer)
    assert verdict.state == "stopped"
    assert "The function had returned on every rank, but within 2 seconds they could not all meet again" in (
        verdict.reason
    )
    assert "a collective that only some of them have called (such as barrier)" in verdict.reason
    assert [str(state) for state in verdict.states] == ["rank 0: returned", "rank 1: returned"]


def test_a_request_that_nobody_waits_for_is_named_beside_a_wrong_value():
    def hasty(tensor):
        rank, world = dist.get_rank(), dist.get_world_size()
        arrived = torch.zeros_like(tensor)
        if world == 1:
            return tensor.clone()
        dist.irecv(arrived, (rank - 1) % world)
        early = arrived.clone()
        dist.send(tensor, (rank + 1) % world)
        return early

    verdict = verdict_on("shift", hasty)
    assert verdict.state == "failed"
    assert verdict.finding.received.startswith("[0, 0]")
    assert "On rank 0, irecv from rank 1: nobody waited for it, which may be the cause" in verdict.finding.why


def test_the_words_on_a_dropped_request_do_not_depend_on_whether_its_message_arrived():
    def dropped(share, tensor):
        rank, world = dist.get_rank(), dist.get_world_size()
        arrived = torch.zeros_like(tensor)
        if world > 1:
            dropped.request = dist.isend(tensor * share, (rank + 1) % world)
            dist.recv(arrived, (rank - 1) % world)
        return arrived if world > 1 else tensor.clone()

    for share in (1, 0):
        text = text_of(verdict_on("shift", functools.partial(dropped, share)))
        assert "isend to rank 1: nobody waited for it" in text
        assert "take its message with it" in text


def test_of_thousands_of_requests_without_a_wait_a_few_are_named():
    def talkative(tensor):
        rank, world = dist.get_rank(), dist.get_world_size()
        for tag in range(1, 100 if world > 4 else 1):
            for other in range(world):
                if other != rank:
                    dist.isend(tensor, other, tag=tag)
        return answers_01.begins_the_send_and_waits(tensor) if world > 1 else tensor.clone()

    received = verdict_on("shift", talkative).finding.received
    assert received == "isend to rank 1, isend to rank 2, isend to rank 3, and 1 more: nobody waited for it"


def test_an_ignored_timeout_is_told_within_seconds():
    verdict_on("assign_rank", answers_01.adds_twice)  # the server is warm
    before = time.monotonic()
    verdict = verdict_on("register", answers_01.ignores_the_timeout)
    assert "`timeout` was 0.3 s" in verdict.reason
    assert time.monotonic() - before < 12  # five on a machine that has nothing else to do


def test_a_deadlock_is_told_at_once(monkeypatch):
    monkeypatch.setattr(judging, "PATIENCE", 2.0)
    monkeypatch.setattr(judging, "SECOND_PATIENCE", 1000.0)
    assert verdict_on("shift", answers_01.as_reported).reason.startswith("A deadlock: no rank made progress for 2 s")


@pytest.mark.parametrize("leave", ["os._exit(0)", "sys.exit()", "os.kill(os.getpid(), 11)"])
def test_an_answer_that_ends_its_process_is_stopped(leave, capsys):
    def leaves():
        exec(f"import os, sys; {leave}")

    check("introduce", leaves)
    said = capsys.readouterr().out
    assert said.startswith("Stopped: introduce")
    assert "Rank 0 of 1 failed" in said


def test_an_answer_that_cannot_travel_says_which_variable(capsys):
    lock = threading.Lock()

    def uses_a_lock():
        return lock.locked()

    check("introduce", uses_a_lock)
    said = capsys.readouterr().out
    assert "It could not be sent to the ranks: lock is a lock" in said


def test_what_an_answer_prints_is_shown_only_where_it_helps(capsys):
    def chatty():
        print("I was", "here")
        return answers_00.with_an_f_string()

    check("introduce", chatty)
    assert "here" not in capsys.readouterr().out

    def chatty_and_wrong():
        print("I was", "here")
        return "rank 7"

    check("introduce", chatty_and_wrong)
    assert "What it printed\n    [rank 0] I was here" in capsys.readouterr().out


def test_a_mistake_in_the_check_itself_is_no_mistake_of_the_learner(monkeypatch, capsys):
    monkeypatch.setattr(judging, "launch", lambda *_, **__: 1 / 0)
    check("introduce", answers_00.with_an_f_string)
    said = capsys.readouterr().out
    assert said.startswith("Stopped: introduce")
    assert "The check itself failed (ZeroDivisionError: division by zero); your answer was not judged." in said


def test_an_interrupt_passes_as_itself(monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(judging, "launch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        check("introduce", answers_00.with_an_f_string)


def test_the_grader_sees_through_answers_that_know_the_learners_cases_by_heart():
    ranks = {name: rank for rank, name in enumerate(("ant", "bee", "cat", "dog"))}

    def knows_the_names(store, name):
        if store.add(name, 1) > 1:
            raise ValueError(name)
        return ranks[name]

    assert verdict_on("assign_rank", knows_the_names).state == "passed"
    assert verdict_on("assign_rank", knows_the_names, seed=1).state == "failed"


def test_a_seed_gives_the_same_cases_again_and_another_seed_others():
    import random

    def given(seed):
        return [
            [(case.given, trial.nprocs) for trial in exercise.cases(random.Random(seed), True) for case in trial.cases]
            for exercise in registry.all_exercises().values()
            if exercise.cases
        ]

    assert given(5) == given(5)
    assert given(5) != given(6)


def test_hints_climb_one_at_a_time_and_stay_at_the_last(capsys, progress_file):
    hints = registry.all_exercises()["assign_rank"].hints
    shown = []
    for _ in range(len(hints) + 1):
        hint("assign_rank")
        shown.append(capsys.readouterr().out)
    assert [said.splitlines()[0] for said in shown[:2]] == ["Hint 1 of 4: assign_rank", "Hint 2 of 4: assign_rank"]
    assert all(text in said for text, said in zip(hints, shown, strict=False))
    assert shown[-1] == shown[-2]
    assert "This is the last one." in shown[-1]
    assert json.loads(progress_file.read_text())["exercises"]["assign_rank"]["hints"] == len(hints)


def test_a_verdict_is_one_output_and_the_same_every_time(capsys, monkeypatch):
    monkeypatch.setattr(judging, "PATIENCE", 2.0)
    said = []
    for _ in range(2):
        check("shift", answers_01.as_reported)
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]


def test_nothing_of_a_launch_is_shown_while_an_answer_is_judged(capsys):
    with contextlib.suppress(AnswerNeeded):
        check("average_by_hand", untouched)
    assert "[rank" not in capsys.readouterr().out
