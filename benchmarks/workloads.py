"""What is trained: the same model, data and optimizer for every contestant."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from clock import StepClock
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout need not be installed


@dataclass(frozen=True)
class Workload:
    """The size of one benchmark."""

    batch_size: int
    warmup: int
    steps: int
    """Measured steps, unless --steps says otherwise."""
    time: int = 0
    """Tokens a sequence; 0: not a language model."""
    bf16: bool = False
    compile: bool = False
    model_options: dict[str, Any] | None = None
    in_order: bool = False
    """Whether every contestant gets the samples in the same order, so that losses can be compared."""
    workers: int = 0
    """Processes that load data."""


WORKLOADS = {
    # 64 -> 128 -> 128 -> 10: almost nothing to compute, so what a framework adds to a step shows.
    "mlp": Workload(batch_size=32, warmup=50, steps=300),
    # A step of some 250 ms on one CPU core: what is left of the overhead in honest work.
    "gpt": Workload(batch_size=8, warmup=3, steps=15, time=128, model_options={"layers": 4, "hidden": 256, "heads": 4}),
    # The same with a smaller batch: gradients travel as often for half the work.
    "gpt-small": Workload(
        batch_size=4, warmup=3, steps=15, time=128, model_options={"layers": 4, "hidden": 256, "heads": 4}
    ),
    # GPT-2's 124 million parameters as they are trained: compiled, bf16. For GPUs.
    "gpt2": Workload(batch_size=32, warmup=15, steps=60, time=1024, bf16=True, compile=True),
    # Its largest sister, 1558 million parameters.
    "gpt2-xl": Workload(batch_size=8, warmup=8, steps=20, time=1024, bf16=True, compile=True),
}


class MlpWithLoss(nn.Module):
    """The small perceptron; forward(inputs, labels) is the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.layers(inputs), labels)


class GptWithLoss(nn.Module):
    """Phalanx's GPT; forward(tokens, targets) is the loss alone: the logits need not be kept or converted."""

    def __init__(self, preset: str, **options: Any) -> None:
        super().__init__()
        from phalanx.zoo.models.gpt import gpt

        self.gpt = gpt(preset, **options)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self.gpt(tokens, targets).loss
        return loss


class PlainDataset(Dataset[tuple[Tensor, ...]]):
    """What users write: a length and a `__getitem__`. Nothing tells a framework that it could fetch whole batches."""

    def __init__(self, tensors: TensorDataset) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        inputs, targets = self.tensors.tensors
        return inputs[index], targets[index]


@dataclass
class Task:
    """One contestant's copy of a workload on this rank."""

    workload: Workload
    model: nn.Module
    dataset: Dataset[tuple[Tensor, ...]]
    tensors: Dataset[tuple[Tensor, ...]]
    """The same samples as a TensorDataset, for those who are measured with one."""
    clock: StepClock
    device: str
    world_size: int

    @property
    def steps(self) -> int:
        """Optimizer steps to take, warm-up included."""
        return self.clock.total_steps

    def loader(self, **options: Any) -> DataLoader[tuple[Tensor, ...]]:
        """Return the loader that users write."""
        workload = self.workload
        options = {"shuffle": not workload.in_order, "pin_memory": self.device == "cuda", **options}
        options = {"num_workers": workload.workers, **options}
        return DataLoader(self.dataset, batch_size=workload.batch_size, **options)

    def optimizer(self, parameters: Any = None) -> torch.optim.Optimizer:
        """Return the AdamW that everyone uses, in its fastest form, with the stopwatch attached."""
        chosen = self.model.parameters() if parameters is None else parameters
        optimizer = torch.optim.AdamW(chosen, lr=1e-4, fused=True)
        self.clock.attach(optimizer)
        return optimizer


def build_task(name: str, *, device: str, world_size: int, steps: int | None = None) -> Task:
    """Build the model (equal on all ranks) and enough data for one epoch of all steps."""
    workload = WORKLOADS[name]
    torch.manual_seed(0)
    clock = StepClock(workload.warmup, steps or workload.steps)
    options = {"seq_len": workload.time, **(workload.model_options or {})}
    model = (
        MlpWithLoss() if name == "mlp" else GptWithLoss("debug" if name in ("gpt", "gpt-small") else name, **options)
    )
    # Two steps more than needed: a loop that looks one batch ahead must not meet the end of the epoch.
    samples = workload.batch_size * world_size * (clock.total_steps + 2)
    tensors = _dataset(workload, samples)
    return Task(workload, model, PlainDataset(tensors), tensors, clock, device, world_size)


def _dataset(workload: Workload, samples: int) -> TensorDataset:
    if not workload.time:
        return TensorDataset(torch.randn(samples, 64), torch.randint(10, (samples,)))
    tokens = torch.randint(256, (samples, workload.time + 1))
    return TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
