"""The quiz of module 202: a bank of questions, 25 drawn for a try, each answer explained. No torch is loaded."""

from __future__ import annotations

import json
import random
import re
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

from grader.catalog import COURSE

BANK = COURSE / "module-202" / "quiz"
DRAWN = 25
PASS_SHARE = 0.8
_LETTERS = "ABCDEFGH"
KINDS = {
    "single": "one letter",
    "multiple": "all letters that are right, such as AC",
    "numeric": "a number",
    "ordering": "the letters in the right order, such as CABD",
}
"""The kinds of questions, and how each is answered."""


@dataclass(frozen=True)
class Option:
    """One answer to choose, and why it is right or wrong."""

    text: str
    right: bool
    why: str


@dataclass(frozen=True)
class Question:
    """A question; options of an ordering stand in the right order in the bank."""

    id: str
    lecture: int
    kind: str
    text: str
    options: tuple[Option, ...] = ()
    answer: float = 0.0
    tolerance: float = 0.0
    unit: str = ""
    explain: str = ""
    check: str = ""
    source: str = ""

    def shuffled(self, draw: random.Random) -> Question:
        """Return it with its options in another order."""
        options = list(self.options)
        draw.shuffle(options)
        return Question(**{**self.__dict__, "options": tuple(options)})


@dataclass
class Try:
    """One try: the questions as they are shown, and which were answered right."""

    questions: list[Question]
    right: dict[str, bool] = field(default_factory=dict)

    @property
    def share(self) -> float:
        """The share of right answers."""
        return sum(self.right.values()) / len(self.questions)

    @property
    def passed(self) -> bool:
        """Whether the quiz is passed."""
        return self.share >= PASS_SHARE


@cache
def bank() -> list[Question]:
    """Return all questions."""
    found = []
    for file in sorted(BANK.glob("questions-*.toml")):
        for entry in tomllib.loads(file.read_text())["question"]:
            options = [Option(one["text"], one.get("right", False), one["why"]) for one in entry.pop("options", [])]
            options += [Option(text, True, "") for text in entry.pop("items", [])]
            found.append(Question(**entry, options=tuple(options)))
    return found


def draw(seed: int, seen: Iterable[str] = (), count: int = DRAWN) -> list[Question]:
    """Return questions for a try: of all lectures alike, those that were not seen before first, options shuffled."""
    mixed, known = random.Random(seed), set(seen)
    by_lecture: dict[int, list[Question]] = {}
    for question in bank():
        by_lecture.setdefault(question.lecture, []).append(question)
    for questions in by_lecture.values():
        mixed.shuffle(questions)
        questions.sort(key=lambda question: question.id in known)  # stable: new ones first
    chosen: list[Question] = []
    while len(chosen) < count:
        lectures = [number for number in sorted(by_lecture) if by_lecture[number]]
        mixed.shuffle(lectures)
        chosen += [by_lecture[number].pop(0) for number in lectures[: count - len(chosen)]]
    mixed.shuffle(chosen)
    return [question.shuffled(mixed) for question in chosen]


def right_order(question: Question) -> str:
    """Return the letters of an ordering's options, as shown, in the right order."""
    original = next(each for each in bank() if each.id == question.id)
    texts = [option.text for option in question.options]
    return "".join(_LETTERS[texts.index(option.text)] for option in original.options)


def right_letters(question: Question) -> str:
    """Return the letters that are right."""
    if question.kind == "ordering":
        return right_order(question)
    return "".join(letter for letter, option in zip(_LETTERS, question.options, strict=False) if option.right)


def is_right(question: Question, given: str) -> bool:
    """Whether an answer is right; raise ValueError, with what to write, for one that cannot be an answer."""
    if question.kind == "numeric":
        number = re.sub(r"[^0-9.eE+-]", "", given.replace(",", ""))
        try:
            value = float(number)
        except ValueError:
            raise ValueError(f"write {KINDS['numeric']}") from None
        return abs(value - question.answer) <= question.tolerance
    letters = "".join(re.findall(r"[A-Z]", given.upper()))
    allowed = _LETTERS[: len(question.options)]
    wanted = len(allowed) if question.kind == "ordering" else 1 if question.kind == "single" else None
    if not letters or set(letters) - set(allowed) or (wanted is not None and len(set(letters)) != wanted):
        raise ValueError(f"write {KINDS[question.kind]}, out of {', '.join(allowed)}")
    if question.kind == "ordering":
        return letters == right_letters(question)
    return sorted(set(letters)) == sorted(right_letters(question))


def shown(question: Question, number: int, total: int) -> str:
    """Return a question as it is printed."""
    lines = [f"{number}/{total}  (lecture {question.lecture}) {question.text}"]
    lines += [f"   {letter}  {option.text}" for letter, option in zip(_LETTERS, question.options, strict=False)]
    unit = f" in {question.unit}" if question.unit else ""
    return "\n".join([*lines, f"   Answer with {KINDS[question.kind]}{unit}."])


def explained(question: Question) -> str:
    """Return the right answer, and why each option is right or wrong."""
    if question.kind == "numeric":
        return f"   {question.answer:g} {question.unit}. {question.explain}"
    lines = []
    if question.kind == "ordering":
        lines.append(f"   {right_letters(question)}. {question.explain}")
    else:
        for letter, option in zip(_LETTERS, question.options, strict=False):
            lines.append(f"   {letter}  {'right' if option.right else 'wrong'}: {option.why}")
    return "\n".join([*lines, *([f"   Source: {question.source}"] if question.source else [])])


def ask(questions: list[Question], read: Callable[[str], str], write: Callable[[str], Any]) -> Try:
    """Ask all questions; an answer that cannot be one is asked for again."""
    attempt = Try(questions)
    for number, question in enumerate(questions, 1):
        write("\n" + shown(question, number, len(questions)))
        while True:
            try:
                right = is_right(question, read("> "))
                break
            except ValueError as error:
                write(f"   Please {error}.")
        attempt.right[question.id] = right
        write(f"   {'Right.' if right else 'Wrong.'}\n{explained(question)}")
    write(f"\n{sum(attempt.right.values())} of {len(questions)} right: {attempt.share:.0%}")
    write(
        "Passed." if attempt.passed else f"Not passed: {PASS_SHARE:.0%} are needed. A second try has other questions."
    )
    weak = sorted({question.lecture for question in questions if not attempt.right[question.id]})
    if weak:
        write(f"Read again: lecture {', '.join(map(str, weak))}.")
    return attempt


def write_page(questions: list[Question], path: Path) -> None:
    """Write the questions as a page that asks, explains and counts; it needs nothing else."""
    data = [
        {
            **{key: value for key, value in question.__dict__.items() if key not in ("options", "check")},
            "options": [option.__dict__ for option in question.options],
            "letters": right_letters(question),
            "how": KINDS[question.kind],
        }
        for question in questions
    ]
    page = Path(__file__).with_name("quiz.html").read_text()
    title = f"Module 202: quiz, {len(questions)} questions"
    path.write_text(page.replace("TITLE", escape(title)).replace("QUESTIONS", json.dumps(data).replace("</", "<\\/")))
