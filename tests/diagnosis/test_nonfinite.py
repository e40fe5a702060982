"""A loss that is not finite: the batch that caused it is named, and the message about the weights is true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from phalanx import PyTorchDDPTrainer
from phalanx.errors import NonFiniteLossError

SAMPLES, BATCH = 64, 8


@pytest.fixture(autouse=True)
def _in_own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def spoilt(kind: str, value: float, at: int = 20) -> TensorDataset:
    torch.manual_seed(0)
    inputs, targets = torch.randn(SAMPLES, 3), torch.zeros(SAMPLES, 1)
    if kind:
        (inputs if kind == "inputs" else targets)[at, 0] = value
    return TensorDataset(inputs, targets)


def fit(data, *, ranks: int = 1, **settings) -> tuple[NonFiniteLossError, nn.Module]:
    model = nn.Linear(3, 1)
    settings = {"optimizer": "sgd", "learning_rate": 1e-3, "run_dir": "run", "verbosity": "quiet", **settings}
    with pytest.raises(NonFiniteLossError) as caught:
        PyTorchDDPTrainer(model, device="cpu", batch_size=BATCH // ranks, num_workers=ranks, **settings).fit(data)
    return caught.value, model


class Noting(nn.Linear):
    """Notes the first number of each sample that it gets."""

    def __init__(self) -> None:
        super().__init__(1, 1)
        self.seen: list[int] = []

    def forward(self, x):
        self.seen.extend(x[:, 0].long().tolist())
        return super().forward(x)


def order() -> list[int]:
    """Return the numbers of the samples in the order of the first epoch."""
    model, numbers = Noting(), torch.arange(float(SAMPLES))[:, None]
    trainer = PyTorchDDPTrainer(
        model, device="cpu", batch_size=BATCH, run_dir="order", verbosity="quiet", learning_rate=1e-9
    )
    trainer.fit((numbers, numbers))
    return model.seen[:SAMPLES]


@pytest.mark.parametrize(
    ("kind", "value", "said"),
    [
        ("inputs", float("nan"), "nan in its inputs"),
        ("inputs", float("inf"), "infinity in its inputs"),
        ("targets", float("nan"), "nan in its targets"),
    ],
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_batch_that_is_not_finite_is_named(kind, value, said, ranks, fork_server):
    step = order().index(20) // BATCH + 1
    error, _ = fit(spoilt(kind, value), ranks=ranks, epochs=2, log_every_n_steps=1000)
    assert f"at step {step}: the batch of step {step} holds {said}; there is no checkpoint before it" in error.message
    assert "torch.nan_to_num" in error.hint


def test_a_finite_batch_is_no_suspect():
    error, model = fit(spoilt("", 0.0), learning_rate=1e30, epochs=2)
    assert "holds" not in error.message
    assert error.hint.startswith("Lower learning_rate")
    assert "is finite." in error.hint
    assert model.weight.isfinite().all()


def test_a_batch_of_the_epoch_before_the_check_is_found():
    """The last step of an epoch is read when the loader has begun the next one."""
    error, _ = fit(spoilt("inputs", float("nan"), order()[-1]), epochs=2, log_every_n_steps=1000)
    assert "the batch of step 8 holds nan in its inputs" in error.message


class Dicts(Dataset):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.full((3,), float("nan") if index == 20 else 1.0), "labels": torch.zeros(1)}


class Named(nn.Linear):
    def forward(self, x, labels):
        return ((super().forward(x) - labels) ** 2).mean()


def test_batches_of_names_are_looked_at():
    with pytest.raises(NonFiniteLossError, match="holds nan in its inputs"):
        PyTorchDDPTrainer(Named(3, 1), device="cpu", batch_size=BATCH, run_dir="run", verbosity="quiet").fit(Dicts())


def test_a_stream_cannot_be_read_again():
    batches = [(torch.full((4, 3), float("nan")), torch.zeros(4, 1))] * 3
    error, _ = fit(batches)
    assert "The batch of step 1 cannot be read again: look for nan in the data." in error.hint


class Once(Dataset):
    """Raises for a sample that was read before."""

    def __init__(self) -> None:
        self.read: set[int] = set()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int):
        if index in self.read:
            raise OSError(f"sample {index} was deleted")
        self.read.add(index)
        return torch.full((3,), float("nan")), torch.zeros(1)


def test_an_error_of_the_data_set_does_not_hide_the_cause():
    error, _ = fit(DataLoader(Once(), batch_size=BATCH))
    assert "the loss is nan at step 1" in error.message
    assert "cannot be read again: OSError: sample 0 was deleted" in error.hint


def test_the_model_gets_the_weights_of_the_last_checkpoint_back():
    error, model = fit(spoilt("inputs", float("nan")), checkpoint_frequency="1 steps", epochs=2)
    last = max(Path("run/checkpoints").glob("step-*"))
    step = int(last.name.split("-")[1])
    assert f"the state of step {step}, that of its last checkpoint, is in the model" in error.__notes__[0]
    assert model.weight.isfinite().all()
    expected = nn.Linear(3, 1)
    PyTorchDDPTrainer(expected, device="cpu").load(last)
    assert torch.equal(model.weight, expected.weight)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_the_last_finite_weights_of_a_small_model_come_back(optimizer):
    data, every = spoilt("inputs", float("nan")), {"epochs": 2, "log_every_n_steps": 3, "optimizer": optimizer}
    torch.manual_seed(1)
    error, model = fit(data, **every)
    found = re.search(
        "the state of step ([0-9]+), the last one with finite weights, is in the model", error.__notes__[0]
    )
    assert found is not None, error.__notes__
    torch.manual_seed(1)
    expected = nn.Linear(3, 1)
    if step := int(found[1]):
        own = {
            "batch_size": BATCH,
            "learning_rate": 1e-3,
            "run_dir": "expected",
            "verbosity": "quiet",
            "max_steps": step,
        }
        PyTorchDDPTrainer(expected, device="cpu", optimizer=optimizer, **own).fit(data)
    assert torch.equal(model.weight, expected.weight)
    assert step < order().index(20) // BATCH + 1


def test_states_of_the_users_optimizer_come_back_too():
    torch.manual_seed(1)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    trainer = PyTorchDDPTrainer(model, optimizer, device="cpu", batch_size=BATCH, run_dir="run", verbosity="quiet")
    with pytest.raises(NonFiniteLossError):
        trainer.fit(spoilt("inputs", float("nan")))
    tensors = [value for state in optimizer.state.values() for value in state.values()]
    assert all(value.isfinite().all() for value in [*tensors, model.weight])


def test_lost_weights_are_called_lost(monkeypatch):
    monkeypatch.setattr("phalanx.loop.last_finite._MOST_BYTES", 0)
    error, model = fit(spoilt("inputs", float("nan")), epochs=2)
    assert "the weights in the model are not finite, and lost, and no checkpoint was saved" in error.__notes__[0]
    assert "the trained state is in the model" not in str(error.__notes__)
    assert not model.weight.isfinite().all()


def test_the_callers_model_stays_as_it_was_while_ranks_lose_theirs(fork_server):
    torch.manual_seed(3)
    before = nn.Linear(3, 1).weight.detach().clone()
    torch.manual_seed(0)
    data = spoilt("inputs", float("nan"))
    torch.manual_seed(3)
    error, model = fit(data, ranks=2, epochs=2)
    assert "the model is as it was before fit" in error.__notes__[0]
    assert torch.equal(model.weight, before)
