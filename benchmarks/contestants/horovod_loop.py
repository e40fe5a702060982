"""Horovod by the loop of its documentation, and through Phalanx."""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING

import horovod.torch as hvd  # type: ignore[import-not-found]
from torch.utils.data import DataLoader, DistributedSampler

if TYPE_CHECKING:
    from workloads import Task


def run(task: Task) -> None:
    """Train by hand."""
    hvd.init()
    sampler: DistributedSampler[object] = DistributedSampler(task.dataset, hvd.size(), hvd.rank())
    loader = DataLoader(task.dataset, batch_size=task.workload.batch_size, sampler=sampler)
    model = task.model
    optimizer = hvd.DistributedOptimizer(task.optimizer(), named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    model.train()
    for step, (inputs, targets) in enumerate(loader, start=1):
        loss = model(inputs, targets)
        loss.backward()
        optimizer.step()
        task.clock.tick()  # Horovod's optimizer is another one than that which it was given, and has not its hooks
        optimizer.zero_grad()
        if step == task.steps:
            break


def run_phalanx(task: Task) -> None:
    """Train with the trainer, in a rank that is started already."""
    from phalanx import HorovodTrainer

    trainer = HorovodTrainer(
        model=task.model,
        optimizer=task.optimizer,
        device="cpu",
        max_steps=task.steps,
        progress=False,
        log_every_n_steps=10 * task.steps,
    )
    loader = DataLoader(task.dataset, batch_size=task.workload.batch_size, shuffle=True)
    with tempfile.TemporaryDirectory(prefix="phalanx-bench-") as run_dir:
        trainer.fit(loader, run_dir=run_dir)
