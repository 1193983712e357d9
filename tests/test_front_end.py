"""Whatever shows something asks one place where it goes, and that place is right in kernels old and new."""

from __future__ import annotations

import contextlib
import io

import pytest

from course_utils.front_end import in_a_notebook, is_plain, prints_to_a_notebook
from tests.kernels import Kernel


def test_a_test_is_no_notebook() -> None:
    assert not in_a_notebook()
    assert not prints_to_a_notebook()


@pytest.mark.parametrize(("value", "plain"), [("1", True), ("0", False), ("", False), (None, False)])
def test_only_COURSE_PLAIN_1_is_plain(value: str | None, plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COURSE_PLAIN", raising=False)
    if value is not None:
        monkeypatch.setenv("COURSE_PLAIN", value)
    assert is_plain() is plain


def test_a_kernel_is_a_notebook_and_a_redirected_stdout_is_not_its_own(tmp_path) -> None:
    with Kernel(tmp_path) as kernel:
        cell = kernel.run("""
import contextlib, io
from course_utils.front_end import in_a_notebook, prints_to_a_notebook
told = [in_a_notebook(), prints_to_a_notebook()]
with contextlib.redirect_stdout(io.StringIO()):
    told += [in_a_notebook(), prints_to_a_notebook()]
print(told)
""")
    assert cell.text == "[True, True, True, False]\n"


def test_an_ipython_without_a_kernel_is_no_notebook() -> None:
    from IPython.core.interactiveshell import InteractiveShell

    try:
        with contextlib.redirect_stdout(io.StringIO()):
            InteractiveShell.instance()
            assert not in_a_notebook()
    finally:
        InteractiveShell.clear_instance()
