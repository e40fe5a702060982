"""The table of one GPU, with tiny models on the CPU: equal training for all contestants, files that are added to."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from command import ROOT
from long_proofs import long_proof
from torch import nn

_OF_BENCHMARKS = (
    "clock",
    "contestants",
    "gpu_cases",
    "gpu_pictures",
    "gpu_table",
    "plain_models",
    "report",
    "workloads",
)


@pytest.fixture
def gpu_table(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Return the script as a module; the short names of its neighbours are removed afterwards."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gpu_table

    yield gpu_table
    for name in [name for name in sys.modules if name.partition(".")[0] in _OF_BENCHMARKS]:
        del sys.modules[name]


def tiny_text(gpu_table: ModuleType) -> Any:
    from plain_models import PlainDecoder

    make = lambda: PlainDecoder(256, 16, 1, 32, 2)  # noqa: E731
    return gpu_table.Case(make, make, 8, (16,), 256, loss_steps=60)


@pytest.mark.parametrize(
    "rivals", [["raw"], pytest.param(["raw", "accelerate", "lightning", "hf"], marks=long_proof)], ids=len
)
def test_every_contestant_trains_the_same_steps_on_the_same_batches(gpu_table, tmp_path, rivals):
    case, file = tiny_text(gpu_table), tmp_path / "part.json"
    found = gpu_table.measure(case, [*rivals, "ours"], 5, file, "cpu")
    assert not [row for row in found.values() if "failed" in row], found
    assert found["ours"]["loss"] == pytest.approx(found["raw"]["loss"], abs=1e-5)
    assert {round(row["loss"], 4) for row in found.values()} == {round(found["raw"]["loss"], 4)}
    assert found["raw"]["loss"] < 5.5, "bytes of text are learned: random ones would stay at log(256) = 5.55"
    assert all(row["mfu"] > 0 for row in found.values())
    assert json.loads(file.read_text()) == found


def test_images_are_trained_channels_last_by_hand_and_by_the_setting(gpu_table, monkeypatch):
    import plain_models

    def network(_: str) -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 1000))

    monkeypatch.setattr(plain_models, "_vision_model", network)
    by_hand, ours = lambda: plain_models.Images("", channels_last=True), lambda: plain_models.Images("")
    case = gpu_table.Case(by_hand, ours, 4, (3, 14, 14), 0, loss_steps=30, settings={"channels_last": True})
    found = gpu_table.measure(case, ["raw", "ours"], 5, None, "cpu")
    assert found["ours"]["loss"] == pytest.approx(found["raw"]["loss"], abs=1e-5)


def test_operations_are_counted_alike_for_all_models(gpu_table):
    gpt2, resnet50 = gpu_table.CASES["gpt2"], gpu_table.CASES["resnet50"]
    assert gpt2.flops == pytest.approx(6 * 124e6 * 1024 * 1.15, rel=0.02)  # attention is an eighth more
    assert resnet50.flops == pytest.approx(3 * 2 * 4.09e9, rel=0.01)


def test_patterns_of_images_belong_to_their_classes(gpu_table):
    from gpu_cases import images

    pixels, labels = images(400, (3, 14, 14)).tensors
    again, _ = images(400, (3, 14, 14)).tensors
    assert torch.equal(pixels, again)
    means = pixels.float().flatten(1)
    near = [(means[labels == label] - means[labels == label].mean(0)).square().mean() for label in labels.unique()[:9]]
    assert torch.stack(near).nanmean() < 0.8 * (means - means.mean(0)).square().mean()


ROW = {"ms": 10.0, "per_second": 1000.0, "mfu": 0.4, "gib": 2.0, "first": 3.0, "compile": 2.0}


def test_a_second_command_adds_to_the_file_and_prints_all_models(gpu_table, tmp_path, monkeypatch, capsys):
    found = {"gpt2": {"raw": {**ROW, "loss": 2.5}}, "resnet50": {"raw": ROW, "ours": {"failed": "ValueError"}}}
    monkeypatch.setattr(gpu_table, "_in_process", lambda model, options: found[model])
    monkeypatch.setattr(gpu_table, "environment", lambda device: {"device": "a GPU"})
    file = tmp_path / "table.json"
    for model in found:
        monkeypatch.setattr(sys, "argv", ["gpu_table.py", "--model", model, "--json", str(file)])
        gpu_table.main()
    assert json.loads(file.read_text())["models"] == found
    printed = capsys.readouterr().out
    assert "2 models in" in printed
    assert "| raw        |    1,000 |  1.00 | 40.0% | 2.0 |  1.00 |      3.0 s |     2.0 s |      2.5000 |" in printed
    whole = printed.split("resnet50: 0 s")[-1]
    assert whole.index("### gpt2") < whole.index("### resnet50")
    assert "failed" in whole


def test_pictures_are_drawn_of_the_file(gpu_table, tmp_path, monkeypatch):
    import gpu_pictures

    models = {"gpt2": {"raw": ROW, "ours": ROW}, "vit-b16": {"ours": ROW}}
    (tmp_path / "table.json").write_text(json.dumps({"environment": {"device": "a GPU"}, "models": models}))
    monkeypatch.setattr(sys, "argv", ["gpu_pictures.py", str(tmp_path / "table.json"), str(tmp_path / "gpu")])
    gpu_pictures.main()
    assert "gpt2" in (tmp_path / "gpu-table.svg").read_text()
