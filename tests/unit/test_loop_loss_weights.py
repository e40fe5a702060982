"""Steps and batches that count for nothing: no label in a step, a placeholder batch in a metric."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from phalanx import Formation, PyTorchDDPTrainer
from phalanx.errors import UsageError
from phalanx.loop.forward import decide_forward
from phalanx.loop.metrics import MetricSums


def gradient_of_two_calls(*weights: float | None) -> torch.Tensor:
    """Two backward calls for one batch, with these weights."""
    model = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)
    with Formation(device="cpu", batch_size=4) as formation:
        data = TensorDataset(torch.arange(8.0).view(4, 2))
        wrapped, _, loader = formation.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0), data)
        (x,) = next(iter(loader))
        for weight, power in zip(weights, (1, 2), strict=True):
            formation.backward(wrapped(x).pow(power).mean(), weight)
        formation.grad_norm()
        return model.weight.grad.clone()


def test_the_weights_of_several_calls_for_one_batch_do_not_add_up():
    torch.testing.assert_close(gradient_of_two_calls(4.0, 4.0), gradient_of_two_calls(None, None))


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ((4.0, 2.0), "the weights 4, 2 in all.*\n.*f.backward\\(first \\+ second, weight=n\\)"),
        ((4.0, None), "some have none"),
        ((None, 4.0), "some have none"),
    ],
)
def test_weights_that_no_one_divisor_fits_are_refused(weights, message):
    with pytest.raises(UsageError, match=message):
        gradient_of_two_calls(*weights)


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
        (nn.CrossEntropyLoss(), [0, 1, 2, 1], None),
        (nn.CrossEntropyLoss(ignore_index=0, reduction="sum"), [0, 1, 2, 1], None),
        (nn.functional.cross_entropy, [0, 1, -100, 2], 3),
    ],
)
def test_a_loss_that_averages_over_labels_is_weighed_by_them(loss, labels, expected):
    batch = (torch.zeros(4, 2), torch.tensor(labels))
    forward = decide_forward(nn.Linear(2, 3), loss, batch)
    assert forward.averages_labels(nn.Linear(2, 3), batch) is (expected is not None)
    if expected is not None:
        assert float(forward.count_labels(batch)) == expected


def test_a_metric_that_is_nan_on_a_placeholder_batch_counts_for_nothing():
    sums = MetricSums({"mean": lambda output, target: output.mean()}, torch.device("cpu"))
    sums.add(None, torch.tensor([2.0, 4.0]), None, samples=2)
    sums.add(None, torch.tensor([math.nan]), None, samples=0)
    assert sums.result() == {"mean": 3.0}
