"""`train_batch` and `training_step` against plain torch, with labels that do not count: what `loss_weighting` means."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from phalanx import Formation, PyTorchDDPTrainer
from phalanx.comm.shm import SharedNumbers
from phalanx.errors import UsageError
from phalanx.run.weights import whole_weights

GLOBAL = 8
GENERATOR = torch.Generator().manual_seed(1)
INPUTS = torch.randn(20, 6, 4, generator=GENERATOR, dtype=torch.float64)  # two steps of 8, and one of 4
LABELS = torch.randint(0, 5, (20, 6), generator=GENERATOR)
for _row, _first in zip(LABELS, torch.randint(1, 6, (20,), generator=GENERATOR), strict=True):
    _row[int(_first) :] = -100


def over_labels(output, labels):
    return F.cross_entropy(output.transpose(1, 2), labels)


def over_samples(output, labels):
    """The mean over samples of each one's mean over its labels."""
    each = F.cross_entropy(output.transpose(1, 2), labels, reduction="none").sum(1)
    return (each / (labels != -100).sum(1)).mean()


def make_model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 5)).double()


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


def by_torch_alone(loss_fn) -> dict[str, torch.Tensor]:
    model = make_model()
    optimizer = make_optimizer(model)
    for first in range(0, len(INPUTS), GLOBAL):
        optimizer.zero_grad()
        loss_fn(model(INPUTS[first : first + GLOBAL]), LABELS[first : first + GLOBAL]).backward()
        optimizer.step()
    return model.state_dict()


def by_train_batch(loss_fn, batch_size: int, weigh=None, **settings):
    model = make_model()
    with Formation(device="cpu", batch_size=batch_size, **settings) as f:
        data = DataLoader(TensorDataset(INPUTS, LABELS), batch_size=batch_size)
        wrapped, optimizer, loader = f.prepare(model, make_optimizer(model), data)
        for batch in loader:
            weight = None if weigh is None else weigh(batch[1])
            f.train_batch(wrapped, batch, loss_fn, weight=weight)
            optimizer.step()
            optimizer.zero_grad()
        return whole_weights(model)


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, tensor in expected.items():
        assert (found[name] - tensor).abs().max() < 1e-12, name


LAYOUTS = {
    "whole": (1, 8, {}),
    "accumulated": (1, 2, {"gradient_accumulation_steps": 4}),
    "2 ranks": (2, 4, {}),
    "2 ranks, accumulated": (2, 2, {"gradient_accumulation_steps": 2}),
    "fsdp": (2, 2, {"gradient_accumulation_steps": 2, "strategy": "fsdp"}),
    "pipeline": (2, 4, {"gradient_accumulation_steps": 2, "pipeline_parallel": 2, "microbatches": 4}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_mean_over_labels_is_that_of_the_global_batch(ranks, layout):
    world_size, size, settings = LAYOUTS[layout]
    expected = by_torch_alone(over_labels)
    for weighting in ("auto", "tokens"):
        chosen = {**settings, "loss_weighting": weighting}
        for found in ranks(lambda chosen=chosen: by_train_batch(over_labels, size, **chosen), world_size=world_size):
            assert_equal(found, expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_mean_over_samples_is_that_of_the_global_batch(ranks, layout):
    world_size, size, settings = LAYOUTS[layout]
    chosen = {**settings, "loss_weighting": "samples"}
    for found in ranks(lambda: by_train_batch(over_samples, size, **chosen), world_size=world_size):
        assert_equal(found, by_torch_alone(over_samples))


def test_a_weight_that_is_given_counts():
    def weigh(labels):
        return (labels != -100).sum()

    found = by_train_batch(over_labels, 2, weigh, gradient_accumulation_steps=4, loss_weighting="samples")
    assert_equal(found, by_torch_alone(over_labels))


def test_backward_needs_the_weights_that_tokens_ask_for():
    model = make_model()
    with Formation(device="cpu", batch_size=2, loss_weighting="tokens") as f:
        wrapped, _, loader = f.prepare(model, make_optimizer(model), TensorDataset(INPUTS, LABELS))
        inputs, labels = next(iter(loader))
        loss = over_labels(wrapped(inputs), labels)
        with pytest.raises(UsageError, match="loss_weighting = 'tokens' weighs losses by their labels") as refused:
            f.backward(loss)
        assert "f.backward(loss, weight=number_of_labels)" in refused.value.hint
        f.backward(loss, weight=(labels != -100).sum())


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.all = make_model()

    def forward(self, inputs):
        return self.all(inputs)


def weighed_step(step, batch):
    inputs, labels = batch
    loss = over_labels(step.model.all(inputs), labels)
    step.backward(loss, weight=(labels != -100).sum())
    step.optimizers["all"].step()
    step.optimizers["all"].zero_grad()
    return loss


def plain_step(step, batch):
    inputs, labels = batch
    loss = over_labels(step.model.all(inputs), labels)
    step.backward(loss)
    return loss


def fit(folder, step, **settings) -> Parts:
    model = Parts()
    trainer = PyTorchDDPTrainer(
        model,
        optimizer={"all": make_optimizer(model.all)},
        training_step=step,
        loss_weighting="tokens",
        device="cpu",
        progress=False,
        log_every_n_steps=1,
        run_dir=str(folder / "run"),
        **settings,
    )
    trainer.fit(DataLoader(TensorDataset(INPUTS, LABELS), batch_size=2))
    return model


def test_a_training_step_weighs_gradients_and_the_reported_loss_by_labels(tmp_path):
    model = fit(tmp_path, weighed_step, gradient_accumulation_steps=4)
    assert_equal(model.all.state_dict(), by_torch_alone(over_labels))
    lines = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    losses = [event["loss"] for event in map(json.loads, lines) if event["event"] == "step"]
    first = over_labels(make_model()(INPUTS[:GLOBAL]), LABELS[:GLOBAL]).item()
    assert losses[0] == pytest.approx(first, rel=1e-12)


def test_a_training_step_needs_the_weights_that_tokens_ask_for(tmp_path):
    with pytest.raises(UsageError, match="weighs losses by their labels") as refused:
        fit(tmp_path, plain_step)
    assert "step.backward(loss, weight=number_of_labels)" in refused.value.hint


def test_labels_are_added_up_over_the_ranks_while_the_forward_pass_runs(ranks):
    """Added up before the backward pass alone, small steps take one wait more."""

    def run() -> list[str]:
        calls: list[str] = []
        put, total = SharedNumbers.put, SharedNumbers.total

        def noted_put(self, number):
            calls.append("put")
            put(self, number)

        def noted_total(self):
            calls.append("total")
            return total(self)

        model = make_model()
        model.register_forward_pre_hook(lambda *_: calls.append("forward"))
        with Formation(device="cpu", batch_size=4, strategy="ddp") as f:
            loader = DataLoader(TensorDataset(INPUTS, LABELS), batch_size=4)
            wrapped, optimizer, loader = f.prepare(model, make_optimizer(model), loader)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(SharedNumbers, "put", noted_put)
                patch.setattr(SharedNumbers, "total", noted_total)
                f.train_batch(wrapped, next(iter(loader)), over_labels)
            optimizer.step()
        return calls

    assert ranks(run, world_size=2) == [["put", "forward", "total"]] * 2
