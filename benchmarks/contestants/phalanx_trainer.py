"""Phalanx by its public trainer as it comes: with its periodic reports, its event file and its console."""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING, Any

from phalanx import PyTorchDDPTrainer

if TYPE_CHECKING:
    from workloads import Task


def run(task: Task) -> None:
    """Train with the trainer that joins the ranks which are started already."""
    _train(task)


def run_ddp(task: Task) -> None:
    """Train the same with torch's DDP."""
    _train(task, strategy="ddp")


def run_on_tensors(task: Task) -> None:
    """Train on the same samples, held as a TensorDataset."""
    task.dataset = task.tensors
    _train(task)


def run_fsdp(task: Task) -> None:
    """Train the same with parameters, gradients and optimizer states sharded."""
    _train(task, strategy="fsdp")


def run_ring(task: Task) -> None:
    """Train the same with gradients that are averaged by our own reducer."""
    _train(task, strategy="ring")


def run_deepspeed(task: Task) -> None:
    """Train the same with DeepSpeed's engine."""
    _train(task, strategy="deepspeed")


def _train(task: Task, **settings: Any) -> None:
    workload = task.workload
    trainer = PyTorchDDPTrainer(
        task.model,
        optimizer=task.optimizer,
        device=task.device,
        **settings,
        max_steps=task.steps,
        mixed_precision="bf16" if workload.bf16 else False,
        compile=workload.compile,
    )
    loader = task.loader()
    with tempfile.TemporaryDirectory(prefix="phalanx-bench-") as run_dir:
        trainer.fit(loader, run_dir=run_dir)
