"""`phalanx plan --failures`: tables, JSON, several sizes, and input that makes no sense."""

from __future__ import annotations

import json

import pytest
from command import phalanx

PUBLISHED = ("plan", "--gpus", 16384, "--failures", "419/54d")


def test_the_published_run():
    found = json.loads(phalanx(*PUBLISHED, "--json").out)
    (row,) = found["predictions"]
    assert row["mtbf_hours"] == pytest.approx(3.09, abs=0.01)
    assert 0.90 < row["ways"]["restart"]["productive"] < row["ways"]["in place"]["productive"] < 1
    assert sum(row["ways"]["restart"].values()) == pytest.approx(1)
    assert found["assumed_seconds"] == {"checkpoint_cost": 10.0, "restart_cost": 300.0, "recovery_cost": 10.0}


def test_the_table_states_what_was_assumed():
    out = phalanx(*PUBLISHED, "--checkpoint-cost", "30s").out
    assert "419 in 54 days on 16,384 GPUs" in out
    assert "checkpoint cost 30.0 s, restart cost 5:00" in out
    assert "3.1 h" in out


def test_several_sizes_with_a_published_rate():
    words = ("plan", "--gpus", "1024,16384", "--failures", "rsc-1")
    rows = json.loads(phalanx(*words, "--json").out)["predictions"]
    assert [round(row["mtbf_hours"], 1) for row in rows] == [7.9, 1.8]
    assert "Kokolis" in phalanx(*words).out


def test_the_forms_of_a_rate_agree():
    def hours(rate: str) -> float:
        return json.loads(phalanx("plan", "--gpus", 1000, "--failures", rate, "--json").out)["predictions"][0][
            "mtbf_hours"
        ]

    assert hours("24h") == pytest.approx(hours("0.001")) == pytest.approx(hours("10/20d/500")) == pytest.approx(24)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--failures", "3h"), "expected a number of GPUs"),
        (("--gpus", "-8", "--failures", "3h"), "--gpus -8: expected a number of GPUs"),
        (("--gpus", "0", "--failures", "3h"), "--gpus 0: expected a number of GPUs"),
        (("--gpus", "8", "--failures=-3h"), "unknown failure rate '-3h'"),
        (("--gpus", "8", "--failures", "0"), "must be greater than 0"),
        (("--gpus", "8", "--failures", "3 fortnights"), "unknown failure rate '3 fortnights'"),
        (("--gpus", "8", "--failures", "3h", "--checkpoint-cost", "cheap"), "--checkpoint-cost cheap: expected"),
        (("--gpus", "8", "--failures", "20s", "--checkpoint-cost", "30s"), "every 20.0 s, and a checkpoint takes 30.0"),
        (("--gpus", "8", "--failures", "60s"), "a restart takes 5:00: it would hardly ever train"),
        (("--gpus", "8,16", "--failures", "2h"), "is the time of one job"),
        (("--gpus", "8,16", "--failures", "4/3d"), "--failures 4/3d/16"),
        (("--gpus", "8", "--failures", "0/3d"), "each number must be greater than 0"),
        (("--gpus", "8", "--failures", "rsc1"), "Did you mean 'rsc-1'?"),
        (("--gpus", "8"), "no model was named"),
        (("gpt2", "--gpu", "h100", "--gpus", "8,16"), "--gpus 8,16: expected a whole number"),
    ],
)
def test_bad_input(words, message):
    answer = phalanx("plan", *words)
    assert answer.code == 2
    assert message in answer.err
