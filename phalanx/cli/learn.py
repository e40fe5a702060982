"""`phalanx learn`: the course: templates to fill in, graders on real ranks, hints, solutions, algorithms to look at."""

from __future__ import annotations

import argparse
import secrets
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from phalanx.cli.flags import FlagParser
from phalanx.cli.json_output import add_output_flag
from phalanx.errors import UsageError, unknown_name
from phalanx.tools.learn.folder import (
    DEFAULT_FOLDER,
    copy_phase,
    find_exercise,
    grader,
    is_phase,
    learners_folder,
    next_exercise,
    phase_of,
    phases,
    solution_of,
)

ACTIONS = {
    "list": "list the phases and exercises, and the points so far",
    "start": "copy the templates and guidelines of a phase",
    "check": "grade your answers on real ranks",
    "hint": "show the next hint of an exercise",
    "solution": "show our answer, after your first try",
    "watch": "grade a template each time it is saved",
    "quiz": "25 questions about module 202, every answer explained; 80% pass",
    "show": "play an algorithm as recorded from real ranks: ring, tree, ddp, pipeline, zero, ...",
}
_MOST_RANKS = 8
_USAGE = {
    "start": " PHASE [FOLDER]",
    "check": " [EXERCISE|PHASE ...]",
    "hint": " EXERCISE",
    "solution": " EXERCISE",
    "watch": " [EXERCISE|PHASE ...]",
    "show": " ALGORITHM",
}


def parser(action: str = "list") -> FlagParser:
    """Return the parser of one action."""
    listed = "\n".join(f"  {name:<9} {text}" for name, text in ACTIONS.items())
    parser = FlagParser(
        prog=f"phalanx learn {action}",
        usage=f"phalanx learn {action}{_USAGE.get(action, '')} [options]",
        description=f"{ACTIONS[action]}.",
        epilog=f"actions:\n{listed}\n\nBegin with: phalanx learn start phase1",
    )
    add = parser.add_argument
    if action == "start":
        add("phase", metavar="PHASE", help="phase1 to phase4, lab-01 to lab-04, assessment, project, or all")
        add("folder", metavar="FOLDER", nargs="?", help="where to copy to [phalanx-course]")
        return parser
    if action == "show":
        add("algorithm", metavar="ALGORITHM", nargs="?", help="algorithm to show; without it, list them")
        add("--ranks", type=int, metavar="N", help="how many ranks [as the algorithm needs]")
        text = "write it as a page with play, pause and single steps instead"
        add_output_flag(parser, "--html", endings=(".html",), help=text)
        add("--speed", type=float, default=1.0, metavar="X", help="2 plays twice as fast [1]")
        return parser
    if action == "quiz":
        add("--seed", type=int, metavar="N", help="which questions [a fresh number]")
        add_output_flag(parser, "--html", endings=(".html",), help="write the questions as a page instead")
    if action in ("hint", "solution"):
        add("exercise", metavar="EXERCISE")
    if action in ("check", "watch"):
        add("exercises", metavar="EXERCISE", nargs="*", help="names, or phases [all with a template in the folder]")
        add("--seed", type=int, metavar="N", help="the same numbers again as in a result that was printed")
    if action == "solution":
        add("--show", action="store_true", help="also before the first try")
    add("--folder", metavar="DIR", help="the folder with your templates [this one, or phalanx-course]")
    return parser


def run(arguments: Sequence[str]) -> int:
    """Run the verb."""
    words = list(arguments)
    if words and words[0] in ("-h", "--help"):
        parser().print_help()
        return 0
    action = words.pop(0) if words and not words[0].startswith("-") else "list"
    if action not in ACTIONS:
        raise UsageError(
            unknown_name("action", action, ACTIONS, of="phalanx learn"), hint="Write: phalanx learn --help"
        )
    namespace = parser(action).parse_all(words)
    doing: dict[str, Callable[[argparse.Namespace], int]] = {
        "list": _list,
        "start": _start,
        "check": _check,
        "hint": _hint,
        "solution": _solution,
        "watch": _watch,
        "quiz": _quiz,
        "show": _show,
    }
    return doing[action](namespace)


def _list(namespace: argparse.Namespace) -> int:
    listed, progress_file = grader("catalog").listed, grader("progress")
    folder = None
    with suppress(UsageError):  # the list is for those who have not begun, too
        folder = learners_folder(namespace.folder)
    progress = progress_file.read_progress(folder) if folder else {}
    for phase, total in zip(phases(), progress_file.table(phases(), progress), strict=True):
        print(total)
        for exercise in listed(phase):
            done = progress.get(exercise.name, {})
            mark = "passed" if done.get("points") else f"{done['tries']} tries" if done.get("tries") else ""
            print(f"  {exercise.name:<24} {exercise.title:<58} {exercise.points:>2}  {mark}".rstrip())
    following = next_exercise(folder) if folder else None
    print()
    if folder is None:
        print("Begin: phalanx learn start phase1")
    elif following is not None:
        print(f"Next: {folder / following.template}, {following.target}; then phalanx learn check {following.name}")
    else:
        print("All exercises of the phases here are passed. The next phase: phalanx learn start PHASE")
    return 0


def _start(namespace: argparse.Namespace) -> int:
    folder = Path(namespace.folder or DEFAULT_FOLDER).expanduser()
    if not namespace.folder:
        with suppress(UsageError):  # a second phase goes beside the first, from wherever it is asked for
            folder = learners_folder(None)
    chosen = phases() if namespace.phase == "all" else [phase_of(namespace.phase)]
    for phase in chosen:
        written = copy_phase(phase, folder)
        note = "" if written else " is there already; nothing was changed"
        print(f"{folder / phase.folder}{note}")
        for file in written:
            print(f"  {file.relative_to(folder)}")
    first = grader("catalog").listed(chosen[0])[0]
    print(f"\nRead {next((folder / chosen[0].folder).glob('*.md'))}, write {first.target}, then:")
    where = f" --folder {folder}" if namespace.folder else ""
    print(f"  phalanx learn check {first.name}{where}")
    return 0


def _check(namespace: argparse.Namespace) -> int:
    named = _named(namespace.exercises)
    folder = learners_folder(namespace.folder)
    chosen = named or _with_template(folder)
    results = _grade(chosen, folder, namespace.seed)
    progress = grader("progress")
    numbers = {phase.name: phase for phase, _ in chosen}
    print("\n" + "\n".join(progress.table(numbers.values(), progress.read_progress(folder))))
    return int(not all(result.passed for result in results))


def _named(words: Sequence[str]) -> list[tuple[Any, Any]]:
    """Return the phases and exercises that are named."""
    listed = grader("catalog").listed
    pairs = []
    for word in words:
        if is_phase(word):
            phase = phase_of(word)
            pairs += [(phase, exercise) for exercise in listed(phase)]
        else:
            pairs.append(find_exercise(word))
    return pairs


def _with_template(folder: Path) -> list[tuple[Any, Any]]:
    """Return the phases and exercises whose template is in the folder."""
    listed = grader("catalog").listed
    return [
        (phase, exercise) for phase in phases() for exercise in listed(phase) if (folder / exercise.template).exists()
    ]


def _grade(chosen: Sequence[tuple[Any, Any]], folder: Path, seed: int | None) -> list[Any]:
    """Grade, with a live view of the ranks in a terminal."""
    from phalanx.tools.learn.terminal import LiveRanks

    report, names = grader("report"), {exercise.name for _, exercise in chosen}
    folders = {exercise.name: phase.folder for phase, exercise in chosen}
    phases = {phase.name: phase for phase, _ in chosen}.values()
    exercises = [candidate for phase in phases for candidate in phase.exercises() if candidate.name in names]
    with LiveRanks(sys.stdout) as live:

        def show(result: Any) -> None:
            live.print("\n".join(report.lines_of(result, folders[result.exercise.name])))

        return report.grade_all(exercises, folder, show, seed, live.watch)  # type: ignore[no-any-return]


def _hint(namespace: argparse.Namespace) -> int:
    phase, exercise = find_exercise(namespace.exercise)
    folder, progress = learners_folder(namespace.folder), grader("progress")
    hints = grader("hints").hints(exercise.name)
    count = min(progress.read_progress(folder).get(exercise.name, {}).get("hints", 0) + 1, len(hints))
    progress.note_progress(folder, exercise.name, hints=count)
    for number, text in enumerate(hints[:count], 1):
        print(textwrap.fill(f"Hint {number}: {text}", 110, subsequent_indent="        "))
    if count == len(hints):
        print(f'That is the last one. Read "{exercise.title}" in {folder / phase.folder / "guidelines.md"}.')
    return 0


def _solution(namespace: argparse.Namespace) -> int:
    _, exercise = find_exercise(namespace.exercise)
    if not namespace.show:
        progress = grader("progress").read_progress(learners_folder(namespace.folder))
        if not progress.get(exercise.name, {}).get("tries"):
            raise UsageError(
                f"{exercise.name} has not been tried yet",
                hint=f"Write: phalanx learn check {exercise.name} (or add --show to see the answer at once)",
            )
    print(f"# {exercise.solution}\n{solution_of(exercise)}")
    return 0


def _watch(namespace: argparse.Namespace) -> int:
    named = _named(namespace.exercises)
    folder = learners_folder(namespace.folder)
    chosen = named or _with_template(folder)
    files = sorted({exercise.template for _, exercise in chosen})
    before = {name: _saved(folder / name) for name in files}
    print(f"watching {', '.join(files)} in {folder}; Ctrl-C ends it", flush=True)
    while True:
        time.sleep(0.3)
        now = {name: _saved(folder / name) for name in files}
        changed = [name for name in files if now[name] != before[name]]
        before = now
        if changed:
            print(f"\n{time.strftime('%H:%M:%S')}  {', '.join(changed)}", flush=True)
            _grade([pair for pair in chosen if pair[1].template in changed], folder, namespace.seed)


def _saved(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:  # an editor that replaces the file, between its two steps
        return 0


def _quiz(namespace: argparse.Namespace) -> int:
    quiz, progress = grader("quiz"), grader("progress")
    folder = Path.cwd()
    with suppress(UsageError):  # the quiz needs no templates: its results are kept here then
        folder = learners_folder(namespace.folder)
    old = progress.read_progress(folder).get("quiz", {})
    seed = secrets.randbelow(10**6) if namespace.seed is None else namespace.seed
    questions = quiz.draw(seed, old.get("seen", []))
    if namespace.html:
        quiz.write_page(questions, Path(namespace.html))
        print(f"wrote {namespace.html}")
        return 0
    try:
        attempt = quiz.ask(questions, input, print)
    except EOFError:
        raise UsageError("the answers ended before the questions; nothing was kept") from None
    answered = sorted({*old.get("seen", []), *attempt.right})
    best = max(old.get("best", 0.0), attempt.share)
    progress.note_progress(folder, "quiz", tries=old.get("tries", 0) + 1, best=best, seen=answered)
    return int(not attempt.passed)


def _show(namespace: argparse.Namespace) -> int:
    from phalanx.tools.learn.terminal import play

    shows = grader("shows").SHOWS
    name, page = namespace.algorithm, namespace.html
    if name is None:
        print("\n".join(f"{name:<10} {show.title}" for name, show in shows.items()))
        return 0
    if name not in shows:
        raise UsageError(unknown_name("algorithm to show", name, shows))
    least, ranks = shows[name].least, namespace.ranks
    if ranks is not None and not least <= ranks <= _MOST_RANKS:
        raise UsageError(f"--ranks {ranks}: {name} is shown with {least} to {_MOST_RANKS} ranks")
    if namespace.speed <= 0:
        raise UsageError(f"--speed {namespace.speed:g} is not above 0")
    print(f"recording {name} on real ranks ...", file=sys.stderr, flush=True)
    stories = grader("story")
    story = stories.record(name, ranks)
    if page:
        stories.write_page(story, Path(page))
        print(f"wrote {page}")
    else:
        play(story, sys.stdout, namespace.speed)
    return 0
