"""What the loss of a batch is the mean of, and steps and batches that count for nothing."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from phalanx import Formation, PyTorchDDPTrainer
from phalanx.errors import UsageError
from phalanx.loop.forward import decide_forward
from phalanx.loop.label_count import counted_by
from phalanx.loop.metrics import MetricSums
from phalanx.zoo.models.preference import DPO


def gradient_of_two_calls(*weights: float | None, accumulation: int = 1) -> torch.Tensor:
    """Two backward calls for each batch of one step, with these weights."""
    model = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)
    with Formation(device="cpu", batch_size=4, gradient_accumulation_steps=accumulation) as formation:
        data = TensorDataset(torch.arange(8.0 * accumulation).view(-1, 2))
        wrapped, _, loader = formation.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0), data)
        for (x,) in loader:
            for weight, power in zip(weights, (1, 2), strict=True):
                formation.backward(wrapped(x).pow(power).mean(), weight)
        formation.grad_norm()
        return model.weight.grad.clone()


def test_the_weights_of_several_calls_for_one_batch_do_not_add_up():
    torch.testing.assert_close(gradient_of_two_calls(4.0, 4.0), gradient_of_two_calls(None, None))


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ((4.0, 2.0), "the weights 8, 4 in all.*\n.*f.backward\\(first \\+ second, weight=n\\)"),
        ((4.0, None), "some have none"),
        ((None, 4.0), "some have none"),
    ],
)
def test_weights_that_no_one_divisor_fits_are_refused(weights, message):
    with pytest.raises(UsageError, match=message):
        gradient_of_two_calls(*weights, accumulation=2)


def test_each_call_for_the_only_batch_of_a_step_has_its_own_weight():
    torch.testing.assert_close(gradient_of_two_calls(4.0, 2.0), gradient_of_two_calls(None, None))


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.table(tokens)


def test_a_step_without_any_label_is_left_out_and_training_continues(tmp_path):
    labels = torch.tensor([[0, 1], [-100, -100], [2, -100], [1, 1]])
    data = TensorDataset(torch.tensor([[0, 1], [2, 3], [4, 0], [1, 2]]), labels)
    trainer = PyTorchDDPTrainer(
        Tagger(), device="cpu", batch_size=1, loss_weighting="tokens", epochs=2, log_every_n_steps=1, progress=False,
        run_dir=str(tmp_path),
    )  # fmt: skip
    history = trainer.fit(data)
    assert len(history.steps) == 6
    assert all(math.isfinite(epoch.train_loss) for epoch in history.epochs)


def test_the_loss_of_an_epoch_is_the_mean_over_its_samples(tmp_path):
    """33 samples by 8: the last step is one sample, and counts as one."""
    model = nn.Linear(1, 1)
    nn.init.ones_(model.weight)
    nn.init.zeros_(model.bias)
    x = torch.cat([torch.zeros(32, 1), torch.full((1, 1), 10.0)])
    data = DataLoader(TensorDataset(x, torch.zeros(33, 1)), batch_size=8)
    sgd = torch.optim.SGD(model.parameters(), lr=0.0)
    trainer = PyTorchDDPTrainer(
        model, sgd, loss_fn="mse", device="cpu", log_every_n_steps=2, progress=False, run_dir=str(tmp_path),
        keep_best="train/loss",
    )  # fmt: skip
    history = trainer.fit(data, data, epochs=1)
    assert history.epochs[-1].train_loss == pytest.approx(100 / 33)
    assert history.epochs[-1].val["loss"] == pytest.approx(100 / 33)


@pytest.mark.parametrize(
    ("loss", "labels", "expected"),
    [
        (nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 0.5])), [0, 1, 2, -100], 6.5),
        (nn.CrossEntropyLoss(ignore_index=0), [0, 1, 2, 0], 2),
        (nn.CrossEntropyLoss(), [0, 1, -100, -100], 2),
        (nn.CrossEntropyLoss(), [0, 1, 2, 1], 4),
        (nn.functional.cross_entropy, [0, 1, -100, 2], 3),
        (functools.partial(nn.functional.cross_entropy, ignore_index=2), [0, 1, 2, 2], 2),
        (nn.CTCLoss(), [0, 1, 2, 1], None),
        (nn.BCEWithLogitsLoss(), [0.0, 1.0, 1.0, 1.0], None),
        (None, [0, -100, 2, 1], 3),
    ],
)
def test_a_loss_that_averages_over_labels_is_weighed_by_them(loss, labels, expected):
    batch = (torch.zeros(4, 2), torch.tensor(labels))
    forward = decide_forward(nn.Linear(2, 3), loss, batch)
    assert forward.is_mean_over_labels(batch) is (expected is not None)
    assert float(forward.share(batch, 4, by_labels=expected is not None)) == (4 if expected is None else expected)


def test_a_batch_in_which_no_label_counts_has_no_weight():
    batch = (torch.zeros(2, 2), torch.tensor([-100, -100]))
    forward = decide_forward(nn.Linear(2, 3), nn.CrossEntropyLoss(), batch)
    assert [float(forward.share(batch, 2, by_labels=by_labels)) for by_labels in (True, False)] == [0, 0]


class PairLoss(nn.Module):
    """A mean over pairs of rows."""

    def forward(self, output, target):
        return (output[::2] - output[1::2]).square().mean() + 0 * target.sum()

    def loss_weight(self, target):
        return len(target) // 2


def test_a_loss_may_say_what_it_is_the_mean_of():
    batch = (torch.zeros(6, 2), torch.zeros(6))
    forward = decide_forward(nn.Linear(2, 3), PairLoss(), batch)
    assert forward.is_mean_over_labels(batch)
    assert float(forward.share(batch, 6, by_labels=True)) == 3
    pairs = (torch.zeros(4, 2, 5, dtype=torch.long), torch.full((4, 2, 5), -100))
    assert float(decide_forward(DPO(nn.Linear(2, 3)), None, pairs).share(pairs, 4, by_labels=True)) == 4


def fitted(tmp_path, labels, batch_size, accumulation, loss_fn=None, **settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20)).double()
    tokens = torch.randint(0, 20, labels.shape, generator=torch.Generator().manual_seed(5))
    loss_fn = loss_fn or (lambda output, target: nn.functional.cross_entropy(output.transpose(1, 2), target))
    trainer = PyTorchDDPTrainer(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        loss_fn=loss_fn,
        device="cpu",
        progress=False,
        epochs=1,
        batch_size=batch_size,
        gradient_accumulation_steps=accumulation,
        run_dir=str(tmp_path / f"{batch_size}x{accumulation}"),
        **settings,
    )
    history = trainer.fit(TensorDataset(tokens, labels))
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]), history


def test_ignored_labels_that_come_after_the_first_batch_weigh_as_well(tmp_path):
    """Data in the order of their lengths begin with a batch in which every label counts."""
    labels = torch.randint(0, 20, (16, 6), generator=torch.Generator().manual_seed(1))
    for row in range(4, 16):
        labels[row, 1 + row % 3 :] = -100
    whole, one = fitted(tmp_path, labels, 8, 1)
    split, two = fitted(tmp_path, labels, 4, 2)
    assert torch.allclose(whole, split, rtol=0, atol=1e-12)
    assert one.epochs[-1].train_loss == pytest.approx(two.epochs[-1].train_loss, rel=1e-12)


def test_a_mean_over_samples_is_weighed_by_samples_if_that_is_said(tmp_path):
    labels = torch.randint(0, 20, (16, 6), generator=torch.Generator().manual_seed(1))
    for row in range(16):
        labels[row, 1 + row % 5 :] = -100

    def mean_of_samples(output, target):
        each = nn.functional.cross_entropy(output.transpose(1, 2), target, reduction="none").sum(1)
        return (each / (target != -100).sum(1)).mean()

    whole, split = (
        fitted(tmp_path, labels, batch, steps, mean_of_samples, loss_weighting="samples")[0]
        for batch, steps in ((8, 1), (4, 2))
    )
    assert torch.allclose(whole, split, rtol=0, atol=1e-12)


@pytest.mark.parametrize("weighting", ["auto", "samples", "tokens"])
def test_a_batch_without_labels_ends_no_run(tmp_path, weighting):
    labels = torch.randint(0, 20, (6, 4), generator=torch.Generator().manual_seed(1))
    labels[2] = -100
    _, history = fitted(tmp_path, labels, 1, 1, loss_weighting=weighting)
    assert history.status == "finished"
    assert math.isfinite(history.epochs[-1].train_loss)


@pytest.mark.parametrize(
    "loss",
    [
        nn.MSELoss(reduction="sum"),
        functools.partial(nn.functional.mse_loss, reduction="sum"),
        nn.L1Loss(reduction="none"),
    ],
)
def test_a_loss_that_is_no_mean_is_refused_before_the_start(loss):
    with pytest.raises(UsageError, match=r"loss_fn has reduction='(sum|none)'"):
        PyTorchDDPTrainer(nn.Linear(2, 1), loss_fn=loss, device="cpu").fit((torch.zeros(4, 2), torch.zeros(4, 1)))


def test_wrapped_models_of_transformers_count_labels_as_the_model_inside():
    transformers = pytest.importorskip("transformers")
    shape = {"vocab_size": 50, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape))
    for wrapped in (model, torch.compile(model, backend="eager")):
        assert counted_by(wrapped, None).skipped == 1
    t5 = transformers.T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    assert counted_by(transformers.T5ForConditionalGeneration(t5), None).skipped == 0


def test_a_metric_that_is_nan_on_a_placeholder_batch_counts_for_nothing():
    sums = MetricSums({"mean": lambda output, target: output.mean()}, torch.device("cpu"))
    sums.add(None, torch.tensor([2.0, 4.0]), None, samples=2)
    sums.add(None, torch.tensor([math.nan]), None, samples=0)
    assert sums.result() == {"mean": 3.0}
