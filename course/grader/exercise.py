"""An exercise, one attempt at it, and what came out: points, or the mistake in words."""

from __future__ import annotations

import ast
import random
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grader.guard import uses
from grader.hints import first_hint
from grader.ranks import Answer, Order, RunFailed, Watch, run_ranks, start_zygote

LIMIT_SECONDS = 60.0
"""No exercise is graded for longer, unless it says so."""


class Mistake(Exception):
    """What is wrong with an answer: what was seen, what should be there, where to look."""

    def __init__(self, text: str, see: str = "") -> None:
        super().__init__(text)
        self.see = see


class Missing(Mistake):
    """What an exercise needs is not installed here: the answer is not wrong, it was not graded."""


@dataclass(frozen=True)
class Exercise:
    """One thing to write, and how it is graded."""

    name: str
    title: str
    template: str
    """Path below `course/`."""
    target: str
    """The function or class of the template that the learner writes."""
    points: int
    grade: Callable[[Attempt], None]
    """Raises Mistake."""
    forbidden: tuple[str, ...] = ()
    """Dotted names that the answer must not use."""
    programs: bool = False
    """Whether the answer may start other programs; it is about them, or what it uses does."""
    limit: float = LIMIT_SECONDS
    """Grading takes no longer; more than usual for answers that run in an engine with its own start."""


@dataclass
class Attempt:
    """One answer to one exercise while it is graded."""

    exercise: Exercise
    answer: Path
    folder: Path
    """An empty folder for files."""
    random: random.Random
    watch: Watch | None = None
    began: float = field(default_factory=time.monotonic)
    printed: list[str] = field(default_factory=list)
    """What the ranks of the last run printed."""

    def seed(self) -> int:
        """Return a fresh number."""
        return self.random.randrange(1, 2**31)

    def run(
        self,
        function: Callable[..., Any],
        ranks: int,
        args: tuple[Any, ...] = (),
        timeout: float | None = None,
        kill: Mapping[int, float | str] | None = None,
        expect_failure: bool = False,
        variables: Mapping[str, str] | None = None,
    ) -> list[Answer]:
        """Start ranks, call `function(module, rank, world, *args)` in each, and return one answer per rank.

        A rank that raises, hangs or ends is a Mistake, unless failures are expected. kill={1: 0.5} ends rank 1 after
        half a second, kill={1: "saving"} when it calls marker("saving"). The variables are in the environment of the
        ranks when the learner's file is loaded.
        """
        left = self.exercise.limit - (time.monotonic() - self.began)
        limit = max(1.0, min(timeout or left, left))
        order = Order(
            self.answer,
            function,
            ranks,
            args,
            limit,
            dict(kill or {}),
            expect_failure,
            self.exercise.forbidden,
            variables or {},
            self.exercise.programs,
        )
        try:
            answers = run_ranks(order, self.folder, self.watch)
            self.printed = [answer.output for answer in answers]
            return answers
        except RunFailed as failure:
            self.printed = [log.read_text(errors="replace")[-4096:] for log in newest_logs(self.folder)]
            hint = first_hint(self.exercise.name) if failure.unwritten else ""
            raise Mistake(f"{failure}. {hint}".strip()) from failure

    def call(
        self,
        function: Callable[..., Any],
        *args: Any,
        timeout: float | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> Any:
        """Call `function(module, *args)` in one process without a group, and return its value."""
        return self.run(function, 0, args, timeout, variables=variables)[0].value


@dataclass(frozen=True)
class Result:
    """What grading an answer gave."""

    exercise: Exercise
    passed: bool
    message: str
    see: str
    seconds: float
    seed: int
    was_run: bool = True
    """Whether the answer could be run at all."""
    printed: tuple[str, ...] = ()
    """The end of what each rank printed, for an answer that is wrong."""
    skipped: bool = False
    """Whether it was not graded, as something that it needs is not installed."""

    @property
    def earned(self) -> int:
        """The points."""
        return self.exercise.points if self.passed else 0


def grade(exercise: Exercise, answer: Path, seed: int | None = None, watch: Watch | None = None) -> Result:
    """Grade an answer. The seed is fresh unless one is given, to repeat a result."""
    seed = random.SystemRandom().randrange(1, 10**6) if seed is None else seed
    start_zygote()  # loading torch is not a part of the answer's time
    began = time.monotonic()
    message, see, was_run, skipped = "", "", False, False
    with tempfile.TemporaryDirectory(prefix="course-", ignore_cleanup_errors=True) as folder:
        attempt = Attempt(exercise, answer.resolve(), Path(folder), random.Random(seed), watch)
        try:
            _check_source(exercise, attempt.answer)
            was_run = True
            exercise.grade(attempt)
        except Missing as missing:
            message, was_run, skipped = str(missing), False, True
        except Mistake as mistake:
            message, see = str(mistake), mistake.see
        except Exception as error:  # noqa: BLE001 (what the answer returned was of a kind that was not expected)
            last = traceback.extract_tb(error.__traceback__)[-1]
            message = (
                f"the grader cannot judge what {exercise.target} returned or changed: {type(error).__name__}: {error}"
                f" (in {last.name}). Compare the types with the docstring"
            )
    printed = tuple(attempt.printed) if message else ()
    return Result(exercise, not message, message, see, time.monotonic() - began, seed, was_run, printed, skipped)


def newest_logs(folder: Path) -> list[Path]:
    """Return what the ranks of the last run in a folder printed."""
    runs = sorted(folder.glob("run-*"), key=lambda path: path.stat().st_mtime)
    return sorted(runs[-1].glob("rank-*.out")) if runs else []


def _check_source(exercise: Exercise, answer: Path) -> None:
    """Raise for a file that is not there or is not Python, a renamed target, and forbidden names."""
    if not answer.exists():
        raise Mistake(f"{answer} does not exist: copy the templates with `phalanx learn start`")
    try:
        tree = ast.parse(answer.read_bytes())  # bytes: as Python reads a file, with its encoding
    except (SyntaxError, ValueError, RecursionError) as error:
        place = f":{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        raise Mistake(f"{answer.name}{place} is not Python: {getattr(error, 'msg', error)}") from None
    defined = {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    if exercise.target not in defined | names:
        raise Mistake(f"{answer.name} has no {exercise.target}: the exercise is graded by that name, so keep it")
    found = uses(tree, exercise.target, exercise.forbidden)
    if found is not None:
        line, name = found
        raise Mistake(
            f"{answer.name}:{line} uses {name}: this exercise asks you to write it yourself"
            if name.startswith("torch")
            else f"{answer.name}:{line} uses {name}: answers are written with torch and the standard library"
        )
