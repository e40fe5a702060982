"""One run of a verification, as a rank executes it."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from phalanx import torch_compat
from phalanx.config import DistributedConfig
from phalanx.config.option import join_options
from phalanx.errors import UsageError
from phalanx.loop.task import TrainTask
from phalanx.tools.verify.own_loop import run_own_loop
from phalanx.tools.verify.probe import Probe, Recording
from phalanx.tools.verify.subject import Parts, Subject
from phalanx.torch_compat import pytree
from phalanx.trainers.job import Job, run_job
from phalanx.world.env import read_rank_env
from phalanx.world.seed import seed_everything

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
    own_loop: str = ""
    """Which loop of `own_loop` trains, in place of the trainer."""


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
        parts = subject.build(run.config.data_dir)
        dtype = getattr(torch, run.dtype)
        data, own_batch = _loader(parts, run, dtype)
        model = without_dropout(parts.model).to(dtype)
        task = TrainTask(model, data, loss_fn=parts.loss_fn, callbacks=[probe], name=subject.name)
        return task, _fitting(run, own_batch, data)

    def job() -> Job:
        return Job("fit", *build(), folder / run.name, renew=job)

    if run.own_loop:
        task, config = build()
        return run_own_loop(run.own_loop, config, task.model, task.train, task.loss_fn)
    result = run_job(job(), in_place=True)
    assert result.history is not None, "a fit always has a history"
    probe.recording.steps = result.history.steps
    return probe.recording


def _fitting(run: Run, own_batch: int, data: DataLoader[Any]) -> DistributedConfig:
    """Give every run the same global batch, and a learning rate scaled from the same base."""
    here = run.ranks * run.config.gradient_accumulation_steps
    whole_batch = own_batch * run.split
    if whole_batch % here:
        raise UsageError(
            f"a global batch of {whole_batch} samples cannot be split evenly over {here} micro-batches",
            hint=f"Write a batch_size that is a multiple of {here}.",
        )
    batch = min(whole_batch // here, len(data.dataset))  # type: ignore[arg-type]
    base = f"base_batch_size={run.config.options.base_batch_size or own_batch}"
    options = join_options(run.config.engine_options or "", base)
    return run.config.with_trusted(batch_size=batch, engine_options=options)


def _loader(parts: Parts, run: Run, dtype: torch.dtype) -> tuple[DataLoader[Any], int]:
    """Return the data in the run's precision, and the batch size per rank of the layout under test."""
    given = parts.data
    has_items = isinstance(given, Dataset) or (hasattr(given, "__getitem__") and hasattr(given, "__len__"))
    loader: Any = given if isinstance(given, DataLoader) else DataLoader(given) if has_items else None
    if loader is None or isinstance(loader.dataset, IterableDataset) or loader.batch_size is None:
        raise UsageError(
            f"verify cannot split the batches of a {type(given).__name__} over another number of ranks",
            hint="Give a data set with a length and items, or a DataLoader over one.",
        )
    asked = run.config.batch_size
    own = asked if asked is not None else loader.batch_size if loader is given else _DEFAULT_BATCH
    cast = CastCollate(loader.collate_fn, dtype)
    if loader is not given:
        return DataLoader(loader.dataset, own, shuffle=True, collate_fn=cast), own
    kept = {"sampler": loader.sampler, "drop_last": loader.drop_last}
    return DataLoader(loader.dataset, own, collate_fn=cast, **kept), own


class CastCollate:
    """A collate function whose floating-point tensors come in one precision."""

    def __init__(self, collate: Any, dtype: torch.dtype) -> None:
        self._collate = collate
        self._dtype = dtype

    def __call__(self, samples: Any) -> Any:
        """Collate, then cast."""
        return pytree.tree_map(self._cast, self._collate(samples))

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
