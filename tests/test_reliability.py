"""Failure models against what was published, and the closed form against the simulation of the same process."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from phalanx.reliability import DAY, HOUR, PRESETS, FailureRate, Process, best_interval

INTERRUPTIONS = {
    "Faulty GPU": 148,
    "GPU HBM3 Memory": 72,
    "Software Bug": 54,
    "Network Switch/Cable": 35,
    "Host Maintenance": 32,
    "GPU SRAM Memory": 19,
    "GPU System Processor": 17,
    "NIC": 7,
    "NCCL Watchdog Timeouts": 7,
    "Silent Data Corruption": 6,
    "GPU Thermal Interface + Sensor": 6,
    "SSD": 3,
    "Power Supply": 3,
    "Server Chassis": 2,
    "IO Expansion Board": 2,
    "Dependency": 2,
    "CPU": 2,
    "System Memory": 2,
}
"""The unexpected interruptions of 54 days on 16,384 GPUs: The Llama 3 Herd of Models (arXiv 2407.21783), table 5."""


def test_the_published_run_of_16384_gpus_is_more_than_90_percent_effective():
    rate = FailureRate.observed(sum(INTERRUPTIONS.values()), 54, 16384)
    mtbf = rate.mtbf(16384)
    assert mtbf / HOUR == pytest.approx(3.09, abs=0.01)
    assert PRESETS["llama-3"].mtbf(16384) == pytest.approx(mtbf)
    for cost, restart in ((10.0, 300.0), (30.0, 300.0), (10.0, 600.0)):
        assert Process(mtbf, cost, best_interval(cost, mtbf), restart).expected()["productive"] > 0.90


@pytest.mark.parametrize(("gpus", "hours"), [(8, 47.7 * 24), (1024, 7.9), (16384, 1.8), (131072, 0.23)])
def test_published_mean_times_to_failure(gpus, hours):
    """Of RSC-1: Kokolis et al., HPCA 2025; 8 and 1,024 GPUs were measured, the others projected."""
    assert PRESETS["rsc-1"].mtbf(gpus) / HOUR == pytest.approx(hours, rel=0.03)


def test_the_rate_per_node_gives_the_projection_but_not_what_was_measured():
    nodes = PRESETS["rsc-1-nodes"]
    assert nodes.mtbf(16384) / HOUR == pytest.approx(1.80, abs=0.01)
    assert nodes.mtbf(1024) / HOUR == pytest.approx(28.8, abs=0.1)


def test_between_and_outside_published_sizes():
    rate = PRESETS["rsc-1"]
    assert rate.mtbf(1024) > rate.mtbf(4096) > rate.mtbf(16384)
    assert rate.mtbf(1) == pytest.approx(8 * 47.7 * DAY)
    assert rate.mtbf(32768) == pytest.approx(rate.mtbf(16384) / 2)


@pytest.mark.parametrize(("cost", "mtbf"), [(10.0, 11_000.0), (60.0, 3600.0), (0.1, 86400.0), (300.0, 1800.0)])
def test_the_interval_of_young_and_daly_is_the_best(cost, mtbf):
    best = best_interval(cost, mtbf)

    def productive(interval: float) -> float:
        return Process(mtbf, cost, interval, 120.0).expected()["productive"]

    assert productive(best) >= max(productive(best * 0.8), productive(best * 1.25))
    if cost / mtbf < 0.001:
        assert best == pytest.approx(math.sqrt(2 * cost * mtbf), rel=0.03)


def test_the_best_interval_is_never_shorter_than_a_checkpoint():
    assert best_interval(100.0, 60.0) >= 60.0
    assert best_interval(100.0, 10.0) == 10.0


def simulate(process: Process, duration: float, source: random.Random) -> float:
    """The share of productive work in a run of this wall time, with failures at random."""
    cycle = process.interval + process.checkpoint_cost
    left, position = duration, 0.0
    while left > 0:
        until_failure = source.expovariate(1 / process.mtbf)
        ran = min(until_failure, left)
        left -= ran
        position += ran
        if until_failure <= ran:  # it failed within the duration
            position -= position % cycle if process.lost is None else min(process.lost, ran)
            while left > 0:  # a failure during a recovery begins it again
                until_next = source.expovariate(1 / process.mtbf)
                left -= min(until_next, process.recovery)
                if until_next >= process.recovery:
                    break
    cycles, rest = divmod(position, cycle)
    return (cycles * process.interval + min(rest, process.interval)) / duration


@pytest.mark.parametrize("lost", [None, 10.0])
@pytest.mark.parametrize(
    ("mtbf", "cost", "restart"), [(11_000.0, 10.0, 300.0), (2000.0, 60.0, 400.0), (900.0, 30.0, 300.0)]
)
def test_simulation_and_closed_form_agree(mtbf, cost, restart, lost):
    process = Process(mtbf, cost, best_interval(cost, mtbf), restart, lost)
    expected = process.expected()
    assert sum(expected.values()) == pytest.approx(1.0)
    assert min(expected.values()) > 0
    simulated = [simulate(process, 2000 * mtbf, random.Random(seed)) for seed in range(20)]
    assert statistics.fmean(simulated) == pytest.approx(expected["productive"], abs=0.004)


def test_recovery_in_place_beats_a_restart():
    mtbf = PRESETS["rsc-1"].mtbf(16384)
    interval = best_interval(10.0, mtbf)
    restart = Process(mtbf, 10.0, interval, 300.0).expected()["productive"]
    in_place = Process(mtbf, 10.0, interval, 1.0, lost=5.0).expected()["productive"]
    assert in_place > restart + 0.05
