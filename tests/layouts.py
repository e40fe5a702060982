"""Train a tiny language model on this rank, whatever the layout, and bring back what can be compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from phalanx.config import DistributedConfig
from phalanx.loop.task import TrainTask
from phalanx.models.gpt import gpt
from phalanx.models.llama import llama
from phalanx.models.moe import moe
from phalanx.trainers.job import Job, run_job
from phalanx.trainers.weights import whole_weights

SHAPE = {"layers": 2, "vocab_size": 61, "block_size": 16}  # 61 tokens cannot be cut evenly
MODELS = {"gpt": gpt, "llama": llama, "moe": moe}


def make_tokens(samples: int, time: int, *, ignoring: bool) -> TensorDataset:
    """Return random tokens and the tokens after them; `ignoring`: samples differ in how many of these count."""
    tokens = torch.randint(61, (samples, time + 1), generator=torch.Generator().manual_seed(1))
    targets = tokens[:, 1:].clone()
    if ignoring:
        targets[::3, :5] = -100
    return TensorDataset(tokens[:, :-1].contiguous(), targets)


def train(
    folder: str,
    name: str = "llama",
    *,
    samples: int = 32,
    val_samples: int | None = None,
    dtype: str = "float64",
    time: int = 8,
    **settings: Any,
) -> tuple[dict[str, torch.Tensor], dict[str, float], list[float]]:
    """Train on this rank; return the whole weights, the last evaluation, and the steps' gradient norms."""
    torch.manual_seed(3)
    model = settings.pop("model", None)
    if model is None:
        model = MODELS[name](**{**SHAPE, **settings.pop("shape", {})}).to(getattr(torch, dtype))
    defaults = {"device": "cpu", "progress": False, "learning_rate": 1e-2, "log_every_n_steps": 1}
    config = DistributedConfig(**{**defaults, **settings})
    ignoring = config.loss_weighting == "tokens"
    data = DataLoader(make_tokens(samples, time, ignoring=ignoring), shuffle=True)
    val = data if val_samples is None else DataLoader(make_tokens(val_samples, time, ignoring=ignoring))
    result = run_job(Job("fit", TrainTask(model, data, val), config, Path(folder)), in_place=True)
    weights = whole_weights(model)
    assert weights is not None
    assert result.history is not None
    return (
        {key: value.clone() for key, value in weights.items()},
        result.history.epochs[-1].val,
        [step["grad_norm"] for step in result.history.steps],
    )


def assert_same(
    ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], tolerance: float, where: str = ""
) -> None:
    """Compare all weights, relative to the largest of each tensor; `where` tells an error which run it was."""
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        difference = (ours[name] - value).abs().max().item() / max(1.0, value.abs().max().item())
        assert difference <= tolerance, f"{where} {name} differs by {difference}".lstrip()
