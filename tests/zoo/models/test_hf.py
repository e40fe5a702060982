"""The Hugging Face layout: transformers and Phalanx load each other's files with equal logits; and what is refused."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from phalanx.errors import CheckpointError, ModelError, UsageError
from phalanx.zoo.export import export_folder
from phalanx.zoo.models import build, load_pretrained, save_pretrained
from phalanx.zoo.models.attention import RopeScaling
from phalanx.zoo.models.hf import from_folder

CASES = {
    "gpt": ("gpt", {"dropout": 0.1}),
    "gpt-untied": ("gpt", {"tie_weights": False, "norm_eps": 1e-4}),
    "llama": ("llama", {"norm_eps": 1e-4}),
    "llama-3.2": (
        "llama",
        {"tie_weights": True, "rope_theta": 5e5, "rope_scaling": RopeScaling(original_seq_len=32), "kv_heads": 1},
    ),
}


@pytest.fixture(autouse=True)
def _quiet(monkeypatch, tmp_path):
    """Tensors on the meta device make torch import its compiler, which sets the first variable for good."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def made(case: str) -> torch.nn.Module:
    """Return a model none of whose parameters, biases and norms included, has a value that hides a mistake."""
    name, changes = CASES[case]
    torch.manual_seed(0)
    model = build(name, **changes)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


def exact_norms(model: torch.nn.Module) -> torch.nn.Module:
    """Make Llama's norms there work in the precision of the model: they round float64 to float32."""
    for name, module in list(model.named_modules()):
        if type(module).__name__ == "LlamaRMSNorm":
            norm = torch.nn.RMSNorm(module.weight.shape, eps=module.variance_epsilon)
            norm.weight = module.weight
            model.set_submodule(name, norm)
    return model


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_transformers_and_phalanx_load_each_others_files(case, tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # a progress bar would leave its thread behind
    ours, tokens = made(case), torch.randint(256, (2, 48))
    save_pretrained(ours, tmp_path / "ours", max_shard_bytes=100_000)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    torch.testing.assert_close(theirs(tokens).logits, ours(tokens), rtol=0, atol=1e-5)

    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="200KB")
    back = load_pretrained(tmp_path / "theirs")
    assert not back.training
    assert back.config == ours.config
    mine, again = ours.state_dict(), back.state_dict()
    assert mine.keys() == again.keys()
    assert all(torch.equal(mine[name], again[name]) for name in mine)

    exact = exact_norms(theirs).double()(tokens).logits
    torch.testing.assert_close(exact, ours.double()(tokens), rtol=0, atol=1e-10)


@pytest.mark.parametrize("case", CASES)
def test_a_round_trip_through_one_file_is_exact(case, tmp_path):
    model = made(case).bfloat16()
    save_pretrained(model, tmp_path / "m")
    assert sorted(path.name for path in (tmp_path / "m").iterdir()) == ["config.json", "model.safetensors"]
    assert json.loads((tmp_path / "m" / "config.json").read_text())["dtype"] == "bfloat16"
    back = load_pretrained(tmp_path / "m")
    assert {parameter.dtype for parameter in back.parameters()} == {torch.bfloat16}
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), back.parameters(), strict=True))
    assert all(parameter.requires_grad for parameter in back.parameters())
    if model.config.tie_weights:
        assert back.head.weight is back.token_embedding().weight
    assert {p.dtype for p in load_pretrained(tmp_path / "m", dtype=torch.float64).parameters()} == {torch.float64}


def test_shards_hold_no_more_than_asked_and_replace_an_earlier_save(tmp_path):
    model = made("llama")
    save_pretrained(model, tmp_path / "m", max_shard_bytes=60_000)
    shards = sorted((tmp_path / "m").glob("model-*.safetensors"))
    index = json.loads((tmp_path / "m" / "model.safetensors.index.json").read_text())
    assert len(shards) > 3
    assert set(index["weight_map"].values()) == {shard.name for shard in shards}
    assert index["metadata"]["total_size"] == 4 * model.num_parameters()
    for shard in shards:
        assert sum(tensor.nbytes for tensor in load_file(shard).values()) <= 60_000
    (tmp_path / "m" / "tokenizer.json").write_text("{}")
    save_pretrained(model, tmp_path / "m")
    left = sorted(path.name for path in (tmp_path / "m").iterdir())
    assert left == ["config.json", "model.safetensors", "tokenizer.json"]
    assert list(tmp_path.iterdir()) == [tmp_path / "m"]


def test_files_of_a_base_model_and_old_buffers_load(tmp_path):
    """The published GPT-2 files have no prefix in front of names, and hold masks that are not parameters."""
    model = made("gpt")
    save_pretrained(model, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    save_file(bare | {"h.0.attn.bias": torch.ones(1, 1, 64, 64)}, tmp_path / "model.safetensors")
    back = load_pretrained(tmp_path)
    assert torch.equal(back.layers[1].attention.qkv.bias, model.layers[1].attention.qkv.bias)


def test_a_gathered_state_dict_replaces_the_models_own(tmp_path):
    whole = made("llama")
    with torch.device("meta"):
        hollow = build("llama", norm_eps=1e-4)
    with pytest.raises(ModelError, match=r"'embed.weight' is on the meta device"):
        save_pretrained(hollow, tmp_path / "m")
    assert list(tmp_path.iterdir()) == []
    save_pretrained(hollow, tmp_path / "m", state_dict=whole.state_dict())
    assert torch.equal(load_pretrained(tmp_path / "m").head.weight, whole.head.weight)


def edited(folder, **changes) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("llama", {"model_type": "llama4"}, "unknown model_type in config.json 'llama4'. Did you mean 'llama'"),
        ("llama", {"intermediate_size": 100}, r"'model.layers.0.mlp.gate_proj.weight' has the shape \[96, 48\].*100"),
        ("gpt", {"n_embd": 128}, r"'transformer.wte.weight' has the shape \[256, 64\]"),
        ("llama", {"num_hidden_layers": 5}, "9 tensors of the model.*'model.layers.4.input_layernorm.weight'"),
        ("llama", {"num_hidden_layers": 3}, "9 tensors in the files.*model.layers.3"),
        ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_type='yarn'"),
        ("llama", {"attention_bias": True}, "attention_bias=True"),
        ("gpt", {"activation_function": "relu"}, "activation_function='relu'"),
    ],
)
def test_a_config_that_does_not_fit_names_what_is_wrong(case, changes, message, tmp_path):
    save_pretrained(made(case), tmp_path)
    edited(tmp_path, **changes)
    with pytest.raises(ModelError, match=message):
        load_pretrained(tmp_path)


def test_missing_and_damaged_files_are_named(tmp_path):
    with pytest.raises(UsageError, match="is not a folder"):
        load_pretrained(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        load_pretrained(tmp_path)
    save_pretrained(made("gpt"), tmp_path, max_shard_bytes=100_000)
    shard = tmp_path / "model-00002-of-00006.safetensors"
    shard.write_bytes(shard.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=r"model-00002-of-00006\.safetensors' is damaged"):
        load_pretrained(tmp_path)
    shard.unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00006\.safetensors' is missing"):
        load_pretrained(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin, but pickle files are not read"):
        load_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json' cannot be read"):
        load_pretrained(tmp_path)


def test_what_has_no_layout_is_refused_and_leaves_nothing(tmp_path):
    with pytest.raises(UsageError, match="a ViT has no Hugging Face layout here, GPT, Llama, Bert, T5 have"):
        save_pretrained(build("vit"), tmp_path / "m")
    with pytest.raises(ModelError, match="bias=False"):
        save_pretrained(build("gpt", bias=False), tmp_path / "m")
    with pytest.raises(UsageError, match="max_shard_bytes=0"):
        save_pretrained(build("gpt"), tmp_path / "m", max_shard_bytes=0)
    stage = build("llama")
    stage.embed = None
    with pytest.raises(ModelError, match=r"no 'embed\.weight'"):
        save_pretrained(stage, tmp_path / "m")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="could not be written"):
        save_pretrained(build("llama"), tmp_path / "file" / "m")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_an_exported_folder_has_the_tokenizer_of_the_model_that_was_read(tmp_path):
    transformers = pytest.importorskip("transformers")
    save_pretrained(build("gpt"), tmp_path / "gpt")
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=9, **sizes)).save_pretrained(tmp_path / "bert")
    for name in ("gpt", "bert"):
        for file in ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "notes.md"):
            (tmp_path / name / file).write_text(f"{name} {file}")
        export_folder(from_folder(tmp_path / name), tmp_path / "out" / name)
        written = {path.name: path for path in (tmp_path / "out" / name).iterdir()}
        assert written["vocab.txt"].read_text() == f"{name} vocab.txt"
        assert {"tokenizer.json", "tokenizer_config.json", "config.json"} <= set(written)
        assert "notes.md" not in written
