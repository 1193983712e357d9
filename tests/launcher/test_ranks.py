"""Ranks that stay between calls: the same processes, fresh functions, and an end for every reason to end."""

from __future__ import annotations

import os
import threading
import time
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from course_utils import Link, Ranks
from course_utils.errors import BadRequest, LaunchError, NotSendable, WorkerFailed, WorkerTimeout
from tests.kernels import await_that


def test_calls_share_processes_and_group(each_way: str) -> None:
    with Ranks(3) as ranks:
        pids = [ranks.run(os.getpid).results for _ in range(3)]
        assert pids[0] == pids[1] == pids[2]
        assert len(set(pids[0])) == 3

        def add(value: float) -> float:
            one = torch.tensor([value + dist.get_rank()])
            dist.all_reduce(one)
            return float(one)

        assert ranks.run(add, 1.0).results == [6.0] * 3
        assert ranks.run(add, value=2.0).results == [9.0] * 3
    await_that(lambda: not any(map(psutil.pid_exists, pids[0])), 5, "the ranks to go")


def test_state_is_kept_where_asked_for_and_belongs_to_its_rank() -> None:
    def count(state: SimpleNamespace, step: int) -> int:
        state.total = getattr(state, "total", dist.get_rank()) + step
        return int(state.total)

    with Ranks(2, state=True) as ranks:
        assert [ranks.run(count, 10).results for _ in range(3)] == [[10, 11], [20, 21], [30, 31]]


def test_what_each_call_printed_and_sent_is_its_own() -> None:
    def talk(word: str, times: int) -> None:
        print(word)
        for _ in range(times):
            if dist.get_rank() == 0:
                dist.send(torch.ones(2), 1)
            else:
                dist.recv(torch.ones(2), 0)

    with Ranks(2, trace=True) as ranks:
        first, second = ranks.run(talk, "one", 1), ranks.run(talk, "two", 3)
    assert [list(run.logs) for run in (first, second)] == [["one\n"] * 2, ["two\n"] * 2]
    assert [run.trace[0].messages_sent for run in (first, second)] == [1, 3]


def test_an_emulated_link_slows_every_call() -> None:
    def timed() -> float:
        dist.barrier()
        start = time.monotonic()
        if dist.get_rank() == 0:
            dist.send(torch.ones(2), 1)
        else:
            dist.recv(torch.ones(2), 0)
        return time.monotonic() - start

    with Ranks(2, link=Link(latency=0.1, bandwidth=1e9)) as ranks:
        for _ in range(2):
            run = ranks.run(timed)
            assert run.results[1] >= 0.09
            assert any("emulated" in note for note in run.notes)


def test_L30_unseeded_calls_draw_different_numbers() -> None:
    with Ranks(2) as ranks:
        drawn = [value for _ in range(3) for value in ranks.run(lambda: float(torch.rand(1))).results]
    assert len(set(drawn)) == len(drawn)


def test_a_failure_ends_the_ranks_and_names_the_cause() -> None:
    def fail() -> None:
        if dist.get_rank() == 1:
            raise ValueError("boom")
        dist.barrier()

    with Ranks(2) as ranks:
        pids = ranks.run(os.getpid).results
        with pytest.raises(WorkerFailed) as caught:
            ranks.run(fail)
        assert (caught.value.rank, caught.value.exception_message) == (1, "boom")
        with pytest.raises(LaunchError, match=r"these ranks have ended: make new ones with Ranks\(\.\.\.\)"):
            ranks.run(os.getpid)
    await_that(lambda: not any(map(psutil.pid_exists, pids)), 5, "the ranks to go")


def test_a_call_without_progress_ends_with_where_each_rank_stands() -> None:
    def hang() -> None:
        if dist.get_rank() == 0:
            dist.barrier()

    with Ranks(2, timeout=2) as ranks, pytest.raises(WorkerTimeout) as caught:
        ranks.run(hang)
    assert [state.state for state in caught.value.states] == ["waiting", "returned"]


def test_idle_ranks_outlive_the_timeout() -> None:
    with Ranks(2, timeout=1) as ranks:
        pids = ranks.run(os.getpid).results
        time.sleep(2)
        assert ranks.run(os.getpid).results == pids


def test_what_cannot_be_run_leaves_the_ranks_as_they_are() -> None:
    lock = threading.Lock()

    def holds() -> Any:
        return lock

    with Ranks(2) as ranks:
        pids = ranks.run(os.getpid).results
        with pytest.raises(NotSendable, match="lock"):
            ranks.run(holds)
        with pytest.raises(BadRequest):
            ranks.run(os.getpid, nprocs=3)
        assert ranks.run(os.getpid).results == pids


def test_one_call_at_a_time() -> None:
    with Ranks(2) as ranks:
        slow = threading.Thread(target=ranks.run, args=(time.sleep, 1.5))
        slow.start()
        time.sleep(0.5)
        with pytest.raises(LaunchError, match="busy"):
            ranks.run(os.getpid)
        slow.join()
        assert len(ranks.run(os.getpid).results) == 2


def test_closing_twice_does_nothing_more_and_the_repr_says_how_it_stands() -> None:
    ranks = Ranks(2)
    assert "ready" in repr(ranks)
    ranks.close()
    ranks.close()
    assert "ended" in repr(ranks)
    with pytest.raises(LaunchError, match="have ended"):
        ranks.run(os.getpid)
