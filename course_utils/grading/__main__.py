"""Mark returned notebooks: `python -m course_utils.grading grade FOLDER --out MARKS.csv`, and `verify`."""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ..exercises.registry import LESSONS
from ..launcher import shutdown
from . import batch, table
from .verification import verify

TRUST = (
    "For trusted submissions: answers run in processes of their own, but with your rights on this machine, its files "
    "and its network. Isolation comes with a later release."
)
NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return 0 when it did its work, 1 when verify found something wrong, 2 for a bad call."""
    options = _parser().parse_args(arguments)
    # torch's log lines are no output of an answer, and a slow name server must not hold up processes of one machine
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    try:
        return _grade(options, seed) if options.command == "grade" else _verify(options, seed)
    except KeyboardInterrupt:
        return 130
    finally:
        shutdown()


def _grade(options: argparse.Namespace, seed: int) -> int:
    folder, out = options.folder, options.out
    for wrong, why in (
        (not folder.is_dir(), f"{folder} is no folder"),
        (out.is_dir(), f"{out} is a folder; --out names the file to write"),
        (not out.parent.is_dir(), f"{out.parent} is no folder: make it first"),
    ):
        if wrong:
            print(why, file=sys.stderr)
            return 2
    print(TRUST)
    print(f"Cases are drawn from seed {seed}; --seed {seed} repeats them.", flush=True)
    submissions = batch.collect(folder, options.lesson, leave_out=[out])
    rows: list[batch.Row] = []
    done = 0
    start = time.perf_counter()
    try:
        for done, report in enumerate(batch.grade(submissions, options.release, seed), start=1):
            rows += report.rows
            file = report.file.encode("utf-8", "backslashreplace").decode()
            print(f"[{done}/{len(submissions)}] {file}: {report.summary} ({report.seconds:.1f} s)", flush=True)
    finally:  # what is done counts, also when somebody interrupts the rest
        table.write(rows, seed, out)
        seconds = time.perf_counter() - start
        print(f"{done} of {len(submissions)} files, {seconds / max(done, 1):.1f} s each: {len(rows)} rows in {out}")
    return 0


def _verify(options: argparse.Namespace, seed: int) -> int:
    print(TRUST)
    print(f"Cases are drawn from seed {seed}; --seed {seed} repeats them.", flush=True)
    failed = 0
    start = time.perf_counter()
    for name, troubles in verify(options.release, options.lesson, seed):
        seconds, start = time.perf_counter() - start, time.perf_counter()
        print(f"{name}: {'as it should be' if not troubles else 'WRONG'} ({seconds:.1f} s)", flush=True)
        for trouble in troubles:
            print(f"  {trouble}", file=sys.stderr, flush=True)
        failed += bool(troubles)
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m course_utils.grading", description=f"Mark notebooks. {TRUST}")
    commands = parser.add_subparsers(dest="command", required=True)
    about = "mark every notebook in a folder, one row per learner and exercise"
    grading = commands.add_parser("grade", help=about, description=f"{about.capitalize()}. {TRUST}", epilog=NAMES)
    grading.add_argument("folder", type=Path, metavar="FOLDER", help="the returned files, also in folders below it")
    grading.add_argument("--out", type=Path, required=True, metavar="MARKS.csv", help="the table to write")
    about = "solved editions must get full marks, untouched ones none"
    verifying = commands.add_parser("verify", help=about, description=f"Try the grader on the course: {about}. {TRUST}")
    for command in (grading, verifying):
        command.add_argument(
            "--seed", type=int, metavar="N", help="draw the cases from this seed (default: a fresh one)"
        )
        command.add_argument(
            "--lesson", action="append", default=[], choices=list(LESSONS), help="only this one; may be repeated"
        )
        command.add_argument(
            "--release",
            type=Path,
            default=NOTEBOOKS,
            metavar="DIR",
            help="the learner editions as handed out (default: notebooks/ of this repository)",
        )
    return parser


NAMES = (
    "A learner's name is the file's, without the lesson's own name and a copy's '(1)' or 'copy'; if nothing is left, "
    "that of the folder the file lies in. Of two submissions of one learner for one lesson the later counts: the one "
    "changed last, or within the same minute the one with the higher copy number."
)

if __name__ == "__main__":
    sys.exit(main())
