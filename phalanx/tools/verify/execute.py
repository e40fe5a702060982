"""One run of a verification, as a rank executes it: by the trainer, or in a loop as users write them.

The loops are the same code on a layout and in one process. `passes`: two forward passes, then their two backward passes
with a weight, and half of the parameters join half-way. `optimizers`: two optimizers that step one after the other, and
a loss after the first step whose gradients the one that has stepped drops, as adversarial training does.
"""

from __future__ import annotations

import math
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from phalanx import torch_compat
from phalanx.config import DistributedConfig
from phalanx.errors import UsageError, a_type
from phalanx.loop.formation import Formation
from phalanx.loop.forward import Forward, decide_forward
from phalanx.loop.loader import PreparedLoader
from phalanx.loop.metrics import LossFn
from phalanx.loop.task import TrainTask
from phalanx.run.job import Job
from phalanx.run.weights import whole_tensors
from phalanx.tools.verify.probe import Probe, Recording, Tensors
from phalanx.tools.verify.subject import Parts, Subject
from phalanx.torch_compat import pytree
from phalanx.world.env import read_rank_env
from phalanx.world.seed import seed_everything

LOOPS = {
    "passes": "two forward and two backward passes, half of the model unfrozen half-way",
    "optimizers": "two optimizers, and a loss between their steps",
}


def loops_for(config: DistributedConfig) -> list[str]:
    """Return the loops that a layout can run: parameter servers take one optimizer."""
    if config.pipeline_parallel > 1:
        raise UsageError(
            "--own-loop calls the model, and a pipeline cannot be called in training",
            hint="Verify the other axes, or the pipeline without --own-loop.",
        )
    return ["passes"] if config.facts.has_servers else list(LOOPS)


def run_loop(which: str, config: DistributedConfig, model: nn.Module, data: Any, loss_fn: LossFn | None) -> Recording:
    """Train the config's steps in a loop and return what is compared."""
    loop = _Loop(which, config, model, loss_fn)
    try:
        return loop.run(data)
    finally:
        loop.formation.close()


class _Loop:
    def __init__(self, which: str, config: DistributedConfig, model: nn.Module, loss_fn: LossFn | None) -> None:
        self.formation = Formation(config)
        self._model, self._loss_fn = model, loss_fn
        self._passes = which == "passes"
        names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        self._late = set(names[: len(names) // 2]) if self._passes and not self.formation.strategy.owns_step else set()
        self._steps = config.max_steps or 1

    def run(self, data: Any) -> Recording:
        """Take the steps, over as many epochs as they need."""
        f, model = self.formation, self._model
        before = {name: module.__class__.__name__ for name, module in model.named_modules()}
        recording = Recording(modules=before, parameters=sum(p.numel() for p in model.parameters()))
        self._want_gradients(False)
        parameters = list(model.parameters())
        cut = len(parameters) if self._passes else len(parameters) // 2
        rate = f.config.learning_rate
        # The second one's step leaves its weights: the loss after it is the same in every micro-batch of a step.
        optimizers = [
            torch.optim.SGD(part, lr=lr) for part, lr in ((parameters[:cut], rate), (parameters[cut:], 0.0)) if part
        ]
        wrapped, *optimizers = f.prepare(model, *optimizers)
        loader = f.prepare_loader(data)
        recording.global_batch = loader.sharded.layout.global_batch
        while f.step < self._steps:
            self._epoch(wrapped, optimizers, loader, recording)
        f.strategy.consolidate(wrapped)
        recording.after = self._whole()
        return recording

    def _epoch(self, wrapped: nn.Module, optimizers: list[Any], loader: PreparedLoader, recording: Recording) -> None:
        f, sums, forward = self.formation, torch.zeros(2, dtype=torch.float64), None
        for batch in loader:
            if f.step == self._steps // 2:
                self._want_gradients(True)
            forward = forward or decide_forward(f.unwrap(wrapped), self._loss_fn, batch)
            weight = self._weight(forward, wrapped, batch, loader)
            loss = self._backward(forward, wrapped, batch, weight)
            sums += torch.tensor([float(loss) * weight, weight], dtype=torch.float64)
            norm = f.clip_grad_norm(math.inf, None if len(optimizers) == 1 else optimizers[1])
            for optimizer in reversed(optimizers):
                optimizer.step()
                optimizer.zero_grad()
                if optimizer is not optimizers[0]:
                    f.backward(0.5 * forward.loss(wrapped, batch))
            for optimizer in optimizers:
                optimizer.zero_grad()
            if norm is not None:
                total, count = f.reduce(sums.to(f.device), "sum").tolist()
                recording.steps.append({"step": f.step, "loss": total / count, "grad_norm": float(norm)})
                sums = torch.zeros(2, dtype=torch.float64)
            if f.step == self._steps:
                return

    def _backward(self, forward: Forward, wrapped: nn.Module, batch: Any, weight: float) -> torch.Tensor:
        f = self.formation
        first = forward.loss(wrapped, batch)
        if not self._passes:
            f.backward(first)
            return first.detach()
        second = 0.5 * forward.loss(wrapped, batch)
        f.backward(first, weight)
        f.backward(second, weight)
        return first.detach()

    def _weight(self, forward: Forward, wrapped: nn.Module, batch: Any, loader: PreparedLoader) -> float:
        """Return what the loss is the mean of: the labels of this rank's batch, or its samples."""
        by_labels = self.formation.weighs_labels(forward, batch)
        return float(forward.share(batch, loader.current.samples, by_labels=by_labels))

    def _want_gradients(self, requires_grad: bool) -> None:
        for name, parameter in self._model.named_parameters():
            if name in self._late:
                parameter.requires_grad_(requires_grad)

    def _whole(self) -> Tensors:
        tensors = {name: t for name, t in self._model.state_dict().items() if t.is_floating_point() or t.is_complex()}
        return {
            k: v.clone() for k, v in (whole_tensors(self._model, tensors, keep=self.formation.is_main) or {}).items()
        }


_DEFAULT_BATCH = 8
_DROPOUT_NAMES = {"dropout", "dropout_p", "attn_dropout", "attention_dropout"}


@dataclass(frozen=True)
class Run:
    """One of the runs that are compared.

    `split` is the number of micro-batches that make a global batch on the layout under test, `ranks` that of the
    layout's data-parallel ranks which this run has; the batch of a rank here follows from the two.
    """

    name: str
    config: DistributedConfig
    dtype: str
    split: int
    ranks: int = 1
    stop_after: int | None = None
    first_step: bool = True
    """Whether the first step is recorded in detail; not where other ranks join later."""
    loop: str = ""
    """Which of `LOOPS` trains, in place of the trainer."""


@dataclass(frozen=True)
class VerifyRequest:
    """What is sent to the ranks."""

    subject: Subject
    runs: list[Run]


def run_request(payload: str) -> None:
    """Execute the runs one after the other; the first rank writes each recording next to the request."""
    path = Path(payload)
    with path.open("rb") as file:
        request: VerifyRequest = pickle.load(file)
    for run in request.runs:
        recording = execute(run, request.subject, path.parent)
        env = read_rank_env()
        if env is None or env.rank == 0:
            torch.save(recording, path.parent / f"{run.name}.pt")


def read_recording(folder: Path, name: str) -> Recording:
    """Read a recording that ranks of this process wrote."""
    recording: Recording = torch.load(folder / f"{name}.pt", map_location="cpu", weights_only=False)
    return recording


def execute(run: Run, subject: Subject, folder: Path) -> Recording:
    """Train the run's few steps and return the recording."""
    torch.backends.cudnn.allow_tf32 = False  # torch's default, which rounds the convolutions of a GPU to 10 bits
    probe = Probe(stop_after=run.stop_after, first_step=run.first_step)

    def build() -> tuple[TrainTask, DistributedConfig]:
        seed_everything(run.config.seed)
        parts = subject.build()
        dtype = getattr(torch, run.dtype)
        data, rank_batch = _loader(parts, run, dtype)
        model = without_dropout(parts.model).to(dtype)
        task = TrainTask(model, data, loss_fn=parts.loss_fn, callbacks=[*parts.callbacks, probe], name=subject.name)
        return task, _fitting(run, rank_batch, data)

    def job() -> Job:
        return Job("fit", *build(), folder / run.name, renew=job)

    if run.loop:
        task, config = build()
        return run_loop(run.loop, config, task.model, task.train, task.loss_fn)
    result = job().run()
    assert result.history is not None, "a fit always has a history"
    probe.recording.steps = result.history.steps
    return probe.recording


def _fitting(run: Run, rank_batch: int, data: DataLoader[Any]) -> DistributedConfig:
    """Give every run the same global batch, and a learning rate scaled from the same base."""
    micro_batches = run.ranks * run.config.gradient_accumulation_steps
    whole_batch = rank_batch * run.split
    if whole_batch % micro_batches:
        raise UsageError(
            f"a global batch of {whole_batch} samples cannot be split evenly over {micro_batches} micro-batches",
            hint=f"Write a batch_size that is a multiple of {micro_batches}.",
        )
    batch = min(whole_batch // micro_batches, len(data.dataset))  # type: ignore[arg-type]
    return run.config.with_trusted(batch_size=batch, base_batch_size=run.config.base_batch_size or rank_batch)


def _loader(parts: Parts, run: Run, dtype: torch.dtype) -> tuple[DataLoader[Any], int]:
    """Return the data in the run's precision, and the batch size per rank of the layout under test."""
    data = parts.data
    has_items = isinstance(data, Dataset) or (hasattr(data, "__getitem__") and hasattr(data, "__len__"))
    loader: Any = data if isinstance(data, DataLoader) else DataLoader(data) if has_items else None
    if loader is None or isinstance(loader.dataset, IterableDataset) or loader.batch_size is None:
        raise UsageError(
            f"verify cannot split the batches of {a_type(data)} over another number of ranks",
            hint="Give a data set with a length and items, or a DataLoader over one.",
        )
    batch_size = run.config.batch_size
    batch = batch_size if batch_size is not None else loader.batch_size if loader is data else _DEFAULT_BATCH
    cast = CastCollate(loader.collate_fn, dtype, parts.augment)
    if loader is not data:
        return DataLoader(loader.dataset, batch, shuffle=True, collate_fn=cast), batch
    options = {"sampler": loader.sampler, "drop_last": loader.drop_last}
    return DataLoader(loader.dataset, batch, collate_fn=cast, **options), batch


class CastCollate:
    """A collate function whose floating-point tensors come in one precision."""

    def __init__(self, collate: Any, dtype: torch.dtype, augment: Any = None) -> None:
        self._collate = collate
        self._dtype = dtype
        self._augment = augment

    def __call__(self, samples: Any) -> Any:
        """Collate, then cast."""
        batch = self._collate(samples)
        return pytree.tree_map(self._cast, batch if self._augment is None else self._augment(batch, None))

    def _cast(self, value: Any) -> Any:
        return value.to(self._dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def without_dropout(model: nn.Module) -> nn.Module:
    """Turn dropout off: two layouts draw its random numbers differently, and both are right."""
    for module in model.modules():
        if torch_compat.is_dropout(module):
            vars(module)["p"] = 0.0
        for name in _DROPOUT_NAMES & vars(module).keys():
            if isinstance(getattr(module, name), float):
                setattr(module, name, 0.0)
    return model
