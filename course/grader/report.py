"""`python test_phaseN.py`: grade the files of a folder, print each result and the table, keep the progress."""

from __future__ import annotations

import argparse
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from grader.catalog import COURSE, PHASES, Phase
from grader.exercise import Exercise, Result, grade
from grader.hints import hints
from grader.progress import names, note_progress, read_progress, table
from grader.ranks import Watch

_WIDTH = 110
_MOST_PRINTED = 8
"""Lines of each rank's output that are shown with a wrong answer."""


def note_result(folder: Path, result: Result) -> None:
    """Keep a result: once passed, an exercise stays passed."""
    old = read_progress(folder).get(result.exercise.name, {})
    note_progress(
        folder,
        result.exercise.name,
        tries=old.get("tries", 0) + int(result.was_run),
        points=max(old.get("points", 0), result.earned),
        message=result.message,
        at=time.strftime("%Y-%m-%d %H:%M"),
    )


def lines_of(result: Result, phase_folder: str) -> list[str]:
    """Return what is printed for one result."""
    exercise = result.exercise
    mark = "passed" if result.passed else "skipped" if result.skipped else "wrong "
    first = f"{mark}  {exercise.name:<24} {result.earned:>3} of {exercise.points:>2} points   {result.seconds:4.1f} s"
    if result.passed:
        return [first]
    parts = [result.message]
    if result.see:
        parts.append(f'Read "{result.see}" in {phase_folder}/guidelines.md.')
    if result.was_run:
        parts.append(f"(the same numbers again: --seed {result.seed})")
    for rank, text in enumerate(result.printed):
        lines = text.strip().splitlines()[-_MOST_PRINTED:]
        parts += [f"rank {rank} printed: {line}" for line in lines]
    return [first, *(textwrap.indent(textwrap.fill(part, _WIDTH), "        ") for part in parts)]


def grade_all(
    exercises: Sequence[Exercise],
    folder: Path,
    show: Callable[[Result], None],
    seed: int | None = None,
    watch: Callable[[Exercise], Watch | None] = lambda _: None,
) -> list[Result]:
    """Grade exercises on the files of a folder, keep the progress there, and show each result as it comes."""
    results = []
    for exercise in exercises:
        result = grade(exercise, folder / exercise.template, seed, watch(exercise))
        note_result(folder, result)
        show(result)
        results.append(result)
    return results


def chosen(phase: Phase, wanted: Sequence[str]) -> list[Exercise]:
    """Return the exercises of these names, or all of the phase."""
    all_names = names(phase)
    unknown = [name for name in wanted if name not in all_names]
    if unknown:
        raise SystemExit(f"unknown exercise {unknown[0]}: {phase.name} has {', '.join(all_names)}")
    return [exercise for exercise in phase.exercises() if not wanted or exercise.name in wanted]


def main(number: int, arguments: Sequence[str] | None = None) -> int:
    """Grade a phase from the command line; the exit code is 1 where an exercise is not passed."""
    phase = PHASES[number - 1]
    parser = argparse.ArgumentParser(description=f"Grade phase {number}: {phase.title}.")
    parser.add_argument("exercises", nargs="*", help="names of exercises [all of the phase]")
    parser.add_argument("--folder", type=Path, default=COURSE, help=f"where {phase.folder} is [{COURSE}]")
    parser.add_argument("--seed", type=int, help="repeat a result with the seed that was printed [a fresh one]")
    parser.add_argument("--hint", type=int, choices=(1, 2, 3), help="show this hint of the exercises, grade nothing")
    words = parser.parse_args(arguments)
    if not words.folder.is_dir():
        parser.error(f"--folder {words.folder} is not a folder")
    if words.hint:
        if not words.exercises:
            parser.error("--hint needs the name of an exercise")
        for exercise in chosen(phase, words.exercises):
            text = f"{exercise.name}, hint {words.hint}: {hints(exercise.name)[words.hint - 1]}"
            print(textwrap.fill(text, _WIDTH, subsequent_indent="    "))
        return 0
    results = grade_all(
        chosen(phase, words.exercises),
        words.folder.resolve(),
        lambda result: print("\n".join(lines_of(result, phase.folder)), flush=True),
        words.seed,
    )
    print("\n" + "\n".join(table([phase], read_progress(words.folder))))
    return int(not all(result.passed for result in results))


def assert_passed(number: int, name: str) -> None:
    """Fail with the message of the grader, for pytest."""
    exercise = chosen(PHASES[number - 1], [name])[0]
    result = grade(exercise, COURSE / exercise.template)
    assert result.passed, result.message
