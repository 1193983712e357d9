"""Calls that cannot be carried out: one clear line each, and nothing is started."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from course_utils import launch
from course_utils.errors import BadRequest, CourseError, LaunchError, NotSendable


def nothing(*_: Any, **__: Any) -> None:
    return None


def takes_size(size: int, *, rate: float = 0.1) -> tuple[int, float]:
    return size, rate


def takes_timeout(timeout: float = 1.0) -> float:
    return timeout


async def asynchronous() -> None:
    return None


@pytest.fixture
def no_process_is_started() -> Any:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield
    after = {child.pid for child in psutil.Process().children(recursive=True)}
    assert after <= before


@pytest.mark.usefixtures("no_process_is_started")
@pytest.mark.parametrize("nprocs", [0, -1, 2.5, "2", 10_000, None, True, [2], float("nan")])
def test_L13_an_impossible_number_of_ranks_is_refused(nprocs: Any) -> None:
    with pytest.raises(BadRequest, match=r"nprocs=.*from 1 to 64"):
        launch(nothing, nprocs=nprocs)


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "no function": (lambda: launch(3), "launch needs a function to run, and got 3"),
    "the function's result": (lambda: launch(nothing()), "needs a function to run, and got None"),
    "an async function": (lambda: launch(asynchronous), "asyncio.run"),
    "an unknown framework": (
        lambda: launch(nothing, framework="jax"),
        "'jax' is unknown; known are torch, tensorflow, horovod, python",
    ),
    "a misspelt framework": (lambda: launch(nothing, framework="Torch"), "did you mean 'torch'"),
    "roles without TensorFlow": (lambda: launch(nothing, roles={"chief": 1}), "it needs framework='tensorflow'"),
    "an unknown backend": (lambda: launch(nothing, backend="mpi"), "backend='mpi' is unknown"),
    "a backend without torch": (lambda: launch(nothing, framework="python", backend="gloo"), "needs framework='torch'"),
    "a trace without torch": (lambda: launch(nothing, framework="python", trace=True), "needs framework='torch'"),
    "init that is no truth value": (lambda: launch(nothing, init="no"), "init='no': it takes True or False"),
    "trace that is no truth value": (lambda: launch(nothing, trace=1), "trace=1: it takes True or False"),
    "env that is no dict": (lambda: launch(nothing, env="A=1"), "dict of strings"),
    "env with numbers": (lambda: launch(nothing, env={"A": 1}), "dict of strings"),
    "preload of one name": (lambda: launch(nothing, preload="numpy"), "tuple of module names"),
    "preload of nothing there": (lambda: launch(nothing, preload=("no_such_module",)), "no such module"),
    "too few arguments": (lambda: launch(takes_size), "missing a required argument: 'size'"),
    "too many arguments": (lambda: launch(takes_size, 1, 2), "too many positional arguments"),
}


@pytest.mark.usefixtures("no_process_is_started")
@pytest.mark.parametrize("what", WRONG)
def test_a_bad_call_gets_one_line_that_says_what_to_change(what: str) -> None:
    call, said = WRONG[what]
    with pytest.raises(BadRequest) as caught:
        call()
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("no_process_is_started")
@pytest.mark.parametrize("timeout", [0, -1, "x", None, float("inf"), float("nan"), True])
def test_an_impossible_timeout_is_refused(timeout: Any) -> None:
    with pytest.raises(BadRequest, match="timeout="):
        launch(nothing, timeout=timeout)


@pytest.mark.usefixtures("no_process_is_started")
def test_L31_a_keyword_that_nobody_takes_is_refused_with_what_was_meant() -> None:
    with pytest.raises(BadRequest, match=r"neither launch nor takes_size\(.*\).* takes 'nproc'; did you mean 'nprocs'"):
        launch(takes_size, 1, nproc=4)
    with pytest.raises(BadRequest, match=r"takes 'raet'; did you mean 'rate'"):
        launch(takes_size, 1, raet=4)


@pytest.mark.usefixtures("no_process_is_started")
def test_L31_a_keyword_that_both_take_is_refused_even_at_its_default() -> None:
    for timeout in (5.0, 120.0):
        with pytest.raises(BadRequest, match=r"takes_timeout has a parameter 'timeout', and so has launch"):
            launch(takes_timeout, timeout=timeout)


def test_L31_a_clash_is_solved_as_the_message_says() -> None:
    bound = functools.partial(takes_timeout, timeout=3.0)
    assert launch(bound, nprocs=1, framework="python").results == [3.0]


def test_L31_keywords_for_the_function_reach_it() -> None:
    assert launch(takes_size, 7, rate=0.5, nprocs=1, framework="python").results == [(7, 0.5)]
    assert launch(lambda **rest: rest, nprocs=1, framework="python", other=1).results == [{"other": 1}]


@pytest.mark.usefixtures("no_process_is_started")
def test_a_call_without_a_function_or_with_two_is_refused() -> None:
    with pytest.raises((BadRequest, TypeError), match="fn"):
        launch()  # type: ignore[call-arg]
    with pytest.raises((BadRequest, TypeError), match="fn"):
        launch(takes_size, 1, fn=3)  # type: ignore[misc]


def test_a_module_of_the_learners_is_not_preloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(BadRequest, match="would not see your edits"):
        launch(nothing, preload=("mine",))


def test_native_windows_gets_one_clear_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "win32")
    with pytest.raises(BadRequest, match="use WSL2"):
        launch(nothing)


def test_torch_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BadRequest, match="pip install torch"):
        launch(nothing)


def test_errors_can_be_caught_as_what_they_are() -> None:
    lock = threading.Lock()
    for call, kinds in (
        (lambda: launch(nothing, nprocs=0), (BadRequest, LaunchError, CourseError, ValueError)),
        (lambda: launch(lambda: lock), (NotSendable, LaunchError, CourseError, TypeError)),
    ):
        for kind in kinds:
            with pytest.raises(kind):
                call()
