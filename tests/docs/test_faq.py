"""The frequently asked questions: each answer is short, has something to run, and what it has runs."""

from __future__ import annotations

import re
import runpy
import shlex

import pytest
from command import ROOT, phalanx

PAGE = (ROOT / "docs" / "faq.md").read_text()
QUESTIONS = dict(re.findall(r"^### (.+?)\n(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL))
CODE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TRAININGS = sorted(
    {
        line.partition("#")[0].partition("train ")[2].strip()
        for language, text in CODE.findall(PAGE)
        if language == "bash"
        for line in text.splitlines()
        if "phalanx train " in line
        and "./llama" not in line  # a model of the Hub: tests/journeys/test_language_recipes.py
    }
)
PYTHON = {
    question: text
    for question, answer in QUESTIONS.items()
    for language, text in CODE.findall(answer)
    if language == "python"
}


def test_thirty_questions_are_answered_in_a_few_sentences():
    assert len(QUESTIONS) >= 30
    for question, answer in QUESTIONS.items():
        assert question.endswith(("?", ".")), question
        assert CODE.search(answer), f"nothing to run: {question}"
        prose = CODE.sub("", answer)
        assert "](" in prose, f"no link: {question}"
        assert len(prose.split()) <= 75, f"{len(prose.split())} words: {question}"


@pytest.mark.parametrize("words", TRAININGS)
def test_the_training_is_one_that_phalanx_would_start(words, tmp_path, monkeypatch):
    """On two CPU ranks in place of GPUs and nodes: the machine may have neither."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PHALANX_DEVICE", "cpu")
    (tmp_path / "train.py").write_text("import phalanx\n\nphalanx.Trainer\n")
    (tmp_path / "rows.csv").write_text("a,b,label\n" + "1.5,2,red\n0.5,1,blue\n" * 20)
    on_cpus = re.sub(r"--num-gpus (\d)|--num-nodes 2 --gpus-per-node 8 --rdzv-endpoint \S+", "--num-workers 2", words)
    answer = phalanx("train", *shlex.split(on_cpus), "--dry-run")
    assert answer.code == 0, answer.text


@pytest.mark.parametrize("question", PYTHON)
def test_the_python_runs(question, tmp_path, monkeypatch, fork_server, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PHALANX_DEVICE", "cpu")
    script = tmp_path / "faq.py"
    script.write_text(PYTHON[question])
    runpy.run_path(str(script), run_name="__main__")
