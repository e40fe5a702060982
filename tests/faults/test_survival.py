"""Every part of a run's state survives lost ranks: with the user's own objects, each is what it is in a quiet run."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset, Sampler
from torch.utils._pytree import tree_map_only

import phalanx
from phalanx import checkpoint
from phalanx.checkpoint import read_manifest

EPOCHS, STEPS = 4, 32


class Rows(Dataset):
    def __init__(self, count: int = 64) -> None:
        self.x = torch.randn(count, 8, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int):
        return self.x[index], self.x[index].sum(0, keepdim=True)


class OwnNumbers(Sampler):
    """Shuffles with a NumPy generator of its own, which every draw advances."""

    def __init__(self, count: int) -> None:
        self.count, self.generator = count, np.random.default_rng(7)

    def __len__(self) -> int:
        return self.count

    def __iter__(self):
        return iter(self.generator.permutation(self.count).tolist())


class Decay(phalanx.Callback):
    """Raises weight_decay by what it has counted, which only its state knows."""

    def __init__(self) -> None:
        self.steps = 0

    def on_step_end(self, trainer, info) -> None:
        self.steps += 1
        for group in trainer.optimizer.param_groups:
            group["weight_decay"] = 1e-3 * self.steps

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state) -> None:
        self.steps = state["steps"]


class Kill(phalanx.Callback):
    """Kills ranks at steps, each once."""

    def __init__(self, folder: Path, faults) -> None:
        self.folder, self.faults = folder, faults

    def on_step_end(self, trainer, info) -> None:
        for rank, step in self.faults:
            mark = self.folder / f"killed-{rank}-{step}"
            if (trainer.formation.rank, info.step) == (rank, step) and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)


def make_model(*, buffers: bool) -> nn.Module:
    torch.manual_seed(3)
    norm = nn.BatchNorm1d(16) if buffers else nn.LayerNorm(16)
    return nn.Sequential(nn.Linear(8, 16), norm, nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 1))


def fit(folder: Path, faults, *, buffers: bool = False, **settings):
    """Train with an optimizer, a scheduler, a sampler and a callback that have state; return all that came of it."""
    folder.mkdir()
    model = make_model(buffers=buffers)
    groups = [{"params": model[0].parameters(), "lr": 0.02}, {"params": model[1:].parameters()}]
    optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    scheduler = settings.pop("scheduler", lambda optimizer: StepLR(optimizer, 6, gamma=0.7))(optimizer)
    chosen = {"ema_decay": 0.9, "keep_best": "val/loss", "early_stopping": "val/loss", "patience": 50, **settings}
    trainer = phalanx.PyTorchDDPTrainer(
        model,
        optimizer,
        scheduler=scheduler,
        scheduler_interval="step",
        loss_fn="mse",
        num_workers=2,
        device="cpu",
        batch_size=4,
        epochs=EPOCHS,
        log_every_n_steps=1,
        gradient_clipping=1.0,
        max_restarts=5,
        progress=False,
        run_dir=str(folder / "run"),
        callbacks=[Decay(), Kill(folder, faults)],
        **chosen,
    )
    rows = Rows()
    history = trainer.fit(DataLoader(rows, batch_size=4, sampler=OwnNumbers(len(rows))), Rows(16))
    events = [json.loads(line) for line in (folder / "run" / "events.jsonl").read_text().splitlines()]
    assert sum(event["event"] == "recovered" for event in events) == len(faults)
    assert [event["lost_steps"] for event in events if event["event"] == "recovered"] == [0] * len(faults)
    last = read_manifest(Path(history.checkpoint))
    return SimpleNamespace(model=model, optimizer=optimizer, scheduler=scheduler, history=history, saved=last)


FAULTS = {"buffers": [(1, 10), (1, 32)], "no buffers": [(0, 10), (1, 21), (0, 32)]}
"""Statistics of BatchNorm are those of rank 0's batches: with rank 0 its last batch is lost."""


@pytest.fixture(scope="module", params=FAULTS)
def runs(request, tmp_path_factory, fork_server):
    folder, buffers = tmp_path_factory.mktemp("runs"), request.param == "buffers"
    return [fit(folder / name, faults, buffers=buffers) for name, faults in (("q", []), ("h", FAULTS[request.param]))]


def momentum(run):
    return [state["momentum_buffer"] for state in run.optimizer.state.values()]


def trained_weights(run):
    """The weights that are trained: those of the model are averaged."""
    saved = checkpoint.choose(run.history.checkpoint).checkpoint
    infos = checkpoint.stored_tensors(saved)
    state = {
        name.removeprefix("trained."): torch.empty(info.shape, dtype=getattr(torch, info.dtype))
        for name, info in infos.items()
        if name.startswith("trained.")
    }
    assert state, "an averaged run saves both"
    checkpoint.read_tensors(saved, {"trained": state})
    return state


FIELDS = {
    "averaged weights and buffers": lambda run: run.model.state_dict(),
    "trained weights": trained_weights,
    "optimizer state": momentum,
    "optimizer settings": lambda run: [(group["lr"], group["weight_decay"]) for group in run.optimizer.param_groups],
    "schedule": lambda run: (run.scheduler.last_epoch, run.scheduler.get_last_lr()),
    "learning rates by step": lambda run: {step["step"]: step["learning_rate"] for step in run.history.steps},
    "data order and dropout": lambda run: {step["step"]: step["loss"] for step in run.history.steps},
    "data position": lambda run: run.saved.shared["loaders"],
    "evaluations": lambda run: [(epoch.epoch, epoch.step, epoch.val) for epoch in run.history.epochs],
    "best": lambda run: (run.history.best_value, run.history.best_step, Path(run.history.best_checkpoint).name),
    "early stopping": lambda run: run.saved.shared["watched"]["stopping"],
    "callbacks": lambda run: run.saved.shared["callbacks"],
    "end": lambda run: (run.history.status, run.history.reason, run.saved.shared["ending"]),
}


def plain(value):
    """Return tensors as numbers, which are compared to the last bit."""
    return tree_map_only(torch.Tensor, torch.Tensor.tolist, value)


@pytest.mark.parametrize("field", FIELDS)
def test_each_part_of_the_state_survives(runs, field):
    quiet, hit = (FIELDS[field](run) for run in runs)
    assert plain(hit) == plain(quiet)


def test_a_schedule_of_the_config_survives_with_the_users_optimizer(tmp_path, fork_server):
    settings = {"scheduler": lambda optimizer: None, "lr_schedule": "cosine", "warmup": 4, "lr_scaling": "linear"}
    quiet, hit = fit(tmp_path / "quiet", [], **settings), fit(tmp_path / "hit", [(0, 9), (1, 17)], **settings)
    for name in ("learning rates by step", "averaged weights and buffers", "optimizer settings"):
        assert plain(FIELDS[name](hit)) == plain(FIELDS[name](quiet))
    assert [group["lr"] for group in hit.optimizer.param_groups] == [0.02, 0.05], "the next fit begins with them"
