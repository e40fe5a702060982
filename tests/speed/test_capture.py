"""Capture without a GPU: what keeps a step from being recorded, and that a recorded step is the same step.

The device is replaced by a graph that runs the recorded calls again: on a CPU that is what a replay is.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from phalanx import Callback, PyTorchDDPTrainer
from phalanx.speed import capture
from phalanx.speed.host_watch import HostProbe, HostWatch, change, hooked, model_state
from phalanx.speed.recording import StaticBatch, StepBatches, batch_form, takes_rate_on_device


class Replayed:
    """A graph that runs what was recorded."""

    def __init__(self, body: Callable[[], None]) -> None:
        self.replay = body


class Log(Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_step_end(self, trainer, info) -> None:
        self.losses.append(info.loss)


@pytest.fixture
def recorded(monkeypatch) -> list[int]:
    """Let steps be recorded on the CPU; return the steps that were."""
    steps: list[int] = []

    def record(self, recording, body):
        steps.append(self._formation.gradients.steps + 1)
        return Replayed(body)

    monkeypatch.setattr(capture, "why_not", lambda prepared: "")
    monkeypatch.setattr(capture.CapturedStep, "_record", record)
    # Dropout draws from the generator of the CPU, which stands for that of the device.
    monkeypatch.setattr("phalanx.speed.host_watch.random_state", lambda: {"random": random.getstate()})
    monkeypatch.setattr(capture, "count_replayed", lambda gradients, passes: None)  # the calls themselves count
    return steps


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 3))


def make_data(samples: int = 90) -> TensorDataset:
    torch.manual_seed(1)
    inputs = torch.randn(samples, 8)
    return TensorDataset(inputs, inputs[:, :3].argmax(1))


def train(tmp_path, *, capture: bool | None, model: nn.Module | None = None, **settings: Any):
    """Return the weights, the history and the model after a run."""
    model = model if model is not None else make_model()
    defaults = {"batch_size": 16, "epochs": 4, "optimizer": "sgd", "learning_rate": 0.05, "log_every_n_steps": 5}
    trainer = PyTorchDDPTrainer(
        model,
        **{**defaults, **settings},
        device="cpu",
        num_workers=1,
        capture=capture,
        progress=False,
        run_dir=str(tmp_path / f"run{capture}"),
    )
    history = trainer.fit(make_data(), make_data(30))
    return {name: value.clone() for name, value in model.state_dict().items()}, history


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(first[name], second[name]) for name in first)


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"batch_size": 4, "gradient_accumulation_steps": 3},
    "clipping and schedule": {"gradient_clipping": 0.5, "lr_schedule": "cosine", "warmup": 3},
    "averaged weights": {"ema_decay": 0.9},
    "no ragged batch": {"drop_last": True},
}


@pytest.mark.parametrize("case", CASES)
def test_a_replayed_step_is_the_eager_step(tmp_path, recorded, case):
    captured, history = train(tmp_path, capture=True, **CASES[case])
    assert recorded
    assert recorded[0] == 3  # two steps before it, of which the second is looked at
    count = len(recorded)
    eager, plain = train(tmp_path, capture=False, **CASES[case])
    assert len(recorded) == count
    assert same(captured, eager)
    assert [step["loss"] for step in history.steps] == [step["loss"] for step in plain.steps]
    assert [step["grad_norm"] for step in history.steps] == [step["grad_norm"] for step in plain.steps]
    assert history.epochs[-1].val == plain.epochs[-1].val


def test_losses_of_many_steps_between_two_readings(tmp_path, recorded, monkeypatch):
    monkeypatch.setattr("phalanx.speed.recording._LOSSES", 4)
    log, plain = Log(), Log()
    _, history = train(tmp_path, capture=True, callbacks=[log], log_every_n_steps=100)
    _, eager = train(tmp_path, capture=False, callbacks=[plain], log_every_n_steps=100)
    assert recorded
    assert log.losses == plain.losses
    assert [each.train_loss for each in history.epochs] == [each.train_loss for each in eager.epochs]


def test_resume_in_the_middle(tmp_path, recorded):
    whole, _ = train(tmp_path, capture=True)
    folder = {"checkpoint_dir": str(tmp_path / "ckpt"), "checkpoint_frequency": "9 steps"}
    train(tmp_path, capture=True, max_steps=9, epochs=None, **folder)
    rest, _ = train(tmp_path, capture=True, resume_from_checkpoint=True, **folder)
    assert same(whole, rest)


class Freezes(Callback):
    """Changes what a recording depends on, as callbacks may."""

    def on_step_end(self, trainer, info) -> None:
        model = trainer.formation.unwrap(trainer.model)
        if info.step == 8:
            model[0].requires_grad_(False)
        if info.step == 12:
            model[3].p = 0.5
        if info.step == 16:
            trainer.optimizer.param_groups[0]["lr"] = 0.01
        if info.step == 20:
            trainer.optimizer.param_groups[0]["weight_decay"] = 0.1


def test_what_a_callback_changes_is_recorded_again(tmp_path, recorded):
    captured, _ = train(tmp_path, capture=True, callbacks=[Freezes()], epochs=6)
    assert len(recorded) > 2
    eager, _ = train(tmp_path, capture=False, callbacks=[Freezes()], epochs=6)
    assert same(captured, eager)


class Counts(nn.Module):
    """Has a state on the host, which a replay would not change."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner = make_model()
        self.kind, self.calls, self.seen = kind, 0, []
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output = self.inner(inputs)
        if self.kind == "counter":
            self.calls += 1
        elif self.kind == "list":
            self.seen.append(len(inputs))
        elif self.kind == "buffer":
            self.mean = 0.9 * self.mean + output.detach().mean(0)
        elif self.kind == "random" and random.random() < 0.5:
            output = output * 1.1
        return output


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("counter", "the model changes Counts.calls on the host"),
        ("list", "the model changes Counts.seen on the host"),
        ("buffer", "the model changes mean on the host"),
        ("random", "the model draws random numbers of random"),
    ],
)
def test_a_model_that_needs_the_host_is_not_recorded(tmp_path, recorded, kind, said):
    messages: list[str] = []
    sink = SimpleNamespace(
        handle=lambda event: messages.append(getattr(event, "text", "")), close=lambda: None, next_commands=()
    )
    random.seed(3)
    captured, _ = train(tmp_path, capture=True, model=Counts(kind), callbacks=[sink])
    random.seed(3)
    eager, _ = train(tmp_path, capture=False, model=Counts(kind))
    assert not recorded
    assert [text for text in messages if said in text], messages
    assert same(captured, eager)


def test_an_optimizer_that_counts_on_the_host_is_named_with_the_remedy():
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    use = HostProbe(model, optimizer)

    def step() -> None:
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()

    step()
    before = torch.get_rng_state()
    with use.watching():
        step()
        torch.set_rng_state(before)  # dropout on the CPU
    assert use.reason == "the optimizer changes AdamW's step of parameter 0 on the host; write fused=True in it"


def test_hooks_of_the_user_are_named():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert hooked(model, optimizer) == ""
    nn.utils.parametrizations.weight_norm(model[0])
    assert hooked(model, optimizer) == ""
    handle = model[4].register_forward_hook(lambda *values: None)
    assert hooked(model, optimizer) == "a hook on the module 4"
    handle.remove()
    optimizer.register_step_post_hook(lambda *values: None)
    assert hooked(model, optimizer) == "a hook on the step of SGD"


def test_rates_on_the_device():
    model = make_model()
    assert takes_rate_on_device(torch.optim.AdamW(model.parameters(), fused=True))
    assert takes_rate_on_device(torch.optim.SGD(model.parameters(), fused=True))
    assert not takes_rate_on_device(torch.optim.AdamW(model.parameters()))
    assert not takes_rate_on_device(torch.optim.Adagrad(model.parameters(), fused=True))


def test_the_form_of_a_batch():
    first = (torch.zeros(4, 2), torch.zeros(4, dtype=torch.long))
    assert batch_form(first) == batch_form((torch.ones(4, 2), torch.ones(4, dtype=torch.long)))
    for other in (first[:1], list(first), (first[0][:3], first[1]), (first[0].double(), first[1])):
        assert batch_form(first) != batch_form(other)
    assert batch_form({"a": first[0], "n": 3}) != batch_form({"a": first[0], "n": 4})
    assert StepBatches([], []).form() == ()


def test_a_batch_at_a_fixed_place():
    batch = {"x": torch.randn(3, 5), "mask": torch.tensor([True, False, True]), "y": torch.arange(3)}
    static = StaticBatch(batch, torch.device("cpu"))
    static.put(batch.values())
    assert all(torch.equal(static.batch[name], value) for name, value in batch.items())
    assert all(tensor.data_ptr() % 64 == 0 for tensor in static.tensors)
    before = static.batch["x"].data_ptr()
    static.put([batch["x"] + 1, batch["mask"], batch["y"]])
    assert torch.equal(static.batch["x"], batch["x"] + 1)
    assert static.batch["x"].data_ptr() == before
    images = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    other = StaticBatch([images], torch.device("cpu"))
    other.put([images])
    assert torch.equal(other.batch[0], images)
    assert other.batch[0].stride() == images.stride()


def test_a_change_is_named():
    model = make_model()
    before = model_state(model)
    assert change(before, model_state(model)) == ""
    model[3].p = 0.3
    assert change(before, model_state(model)) == "3.p"
    model[3].p = 0.1
    model[0].weight.data = model[0].weight.data.clone()
    assert change(before, model_state(model)) == "0.weight"
    assert change({"gone": 1}, {}) == "gone"


def prepared(**changes: Any) -> Any:
    """Return what `why_not` asks of a run that can be captured, with some of it changed."""
    config = SimpleNamespace(capture=None, on_nonfinite="stop", debug=None, gradient_accumulation_steps=1)
    for name in set(vars(config)) & set(changes):
        setattr(config, name, changes[name])
    return SimpleNamespace(
        config=config,
        device=torch.device(changes.get("device", "cuda")),
        strategy=SimpleNamespace(why_not_captured=changes.get("strategy", "")),
        models=[None],
        optimizers=[None] * changes.get("optimizers", 1),
        clock=SimpleNamespace(on_enter=changes.get("on_enter")),
        gradients=SimpleNamespace(gate=changes.get("gate")),
        world=SimpleNamespace(accumulation=lambda count: count),
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ""),
        ({"capture": False}, "asked for"),
        ({"device": "cpu"}, "the device is cpu"),
        ({"strategy": "strategy = 'ring' needs the host"}, "ring"),
        ({"optimizers": 2}, "one optimizer"),
        ({"on_nonfinite": "skip"}, "on_nonfinite"),
        ({"debug": "nan"}, "debug"),
        ({"on_enter": print}, "profile"),
        ({"gate": object()}, "lost ranks"),
        ({"gradient_accumulation_steps": 65}, "micro-batches"),
    ],
)
def test_why_not(changes, said):
    why = capture.why_not(prepared(**changes))
    assert said in why
    assert bool(said) == bool(why)


def test_asked_for_without_a_gpu_is_said(tmp_path):
    messages: list[tuple[str, str]] = []

    class Sink:
        next_commands = ()

        def handle(self, event) -> None:
            if hasattr(event, "text"):
                messages.append((event.level, event.text))

        def close(self) -> None: ...

    train(tmp_path, capture=True, callbacks=[Sink()], epochs=1)
    said = [text for level, text in messages if level == "warning"]
    assert said == ["capture: CUDA graph capture is off: a CUDA graph needs a GPU, and the device is cpu"]
    messages.clear()
    train(tmp_path, capture=None, callbacks=[Sink()], epochs=1)
    assert not [text for _, text in messages if "capture" in text]


class Holder(nn.Module):
    """A model that keeps something on the host."""

    def __init__(self, held):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.held = held


class Counter:
    calls = 0


@pytest.mark.parametrize(
    ("held", "use"),
    [
        ({"calls": 0}, lambda held: held.update(calls=1)),
        ([0], lambda held: held.__setitem__(0, 1)),
        (Counter(), lambda held: setattr(held, "calls", 1)),
        (random.Random(0), lambda held: held.random()),
        (np.random.default_rng(0), lambda held: held.random()),
        (torch.Generator(), lambda held: torch.rand(1, generator=held)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_a_model_holds_on_the_host_is_watched(held, use):
    model = Holder(held)
    before = model_state(model)
    assert change(before, model_state(model)) == ""
    use(held)
    assert change(before, model_state(model)) == "Holder.held"


def test_what_a_loss_holds_on_the_host_is_watched():
    weights = {"now": 1.0}

    def loss_fn(output, target):
        weights["now"] *= 0.5
        return weights["now"] * (output - target).square().mean()

    model = Holder(None)
    before = model_state(model, loss_fn)
    loss_fn(torch.ones(1), torch.zeros(1))
    assert change(before, model_state(model, loss_fn)) == "loss_fn.weights"


@pytest.mark.parametrize("asked", [None, True])
def test_a_step_that_needs_much_of_the_memory_is_captured_only_where_that_was_asked_for(monkeypatch, asked):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80 * 2**30))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 45 * 2**30)
    prepared = SimpleNamespace(
        device=torch.device("cuda"), config=SimpleNamespace(capture=asked), world=SimpleNamespace(ranks_per_gpu=1)
    )
    why = capture.CapturedStep._too_large(SimpleNamespace(_formation=prepared))
    expected = "a step uses 45.0 of 80.0 GiB, and its graph may need as much again; capture=True tries it"
    assert why == ("" if asked else expected)


SCALE = 1.0


class Annealed(nn.Module):
    """A loss and a model whose values callbacks change, wherever they are kept."""

    kind_scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.alpha = 1.0
        self.table = {"scale": 1.0, "inner": {"scale": 1.0}}
        self.options = SimpleNamespace(scale=1.0, steps=[1, 2])
        self.fixed = Slotted(1.0)

    def forward(self, output, target=None):
        return self.layer(output) * SCALE


class Slotted:
    """An object without a dict."""

    __slots__ = ("scale",)

    def __init__(self, scale: float) -> None:
        self.scale = scale


def annealed_by(weights: dict[str, float]):
    scale = 1.0

    def loss(output, target):
        return (output - target).square().mean() * scale * weights["a"]

    def change(value: float) -> None:
        nonlocal scale
        scale = value

    return loss, change


@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model, "alpha", 0.5),
        lambda model: model.table.update(scale=0.5),
        lambda model: model.table["inner"].update(scale=0.5),
        lambda model: setattr(model.options, "scale", 0.5),
        lambda model: model.options.steps.__setitem__(1, 3),
        lambda model: setattr(model.fixed, "scale", 0.5),
        lambda model: setattr(model, "table", {"scale": 1.0}),
        lambda model: setattr(type(model), "kind_scale", 0.5),
        lambda model: globals().update(SCALE=0.5),
        lambda model: model.layer.register_forward_hook(lambda *_: None),
    ],
)
@pytest.mark.parametrize("place", ["model", "loss", "wrapped loss"])
def test_what_a_callback_changes_is_noticed(change, place, monkeypatch):
    monkeypatch.setattr(Annealed, "kind_scale", 1.0)
    monkeypatch.setitem(globals(), "SCALE", 1.0)
    changed = Annealed()
    model = changed if place == "model" else nn.Linear(2, 1)
    loss = {"model": None, "loss": changed, "wrapped loss": functools.partial(max, changed)}[place]
    watch = HostWatch(model, torch.optim.SGD(model.parameters(), lr=0.1), loss)
    assert not watch.unwatched
    assert not watch.has_changed()
    change(changed)
    assert watch.has_changed()


def test_variables_and_values_of_a_loss_function_are_watched():
    weights = {"a": 1.0}
    loss, change = annealed_by(weights)
    model = nn.Linear(2, 1)

    def watch() -> HostWatch:
        return HostWatch(model, torch.optim.SGD(model.parameters(), lr=0.1), loss)

    first = watch()
    change(0.5)
    assert first.has_changed()
    second = watch()
    weights["a"] = 0.5
    assert second.has_changed()
    assert not watch().has_changed()


def test_the_rate_may_change_and_parameters_may_not():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD([model.weight], lr=0.1)
    watch = HostWatch(model, optimizer)
    optimizer.param_groups[0]["lr"] = 0.05
    assert not watch.has_changed()
    optimizer.add_param_group({"params": [model.bias]})
    assert watch.has_changed()


def test_what_holds_too_much_is_named():
    model = nn.Linear(2, 1)
    model.vocabulary = {str(number): number for number in range(5000)}
    assert (
        HostWatch(model, torch.optim.SGD(model.parameters(), lr=0.1)).unwatched == "Linear.vocabulary holds 5,000 items"
    )
