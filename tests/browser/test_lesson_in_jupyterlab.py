"""A solved lesson in a real JupyterLab, in a real browser: all cells run, none shows an error."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, sync_playwright

ROOT = Path(__file__).resolve().parents[2]
SLOW = 120_000  # milliseconds that a step of the page may take on a loaded machine
LESSON_SECONDS = 600

# What JupyterLab would otherwise ask, or fetch, or leave out of the page while it is scrolled away.
SETTINGS = {
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False, "doNotDisturbMode": True},
    "notebook-extension/tracker": {"windowingMode": "none"},
}
CHROMIUM = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@dataclass
class Lab:
    """A running JupyterLab: its folder and its address."""

    folder: Path
    address: str
    token: str


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    """A JupyterLab of its own in a scratch folder: free port, token, no settings of this machine's user."""
    folder, runtime, settings = tmp_path / "notebooks", tmp_path / "runtime", tmp_path / "settings"
    folder.mkdir()
    for name, values in SETTINGS.items():
        path = settings / "@jupyterlab" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values), encoding="utf-8")
    token = secrets.token_hex(16)
    ours = {
        "COURSE_PROGRESS": str(tmp_path / "progress.json"),
        "IPYTHONDIR": str(tmp_path / "ipython"),
        "JUPYTERLAB_SETTINGS_DIR": str(settings),
        "JUPYTERLAB_WORKSPACES_DIR": str(tmp_path / "workspaces"),
        "JUPYTER_CONFIG_DIR": str(tmp_path / "config"),
        "JUPYTER_DATA_DIR": str(tmp_path / "data"),
        "JUPYTER_RUNTIME_DIR": str(runtime),
        "JUPYTER_TOKEN": token,
        "PYTHONPATH": str(ROOT),
    }
    options = [
        "--no-browser",
        "--allow-root",
        "--ServerApp.ip=127.0.0.1",
        "--ServerApp.port=0",
        "--LabApp.news_url=None",
    ]
    with open(tmp_path / "jupyterlab.log", "w", encoding="utf-8") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", *options, f"--ServerApp.root_dir={folder}"],
            cwd=folder,
            env={**os.environ, **ours},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            yield Lab(folder, _address(runtime, server, Path(log.name)), token)
        finally:
            server.terminate()  # it ends its kernels, then itself
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def _address(runtime: Path, server: subprocess.Popen[bytes], log: Path) -> str:
    """The server's address, once it has written it down."""
    deadline = time.monotonic() + SLOW / 1000
    while time.monotonic() < deadline and server.poll() is None:
        for path in runtime.glob("jpserver-*.json"):
            try:
                return json.loads(path.read_text(encoding="utf-8"))["url"]
            except json.JSONDecodeError:  # half written
                pass
        time.sleep(0.1)
    raise AssertionError(f"JupyterLab did not start:\n{log.read_text(encoding='utf-8')[-3000:]}")


@pytest.fixture
def page(require_system) -> Iterator[Page]:
    """An empty page of the system's Chromium."""
    chromium = require_system("chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=CHROMIUM, timeout=SLOW)
        page = browser.new_page(viewport={"width": 1400, "height": 1000})
        page.set_default_timeout(SLOW)
        yield page
        browser.close()


def choose(page: Page, menu: str, command: str) -> None:
    """Click a command of JupyterLab's menu bar."""
    page.locator("#jp-MainMenu .lm-MenuBar-item", has_text=re.compile(rf"^{menu}$")).click()
    page.locator(".lm-Menu .lm-Menu-item", has=page.get_by_text(command, exact=True)).click()


def prompts(page: Page) -> list[str]:
    """What stands beside each code cell: "[ ]:" not run, "[*]:" running or waiting, "[3]:" done."""
    return [text.strip() for text in page.locator(".jp-CodeCell .jp-InputPrompt").all_inner_texts()]


def kernel_state(page: Page, lab: Lab) -> str:
    kernels = page.request.get(f"{lab.address}api/kernels", headers={"Authorization": f"token {lab.token}"}).json()
    return kernels[0]["execution_state"] if kernels else "absent"


def wait(page: Page, lab: Lab, condition: Callable[[], bool], seconds: float) -> None:
    """Return once `condition()` holds; say what the page shows if that takes longer than `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            dialogs = page.locator(".jp-Dialog").all_inner_texts()
            raise AssertionError(
                f"{seconds} s: cells {prompts(page)}, kernel {kernel_state(page, lab)}, asked {dialogs}"
            )
        page.wait_for_timeout(300)


def open_and_run(page: Page, lab: Lab, name: str) -> list[dict[str, Any]]:
    """Open a notebook, clear what is stored in it, run all cells, save; return the code cells as saved."""
    page.goto(f"{lab.address}lab/tree/{name}?token={lab.token}")
    page.locator(".jp-Notebook .jp-CodeCell").first.wait_for()
    wait(page, lab, lambda: kernel_state(page, lab) == "idle", SLOW / 1000)
    page.locator(".jp-Notebook-ExecutionIndicator[data-status=idle]").wait_for(state="attached")
    choose(page, "Edit", "Clear Outputs of All Cells")
    wait(page, lab, lambda: not any(re.search(r"\d", prompt) for prompt in prompts(page)), SLOW / 1000)
    for attempt in range(10):
        choose(page, "Run", "Run All Cells")
        try:  # a page that has not yet heard of its kernel drops the command without a word
            wait(page, lab, lambda: any(re.search(r"[\d*]", prompt) for prompt in prompts(page)), 10)
            break
        except AssertionError:
            if attempt == 9:
                raise
    wait(
        page,
        lab,
        lambda: not any("*" in prompt for prompt in prompts(page)) and kernel_state(page, lab) == "idle",
        LESSON_SECONDS,
    )
    path = lab.folder / name
    before = path.read_bytes()
    choose(page, "File", "Save Notebook")
    wait(page, lab, lambda: path.read_bytes() not in (before, b""), SLOW / 1000)
    return [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]


def errors(cells: list[dict[str, Any]]) -> list[str]:
    return [output["evalue"] for cell in cells for output in cell["outputs"] if output["output_type"] == "error"]


def test_lesson_01_runs_in_jupyterlab_without_an_error(page, lab, tmp_path):
    (solved,) = (ROOT / "notebooks" / "solutions").glob("01_*.ipynb")
    shutil.copy(solved, lab.folder / solved.name)
    cells = open_and_run(page, lab, solved.name)
    screenshot = tmp_path / "lesson_01.png"
    page.screenshot(path=screenshot)
    print(f"screenshot: {screenshot}")
    assert errors(cells) == []
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert page.locator(".jp-Dialog").count() == 0, "JupyterLab asks something"


def test_an_error_in_a_cell_is_seen(page, lab):
    cells = [
        {"cell_type": "code", "id": f"c{at}", "metadata": {}, "execution_count": None, "outputs": [], "source": source}
        for at, source in enumerate(["print('fine')", "1 / 0", "print('never')"])
    ]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
    notebook = {"cells": cells, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}
    (lab.folder / "broken.ipynb").write_text(json.dumps(notebook), encoding="utf-8")
    ran = open_and_run(page, lab, "broken.ipynb")
    assert errors(ran) == ["division by zero"]
    assert [cell["execution_count"] for cell in ran] == [1, 2, None]
