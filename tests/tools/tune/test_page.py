"""The page of a search: importance, scales, and a table that sorts by exact values."""

from __future__ import annotations

import pytest

from phalanx.tools.svg import Axis, brief
from phalanx.tools.tune import choice, loguniform, uniform
from phalanx.tools.tune.page import axes_and_lines, importances, page
from phalanx.tools.tune.results import PlainTable, Results, SearchProgress, columns
from phalanx.tools.tune.space import SearchSpace
from phalanx.tools.tune.trial import Objective, State, Trial


def trials(tmp_path, count=12):
    """Return trials whose loss follows x, and hardly the others."""
    made = []
    for number in range(count):
        x = number / (count - 1)
        trial = Trial(
            number, {"x": x, "noise": (number * 7 % count) / count, "kind": "ab"[number % 2], "fixed": 3}, tmp_path
        )
        trial.reports = {1: {"loss": x + 1}, 2: {"loss": x}}
        trial.state, trial.seconds = State.FINISHED, 1.0
        made.append(trial)
    return made


SPACE = {"x": uniform(0, 1), "noise": uniform(0, 1), "kind": choice(["a", "b"]), "fixed": 3}


def test_importance_finds_the_hyperparameter_that_matters(tmp_path):
    pytest.importorskip("optuna")
    results = Results(tuple(trials(tmp_path)), Objective("loss", "min"), tmp_path)
    shares = importances(results, SearchSpace(SPACE))
    assert next(iter(shares)) == "x"
    assert shares["x"] > 0.5
    few = Results(tuple(trials(tmp_path, 3)), Objective("loss", "min"), tmp_path)
    assert importances(few, SearchSpace(SPACE)) == {}


def test_the_table_leaves_fixed_values_out_and_shortens_values_not_names(tmp_path):
    made = trials(tmp_path)
    made[0].params["kind"] = "a-name-that-is-far-too-long-for-a-table"
    head, rows = columns(made, Objective("loss", "min"))
    assert head == ["trial", "state", "iteration", "loss", "x", "noise", "kind", "time"]
    assert rows[0][6] == brief("a-name-that-is-far-too-long-for-a-table") == "a-name-th…r-a-table"


def test_the_page_holds_every_part_and_is_escaped(tmp_path):
    made = trials(tmp_path)
    made[1].params["kind"] = "<b>"
    results = Results(tuple(made), Objective("loss", "min"), tmp_path)
    space = SearchSpace({**SPACE, "kind": choice(["a", "b", "<b>"]), "x": loguniform(0.01, 1)})
    for trial in made:
        trial.params["x"] = max(trial.params["x"], 0.01)
    axes, lines = axes_and_lines(made, space, results.objective)
    assert len(lines) == len(made)  # a loss of 0 is a result too
    text = page(results, space, axes, lines, "Tuning it", {"command": "phalanx tune it --seed 3", "seed": "3"})
    assert "phalanx tune it --seed 3" in text
    assert "<b></td>" not in text
    assert 'data-value="0.09090909090909091"' in text
    assert text.count("<circle") >= 12


@pytest.mark.parametrize(
    ("axis", "labels"),
    [
        (Axis("", 0, 1), ["0", "0.2", "0.4", "0.6", "0.8", "1"]),
        (Axis("", 1e-4, 1e-1, log=True), ["0.0001", "0.001", "0.01", "0.1"]),
        (Axis("", names=("a", "b")), ["a", "b"]),
        (Axis.of("", [1, 2, 3]), ["1", "2", "3"]),
        (Axis.of("", [2.0]), ["1.9", "1.95", "2", "2.05", "2.1"]),
    ],
)
def test_ticks_are_round(axis, labels):
    assert [label for _, label in axis.ticks()] == labels


def test_progress_says_how_many_of_how_many_and_the_best_so_far(tmp_path, capsys):
    made = trials(tmp_path, 4)
    made[3].state, made[2].state = State.WAITING, State.RUNNING
    progress = SearchProgress(Objective("loss", "min"))
    progress.begin(4)
    words = progress.words(made)
    assert words.startswith("2 of 4 done, 1 running, about ")
    assert words.endswith("best 0 (trial 0)")
    table = PlainTable(Objective("loss", "min"))
    table.progress.begin(4)
    table.show(made)
    assert "trial 0 finished at iteration 2, loss 0 [2 of 4 done" in capsys.readouterr().out
