"""A strategy of another package, found by its entry point."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from command import Answer, installed_package, phalanx

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

OUTSIDE = '''
import torch
import torch.distributed as dist
from phalanx.strategies.base import Strategy, share_weights


class ByHand(Strategy):
    """Averages gradients with one all-reduce per parameter, after the last backward pass of a step."""

    name = "by-hand"
    sync = True

    def wrap(self, model):
        share_weights(model)
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return model

    def set_sync(self, wrapped, sync):
        self.sync = sync

    def backward(self, loss):
        loss.backward()
        for parameter in self.parameters if self.sync else ():
            dist.all_reduce(parameter.grad)
            parameter.grad /= self.world.world_size
'''


@pytest.fixture(autouse=True)
def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fork_server: None) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    entry_points = "[phalanx.strategies]\nby-hand = outside:ByHand\nbroken = outside:Missing\nnot-one = outside:torch\n"
    with installed_package(tmp_path / "site", {"outside": OUTSIDE}, entry_points):
        yield


def train(*words: str) -> Answer:
    return phalanx("train", "digits", "--num-workers", "2", "--device", "cpu", "--epochs", "1", *words)


def losses(folder: Path, run: str) -> list[float]:
    events = [json.loads(line) for line in (folder / run / "events.jsonl").read_text().splitlines()]
    found = [event["loss"] for event in events if event["event"] == "step"]
    assert found, "no step was reported"
    return found


def test_a_strategy_of_another_package_trains_as_ddp_does(tmp_path):
    for strategy in ("by-hand", "ddp"):
        answer = train("--strategy", strategy, "--run-dir", strategy)
        assert answer.code == 0, answer.err
        assert f"2 ranks on cpu · {strategy} · fp32" in answer.out
    assert losses(tmp_path, "by-hand") == pytest.approx(losses(tmp_path, "ddp"), rel=1e-5)


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("broken", "the entry point broken = outside:Missing in the group phalanx.strategies cannot be loaded"),
        ("not-one", "the entry point not-one = outside:torch in the group phalanx.strategies is not a subclass"),
        ("by-hnad", "strategy = 'by-hnad': not one of"),
    ],
)
def test_a_broken_entry_point_is_named(name, error):
    answer = train("--strategy", name)
    assert answer.code != 0
    assert error in " ".join(answer.err.split())


def test_the_table_lists_strategies_of_other_packages():
    assert "by-hand\n  how       --strategy by-hand\n  what      outside:ByHand" in phalanx("strategies").out
