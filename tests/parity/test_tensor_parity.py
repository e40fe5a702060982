"""tensor parallelism equals one process: alone and with sharded data axes, and checkpoints across layouts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.utils.data import DataLoader, TensorDataset

from phalanx.config import DistributedConfig
from phalanx.errors import ModelError, UsageError
from phalanx.loop.task import TrainTask
from phalanx.models.gpt import gpt
from phalanx.models.llama import llama
from phalanx.models.plan_names import PLAN_NAMES
from phalanx.strategies.base import whole
from phalanx.strategies.tensor import STYLES
from phalanx.trainers.job import Job, run_job

SHAPE = {"layers": 2, "vocab_size": 61, "block_size": 16}  # 61 tokens cannot be cut evenly
MODELS = {"gpt": gpt, "llama": llama}


class Net(nn.Module):
    """A model of a user's own, with a plan of words and of torch's styles; ranks hold equal activations."""

    def __init__(self, plan: dict | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(61, 12)
        self.up = nn.Linear(12, 20)
        self.down = nn.Linear(20, 12)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(12, 61)
        self.plan = plan

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        return self.head(hidden + self.dropout(self.down(torch.tanh(self.up(hidden)))))

    def tensor_plan(self) -> dict:
        styles = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        return self.plan or {"embed": "whole", **styles, "head": "whole"}


def make_tokens(samples: int, time: int, *, ignoring: bool) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(61, (samples, time + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    if ignoring:
        targets[::3, :5] = -100  # samples differ in what they weigh
    return TensorDataset(tokens[:, :-1].contiguous(), targets)


def train(folder: str, name: str = "llama", *, samples: int = 37, dtype: str = "float64", time: int = 8, **settings):
    """Train on this rank; return the whole weights, the last evaluation, and the steps' gradient norms."""
    torch.manual_seed(3)
    built = {**SHAPE, **settings.pop("shape", {})}
    model = MODELS[name](**built).to(getattr(torch, dtype)) if name in MODELS else settings.pop("model")
    defaults = {"device": "cpu", "progress": False, "learning_rate": 1e-2, "log_every_n_steps": 1}
    config = DistributedConfig(**{**defaults, **settings})
    data = DataLoader(make_tokens(samples, time, ignoring=config.loss_weighting == "tokens"), shuffle=True)
    result = run_job(Job("fit", TrainTask(model, data, data), config, Path(folder)), in_place=True)
    weights = {key: whole(value.detach()).clone() for key, value in model.state_dict().items()}
    assert result.history is not None
    epoch = result.history.epochs[-1]
    return weights, epoch.val, [step["grad_norm"] for step in result.history.steps]


def assert_same(ours: dict, theirs: dict, tolerance: float) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        difference = (ours[name] - value).abs().max().item() / max(1.0, value.abs().max().item())
        assert difference <= tolerance, f"{name} differs by {difference}"


LAYOUTS = {
    "tensor 2": (2, {"tensor_parallel": 2}),
    "tensor 2 x fsdp 2": (4, {"tensor_parallel": 2, "strategy": "fsdp"}),
    "tensor 2 x ddp 2": (4, {"tensor_parallel": 2, "strategy": "ddp"}),
}
ONE: dict[tuple, tuple] = {}


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("weighting", ["samples", "tokens"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
def test_every_layout_equals_one_process(ranks, tmp_path, name, layout, weighting, accumulation):
    """37 samples in global batches of 8 are 5 steps with a ragged end; clipping by one norm of all parameters."""
    common = {"loss_weighting": weighting, "gradient_clipping": 0.5, "epochs": 1}
    if (name, weighting) not in ONE:
        ONE[name, weighting] = ranks(lambda: train(str(tmp_path / "one"), name, batch_size=8, **common), world_size=1)[
            0
        ]
    weights, metrics, norms = ONE[name, weighting]
    world_size, settings = LAYOUTS[layout]
    batch_size = 8 // (accumulation * world_size // 2)

    def run():
        split = {"batch_size": batch_size, "gradient_accumulation_steps": accumulation, **settings}
        return train(str(tmp_path / "split"), name, **common, **split)

    assert len(norms) == 5
    assert min(norms) > 0.5
    for rank, (ours, measured, our_norms) in enumerate(ranks(run, world_size=world_size)):
        assert_same(ours, weights, 1e-10)
        assert measured == pytest.approx(metrics, rel=1e-10)
        if rank == 0:
            assert our_norms == pytest.approx(norms, rel=1e-10)
