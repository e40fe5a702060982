"""Train a tiny language model on this rank, whatever the layout, and bring back what can be compared."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from phalanx import PyTorchDDPTrainer
from phalanx.config import DistributedConfig
from phalanx.observe.history import History
from phalanx.run.weights import whole_weights
from phalanx.zoo.models.gpt import gpt
from phalanx.zoo.models.llama import llama
from phalanx.zoo.models.moe import moe

SHAPE = {"layers": 2, "vocab_size": 61, "seq_len": 16}  # 61 tokens cannot be cut evenly
MODELS = {"gpt": gpt, "llama": llama, "moe": moe}


def make_tokens(samples: int, time: int, *, ignoring: bool) -> TensorDataset:
    """Return random tokens and the tokens after them; `ignoring`: samples differ in how many of these count."""
    tokens = torch.randint(61, (samples, time + 1), generator=torch.Generator().manual_seed(1))
    targets = tokens[:, 1:].clone()
    if ignoring:
        targets[::3, :5] = -100
    return TensorDataset(tokens[:, :-1].contiguous(), targets)


def fit(
    folder: str,
    name: str = "llama",
    *,
    samples: int = 32,
    val_samples: int | None = None,
    dtype: str = "float64",
    time: int = 8,
    **settings: Any,
) -> tuple[PyTorchDDPTrainer, History]:
    """Train on this rank; return the trainer and the history."""
    torch.manual_seed(3)
    model = settings.pop("model", None)
    if model is None:
        model = MODELS[name](**{**SHAPE, **settings.pop("shape", {})}).to(getattr(torch, dtype))
    defaults = {"device": "cpu", "progress": False, "learning_rate": 1e-2, "log_every_n_steps": 1, "run_dir": folder}
    config = DistributedConfig(**{**defaults, **settings})
    ignoring = config.loss_weighting == "tokens"
    data = DataLoader(make_tokens(samples, time, ignoring=ignoring), shuffle=True)
    val = data if val_samples is None else DataLoader(make_tokens(val_samples, time, ignoring=ignoring))
    trainer = PyTorchDDPTrainer(model, config)
    return trainer, trainer.fit(data, val)


def train(
    folder: str, name: str = "llama", **settings: Any
) -> tuple[dict[str, torch.Tensor], dict[str, float], list[float]]:
    """Train as `fit`; return the whole weights, the last evaluation, and the steps' gradient norms."""
    trainer, history = fit(folder, name, **settings)
    weights = whole_weights(trainer.model)
    assert weights is not None
    return (
        {key: value.cpu().clone() for key, value in weights.items()},
        history.epochs[-1].val,
        [step["grad_norm"] for step in history.steps],
    )


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return the largest difference of two tensors, relative to the largest value where that is above 1."""
    return (ours - theirs).abs().max().item() / max(1.0, theirs.abs().max().item())


def assert_same(
    ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], tolerance: float, where: str = ""
) -> None:
    """Compare all weights, relative to the largest of each tensor; `where` tells an error which run it was."""
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        apart = difference(ours[name], value)
        assert apart <= tolerance, f"{where} {name} differs by {apart}".lstrip()
