"""What a long piece of set-up shows: a bar that goes in the end, lines where nothing can be redrawn, or nothing."""

from __future__ import annotations

import pytest

from course_utils import showing


def test_lines_say_how_long_it_took_and_how_long_it_will_take(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COURSE_PLAIN", raising=False)
    now = [0.0]
    progress = showing.Progress(True, clock=lambda: now[0])
    progress.step("Compiling")
    for now[0], part in ((20.0, 0.05), (31.0, 0.25), (40.0, 0.3), (61.5, 0.5), (100.0, 0.9)):
        progress.part(part)
        progress.tick()
    assert capsys.readouterr().out.splitlines() == [
        "Compiling: 0 s",
        "[#######.......................] 25% Compiling: 31 s, about 2 min left",
        "[###############...............] 50% Compiling: 1 min 01 s, about 1 min left",
        "[###########################...] 90% Compiling: 1 min 40 s, less than a minute left",
    ]


def test_nothing_is_shown_unless_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    progress = showing.Progress(False)
    progress.say("Building")
    progress.step("Compiling")
    progress.tick()
    progress.close()
    assert capsys.readouterr().out == ""


def test_a_notebook_shows_one_bar_that_goes_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    import IPython
    from IPython.core.interactiveshell import InteractiveShell

    monkeypatch.delenv("COURSE_PLAIN", raising=False)
    monkeypatch.setattr(InteractiveShell, "kernel", object(), raising=False)
    monkeypatch.setattr(IPython, "get_ipython", InteractiveShell.instance)
    shown: list[tuple[dict[str, str], bool]] = []

    class Handle:
        def update(self, data: dict[str, str], raw: bool) -> None:
            shown.append((data, True))

    def display(data: dict[str, str], raw: bool, display_id: bool) -> Handle:
        shown.append((data, False))
        return Handle()

    monkeypatch.setattr("IPython.display.display", display)
    progress = showing.Progress(True)
    progress.step("Compiling <objects>")
    progress.part(0.5)
    progress.tick()
    progress.close()
    assert [updated for _, updated in shown] == [False, True, True]
    assert '<progress max="1" value="0.500"' in shown[1][0]["text/html"]
    assert "Compiling &lt;objects&gt;" in shown[1][0]["text/html"]
    assert "50% Compiling <objects>" in shown[1][0]["text/plain"]
    assert shown[2][0] == {"text/plain": "", "text/html": ""}
