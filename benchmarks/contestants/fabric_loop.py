"""Lightning Fabric, by the loop of its documentation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

try:
    from lightning.fabric import Fabric
except ModuleNotFoundError:
    from lightning_fabric import Fabric  # type: ignore[assignment]

if TYPE_CHECKING:
    from workloads import Task


def run(task: Task) -> None:
    """Train."""
    workload = task.workload
    fabric = Fabric(
        accelerator=task.device,
        devices=task.world_size,
        strategy="ddp" if task.world_size > 1 else "auto",
        precision="bf16-mixed" if workload.bf16 else "32-true",
    )
    fabric.launch()
    model: Any = torch.compile(task.model) if workload.compile else task.model
    model, optimizer = fabric.setup(model, task.optimizer())
    loader = fabric.setup_dataloaders(task.loader())
    model.train()
    for step, (inputs, targets) in enumerate(loader, start=1):
        loss = model(inputs, targets)
        task.clock.note(loss)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if step == task.steps:
            break
