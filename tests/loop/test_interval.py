"""`checkpoint_frequency = "auto"`: the interval follows the cost of a save, the time of a step and the failures."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import phalanx as px
from phalanx.config import DistributedConfig
from phalanx.errors import ConfigError
from phalanx.loop.interval import AutoInterval
from phalanx.observe.goodput import LAUNCHED_AT
from phalanx.reliability import PRESETS, best_interval


class Clock:
    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


def interval(clock: Clock, *, failures: int = 0, ranks: int = 8, **settings: Any) -> AutoInterval:
    formation: Any = SimpleNamespace(
        config=DistributedConfig(**{"checkpoint_frequency": "auto", **settings}),
        world=SimpleNamespace(env=SimpleNamespace(failures=failures)),
        world_size=ranks,
        is_main=True,
        reduce=lambda value, op: value,
    )
    return AutoInterval(formation, clock)


def steps_until_due(auto: AutoInterval, clock: Clock, step: int, seconds: float) -> int:
    while True:
        step += 1
        clock.now += seconds
        if auto.is_due(step):
            return step


def test_the_first_save_is_early_and_the_next_by_young_and_daly():
    clock = Clock()
    auto = interval(clock, checkpoint_frequency="auto 3h")
    step = steps_until_due(auto, clock, 0, 0.5)
    assert step == 10
    clock.now += 0.4
    note = auto.saved(step, 0.4)
    wanted = round(best_interval(0.4, 3 * 3600) / 0.5)
    assert note.startswith(f"a checkpoint every {wanted} steps (about 1:32): a save stalls 0.4 s")
    assert "every 3.0 h (as given)" in note
    assert steps_until_due(auto, clock, step, 0.5) == step + wanted


def test_it_adapts_when_the_cost_changes_by_much_and_only_then():
    clock = Clock()
    auto = interval(clock, checkpoint_frequency="auto 3h")
    stalled, step = 0.0, 0
    notes = []
    for cost in (0.4, 0.45, 0.35, 4.0, 4.0, 4.0, 4.0):
        step = steps_until_due(auto, clock, step, 0.5)
        clock.now += cost
        stalled += cost
        notes.append(auto.saved(step, stalled))
    assert notes[0]
    assert notes[1:3] == ["", ""]
    assert any("stalls 4 s" in note for note in notes[3:])


def test_failures_of_this_launch_count(monkeypatch):
    monkeypatch.setenv(LAUNCHED_AT, str(time.time() - 7200))
    clock = Clock()
    auto = interval(clock, failures=2)
    step = steps_until_due(auto, clock, 0, 0.5)
    assert "every 1.0 h (2 failures in 2.0 h)" in auto.saved(step, 0.4)


def test_without_failures_those_of_a_published_cluster_are_expected():
    clock = Clock()
    auto = interval(clock, ranks=1024)
    step = steps_until_due(auto, clock, 0, 0.5)
    assert "every 7.9 h (as on a published cluster" in auto.saved(step, 0.4)
    assert PRESETS["rsc-1"].mtbf(1024) == pytest.approx(7.9 * 3600)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"checkpoint_frequency": "auto often"}, "expected a duration above 0"),
        ({"checkpoint_frequency": "auto -3"}, "expected a duration above 0"),
        ({"checkpoint_frequency": "automatic"}, "'auto', or 'auto 12h'"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ConfigError, match=message):
        DistributedConfig(**settings)


def test_a_run_says_its_interval(tmp_path, capsys):
    data = TensorDataset(torch.randn(400, 4), torch.randn(400, 1))
    trainer = px.PyTorchDDPTrainer(
        nn.Linear(4, 1),
        loss_fn=nn.functional.mse_loss,
        num_workers=1,
        device="cpu",
        batch_size=4,
        checkpoint_frequency="auto",
        run_dir=str(tmp_path / "run"),
    )
    trainer.fit(data)
    assert "a checkpoint every" in capsys.readouterr().out
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*"))
    assert names[0] == "step-00000010"
    assert names[-1] == "step-00000100"
