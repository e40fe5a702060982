"""Tokens per second and MFU: known for models that count their operations, on devices whose peak is known."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import phalanx
from phalanx import PyTorchDDPTrainer
from phalanx.loop.gauges import peak_flops, token_rate
from phalanx.tools.plan.presets import gpu, names
from phalanx.zoo.models import build

TOKENS = torch.zeros(2, 32, dtype=torch.long)


def on_device(name: str, monkeypatch) -> SimpleNamespace:
    """Return what `token_rate` asks of a world, as four ranks of such a device would have it."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    return SimpleNamespace(device=torch.device("cuda"), world_size=4)


def test_mfu_is_operations_over_the_peak_of_all_devices(monkeypatch):
    model = build("gpt")
    rate = token_rate(model, (TOKENS, TOKENS), on_device("NVIDIA H200", monkeypatch), "bf16")
    assert rate.tokens(10.0) == 320.0
    assert rate.mfu(10.0) == pytest.approx(320 * model.flops_per_token(32) / (4 * 989.4e12))


def test_what_is_not_known_is_not_reported(monkeypatch):
    unknown = token_rate(build("gpt"), (TOKENS, TOKENS), on_device("NVIDIA GeForce 9", monkeypatch), "bf16")
    assert (unknown.tokens(1.0), unknown.mfu(1.0)) == (32.0, None)
    adapted = token_rate(phalanx.lora(build("gpt"), 2), (TOKENS,), on_device("NVIDIA H200", monkeypatch), "bf16")
    assert adapted.mfu(1.0) is None  # frozen weights cost fewer operations than the model counts
    images = token_rate(build("mlp"), (torch.zeros(2, 64), TOKENS), on_device("NVIDIA H200", monkeypatch), "bf16")
    assert (images.tokens(1.0), images.mfu(1.0)) == (None, None)


@pytest.mark.parametrize(
    ("name", "precision", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H100 PCIe", "fp16", 756.0),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312.0),
        ("NVIDIA A10G", "bf16", None),
        ("NVIDIA L4", "bf16", 121.0),
        ("NVIDIA L40S", "bf16", 362.0),
        ("NVIDIA H200", "fp32", None),
    ],
)
def test_peaks_by_device_name(name, precision, teraflops):
    assert peak_flops(name, precision) == (None if teraflops is None else teraflops * 1e12)


def test_peaks_are_those_of_the_planner():
    known = [gpu(name) for name in names("gpus") if name.split("-")[0] in ("a100", "h100", "h200", "b200", "l40s")]
    assert len(known) > 5
    for each in known:
        assert peak_flops(each.name.upper().replace("PCIE", "PCIe"), "bf16") == each.tflops["bf16"] * 1e12


class Compiles(nn.Module):
    """Takes long in its first step, as a compiled model does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.warm = False

    def forward(self, inputs):
        if not self.warm:
            time.sleep(1.0)
            self.warm = True
        return self.layer(inputs)


def test_throughput_of_a_run_leaves_its_first_step_out(tmp_path):
    trainer = PyTorchDDPTrainer(Compiles(), device="cpu", batch_size=4, progress=False, run_dir=str(tmp_path))
    history = trainer.fit(TensorDataset(torch.ones(40, 2), torch.ones(40, 1)))
    assert history.first_steps_seconds > 1.0
    assert history.throughput > 40 / history.total_time
