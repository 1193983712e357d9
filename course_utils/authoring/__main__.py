"""The maintainers' commands: `python -m course_utils.authoring build` and `release`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from .build import Course, build, check
from .release import release
from .source import AuthoringError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return 0 when all went well and 1 when something is to be mended."""
    options = _parser().parse_args(arguments)
    try:
        course = Course(options.root)
        if options.command == "release":
            print(release(course, options.out))
            return 0
        if options.check:
            return _report(check(course, options.lessons), "every edition is as its source says")
        return _build(course, options.lessons)
    except AuthoringError as error:
        print(error, file=sys.stderr)
        return 1


def _build(course: Course, lessons: Sequence[str]) -> int:
    failed = []
    for source in course.sources(lessons):
        try:
            print(build(course, source), flush=True)
        except AuthoringError as error:  # the other lessons are still worth building
            failed.append(f"{error}\n{source.stem} stays as it was")
            print(failed[-1], file=sys.stderr, flush=True)
    return 1 if failed else 0


def _report(problems: Sequence[str], otherwise: str) -> int:
    print("\n".join(problems) if problems else otherwise, file=sys.stderr if problems else sys.stdout)
    return 1 if problems else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m course_utils.authoring", description=__doc__)
    parser.add_argument(
        "--root", type=Path, default=Path(__file__).resolve().parents[2], help="the repository (default: this one)"
    )
    commands = parser.add_subparsers(dest="command", required=True)
    building = commands.add_parser("build", help="write the learner and the solved edition of lessons")
    building.add_argument("lessons", nargs="*", metavar="NN", help="numbers of lessons (default: all)")
    building.add_argument("--check", action="store_true", help="compare what is written with the sources; run nothing")
    releasing = commands.add_parser("release", help="write the zip of learner editions that an instructor hands out")
    releasing.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the zip")
    return parser


if __name__ == "__main__":
    sys.exit(main())
