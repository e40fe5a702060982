"""Small proofs with their own models and data, for what a user's model may never meet while it is verified.

`late-labels`: labels that do not count (-100) come only after the first batches, so that each batch must say what its
loss is the mean of. `changed-loss`: a callback changes the loss and the model while steps are launched as a CUDA graph.
`data-schema`: files for validation with their columns, classes and numbers of classes in another order.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from phalanx.config import DistributedConfig
from phalanx.errors import UsageError, unknown_name
from phalanx.host.files import scratch_folder
from phalanx.host.gpus import count_gpus
from phalanx.loop.hooks import Callback
from phalanx.loop.step_info import StepInfo
from phalanx.tools.verify.proofs import prove
from phalanx.tools.verify.subject import Parts
from phalanx.tools.verify.verdict import Verdict
from phalanx.world.mesh import plan_layout
from phalanx.zoo.data import load_splits

if TYPE_CHECKING:
    from phalanx.loop.running_trainer import RunningTrainer
    from phalanx.loop.train_loop import TrainLoop

_FULL = 8
"""The first samples, whose labels all count: the first global batch has no others."""
_VOCABULARY, _LENGTH, _SAMPLES = 20, 10, 64
_CAPTURED_STEPS = 24
"""More than torch's DDP takes before its step can be recorded."""


class Tagger(nn.Module):
    """Predicts a label for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(_VOCABULARY, 8), nn.Linear(8, _VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return scores [batch, labels, tokens]."""
        scores: torch.Tensor = self.out(self.embed(tokens)).transpose(1, 2)
        return scores


@dataclass(frozen=True)
class LateLabels:
    """Texts sorted by length: the first batches are full, and those after them are padded."""

    name: str = "late-labels"

    def build(self) -> Parts:
        """Return the model, its data in their order, and torch's mean over the labels that count."""
        tokens, labels = (torch.randint(0, _VOCABULARY, (_SAMPLES, _LENGTH)) for _ in range(2))
        for number in range(_FULL, _SAMPLES):
            labels[number, 1 + (7 * number) % (_LENGTH - 1) :] = -100
        return Parts(Tagger(), DataLoader(TensorDataset(tokens, labels), 1), nn.CrossEntropyLoss())


class AnnealedModel(nn.Module):
    """A loss with a weight that a callback changes."""

    alpha = 1.0

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return the weighted mean squared error."""
        return self.alpha * nn.functional.mse_loss(output, target)


class ScaledModel(nn.Module):
    """A model whose output depends on an attribute, an entry of a dict, and an attribute of an object."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.plain = nn.Linear(4, 1), 1.0
        self.table, self.options = {"scale": 1.0}, SimpleNamespace(scale=1.0)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the scaled output."""
        scaled: torch.Tensor = self.layer(inputs) * self.plain * self.table["scale"] * self.options.scale
        return scaled


class Anneal(Callback):
    """Changes one of the values after every step, in turns."""

    def on_step_end(self, trainer: RunningTrainer, info: StepInfo) -> None:
        """Change it."""
        model: Any = trainer.formation.unwrap(trainer.model)
        loss: Any = cast("TrainLoop", trainer).task.loss_fn
        which = info.step % 4
        if which == 0:
            model.plain *= 0.9
        elif which == 1:
            model.table["scale"] *= 0.9
        elif which == 2:
            model.options.scale *= 0.9
        else:
            loss.alpha *= 0.9


@dataclass(frozen=True)
class ChangedLoss:
    """A loss and a model that a callback changes."""

    name: str = "changed-loss"

    def build(self) -> Parts:
        """Return model, data, loss and callback."""
        inputs = torch.randn(_SAMPLES, 4)
        return Parts(
            ScaledModel(), TensorDataset(inputs, inputs.sum(1, keepdim=True)), AnnealedModel(), callbacks=[Anneal()]
        )


def prove_case(name: str, config: DistributedConfig) -> Verdict:
    """Run one of the cases on a layout."""
    if name not in CASES:
        raise UsageError(unknown_name("case", name, CASES))
    return CASES[name](config)


def _late_labels(config: DistributedConfig) -> Verdict:
    split = plan_layout(config, count_gpus()).mesh.dp_size * config.gradient_accumulation_steps
    if split > _FULL:
        raise UsageError(
            f"late-labels has {_FULL} samples in its first batch, and the layout splits it into {split}",
            hint="Give fewer ranks, or fewer gradient_accumulation_steps.",
        )
    return prove(LateLabels(), config.replace(batch_size=_FULL // split))


def _changed_loss(config: DistributedConfig) -> Verdict:
    if plan_layout(config, count_gpus()).device != "cuda":
        raise UsageError("changed-loss needs a GPU: elsewhere no step is launched as a CUDA graph")
    return prove(ChangedLoss(), config.replace(capture=True, max_steps=max(config.max_steps or 0, _CAPTURED_STEPS)))


def _data_schema(config: DistributedConfig) -> Verdict:
    with scratch_folder("schema") as folder:
        problems = [
            problem for write in (_csv_files, _jsonl_files, _parquet_files, _class_folders) for problem in write(folder)
        ]
    claim = "read the same samples in files that are ordered otherwise"
    return Verdict("data-schema", "validation data", claim, "tables and class folders", [], problems)


CASES: dict[str, Callable[[DistributedConfig], Verdict]] = {
    "late-labels": _late_labels,
    "changed-loss": _changed_loss,
    "data-schema": _data_schema,
}

_CLASSES = ("ant", "bee", "cat")
_ROWS = [{"a": float(n), "b": 10.0 * n, "label": _CLASSES[n % 3]} for n in range(1, 7)]


def _without_ant() -> list[dict[str, Any]]:
    """Return the rows of two of three classes, with their columns the other way round."""
    return [dict(reversed(row.items())) for row in _ROWS if row["label"] != "ant"]


def _csv_files(folder: Path) -> Iterator[str]:
    directory = folder / "csv"
    directory.mkdir()
    for name, rows in (("train", _ROWS), ("val", _without_ant())):
        with (directory / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    yield from _compared(directory)


def _jsonl_files(folder: Path) -> Iterator[str]:
    directory = folder / "jsonl"
    directory.mkdir()
    for name, rows in (("train", _ROWS), ("val", _without_ant())):
        (directory / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    yield from _compared(directory)


def _parquet_files(folder: Path) -> Iterator[str]:
    """Write files that number their classes themselves."""
    import datasets  # needed by this case alone

    directory = folder / "parquet"
    directory.mkdir()
    for name, rows, classes in (("train", _ROWS, _CLASSES), ("val", _without_ant(), _CLASSES[::-1])):
        numbers = {column: datasets.Value("float32") for column in ("a", "b")}
        features = datasets.Features({**numbers, "label": datasets.ClassLabel(names=list(classes))})
        datasets.Dataset.from_list(rows, features=features).to_parquet(str(directory / f"{name}.parquet"))
    yield from _compared(directory)


def _class_folders(folder: Path) -> Iterator[str]:
    from PIL import Image  # needed by this case alone

    for split, classes in (("train", _CLASSES), ("val", _CLASSES[1:])):
        for number, name in enumerate(_CLASSES):
            if name in classes:
                (folder / "images" / split / name).mkdir(parents=True)
                picture = Image.new("RGB", (8, 8), (80 * number + 10, 0, 0))
                picture.save(folder / "images" / split / name / "0.png")
    yield from _compared(folder / "images", size=8)


def _compared(directory: Path, **options: Any) -> Iterator[str]:
    """Yield how the samples for validation differ from the same ones among the training samples."""
    train, val = load_splits(str(directory), **options)
    samples = [(inputs, int(label)) for inputs, label in train]
    for number, (inputs, label) in enumerate(val):
        if not any(torch.equal(inputs, tensor) and int(label) == class_index for tensor, class_index in samples):
            sample = f"sample {number} for validation (label {int(label)})"
            yield f"{directory.name}: {sample} is not what it is in training"
            return
