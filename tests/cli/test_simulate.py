"""`phalanx simulate`: tables, JSON, sweeps, and input that makes no sense."""

from __future__ import annotations

import json

import pytest
from command import phalanx

PUBLISHED = ("--gpus", 16384, "--failures", 419, "--days", 54, "--trials", 20)


def test_the_published_run():
    found = json.loads(phalanx("simulate", *PUBLISHED, "--in-place", "--json").out)
    (row,) = found["predictions"]
    assert row["mtbf_hours"] == pytest.approx(3.09, abs=0.01)
    restart, in_place = row["ways"]["restart"], row["ways"]["in place"]
    assert 0.90 < restart["shares"]["productive"] < in_place["shares"]["productive"]
    assert restart["simulated"]["mean"] == pytest.approx(restart["shares"]["productive"], abs=0.01)
    assert found["assumed_seconds"] == {
        "checkpoint_cost": 10.0,
        "restart_cost": 300.0,
        "duration": 54 * 86400.0,
        "recovery_cost": 10.0,
        "step": 10.0,
    }


def test_the_table_states_what_was_assumed():
    out = phalanx("simulate", *PUBLISHED, "--checkpoint-cost", "30s").out
    assert "419 in 54 days on 16,384 GPUs" in out
    assert "checkpoint cost 30.0 s, restart cost 5:00" in out
    assert "3.1 h" in out


def test_a_sweep_with_a_published_rate():
    words = ("simulate", "--gpus", "1024,16384", "--failure-rate", "rsc-1", "--trials", 5)
    rows = json.loads(phalanx(*words, "--json").out)["predictions"]
    assert [round(row["mtbf_hours"], 1) for row in rows] == [7.9, 1.8]
    assert "Kokolis" in phalanx(*words).out


def test_a_longer_interval_than_the_best_one_loses_more():
    def productive(*words: object) -> float:
        found = json.loads(phalanx("simulate", *PUBLISHED, *words, "--json").out)
        return found["predictions"][0]["ways"]["restart"]["shares"]["productive"]

    assert productive("--interval", "2h") < productive()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--gpus", "8"), "none of them was given"),
        (("--gpus", "-8", "--mtbf", "3h"), "--gpus -8: expected a number of GPUs"),
        (("--gpus", "0", "--mtbf", "3h"), "--gpus 0: expected a number of GPUs"),
        (("--gpus", "8", "--mtbf=-3h"), "expected a duration above 0"),
        (("--gpus", "8", "--mtbf", "0"), "expected a duration above 0"),
        (("--gpus", "8", "--mtbf", "3 fortnights"), "--mtbf 3 fortnights: expected a duration"),
        (("--gpus", "8", "--mtbf", "3h", "--checkpoint-cost", "cheap"), "--checkpoint-cost cheap: expected a duration"),
        (
            ("--gpus", "8", "--mtbf", "20s", "--checkpoint-cost", "30s"),
            "every 20.0 s, and a checkpoint takes 30.0 s",
        ),
        (("--gpus", "8", "--mtbf", "60s"), "a restart takes 5:00: it would hardly ever train"),
        (("--gpus", "8", "--mtbf", "3h", "--failures", "4"), "2 of them were given"),
        (("--gpus", "8,16", "--mtbf", "2h"), "--mtbf is that of one job"),
        (("--gpus", "8,16", "--failures", "4", "--days", "3"), "--observed-gpus 16"),
        (("--gpus", "8", "--failures", "4"), "--failures without --days"),
        (("--gpus", "8", "--failures", "-4", "--days", "3"), "--failures -4: must be greater than 0"),
        (("--gpus", "8", "--failures", "4", "--days", "0"), "--days 0: must be greater than 0"),
        (("--gpus", "8", "--failure-rate", "rsc1"), "Did you mean 'rsc-1'?"),
        (("--gpus", "8", "--failure-rate", "-1"), "must be greater than 0"),
        (("--gpus", "8", "--mtbf", "3h", "--trials", "0"), "--trials 0"),
        (("--gpus", "8", "--mtbf", "2h", "--in-place", "--step", "3h"), "--step 3h: a step takes longer"),
    ],
)
def test_bad_input(words, message):
    answer = phalanx("simulate", *words)
    assert answer.code == 2
    assert message in answer.err
