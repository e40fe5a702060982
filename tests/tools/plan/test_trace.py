"""Modules traced without memory: what is counted, what is recognised, and what is refused."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from phalanx.errors import UsageError
from phalanx.tools.plan.model import ModelShape, TracedShape
from phalanx.tools.plan.trace import supports, trace_import, trace_module
from phalanx.zoo.models.registry import build

RESNET = "phalanx.zoo.models.resnet:resnet"


def test_resnet50_is_counted_as_published() -> None:
    found = trace_import(RESNET, options={"preset": "resnet50"})
    assert isinstance(found, TracedShape)
    assert found.parameters == found.trainable == 25_557_032
    assert found.forward_flops_per_sample == pytest.approx(8.18e9, rel=0.01)  # 4.09 G multiply-adds
    assert found.activation_bytes_per_sample == pytest.approx(43.9e6, rel=0.02)
    assert found.traffic_bytes_per_sample == pytest.approx(164e6, rel=0.02)
    assert found.block_boundary_bytes_per_sample == pytest.approx(11.2e6, rel=0.01)
    assert (found.blocks, found.largest_block_parameters, found.buffers) == (16, 6_039_552, 53_173)
    assert (found.example, found.output_bytes_per_sample) == ("3x224x224", 2000)


def test_operations_follow_the_image() -> None:
    small, large = (trace_import(RESNET, f"3x{size}x{size}", {"preset": "resnet18"}) for size in (128, 256))
    assert isinstance(small, TracedShape)
    assert isinstance(large, TracedShape)
    assert large.forward_flops_per_sample == pytest.approx(4 * small.forward_flops_per_sample, rel=0.01)
    assert small == trace_import(RESNET, (3, 128, 128), {"preset": "resnet18"})


@pytest.mark.parametrize(
    ("model", "preset"), [("gpt", "gpt2"), ("llama", "1b"), ("moe", "small"), ("vit", "base"), ("gpt", "debug")]
)
def test_transformers_of_ours_become_dimensions(model: str, preset: str) -> None:
    found = trace_import(f"phalanx.zoo.models.{model}:{model}", options={"preset": preset})
    assert isinstance(found, ModelShape)
    with torch.device("meta"):
        module = build(model, preset=preset)
    assert found.parameters == sum(parameter.numel() for parameter in module.parameters())


def test_a_transformer_with_changes_of_the_user_is_traced() -> None:
    model = build("gpt", preset="debug")
    model.extra = nn.Linear(64, 64)  # its dimensions no longer give all parameters
    found = trace_module(model)
    assert isinstance(found, TracedShape)
    assert found.example == "2x64"
    assert set(found.supports) == {"tensor", "pipeline", "context"}


def test_what_backward_keeps_is_counted_once() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 16, bias=False)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            hidden = self.first(inputs)
            return (hidden * hidden).sum(-1)  # one tensor, saved for both factors

    found = trace_module(Twice(), "8")
    assert isinstance(found, TracedShape)
    assert found.activation_bytes_per_sample == 2 * (8 + 16)  # the input and the product, in half precision
    assert found.forward_flops_per_sample == 2 * 8 * 16


def test_a_module_of_the_user_is_left_as_it_was() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    module.table = torch.ones(3)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    frozen = next(module.parameters()).requires_grad_(False)
    found = trace_module(module, torch.zeros(5, 4))
    assert isinstance(found, TracedShape)
    assert found.parameters - found.trainable == frozen.numel()
    assert not module.training
    assert torch.equal(module.table, torch.ones(3))
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert not any(part._forward_pre_hooks for part in module.modules())


def test_axes_are_those_of_the_models_methods() -> None:
    assert set(supports(build("gpt"))) == {"tensor", "pipeline", "context"}
    assert set(supports(build("moe"))) >= {"expert"}
    assert supports(nn.Linear(2, 2)) == ()


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    lines = """
        import torch
        from torch import nn

        class Reads(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(4, 4)
                self.scale = self.layer.weight.abs().max().item()

        class Branches(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(4, 4)

            def forward(self, inputs):
                hidden = self.layer(inputs)
                if hidden.sum() > 0:
                    return hidden
                return -hidden

        class Needs(nn.Module):
            def __init__(self, width):
                super().__init__()

        def table():
            return torch.zeros(3)
        """
    text = "\n".join(line[8:] for line in lines.splitlines())
    (tmp_path / "own_nets.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_nets", raising=False)
    return str(tmp_path / "own_nets.py")


def test_what_blocks_the_meta_device_is_named_with_its_line(own: str) -> None:
    with pytest.raises(UsageError) as caught:
        trace_import("own_nets:Reads")
    message = caught.value.message
    assert "model 'own_nets:Reads' cannot be built on the meta device" in message
    assert re.search(rf"{re.escape(own)}:9: self.scale = self.layer.weight.abs\(\).max\(\).item\(\)", message)
    assert "item" in message.split("(")[0]  # torch names the operation


def test_what_blocks_the_forward_pass_is_named_with_its_line(own: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError) as caught:
        trace_import("own_nets:Branches")
    assert "cannot be traced with an input of 4" in caught.value.message
    assert f"{own}:18: if hidden.sum() > 0:" in caught.value.message
    with pytest.raises(UsageError, match="cannot be traced with an input of 3"):
        trace_import("own_nets:Branches", "3")  # a shape that does not fit
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.usefixtures("own")
def test_other_mistakes_are_named() -> None:
    with pytest.raises(UsageError, match="needs the option width"):
        trace_import("own_nets:Needs")
    with pytest.raises(UsageError, match=r"gives a Tensor, not a torch\.nn\.Module"):
        trace_import("own_nets:table")
    with pytest.raises(UsageError, match="Did you mean 'Reads'"):
        trace_import("own_nets:Read")
    with pytest.raises(UsageError, match="the input of Needs is not known"):
        trace_import("own_nets:Needs", options={"width": 3})
    for wrong in ("3x", "words:5", "0x4", ""):
        with pytest.raises(UsageError, match="is not the shape of a sample"):
            trace_module(nn.Linear(2, 2), wrong)
