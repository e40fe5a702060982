"""The quiz: a bank whose answers are computed, tries that differ, answers in the terminal and in the page."""

from __future__ import annotations

import io
import json
import math
from collections import Counter

import pytest
import torch
from browser import browser
from grader.quiz import DRAWN, KINDS, Question, bank, draw, is_right, right_letters

from phalanx.cli import main

BANK = {question.id: question for question in bank()}


@pytest.mark.parametrize("name", BANK)
def test_an_answer_is_computed_or_has_a_source(name):
    question = BANK[name]
    assert question.check or question.source
    value = eval(question.check, {"math": math, "torch": torch}) if question.check else True
    if question.kind == "numeric":
        assert value == pytest.approx(question.answer, abs=max(question.tolerance, 1e-9))
        assert question.explain
    else:
        assert value is True
        assert len(question.options) >= 3
    if question.kind == "ordering":
        assert question.explain
    elif question.kind != "numeric":
        assert all(option.why for option in question.options)
        assert sum(option.right for option in question.options) == 1 or question.kind == "multiple"


def test_the_bank_covers_all_lectures_and_kinds():
    assert len(BANK) >= 60
    assert Counter(question.lecture for question in BANK.values()).keys() == set(range(1, 8))
    assert {question.kind for question in BANK.values()} == set(KINDS)


def test_lengths_give_no_answer_away():
    single = [question for question in BANK.values() if question.kind == "single"]
    longest = shortest = 0
    for question in single:
        lengths = sorted(len(option.text) for option in question.options)
        right = next(len(option.text) for option in question.options if option.right)
        longest += right == lengths[-1] > lengths[-2]
        shortest += right == lengths[0] < lengths[1]
        assert lengths[-1] <= 2 * lengths[-2], question.id
        assert right >= lengths[-1] / 2, question.id
    assert longest <= 0.3 * len(single)
    assert shortest <= 0.5 * len(single)


def test_a_second_try_has_other_questions_and_all_lectures():
    first = draw(1)
    second = draw(2, seen=[question.id for question in first])
    assert len(first) == len(second) == DRAWN
    assert not {question.id for question in first} & {question.id for question in second}
    for tried in (first, second):
        assert len({question.lecture for question in tried}) == 7
    assert [question.id for question in draw(1)] == [question.id for question in first]


def answer(question: Question) -> str:
    return f"{question.answer:g}" if question.kind == "numeric" else right_letters(question)


def test_letters_follow_the_shuffled_options():
    for seed in range(20):
        assert all(is_right(question, answer(question)) for question in draw(seed))


@pytest.mark.parametrize(
    ("kind", "given"), [("single", "AB"), ("single", "Z"), ("ordering", "A"), ("numeric", "many"), ("multiple", "")]
)
def test_what_cannot_be_an_answer_is_said(kind, given):
    question = next(each for each in BANK.values() if each.kind == kind)
    with pytest.raises(ValueError, match=r"write .*(letter|number)"):
        is_right(question, given)


@pytest.mark.parametrize(("wrong", "code"), [(5, 0), (6, 1)])
def test_the_terminal_asks_explains_and_keeps(wrong, code, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    lines = [answer(question) for question in draw(7)]
    for place in range(wrong):
        question = draw(7)[place]
        lines[place] = "-1" if question.kind == "numeric" else _other(question)
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(["?", *lines]) + "\n"))
    assert main(["learn", "quiz", "--seed", "7"]) == code
    out = capsys.readouterr().out
    assert "Please write" in out
    assert f"{DRAWN - wrong} of {DRAWN} right" in out
    kept = json.loads((tmp_path / ".course-progress.json").read_text())["quiz"]
    assert kept["tries"] == 1
    assert kept["best"] == (DRAWN - wrong) / DRAWN
    assert len(kept["seen"]) == DRAWN


def _other(question: Question) -> str:
    right = right_letters(question)
    if question.kind == "ordering":
        return right[::-1]
    return next(letter for letter in "ABCD" if letter != right)


def test_the_page_counts_and_explains(tmp_path):
    page = tmp_path / "quiz.html"
    assert main(["learn", "quiz", "--seed", "7", "--html", str(page)]) == 0
    with browser() as window:
        window.open(page.as_uri())
        for place, question in enumerate(draw(7)):
            box = f"document.querySelectorAll('fieldset')[{place}]"
            if question.kind in ("single", "multiple"):
                for letter in right_letters(question):
                    window.run(f"{box}.querySelector('input[value={letter}]').click()")
            else:
                window.run(f"{box}.querySelector('input').value = '{answer(question)}'")
            window.run(f"{box}.querySelector('button').click()")
        assert window.run("document.getElementById('score').textContent") == f"{DRAWN} of {DRAWN} right: passed."
        assert not window.problems
