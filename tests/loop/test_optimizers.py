"""Optimizers on unusual parameters, as in torch: sparse gradients, complex numbers, and what is refused by name."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from phalanx import PyTorchDDPTrainer
from phalanx.errors import UsageError


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.out = nn.EmbeddingBag(50, 8, sparse=True), nn.Linear(8, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(self.embed(tokens))


class Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.out = nn.Parameter(torch.randn(9, dtype=torch.cfloat)), nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.fft.irfft(torch.fft.rfft(x) * self.weight, n=16))


def trained_by_hand(model: nn.Module, optimizer: torch.optim.Optimizer, data: TensorDataset, clip: float) -> list:
    dense = copy.deepcopy(model)
    for _ in range(3):
        optimizer.zero_grad()
        output = model(data.tensors[0])
        loss = F.mse_loss(output, data.tensors[1]) if output.shape[1] == 1 else F.cross_entropy(output, data.tensors[1])
        loss.backward()
        grads = [p.grad.to_dense() if p.grad.is_sparse else p.grad for p in model.parameters()]
        factor = min(1.0, clip / (nn.utils.get_total_norm(grads).item() + 1e-6))
        for parameter in model.parameters():
            parameter.grad = parameter.grad * factor
        optimizer.step()
    assert not torch.equal(next(dense.parameters()), next(model.parameters()))
    return list(model.parameters())


@pytest.mark.parametrize("clip", [None, 0.01])
@pytest.mark.parametrize("own", [False, True])
def test_sparse_gradients_are_measured_clipped_and_trained(own, clip, tmp_path):
    data = TensorDataset(torch.randint(0, 50, (8, 3)), torch.randint(0, 2, (8,)))
    plain, model = Bag(), Bag()
    expected = trained_by_hand(plain, torch.optim.SGD(plain.parameters(), lr=0.1), data, clip or math.inf)
    settings = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1)} if own else {"optimizer": "sgd"}
    fitted(model, data, tmp_path, gradient_clipping=clip, momentum=0.0, learning_rate=0.1, **settings)
    torch.testing.assert_close(list(model.parameters()), expected)


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd", "adagrad"])
def test_complex_parameters_are_trained_by_every_optimizer(name, tmp_path):
    data = TensorDataset(torch.randn(8, 16), torch.randn(8, 1))
    model, plain = Spectral(), Spectral()
    options = {"weight_decay": 0.0, "lr": 0.01, **({"momentum": 0.9} if name == "sgd" else {})}
    made = {
        "adamw": torch.optim.AdamW,
        "adam": torch.optim.Adam,
        "sgd": torch.optim.SGD,
        "adagrad": torch.optim.Adagrad,
    }
    expected = trained_by_hand(plain, made[name](plain.parameters(), **options), data, math.inf)
    fitted(model, data, tmp_path, optimizer=name, learning_rate=0.01, weight_decay=0.0)
    torch.testing.assert_close(list(model.parameters()), expected)


def fitted(model: nn.Module, data: TensorDataset, folder, **settings) -> None:
    """Take three steps of the whole data, in its order."""
    quiet = {"verbosity": "quiet", "progress": False, "device": "cpu", "num_workers": 1, "run_dir": str(folder / "run")}
    loader = DataLoader(data, batch_size=8)
    PyTorchDDPTrainer(model, **settings, **quiet, checkpoint_dir=str(folder / "kept")).fit(loader, epochs=3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optimizer": lambda parameters: torch.optim.LBFGS(parameters)}, "LBFGS calls the model several times"),
        ({"optimizer": torch.optim.LBFGS}, r"LBFGS calls the model several times(.|\n)*optimizer='adamw'"),
        ({}, r"adamw does not take the sparse gradients of embed \(sparse=True\)(.|\n)*optimizer='sgd', momentum=0"),
        ({"optimizer": torch.optim.RMSprop}, "RMSprop does not take the sparse gradients of embed"),
        ({"optimizer": "sgd", "weight_decay": 0.1}, "weight_decay = 0.1 does not go with the sparse gradients"),
        ({"optimizer": "sgd"}, r"momentum = 0.9 does not go with(.|\n)*momentum=0"),
    ],
)
def test_optimizers_that_cannot_are_refused_by_name(settings, message, tmp_path):
    data = TensorDataset(torch.randint(0, 50, (8, 3)), torch.randint(0, 2, (8,)))
    with pytest.raises(UsageError, match=message):
        fitted(Bag(), data, tmp_path, **settings)
