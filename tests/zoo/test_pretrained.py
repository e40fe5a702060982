"""`model.pretrained`: a new task on the weights of a folder, a run or a file; what is new and what was left out."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from phalanx.errors import CheckpointError, UsageError
from phalanx.run.weights import save_weights
from phalanx.zoo.models import build, save_pretrained
from phalanx.zoo.pretrained import build_pretrained, pretrained_tokenizer


@pytest.fixture(autouse=True)
def _quiet(monkeypatch, tmp_path):
    """Tensors on the meta device make torch import its compiler, which sets the first variable for good."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # a progress bar would leave its thread behind


@pytest.fixture
def masked():
    torch.manual_seed(1)
    return build("bert", layers=1, hidden=16, heads=2, ffn_hidden=32, vocab_size=50, seq_len=24)


def bodies_are_equal(first, second) -> bool:
    body = [name for name in first.state_dict() if not name.startswith("head")]
    return all(torch.equal(first.state_dict()[name], second.state_dict()[name]) for name in body)


def test_a_folder_of_ours_gets_a_new_head(masked, tmp_path):
    save_pretrained(masked, tmp_path / "hf")
    options = {"task": "qa", "preset": "base", "vocab_size": 1024, "dropout": 0.2, "pretrained": str(tmp_path / "hf")}
    model = build_pretrained("bert", **options)
    assert bodies_are_equal(model, masked)
    assert (model.config.task, model.config.dropout, model.config.vocab_size) == ("qa", 0.2, 50)
    assert model.weights_note.startswith(f"weights of {tmp_path / 'hf'}: 21 tensors; new: head.weight, head.bias; ")
    assert "left out: cls.predictions.bias, " in model.weights_note
    assert "decoder" not in model.weights_note, "a tied tensor is not lost"
    assert model.weights_note.endswith("; it decides on preset, vocab_size")


@pytest.mark.parametrize("kind", ["BertForMaskedLM", "BertModel"])
def test_folders_of_transformers_load_with_and_without_prefix(masked, tmp_path, kind):
    transformers = pytest.importorskip("transformers")
    save_pretrained(masked, tmp_path / "ours")
    theirs = getattr(transformers, kind).from_pretrained(tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "theirs")
    model = build_pretrained("bert", task="classify", classes=3, pretrained=str(tmp_path / "theirs"))
    assert bodies_are_equal(model, masked)
    assert model.head.output.out_features == 3
    pooler = getattr(theirs, "pooler", None)
    if pooler is not None:
        assert torch.equal(model.head.pool.weight, pooler.dense.weight), "a base model has a pooler, and it is kept"
        assert "new: head.output.weight, head.output.bias" in model.weights_note
    else:
        assert "new: head.pool.weight" in model.weights_note


def test_names_of_tensorflow_are_read(masked, tmp_path):
    save_pretrained(masked, tmp_path)
    path = tmp_path / "model.safetensors"
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    renamed = {}
    for name, tensor in load_file(path).items():
        for new, before in old.items():
            name = name.replace(new, before)
        renamed[name] = tensor
    save_file(renamed, path)
    assert bodies_are_equal(build_pretrained("bert", task="qa", pretrained=str(tmp_path)), masked)


def test_a_file_of_weights_fills_a_model_of_the_given_shape(tmp_path):
    torch.manual_seed(0)
    source = build("convnet", classes=10)
    save_weights(source, tmp_path / "net.safetensors")
    model = build_pretrained("convnet", classes=3, pretrained=str(tmp_path / "net.safetensors"))
    assert "; new: " in model.weights_note
    same = (
        [name for name, value in model.state_dict().items() if torch.equal(value, source.state_dict()[name])]
        if (model.state_dict().keys() == source.state_dict().keys())
        else []
    )
    assert len(same) == len(source.state_dict()) - 2


def test_wrong_sources_are_named(masked, tmp_path):
    with pytest.raises(UsageError, match="nope': there is nothing at that path"):
        build_pretrained("bert", pretrained=str(tmp_path / "nope"))
    save_pretrained(build("gpt"), tmp_path / "gpt")
    with pytest.raises(UsageError, match="holds a GPT, which is not a 'bert'"):
        build_pretrained("bert", pretrained=str(tmp_path / "gpt"))
    save_weights(masked, tmp_path / "small.safetensors")
    with pytest.raises(CheckpointError, match="it is another model"):
        build_pretrained("bert", preset="debug", pretrained=str(tmp_path / "small.safetensors"))
    (tmp_path / "run").mkdir()
    with pytest.raises(UsageError, match="was not trained from a recipe"):
        build_pretrained("bert", pretrained=str(tmp_path / "run"))


def test_the_tokenizer_of_a_folder_is_found(masked, tmp_path):
    save_pretrained(masked, tmp_path)
    assert pretrained_tokenizer(str(tmp_path)) is None
    (tmp_path / "tokenizer.json").write_text(json.dumps({}))
    assert pretrained_tokenizer(str(tmp_path)) == str(tmp_path)
