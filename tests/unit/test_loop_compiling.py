"""torch.compile in a run: one graph per training model, its time counted apart, its results kept."""

from __future__ import annotations

import functools
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from phalanx import PyTorchDDPTrainer, torch_compiler
from phalanx.loop import compiling
from phalanx.loop.compiling import CompiledCalls, CompileWatch, keep_compiled_code
from phalanx.loop.hooks import Callback
from phalanx.models import build
from phalanx.observe import events
from phalanx.observe.step_clock import StepClock


@pytest.fixture(autouse=True)
def compiler(monkeypatch, tmp_path):
    """Let torch trace models, and not generate code for them, which takes seconds each."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    yield
    torch.compiler.reset()


class Graphs(Callback):
    """Keeps how many graphs there were after each step, and the events of the run."""

    def __init__(self) -> None:
        self.before = torch_compiler.compiled_graphs()
        self.after_steps: list[int] = []
        self.seen: list[events.Event] = []

    def on_step_end(self, trainer: Any, info: Any) -> None:
        self.after_steps.append(torch_compiler.compiled_graphs() - self.before)

    def handle(self, event: events.Event) -> None:
        self.seen.append(event)

    def close(self) -> None:
        pass


class Normalised(nn.Sequential):
    """What a user may have: batch norm and dropout run differently in evaluation."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 10))


def data(kind: str, count: int) -> TensorDataset:
    """Return `count` samples: digits as 64 numbers or an image, or texts of 16 tokens."""
    if kind == "text":
        tokens = torch.randint(0, 64, (count, 17))
        return TensorDataset(tokens[:, :-1], tokens[:, 1:])
    shape = (count, 1, 8, 8) if kind == "image" else (count, 64)
    return TensorDataset(torch.randn(shape), torch.randint(0, 10, (count,)))


SMALL = {"vocab_size": 64, "seq_len": 16, "hidden": 16, "layers": 2, "heads": 2}
MODELS = {
    "digits": (lambda: build("convnet"), "image"),
    "gpt": (lambda: build("gpt", **SMALL), "text"),
    "llama": (lambda: build("llama", **SMALL), "text"),
    "moe": (lambda: build("moe", **SMALL), "text"),
    "user": (Normalised, "numbers"),
}


@pytest.mark.parametrize("name", MODELS)
def test_only_whole_training_batches_are_compiled(name, tmp_path):
    make, kind = MODELS[name]
    graphs = Graphs()
    loss = None if kind == "text" else nn.CrossEntropyLoss()
    trainer = PyTorchDDPTrainer(make(), num_workers=1, device="cpu", batch_size=4, epochs=2, compile=True, loss_fn=loss,
                                run_dir=str(tmp_path), progress=False, callbacks=[graphs])  # fmt: skip
    history = trainer.fit(data(kind, 11), data(kind, 7))
    assert len(graphs.after_steps) == 6
    assert graphs.after_steps == [graphs.after_steps[0]] * 6
    assert torch_compiler.compiled_graphs() - graphs.before == history.compile_graphs == graphs.after_steps[0] >= 1
    print("GRAPHS", name, graphs.after_steps, [e for e in graphs.seen if isinstance(e,(events.Phase,events.Message))])
    assert history.compile_seconds > 0
