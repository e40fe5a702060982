"""torch.compile in a run: one graph per training model, its time counted apart, its results kept."""

from __future__ import annotations

import functools
import os
import re
import threading
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from phalanx import PyTorchDDPTrainer, torch_compat
from phalanx.loop.hooks import Callback
from phalanx.observe import events
from phalanx.observe.step_clock import StepClock
from phalanx.speed import compilation
from phalanx.speed.compilation import CompiledCalls, CompileWatch, keep_compiled_code
from phalanx.zoo.models import build


@pytest.fixture(autouse=True)
def compiler(monkeypatch, tmp_path):
    """Let torch trace models, and not generate code for them, which takes seconds each."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    yield
    torch.compiler.reset()


class Graphs(Callback):
    """Keeps how many graphs there were after each step."""

    def __init__(self) -> None:
        self.before = torch_compat.compiled_graphs()
        self.after_steps: list[int] = []

    def on_step_end(self, trainer: Any, info: Any) -> None:
        self.after_steps.append(torch_compat.compiled_graphs() - self.before)


class Said:
    """A sink that keeps messages, and phases as (name, state)."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.phases: list[tuple[str, str]] = []

    def handle(self, event: events.Event) -> None:
        if isinstance(event, events.Message):
            self.texts.append(event.text)
        elif isinstance(event, events.Phase):
            self.phases.append((event.name, event.state))

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


def trainer_of(model: nn.Module, tmp_path: Path, *callbacks: Any, **settings: Any) -> PyTorchDDPTrainer:
    """Return a trainer of one rank in this process."""
    return PyTorchDDPTrainer(model, num_workers=1, device="cpu", batch_size=4, epochs=2, run_dir=str(tmp_path),
                             progress=False, callbacks=list(callbacks), **settings)  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_only_whole_training_batches_are_compiled(name, tmp_path):
    make, kind = MODELS[name]
    loss = None if kind == "text" else nn.CrossEntropyLoss()
    graphs, said = Graphs(), Said()
    history = trainer_of(make(), tmp_path, graphs, said, compile=True, loss_fn=loss).fit(data(kind, 11), data(kind, 7))
    assert graphs.after_steps == [graphs.after_steps[0]] * 6, "the third and the sixth batch have three samples"
    assert torch_compat.compiled_graphs() - graphs.before == history.compile_graphs == graphs.after_steps[0]
    assert history.compile_graphs == 1 if name in ("digits", "user") else history.compile_graphs >= 1
    assert [phase for phase in said.phases if phase[0] == "compile"] == [("compile", "begin"), ("compile", "end")]
    assert not [text for text in said.texts if "torch.compile" in text]
    assert history.compile_seconds > 0
    assert history.total_time > history.compile_seconds + history.first_steps_seconds
    assert torch_compat.is_compiler_loaded()


def test_evaluation_between_whole_batches_is_not_compiled_and_training_is(tmp_path):
    graphs = Graphs()
    trainer = trainer_of(Normalised(), tmp_path, graphs, compile=True, loss_fn=nn.CrossEntropyLoss())
    history = trainer.fit(data("numbers", 8), data("numbers", 8))
    assert (graphs.after_steps, history.compile_graphs) == ([1, 1, 1, 1], 1)
    trainer.evaluate(data("numbers", 8))
    assert torch_compat.compiled_graphs() - graphs.before == 1


def test_a_model_that_the_user_has_compiled_is_watched_and_says_why_it_is_compiled_again(tmp_path):
    model, said = Normalised(), Said()
    compiled = torch.compile(model)
    history = trainer_of(compiled, tmp_path, said, loss_fn=nn.CrossEntropyLoss()).fit(data("numbers", 11))
    assert history.compile_graphs == 2, "torch makes another one for the last batch of an epoch"
    again = [text for text in said.texts if text.startswith("step 3: torch.compile compiled again for ")]
    assert len(again) == 1
    assert "size mismatch at index 0. expected 4, actual 3" in again[0]


def test_the_watch_ends_with_the_run(tmp_path):
    seen: list[str] = []
    remove = torch_compat.around_compiles(lambda: seen.append("begin"), lambda: seen.append("end"))
    handler = import_module("torch._dynamo.callback").callback_handler
    before = len(handler.start_callbacks), len(handler.end_callbacks)
    trainer_of(Normalised(), tmp_path, compile=True, loss_fn=nn.CrossEntropyLoss()).fit(data("numbers", 8))
    assert (len(handler.start_callbacks), len(handler.end_callbacks)) == before
    assert seen[:2] == ["begin", "end"]
    remove()
    assert torch.compile(lambda x: 2 * x)(torch.ones(2)).sum() == 4
    count = len(seen)
    torch.compiler.reset()
    remove()
    assert len(seen) == count


def test_a_long_compilation_is_reported_while_it_lasts_from_any_thread(monkeypatch):
    monkeypatch.setattr(compilation, "_SAID_AFTER", 0.1)
    monkeypatch.setattr(compilation, "_SAID_AGAIN", 1000)
    clock, said = StepClock(), Said()
    watch = CompileWatch(clock, said.handle)

    def compile_for(seconds: float) -> None:
        watch._begin()
        time.sleep(seconds)
        watch._end()

    for seconds in (0.06, 0.06, 0.2):  # two short ones, of which the second is at a tenth of a second
        thread = threading.Thread(target=compile_for, args=(seconds,))
        thread.start()
        thread.join()
    assert said.texts == ["compiling the model (first step): 0 s so far"]
    clock.step_done(4)
    watch.step_done()
    assert said.phases == [("compile", "begin"), ("compile", "end")]
    assert watch.seconds == clock.pauses["compile"] >= 0.32
    compile_for(0.2)
    assert said.texts[1:] == ["compiling the model (step 2): 0 s so far"]


def test_calls_are_switched_for_the_whole_process():
    traced: list[int] = []

    def twice(x: torch.Tensor) -> torch.Tensor:
        traced.append(torch.compiler.is_compiling())
        return 2 * x

    compiled, calls = torch.compile(twice), CompiledCalls([])
    calls.use(compiled=False)
    calls.use(compiled=False)
    compiled(torch.ones(2))
    assert traced == [False]
    calls.use(compiled=True)
    before = torch_compat.compiled_graphs()
    compiled(torch.ones(2))
    assert torch_compat.compiled_graphs() == before + 1


def test_a_recompilation_says_its_reason():
    @torch.compile(dynamic=False)
    def twice(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    began = time.time()
    twice(torch.ones(2))
    assert torch_compat.recompile_reason(began) == ""
    twice(torch.ones(3))
    assert "size" in torch_compat.recompile_reason(began)
    assert torch_compat.recompile_reason(time.time() + 60) == ""


def test_compiled_code_is_kept_in_the_users_cache(tmp_path):
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    assert keep_compiled_code(environ) == ""
    place = tmp_path / "phalanx" / "compile"
    assert (environ["TORCHINDUCTOR_CACHE_DIR"], environ["TRITON_CACHE_DIR"]) == (str(place), str(place / "triton"))
    assert place.stat().st_mode & 0o077 == 0, "what is read from there is executed"
    own = {"XDG_CACHE_HOME": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": torch_compat.default_compile_cache()}
    keep_compiled_code(own)
    assert own["TORCHINDUCTOR_CACHE_DIR"] == str(place), "torch has written its own place there, not the user"


def test_variables_of_the_process_are_as_before_after_a_run(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    calls = CompiledCalls([])
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"].startswith(str(tmp_path))
    calls.end()
    assert not {"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"} & os.environ.keys()


def test_a_place_that_the_user_has_chosen_stays(tmp_path):
    environ = {"XDG_CACHE_HOME": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": "/fast/disk", "TRITON_CACHE_DIR": "/other"}
    before = dict(environ)
    assert keep_compiled_code(environ) == ""
    assert (environ, list(tmp_path.iterdir())) == (before, [])


def test_a_cache_that_cannot_be_written_is_a_note(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    environ = {"XDG_CACHE_HOME": str(tmp_path / "file")}
    start = "compiled code is not kept for the next run: "
    assert re.match(rf"{start}.*Not a directory: .*file/phalanx", keep_compiled_code(environ))
    monkeypatch.setattr(compilation.os, "access", lambda *_: False)  # tests may run as root, who may write anywhere
    assert keep_compiled_code({"XDG_CACHE_HOME": str(tmp_path)}).startswith(f"{start}{tmp_path}/phalanx/compile is not")
    assert list(environ) == ["XDG_CACHE_HOME"]


def test_a_share_of_activations_is_set_and_set_back():
    config = import_module("torch._functorch.config")
    before = config.activation_memory_budget
    undo = torch_compat.keep_activations(0.25)
    assert config.activation_memory_budget == 0.25
    undo()
    assert config.activation_memory_budget == before
