"""What trials on Ray record: which have ended, after which report, and at which point; read without Ray."""

from __future__ import annotations

import json

import pytest

from phalanx.config import resolve
from phalanx.engines.ray.tune.record import (
    folder_of,
    forget_end,
    mark_ended,
    note_end,
    number_of,
    read_point,
    write_point,
)
from phalanx.engines.ray.tune.trial import TrialDecider, Work
from phalanx.tools.tune import choice, loguniform
from phalanx.tools.tune.objective import Objective
from phalanx.tools.tune.schedulers import Asha, decide
from phalanx.tools.tune.space import SearchSpace
from phalanx.tools.tune.trainable import FunctionTrainable
from phalanx.tools.tune.trial import State, Trial

LOSS = Objective("loss", "min")
LATE = [{"other": 1.0}, {"loss": 2.5}, {"loss": 2.3}]


@pytest.fixture
def work(tmp_path):
    subject = FunctionTrainable(resolve({}), lambda config: config["x"], "loss")
    return Work(subject, SearchSpace({"x": choice([0, 1, 2])}), LOSS, str(tmp_path), ({"x": 0}, {"x": 1}, {"x": 2}))


def report(work, number, reports):
    folder = folder_of(work.folder, number)
    folder.mkdir(parents=True, exist_ok=True)
    lines = [
        {"event": "metrics", "step": 0, "epoch": place + 1, "split": "tune", "values": values, "ends_epoch": True}
        for place, values in enumerate(reports)
    ]
    (folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return work.trial(number)


def test_a_trial_without_a_mark_is_unfinished_whatever_it_reported(work):
    ended, interrupted = report(work, 0, LATE), report(work, 1, LATE)
    ended.state, ended.cause, ended.seconds = State.FAILED, "the disk is on fire", 1.5
    note_end(ended)
    assert not work.trial(0).state.is_final, "its worker may be one that is just being killed"
    mark_ended(ended.folder)
    again = work.trial(0)
    assert (again.state, again.cause, again.seconds) == (State.FAILED, "the disk is on fire", 1.5)
    assert not work.trial(interrupted.number).state.is_final
    interrupted.state = State.FAILED
    note_end(interrupted)
    forget_end(interrupted)
    mark_ended(interrupted.folder)
    assert not work.trial(interrupted.number).state.is_final, "the next worker begins without it"
    assert not work.trial(2).state.is_final, "nor is one that never began"


def test_a_stopped_trial_keeps_the_report_that_was_judged(work):
    better = Trial(0, {}, folder_of(work.folder, 0), State.FINISHED, {1: {"loss": 1.0}})
    late = report(work, 1, LATE)
    assert sorted(late.reports) == [1, 2, 3]
    assert decide(late, [better], Asha(eta=3), LOSS) is False
    assert (late.stopped_at, sorted(late.reports), late.value(LOSS)) == (2, [1, 2], 2.5)
    late.state = State.STOPPED
    note_end(late)
    mark_ended(late.folder)
    assert sorted(work.trial(1).reports) == [1, 2], "what was measured beyond does not count for who reads it either"


def test_a_verdict_does_not_count_what_others_reported_after_they_were_stopped(work):
    report(work, 0, [{"loss": 1.0}, {"loss": 1.0}, {"loss": 1.0}])
    report(work, 1, LATE)  # stopped at its second report; its worker has not noticed yet
    mine = report(work, 2, [{"loss": 0.5}, {"loss": 0.5}, {"loss": 1.5}])
    judge = TrialDecider(mine, Asha(eta=3), LOSS, work.folder)
    judge.judge()
    assert mine.passed == {1}, "the second may not have a third report: its end is waited for"
    given_up = work.trial(1)
    given_up.end_after(2)
    given_up.state = State.STOPPED
    note_end(given_up)
    mark_ended(given_up.folder)
    judge.judge()
    assert mine.stopped_at == 3, "one of two that came there, and not the best"


def test_a_learnt_point_is_found_again(tmp_path):
    space = SearchSpace({"rate": loguniform(1e-4, 1), "shape": choice([(1, 2), (3, 4)]), "depth": 2})
    point = {"rate": 0.125, "shape": (3, 4), "depth": 2}
    assert read_point(str(tmp_path), 4, space) is None
    write_point(str(tmp_path), 4, space, point)
    assert read_point(str(tmp_path), 4, space) == point


def test_a_member_keeps_its_number_when_it_continues_with_anothers_config():
    assert number_of("abc_00003", {"point": 1, "params": {}}) == 3
    assert number_of("1a2b3c4d", {"number": 5}) == 5
