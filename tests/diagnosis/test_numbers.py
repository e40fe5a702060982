"""`debug = "nan"` names the module that first produced a bad number, and what it computed from."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from phalanx import DistributedConfig, PyTorchDDPTrainer
from phalanx.errors import ConfigError, NonFiniteLossError

DATA = TensorDataset(torch.arange(64.0).reshape(16, 4) / 64, torch.zeros(16, 1))


class Late(nn.Module):
    """The identity; from its n-th call on something goes wrong."""

    def __init__(self, wrong, calls: int = 6) -> None:
        super().__init__()
        self.wrong, self.left = wrong, calls

    def forward(self, x):
        self.left -= 1
        return self.wrong(x) if self.left < 0 else x


class BadGradient(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        return gradient * float("inf")


def fit(tmp_path, middle: nn.Module, data=DATA, **settings):
    model = nn.Sequential(nn.Linear(4, 8), middle, nn.Linear(8, 1))
    trainer = PyTorchDDPTrainer(model, loss_fn=nn.functional.mse_loss, run_dir=str(tmp_path / "run"), debug="nan",
                                batch_size=2, device="cpu", epochs=2, **settings)  # fmt: skip
    try:
        trainer.fit(data)
    finally:
        assert not any(module._forward_hooks for module in model.modules())


def test_the_module_that_divides_by_zero_is_named_with_its_inputs(tmp_path):
    with pytest.raises(
        NonFiniteLossError, match=r"step 7, rank 0: 1 \(Late\) produced float32 \[2, 8\].*16 infinite of 16"
    ):
        fit(tmp_path, Late(lambda x: x / 0))


def test_what_the_module_computed_from_is_described(tmp_path):
    with pytest.raises(NonFiniteLossError, match=r"from input float32 \[2, 8\] from -?\d.* mean .* std \d"):
        fit(tmp_path, Late(lambda x: x / 0))


def test_a_gradient_is_told_from_an_output(tmp_path):
    with pytest.raises(NonFiniteLossError, match=r"gradient of the output of 0 \(Linear\).*finite at 1 \(Late\)"):
        fit(tmp_path, Late(BadGradient.apply))


def test_bad_data_are_shown_as_the_input_of_the_first_module(tmp_path):
    inputs = DATA.tensors[0].clone()
    inputs[3, 1] = float("nan")
    with pytest.raises(NonFiniteLossError, match=r"0 \(Linear\) produced .* from input .*\(1 NaN of 8 values\)"):
        fit(tmp_path, nn.ReLU(), TensorDataset(inputs, DATA.tensors[1]))


def test_a_spike_is_a_warning_and_training_goes_on(tmp_path, capsys):
    fit(tmp_path, Late(lambda x: x * 1e6, calls=12), max_steps=14, learning_rate=1e-12)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "1 (Late) produced" in line]
    assert "step 13, rank 0: " in line
    assert "usually" in line


def test_a_compiled_model_is_refused():
    with pytest.raises(ConfigError, match="debug = 'nan' with compile"):
        DistributedConfig(debug="nan", compile=True)
