"""Hugging Face Accelerate, by the loop of its quick start."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate import Accelerator  # type: ignore[import-untyped]

if TYPE_CHECKING:
    from workloads import Task


def run(task: Task) -> None:
    """Train."""
    workload = task.workload
    accelerator = Accelerator(cpu=task.device == "cpu", mixed_precision="bf16" if workload.bf16 else "no")
    # On the device first, because a fused optimizer is made for the parameters it will see.
    model = task.model.to(accelerator.device)
    loader = task.loader()
    model, optimizer, loader = accelerator.prepare(model, task.optimizer(), loader)
    if workload.compile:
        model.compile()
    model.train()
    for step, (inputs, targets) in enumerate(loader, start=1):
        loss = model(inputs, targets)
        task.clock.note(loss)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if step == task.steps:
            break
    accelerator.free_memory(model, optimizer, loader)
    del model, optimizer, loader
    accelerator.end_training()
