"""Small trainings that run under Horovod and under torch's DDP, and must give the same weights."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from phalanx.engines.horovod.strategy import HorovodReducer
from phalanx.errors import UsageError

SAMPLES = 45
"""Two ranks with batches of 4 end an epoch with a global batch that is not full."""


class Branches(nn.Module):
    """A model of which each sample uses one branch only, so that a rank's batch may miss one."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.high, self.never = nn.Linear(6, 1), nn.Linear(6, 1), nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.low(x) if bool(x[0, 0] < 0) else self.high(x)


def make_model(kind: str = "mlp") -> nn.Module:
    torch.manual_seed(7)
    if kind == "branches":
        return Branches()
    if kind == "linear":
        return nn.Linear(6, 1)
    return nn.Sequential(nn.Linear(6, 16, bias=False), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1))


def make_data(kind: str = "") -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 6, generator=generator)
    y = x.sum(1, keepdim=True)
    if kind == "spoilt":
        x[17] = torch.inf
    return TensorDataset(x, y)


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated and clipped": {"gradient_accumulation_steps": 2, "gradient_clipping": 0.1},
    "bf16": {"mixed_precision": "bf16"},
    "sgd": {"optimizer": "sgd", "learning_rate": 0.01},
    "a spoilt batch": {"model": "linear", "data": "spoilt", "on_nonfinite": "skip"},
    "by tokens": {"model": "linear", "loss_weighting": "tokens"},
    "branches": {"model": "branches", "find_unused_parameters": True, "weight_decay": 0.5},
}


def train(trainer: type, name: str, folder: Path, **more: Any) -> dict[str, torch.Tensor]:
    """Train one case on this rank and return the weights."""
    settings: dict[str, Any] = {**CASES.get(name, {}), **more}
    model, data = make_model(settings.pop("model", "mlp")), make_data(settings.pop("data", ""))
    fitted = trainer(
        model,
        loss_fn=nn.functional.mse_loss,
        **{"batch_size": 4, "epochs": 2, "device": "cpu", "progress": False, "run_dir": folder / name, **settings},
    )
    fitted.fit(data)
    return {key: value.clone() for key, value in model.state_dict().items()}


def optimizer_with_a_past(model: nn.Module, steps: int) -> torch.optim.Optimizer:
    """Return an optimizer whose moments come from some steps with gradients of one."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    optimizer.zero_grad()
    model.load_state_dict(weights)
    return optimizer


def train_with_a_past(trainer: type, folder: Path, *, steps: int) -> dict[str, torch.Tensor]:
    """Train with an optimizer that has moments already."""
    model = make_model()
    fitted = trainer(
        model,
        loss_fn=nn.functional.mse_loss,
        optimizer=optimizer_with_a_past(model, steps),
        batch_size=4,
        epochs=1,
        device="cpu",
        progress=False,
        run_dir=folder / "past",
    )
    fitted.fit(make_data())
    return {key: value.clone() for key, value in model.state_dict().items()}


def refusal_of_adasum(trainer: type, folder: Path) -> str:
    """Return what a build without Adasum says; empty where it has it."""
    try:
        train(trainer, "plain", folder, adasum=True)
    except UsageError as error:
        return str(error)
    return ""


def wait_for_a_late_rank(hvd: Any, folder: Path) -> tuple[float, float]:
    """Return rank 0's seconds, and those of them that it computed, of a backward pass that rank 1 begins after it."""
    parameter = nn.Parameter(torch.ones(3))
    reducer = HorovodReducer(hvd, [("late", parameter)])
    waiting = folder / "waiting"
    if hvd.rank() == 1:
        while not waiting.exists():
            time.sleep(0.01)
        time.sleep(0.5)
    began, computed = time.perf_counter(), time.thread_time()
    if hvd.rank() == 0:
        waiting.touch()
    parameter.sum().backward()
    reducer.close()
    return time.perf_counter() - began, time.thread_time() - computed


def main(folder: Path) -> None:
    """In a rank of horovodrun, whose script has called hvd.init() itself: run all cases, leave what they gave."""
    import horovod.torch as hvd

    from phalanx import HorovodTrainer

    hvd.init()
    found: dict[str, Any] = {name: train(HorovodTrainer, name, folder) for name in CASES}
    found["fp16"] = train(HorovodTrainer, "sgd", folder, compression=hvd.Compression.fp16)
    # Rank 1 has no moments and other weights at first: it must start from rank 0's.
    found["past"] = train_with_a_past(HorovodTrainer, folder, steps=3 if hvd.rank() == 0 else 0)
    trainer = HorovodTrainer(make_model(), backward_passes_per_step=3, verbose=False)
    found["accumulation"] = trainer.config.gradient_accumulation_steps
    found["average"] = trainer.metric_average(torch.tensor(float(hvd.rank() + 1)), name="rank")
    found["adasum"] = refusal_of_adasum(HorovodTrainer, folder)
    found["late"] = wait_for_a_late_rank(hvd, folder)
    torch.save(found, folder / f"found-{hvd.rank()}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
