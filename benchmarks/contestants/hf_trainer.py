"""Hugging Face's Trainer without logging, saving, clipping and progress bar."""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, SequentialSampler
from transformers import Trainer, TrainingArguments

if TYPE_CHECKING:
    from workloads import Task


class DictDataset(Dataset[dict[str, Tensor]]):
    """The same tensors, one dict a sample, as this trainer wants them."""

    def __init__(self, dataset: Dataset[tuple[Tensor, ...]]) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        inputs, labels = self.dataset[index]
        return {"inputs": inputs, "labels": labels}


class DictModel(nn.Module):
    """The same model, called by keywords and answering with a dict."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": self.model(inputs, labels)}


def stack(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Make a batch: less work than the default collator, which looks at every feature."""
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


class NotedTrainer(Trainer):
    """The trainer, whose losses the stopwatch keeps, and which takes the samples in their order where the task does."""

    task: Task

    def compute_loss(self, *arguments: Any, **options: Any) -> Any:
        result = super().compute_loss(*arguments, **options)
        self.task.clock.note(result[0] if isinstance(result, tuple) else result)
        return result

    def _get_train_sampler(self, *arguments: Any) -> Any:
        if self.task.workload.in_order:
            return SequentialSampler(self.train_dataset)
        return super()._get_train_sampler(*arguments)


def run(task: Task) -> None:
    """Train."""
    with tempfile.TemporaryDirectory(prefix="hf-trainer-") as folder:
        options: dict[str, Any] = {
            "output_dir": folder,
            "per_device_train_batch_size": task.workload.batch_size,
            "max_steps": task.steps,
            "use_cpu": task.device == "cpu",
            "bf16": task.workload.bf16,
            "torch_compile": task.workload.compile,
            "max_grad_norm": 0.0,
            "logging_strategy": "no",
            "logging_nan_inf_filter": False,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "remove_unused_columns": False,
            "lr_scheduler_type": "constant",
            "ddp_find_unused_parameters": False,
            "average_tokens_across_devices": False,
        }
        if task.device == "cpu" and task.world_size > 1:
            options["ddp_backend"] = "gloo"
        model = DictModel(task.model).to(task.device)
        trainer = NotedTrainer(
            model=model,
            args=TrainingArguments(**options),
            train_dataset=DictDataset(task.dataset),
            data_collator=stack,
            optimizers=(task.optimizer(), None),
        )
        trainer.task = task
        trainer.train()
