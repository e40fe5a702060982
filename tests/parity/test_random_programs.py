"""Small programs drawn at random, as users write them, against the same loop in plain torch, in float64.

A program is a model, a loss with its weighting, labels of which some are -100, an optimizer as an instance, a class or
a function, a schedule, accumulation, one rank or two, and perhaps a stop and a resumption. The same seed gives the same
programs; `PHALANX_PROGRAM_SEED=7` starts another series, and `make test-all` draws ten times as many.
"""

from __future__ import annotations

import functools
import math
import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from long_proofs import ALL
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from phalanx import Callback
from phalanx.config import DistributedConfig
from phalanx.errors import PhalanxError
from phalanx.loop.task import TrainTask
from phalanx.run.job import Job

SEED = int(os.environ.get("PHALANX_PROGRAM_SEED", "1"))
PROGRAMS = 60
CLASSES, LENGTH, EPOCHS = 7, 5, 2


@dataclass(frozen=True)
class Program:
    """What is drawn; every part is plain data, so that a failure can be read and run again."""

    number: int
    loss: str
    optimizer: str
    kind: str
    schedule: str
    batch_size: int
    accumulation: int
    samples: int
    clips: bool
    stops_at: int | None

    @property
    def rows(self) -> TensorDataset:
        draw = torch.Generator().manual_seed(self.number)
        if self.loss in ("mse", "huber"):
            inputs = torch.randn(self.samples, 4, dtype=torch.float64, generator=draw)
            return TensorDataset(inputs, torch.randn(self.samples, 2, dtype=torch.float64, generator=draw))
        tokens, labels = (torch.randint(0, CLASSES, (self.samples, LENGTH), generator=draw) for _ in range(2))
        for row in range(self.samples // 3, self.samples):  # as in data that are sorted by length
            # A batch in which no label counts has no weight; a mean over samples takes it for a loss of 0.
            least = int(self.loss == "mean of samples")
            labels[row, int(torch.randint(least, LENGTH + 1, (1,), generator=draw)) :] = -100
        return TensorDataset(tokens, labels)

    @property
    def model(self) -> nn.Module:
        torch.manual_seed(self.number)
        if self.loss in ("mse", "huber"):
            return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()
        return nn.Sequential(nn.Embedding(CLASSES, 6), nn.Linear(6, CLASSES), ByClass()).double()


class ByClass(nn.Module):
    """[batch, length, classes] -> [batch, classes, length], as cross entropy takes it."""

    def forward(self, scores):
        return scores.transpose(1, 2)


def mean_of_samples(output, target):
    """The mean over samples of each one's mean over its labels."""
    each = F.cross_entropy(output, target, reduction="none").sum(1)
    return (each / (target != -100).sum(1).clamp(min=1)).mean()


WEIGHTS = torch.linspace(0.5, 2.0, CLASSES, dtype=torch.float64)
LOSSES = {
    "cross entropy": lambda: nn.CrossEntropyLoss(),
    "class weights": lambda: nn.CrossEntropyLoss(weight=WEIGHTS.clone()),
    "function": lambda: F.cross_entropy,
    "partial": lambda: functools.partial(F.cross_entropy, ignore_index=-100, label_smoothing=0.1),
    "mean of samples": lambda: mean_of_samples,
    "mse": lambda: nn.MSELoss(),
    "huber": lambda: nn.SmoothL1Loss(),
}


def units(program: Program, target: torch.Tensor) -> float:
    """How many units the loss of these targets is the mean of."""
    if program.loss in ("mse", "huber", "mean of samples"):
        return float(len(target))
    counts = target != -100
    if program.loss == "class weights":
        return float(WEIGHTS[target[counts]].sum())
    return float(counts.sum())


SETTINGS = {
    "sgd": {"learning_rate": 0.1, "weight_decay": 0.05, "momentum": 0.9},
    "adamw": {"learning_rate": 0.02, "weight_decay": 0.1},
}


def optimizer_of(program: Program, parameters: Any) -> torch.optim.Optimizer:
    given = SETTINGS[program.optimizer]
    options = {"lr": given["learning_rate"], "weight_decay": given["weight_decay"]}
    if program.optimizer == "sgd":
        return torch.optim.SGD(parameters, momentum=given["momentum"], **options)
    return torch.optim.AdamW(parameters, **options)


def steps_of(program: Program, ranks: int) -> int:
    return EPOCHS * math.ceil(program.samples / (program.batch_size * program.accumulation * ranks))


def factor(program: Program, total: int, step: int) -> float:
    """The rate of a step, from 0, as a share of the optimizer's own."""
    warmup = 2 if program.schedule == "warm-up, linear" else 0
    if step < warmup:
        return (step + 1) / warmup
    if program.schedule in ("linear", "warm-up, linear"):
        return 1 - (step - warmup) / max(1, total - warmup)
    if program.schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * step / total))
    return 0.5 ** (step // 3) if program.schedule == "own, per step" else 1.0


def by_torch(program: Program, ranks: int) -> tuple[dict[str, torch.Tensor], float]:
    """The loop in plain torch: one process, whole batches."""
    model, loss_fn, rows = program.model, LOSSES[program.loss](), program.rows
    optimizer = optimizer_of(program, model.parameters())
    own = optimizer.param_groups[0]["lr"]
    total, size, step = steps_of(program, ranks), program.batch_size * program.accumulation * ranks, 0
    for _ in range(EPOCHS):
        weighed = count = 0.0
        for begin in range(0, program.samples, size):
            inputs, target = rows[begin : begin + size]
            optimizer.param_groups[0]["lr"] = own * factor(program, total, step)
            optimizer.zero_grad()
            weight = units(program, target)
            loss = loss_fn(model(inputs), target)
            if weight:
                loss.backward()
                weighed, count = weighed + loss.item() * weight, count + weight
            else:  # no label counts: a step without a gradient
                for parameter in model.parameters():
                    parameter.grad = torch.zeros_like(parameter)
            if program.clips:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            step += 1
    return model.state_dict(), weighed / count


class StopAt(Callback):
    """Ends the run after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, trainer, info):
        if info.step == self.step:
            trainer.request_stop()


def own_schedule(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)


def by_phalanx(program: Program, ranks: int, folder: str) -> tuple[dict[str, torch.Tensor], float]:
    """The same with a trainer, on this rank of all; stopped once and resumed if the program says so."""
    settings: dict[str, Any] = {"batch_size": program.batch_size, "gradient_accumulation_steps": program.accumulation}
    if program.kind != "factory" and program.kind != "instance":
        settings |= SETTINGS[program.optimizer]
    if program.schedule in ("linear", "cosine", "warm-up, linear"):
        settings |= {
            "lr_schedule": program.schedule.rpartition(" ")[2],
            "warmup": 2 * program.schedule.startswith("warm"),
        }
    if program.loss == "mean of samples":
        settings["loss_weighting"] = "samples"
    if program.clips:
        settings["gradient_clipping"] = 0.5
    if program.stops_at is not None:
        settings |= {"checkpoint_dir": f"{folder}/checkpoints", "resume_from_checkpoint": True}
    config = DistributedConfig(device="cpu", verbosity="quiet", progress=False, epochs=EPOCHS, **settings)

    def run(part: int, callbacks: list[Callback]) -> tuple[nn.Module, Any]:
        model = program.model
        made = {
            "instance": lambda: optimizer_of(program, model.parameters()),
            "class": lambda: torch.optim.SGD if program.optimizer == "sgd" else torch.optim.AdamW,
            "factory": lambda: functools.partial(optimizer_of, program),
            "name": lambda: None,
        }[program.kind]()
        named = {} if program.kind != "name" else {"optimizer": program.optimizer}
        task = TrainTask(
            model,
            DataLoader(program.rows, batch_size=program.batch_size),
            loss_fn=LOSSES[program.loss](),
            optimizer=made,
            callbacks=callbacks,
            scheduler=own_schedule if program.schedule == "own, per step" else None,
            scheduler_interval="step",
            given=frozenset(settings),
        )
        result = Job("fit", task, config.replace(**named), Path(folder) / f"run-{part}").run()
        return model, result

    if program.stops_at is not None:
        run(1, [StopAt(program.stops_at)])
    model, result = run(2, [])
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return state, result.history.epochs[-1].train_loss if result.history is not None else math.nan


def drawn(count: int) -> list[Program]:
    draw = random.Random(SEED)
    return [
        Program(
            number=SEED * 10_000 + number,
            loss=draw.choice(list(LOSSES)),
            optimizer=draw.choice(["sgd", "adamw"]),
            kind=draw.choice(["instance", "class", "factory", "name"]),
            schedule=draw.choice(["none", "linear", "cosine", "warm-up, linear", "own, per step"]),
            batch_size=draw.choice([1, 2, 3, 4]),
            accumulation=draw.choice([1, 2]),
            samples=draw.choice([12, 13, 17]),
            clips=draw.random() < 0.3,
            stops_at=draw.choice([None, None, 2, 3]),
        )
        for number in range(count)
    ]


def run_all(programs: list[Program], ranks: int, folder: str) -> list[Any]:
    """Run programs on this rank; an error is returned, so that each program is judged by itself."""
    torch.set_num_threads(1)
    found: list[Any] = []
    for program in programs:
        try:
            found.append(by_phalanx(program, ranks, f"{folder}/{program.number}"))
        except PhalanxError as error:
            found.append(f"{type(error).__name__}: {error.message}")
    return found


def judged(program: Program, ranks: int, found: Any) -> str:
    """What differs from plain torch; empty: nothing."""
    if isinstance(found, str):
        return f"{ranks} ranks, {found}: {program}"
    expected, loss = by_torch(program, ranks)
    state, reported = found
    off = max(float((expected[name] - state[name]).abs().max()) for name in expected)
    if not off < 1e-10:
        return f"{ranks} ranks, weights off by {off:.2g}: {program}"
    if not math.isclose(reported, loss, rel_tol=1e-9):
        return f"{ranks} ranks, loss of the last epoch {reported!r}, expected {loss!r}: {program}"
    return ""


@pytest.mark.parametrize("ranks_used", [1, 2])
def test_random_programs_equal_plain_torch(ranks, tmp_path, ranks_used):
    programs = drawn(PROGRAMS * (10 if ALL else 1))[ranks_used - 1 :: 2]
    found = ranks(run_all, programs, ranks_used, str(tmp_path), world_size=ranks_used)[0]
    wrong = [text for program, each in zip(programs, found, strict=True) if (text := judged(program, ranks_used, each))]
    assert not wrong, f"{len(wrong)} of {len(programs)}:\n" + "\n".join(wrong)
