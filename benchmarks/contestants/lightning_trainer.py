"""Lightning's Trainer without checkpoints, logger, progress bar and summary."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

try:
    import lightning
except ModuleNotFoundError:
    import pytorch_lightning as lightning  # type: ignore[no-redef]

if TYPE_CHECKING:
    from workloads import Task


class Module(lightning.LightningModule):
    """The smallest LightningModule around the model."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.task = task
        self.model = torch.compile(task.model) if task.workload.compile else task.model

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(*batch)
        self.task.clock.note(loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.task.optimizer()


def run(task: Task) -> None:
    """Train."""
    workload = task.workload
    trainer = lightning.Trainer(
        accelerator=task.device,
        devices=task.world_size,
        strategy="ddp" if task.world_size > 1 else "auto",
        precision="bf16-mixed" if workload.bf16 else "32-true",
        max_steps=task.steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = task.loader()
    trainer.fit(Module(task), loader)
