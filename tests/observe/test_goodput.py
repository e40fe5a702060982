"""The ledger of wall time: its categories add up, and runs that were killed or restarted are accounted for."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from phalanx.observe import events
from phalanx.observe.format import goodput_words
from phalanx.observe.goodput import CATEGORIES, Ledger, account, read_events
from phalanx.observe.step_clock import StepClock


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def report(ledger: Ledger, step: int, first_step: int = 0, samples: tuple[int, int] = (0, 0)) -> dict[str, Any]:
    return ledger.event(step, first_step, samples, 10.0, 0.5).to_dict()


def test_every_second_has_a_category():
    clock = Clock()
    waited = {"data": 0.0, "comm": 0.0}
    steps = StepClock(clock)
    steps.data_wait, steps.communication = (lambda: waited["data"]), (lambda: waited["comm"])
    ledger = Ledger(steps)
    clock.now += 5.0
    steps.start()
    ledger.begin()
    for step in range(10):
        clock.now += 4.0 if step == 0 else 1.0
        steps.step_done(8)
        if step == 0:
            steps.warmed_up()
    waited |= {"data": 2.0, "comm": 1.0}
    clock.now += 3.0
    clock.now += 8.0
    steps.leave_out("compile", 8.0)
    with steps.paused("evaluate"):
        clock.now += 6.0
    with steps.paused("checkpoint"):
        clock.now += 7.0
    found = ledger.seconds()
    assert sum(found.values()) == pytest.approx(clock.now - 100.0)
    assert list(found) == [name for name in CATEGORIES if name in found]
    expected = {
        "startup": 5.0,
        "first_steps": 3.0,
        "compile": 8.0,
        "data_wait": 2.0,
        "communication": 1.0,
        "evaluation": 6.0,
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected, abs=0.2)
    assert found["checkpoint"] == 7.0
    assert found["productive"] == pytest.approx(10.0, abs=0.2)


def test_start_up_after_a_failure_is_recovery():
    clock = Clock()
    ledger = Ledger(StepClock(clock), attempt=1)
    clock.now += 4.0
    ledger.begin()
    assert ledger.seconds() == pytest.approx({"productive": 0.0, "recovery": 4.0, "data_wait": 0.0})


def test_a_report_is_due_every_ten_seconds_and_after_a_long_phase():
    clock = Clock()
    steps = StepClock(clock)
    ledger = Ledger(steps)
    ledger.begin()
    assert ledger.is_due
    report(ledger, 0)
    clock.now += 9.0
    assert not ledger.is_due
    with steps.paused("checkpoint"):
        clock.now += 2.0
    assert ledger.is_due


def attempt_events(began: float, first: int, last: int, *, attempt: int = 0, seconds: float, **more: Any) -> list[Any]:
    spent = {"productive": seconds - 1.0, "startup" if not attempt else "recovery": 1.0}
    started = {"event": "run_started", "time": began + 1.0, "first_step": first}
    fields = {"throughput": 10.0, "mfu": 0.5, "redone_steps": 0, "first_samples": first * 10, "samples": last * 10}
    good = {"event": "goodput", "time": began + seconds, "step": last, "first_step": first, "seconds": spent}
    return [started, {**good, **fields, "began": began, "attempt": attempt, **more}]


def test_a_restart_loses_the_steps_since_the_checkpoint_and_the_time_between():
    first = attempt_events(1000.0, 0, 10, seconds=11.0)
    again = attempt_events(1015.0, 6, 20, attempt=1, seconds=15.0, before=[12, 1013.0])
    found = account([*first, *again])
    assert found is not None
    assert found.total == pytest.approx(30.0)
    assert (found.attempts, found.steps, found.redone_steps) == (2, 20, 6)
    assert found.seconds["recovery"] == pytest.approx(1.0 + 2.0)
    assert found.seconds["lost"] == pytest.approx(12.0 * 6 / 12)
    assert found.throughput == pytest.approx(200 / 30.0)
    assert found.mfu == pytest.approx(0.5 * found.throughput / 10.0)
    assert sum(found.shares.values()) == pytest.approx(1.0)


def test_a_second_restart_from_an_older_checkpoint_loses_both_attempts():
    parts = [
        *attempt_events(1000.0, 0, 10, seconds=11.0),
        *attempt_events(1011.0, 8, 12, attempt=1, seconds=5.0),
        *attempt_events(1016.0, 4, 20, attempt=2, seconds=17.0),
    ]
    found = account(parts)
    assert found is not None
    assert found.redone_steps == 6 + 4
    assert found.seconds["lost"] == pytest.approx(6.0 + 4.0)


def test_the_time_until_a_run_is_resumed_by_another_command_does_not_count():
    parts = [*attempt_events(1000.0, 0, 10, seconds=11.0), *attempt_events(1111.0, 10, 20, seconds=11.0)]
    found = account(parts)
    assert found is not None
    assert {"idle", "recovery", "lost"}.isdisjoint(found.seconds)
    assert found.total == pytest.approx(22.0)


def test_a_killed_run_counts_up_to_its_last_event():
    parts = attempt_events(1000.0, 0, 10, seconds=11.0)
    found = account([*parts, {"event": "step", "time": 1014.0, "step": 13, "loss": 1.0}])
    assert found is not None
    assert (found.total, found.steps, found.until) == (pytest.approx(14.0), 13, 1014.0)


def test_events_without_goodput_have_no_account():
    assert account([{"event": "run_started", "time": 1.0}]) is None


def test_a_part_of_a_line_is_left_out(tmp_path):
    path = tmp_path / "events.jsonl"
    whole = attempt_events(time.time(), 0, 1, seconds=2.0)
    path.write_text("".join(json.dumps(each) + "\n" for each in whole) + '{"event": "step", "ti')
    assert [each["event"] for each in read_events(path)] == ["run_started", "goodput"]
    assert list(read_events(tmp_path / "none")) == []


def test_words_of_the_summary():
    words = goodput_words({"productive": 90.0, "data_wait": 0.1, "checkpoint": 3.9, "recovery": 6.0})
    assert words == "90.0% productive, 6.0% recovery, 3.9% checkpoint stall"


def test_a_step_is_counted_in_less_than_a_hundredth_of_two_milliseconds():
    steps = StepClock()
    ledger = Ledger(steps)
    ledger.begin()
    report(ledger, 0)
    began = time.process_time()
    for _ in range(10_000):
        steps.step_done(8)
        assert not ledger.is_due
    assert (time.process_time() - began) / 10_000 < 20e-6


def test_the_event_survives_json():
    event = Ledger(StepClock()).event(1, 0, (0, 8), 3.0, None)
    assert events.from_json(event.to_json()) == event


def test_parts_of_a_recovery_are_named():
    parts = [*attempt_events(1000.0, 0, 10, seconds=11.0), *attempt_events(1015.0, 10, 20, attempt=1, seconds=15.0)]
    recovered = {"event": "recovered", "time": 1018.0, "step": 10, "parts": {"abort": 0.5, "group": 1.0}}
    found, before = account([*parts, recovered]), account(parts)
    assert found is not None
    assert before is not None
    assert (found.seconds["abort"], found.seconds["group"]) == (0.5, 1.0)
    assert found.seconds["recovery"] == pytest.approx(before.seconds["recovery"] - 1.5)
    assert found.total == pytest.approx(before.total)
