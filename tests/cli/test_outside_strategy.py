"""A strategy of another package, found by its entry point."""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING

import pytest
from command import COMMAND, install_package

if TYPE_CHECKING:
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


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, str]:
    """Return the environment in which Python finds the package."""
    entry_points = "[phalanx.strategies]\nby-hand = outside:ByHand\nbroken = outside:Missing\nnot-one = outside:torch\n"
    return install_package(tmp_path / "site", {"outside": OUTSIDE}, entry_points)


def train(folder: Path, environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, "train", "digits", "--num-workers", "2", "--device", "cpu", "--epochs", "1", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=90, check=False)


def losses(folder: Path, run: str) -> list[float]:
    events = [json.loads(line) for line in (folder / run / "events.jsonl").read_text().splitlines()]
    found = [event["loss"] for event in events if event["event"] == "step"]
    assert found, "no step was reported"
    return found


def test_a_strategy_of_another_package_trains_as_ddp_does(tmp_path, installed):
    for strategy in ("by-hand", "ddp"):
        done = train(tmp_path, installed, "--strategy", strategy, "--run-dir", strategy)
        assert done.returncode == 0, done.stderr
        assert f"2 ranks on cpu · {strategy} · fp32" in done.stdout
    assert losses(tmp_path, "by-hand") == pytest.approx(losses(tmp_path, "ddp"), rel=1e-5)


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("broken", "the entry point broken = outside:Missing in the group phalanx.strategies cannot be loaded"),
        ("not-one", "the entry point not-one = outside:torch in the group phalanx.strategies is not a subclass"),
        ("by-hnad", "strategy = 'by-hnad': not one of"),
    ],
)
def test_a_broken_entry_point_is_named(tmp_path, installed, name, error):
    done = train(tmp_path, installed, "--strategy", name)
    assert done.returncode != 0
    assert error in " ".join(done.stderr.split())


def test_the_table_lists_strategies_of_other_packages(tmp_path, installed):
    listed = subprocess.run([*COMMAND, "strategies"], env=installed, capture_output=True, text=True, check=True)
    assert "by-hand\n  how       --strategy by-hand\n  what      outside:ByHand" in listed.stdout
