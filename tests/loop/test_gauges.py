"""What a rank measures about itself: which time counts as that of steps."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from phalanx.loop import gauges
from phalanx.observe import heartbeat
from phalanx.observe.step_clock import StepClock


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test sets; the gauges of a process that no launcher started."""
    found = SimpleNamespace(now=100.0)
    monkeypatch.delenv("PHALANX_LOG_DIR", raising=False)
    monkeypatch.setattr(heartbeat, "_LOCAL", heartbeat.LocalBoard())
    found.steps = StepClock(lambda: found.now)
    return found


def steps(measured: gauges.RankGauges, clock: SimpleNamespace, first: int, last: int) -> None:
    for step in range(first, last + 1):
        clock.now += 0.1
        heartbeat.current().beat(step)
        measured.after_step(clock.steps.step_done(samples=8))


def test_evaluation_and_the_end_of_a_run_do_not_count_as_steps(clock):
    world = SimpleNamespace(world_size=2, device=torch.device("cpu"), env=SimpleNamespace(local_world_size=2))
    waited, reports = [0.0], []
    clock.steps.data_wait = lambda: waited[0]
    measured = gauges.RankGauges(world, clock.steps, reports.append)
    steps(measured, clock, 1, 5)
    with clock.steps.paused("evaluate"):
        clock.now += 60.0
        waited[0] += 30.0
    steps(measured, clock, 6, 15)
    found = heartbeat.current().read(0)
    assert found is not None
    assert found.step == 15, "beats keep the gauges"
    assert found.gauges.step_seconds == pytest.approx(0.1)
    assert found.gauges.samples_per_second == pytest.approx(40)
    assert found.gauges.data_wait == 0.0
    steps(measured, clock, 16, 17)
    clock.now += 5.0
    measured.end()
    assert reports[-1].values["step_seconds"] == [pytest.approx(0.1)]
    assert reports[-1].values["data_wait_seconds"] == [30.0]


def test_reports_that_take_long_come_less_often(clock):
    """The main rank gathers them between two steps, and the others wait for it."""
    reports = []

    def emit(event):
        reports.append(clock.now)
        clock.now += 0.2

    world = SimpleNamespace(world_size=2, device=torch.device("cpu"), env=SimpleNamespace(local_world_size=2))
    measured = gauges.RankGauges(world, clock.steps, emit)
    steps(measured, clock, 1, 600)
    assert [round(when - 100) for when in reports] == [3, 44]
