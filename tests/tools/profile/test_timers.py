"""`PerformanceMonitor`: timers of a loop of one's own."""

from __future__ import annotations

import time

import pytest

from phalanx import PerformanceMonitor
from phalanx.errors import UsageError


def test_timers_are_measured_and_summarised():
    monitor = PerformanceMonitor()
    for _ in range(3):
        monitor.start_timer("forward")
        time.sleep(0.01)
        assert monitor.end_timer("forward") >= 0.01
    with monitor.timer("backward"):
        pass
    row = monitor.summary()["forward"]
    assert row["count"] == 3
    assert row["total"] == pytest.approx(sum(monitor.timings["forward"]))
    assert 0.01 <= row["median"] <= row["p95"] == row["max"]
    assert str(monitor).splitlines()[1].split()[:2] == ["forward", "3"]


def test_nested_timers_are_independent_and_a_second_start_is_refused():
    monitor = PerformanceMonitor()
    monitor.start_timer("step")
    monitor.start_timer("data")
    with pytest.raises(UsageError, match="'step' is running already"):
        monitor.start_timer("step")
    with pytest.raises(UsageError, match=r"unknown timer 'dat'. Did you mean 'data'"):
        monitor.end_timer("dat")
    assert monitor.end_timer("data") <= monitor.end_timer("step")
    with pytest.raises(UsageError, match="'data' was not started"):
        monitor.end_timer("data")


class Steps:
    def __init__(self):
        self.seen = []

    def train_step(self, data, target):
        self.seen.append((data, target))


@pytest.mark.parametrize(("num_steps", "taken"), [(2, 2), (100, 3)])
def test_training_is_monitored_for_some_steps(num_steps, taken):
    steps, monitor = Steps(), PerformanceMonitor()
    summary = monitor.monitor_training(steps, [(1, 2), (3, 4), (5, 6)], num_steps=num_steps)
    assert len(steps.seen) == summary["train_step"]["count"] == summary["data"]["count"] == taken
    assert summary["total_training"]["total"] >= summary["train_step"]["total"]


def test_a_function_of_a_batch_is_a_step_too_and_anything_else_is_refused():
    seen = []
    PerformanceMonitor().monitor_training(seen.append, iter([1, 2]))
    assert seen == [1, 2]
    with pytest.raises(UsageError, match="a list, which has no train_step"):
        PerformanceMonitor().monitor_training([], [1])
