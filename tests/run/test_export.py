"""Every reference model can be written as TorchScript and ONNX, and gives the same outputs for another batch."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import TensorDataset

from phalanx.run.export import export_model
from phalanx.zoo.models import build

DECODERS = ("gpt", "llama", "moe")


def made(name: str):
    torch.manual_seed(0)
    model = build(name, **({"seq_len": 32} if name in DECODERS else {})).eval()
    if name in DECODERS:
        return model, torch.randint(0, 256, (8, 32)), torch.randint(0, 256, (8, 32))
    return model, torch.randn(8, 1, 8, 8), torch.zeros(8).long()


@pytest.mark.parametrize("name", [*DECODERS, "vit"])
@pytest.mark.filterwarnings("ignore")
def test_torchscript(tmp_path, name):
    model, inputs, targets = made(name)
    export_model(model, tmp_path / "model.pt", "torchscript", TensorDataset(inputs, targets))
    other = inputs[:3].flip(0)
    with torch.no_grad():
        torch.testing.assert_close(torch.jit.load(tmp_path / "model.pt")(other), model(other), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["moe", "vit"])
@pytest.mark.filterwarnings("ignore")
def test_onnx(tmp_path, name):
    reference = pytest.importorskip("onnx.reference")
    pytest.importorskip("onnxscript")
    model, inputs, targets = made(name)
    export_model(model, tmp_path / "model.onnx", "onnx", TensorDataset(inputs, targets))
    session = reference.ReferenceEvaluator(str(tmp_path / "model.onnx"))
    other = inputs[:3].flip(0)
    (found,) = session.run(None, {session.input_names[0]: other.numpy()})
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(found), model(other), rtol=1e-4, atol=1e-4)
