"""LoRA on one process: what is added, frozen, trained and merged, and PEFT's files in both directions."""

from __future__ import annotations

import copy
import json
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import phalanx
from phalanx import DistributedConfig, Formation, PyTorchDDPTrainer
from phalanx.errors import CheckpointError, ConfigError, ModelError, UsageError
from phalanx.zoo.export import export_folder
from phalanx.zoo.models import build
from phalanx.zoo.models.lora import adapters, target_layers

TOKENS = torch.randint(256, (3, 12), generator=torch.Generator().manual_seed(1))


def adapted(name: str = "llama", rank: int = 4, **options) -> nn.Module:
    """Return a model whose adapters matter: B is not zero any more."""
    torch.manual_seed(0)
    model = phalanx.lora(build(name).double(), rank, **options)
    for adapter in adapters(model).values():
        nn.init.normal_(adapter.B, std=0.1)
    return model.eval()


def test_a_fresh_adapter_changes_nothing_and_alone_is_trained():
    torch.manual_seed(0)
    model = build("llama", layers=2)
    names, before = set(model.state_dict()), model(TOKENS)
    assert phalanx.lora(model, 4) is model
    assert torch.equal(model(TOKENS), before)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert len(trained) == 2 * 4 * 2  # A and B of query, key, value and project in both layers
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in trained} == {"lora"}
    assert names | set(trained) == set(model.state_dict())


def test_the_update_is_scale_times_b_a():
    model = adapted(alpha=6.0)
    layer = model.layers[0].attention.query
    x = torch.randn(5, 48, dtype=torch.float64)
    expected = x @ (layer.weight + 6 / 4 * layer.lora.B @ layer.lora.A).T
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-12)


def test_equal_seeds_draw_equal_adapters_and_others_do_not():
    drawn = [phalanx.lora(build("gpt"), 2, seed=seed).layers[1].attention.qkv.lora.A for seed in (5, 5, 6)]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    bound = 1 / drawn[0].shape[1] ** 0.5
    assert 0.8 * bound < drawn[0].abs().max().item() <= bound


def test_merge_unmerge_and_remove():
    model = adapted()
    base, with_adapters = copy.deepcopy(model), model(TOKENS)
    phalanx.remove_lora(base)
    merged = phalanx.merge_lora(phalanx.merge_lora(model))  # twice is once
    torch.testing.assert_close(merged(TOKENS), with_adapters, rtol=0, atol=1e-12)
    weight = model.layers[0].attention.key.weight
    assert (weight - base.layers[0].attention.key.weight).abs().max() > 1e-2
    phalanx.unmerge_lora(model)
    torch.testing.assert_close(weight, base.layers[0].attention.key.weight, rtol=0, atol=1e-14)
    plain = phalanx.remove_lora(phalanx.merge_lora(model))
    torch.testing.assert_close(plain(TOKENS), with_adapters, rtol=0, atol=1e-12)
    assert plain.state_dict().keys() == build("llama").state_dict().keys()
    assert all(parameter.requires_grad for parameter in plain.parameters())
    assert (base(TOKENS) - with_adapters).abs().max() > 1e-3


def test_an_adapted_model_is_copied_and_pickled_whole():
    model = adapted()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(TOKENS), model(TOKENS))
        nn.init.zeros_(twin.layers[0].attention.query.lora.B)
        assert not torch.equal(twin(TOKENS), model(TOKENS))


def test_half_precision_models_have_float32_adapters():
    model = phalanx.lora(build("gpt").bfloat16(), 2)
    assert {adapter.A.dtype for adapter in adapters(model).values()} == {torch.float32}
    loss = model(TOKENS, TOKENS).loss
    loss.backward()
    assert loss.dtype in (torch.bfloat16, torch.float32)
    assert model.layers[0].attention.qkv.lora.B.grad.abs().max() > 0


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (None, ["attention.qkv", "attention.project"]),
        ("qkv", ["attention.qkv"]),
        ("expand, qkv", ["attention.qkv", "feed.expand"]),
        (["feed.project"], ["feed.project"]),
        ("layers.*.feed.*", ["feed.expand", "feed.project"]),
    ],
)
def test_targets(targets, expected):
    found = target_layers(build("gpt"), targets)
    assert found == [f"layers.{layer}.{name}" for layer in (0, 1) for name in expected]


def test_attention_is_found_by_class_as_well():
    vit = target_layers(build("vit"), None)
    assert vit
    assert all("attention" in name for name in vit)


def test_targets_and_models_that_cannot_are_refused():
    model = build("llama")
    with pytest.raises(UsageError, match=r"called 'qury'\n.*Did you mean 'query'\? Its layers end in: query, key"):
        phalanx.lora(model, targets="value,qury")
    with pytest.raises(UsageError, match=r"MLP has no attention(.|\n)*lora_targets="):
        phalanx.lora(build("mlp"))
    with pytest.raises(UsageError, match="has adapters already"):
        phalanx.lora(phalanx.lora(model))
    with pytest.raises(UsageError, match="rank = 0 must be 1 or more"):
        phalanx.lora(build("gpt"), 0)
    tied = phalanx.lora(build("gpt"), targets="head")
    with pytest.raises(UsageError, match=r"embed.tokens.weight and head.weight are one tensor"):
        phalanx.merge_lora(tied)
    # nn.MultiheadAttention never calls its output layer: an adapter there would be without effect.
    with pytest.raises(UsageError, match="no linear layer of TransformerEncoderLayer is called 'out_proj'"):
        phalanx.lora(nn.TransformerEncoderLayer(8, 2), targets="out_proj")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lora_alpha": 4.0}, "lora_alpha = 4.0 without lora_rank"),
        ({"lora_targets": "query"}, "lora_targets = 'query' without lora_rank"),
        ({"lora_rank": 4, "lora_dropout": 1.0}, "lora_dropout = 1.0: must be below 1"),
        ({"lora_rank": 4, "tensor_parallel": 2}, "adapters are not split over ranks"),
        ({"lora_rank": 0}, "lora_rank = 0: must be 1 or more"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        DistributedConfig(**settings)


def test_an_optimizer_without_adapters_is_refused(tmp_path):
    model = build("gpt")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = PyTorchDDPTrainer(model, optimizer=optimizer, lora_rank=2, device="cpu", run_dir=str(tmp_path / "run"))
    with pytest.raises(UsageError, match=r"made before the adapters(.|\n)*phalanx.lora\(model, rank=2\)"):
        trainer.fit([(TOKENS, TOKENS)])
    with Formation(device="cpu", lora_rank=2) as formation, pytest.raises(UsageError, match="made before the adapters"):
        formation.prepare(model, optimizer)
    with pytest.raises(UsageError, match="lora_rank = 3, but the model has adapters of rank 2"):
        Formation(device="cpu", lora_rank=3).prepare(model)


def test_merged_adapters_are_not_trained():
    model = phalanx.merge_lora(adapted())
    optimizer = torch.optim.SGD([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.1)
    with Formation(device="cpu") as formation, pytest.raises(UsageError, match=r"merged(.|\n)*unmerge_lora"):
        formation.prepare(model, optimizer)


def test_saved_adapters_come_back(tmp_path):
    model = adapted("gpt", targets="qkv,expand", dropout=0.1)
    phalanx.save_adapter(model, tmp_path / "a")
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    names = load_file(tmp_path / "a" / "adapter_model.safetensors")
    assert "base_model.model.layers.1.feed.expand.lora_B.weight" in names
    fresh = phalanx.remove_lora(copy.deepcopy(model))
    phalanx.load_adapter(fresh, tmp_path / "a")
    assert torch.equal(fresh.eval()(TOKENS), model(TOKENS))
    assert fresh.layers[0].feed.expand.lora.dropout.p == 0.1
    assert [name for name, parameter in fresh.named_parameters() if parameter.requires_grad] == [
        name for name, parameter in model.named_parameters() if parameter.requires_grad
    ]


def test_files_that_do_not_fit_are_refused(tmp_path):
    with pytest.raises(ModelError, match="has no adapters to save"):
        phalanx.save_adapter(build("gpt"), tmp_path / "none")
    with pytest.raises(CheckpointError, match=r"no adapter_config.json"):
        phalanx.load_adapter(build("gpt"), tmp_path)
    phalanx.save_adapter(adapted("gpt"), tmp_path)
    with pytest.raises(ModelError, match=r"'layers.0.attention.project' is the first"):
        phalanx.load_adapter(phalanx.lora(build("gpt"), 4, targets="qkv"), tmp_path)
    with pytest.raises(ModelError, match=r"A of 'layers.0.attention.qkv' is \[4, 64\] in the file and \[2, 64\]"):
        phalanx.load_adapter(phalanx.lora(build("gpt"), 2), tmp_path)
    with pytest.raises(ModelError, match=r"no linear layer of that name in Llama"):
        phalanx.load_adapter(build("llama"), tmp_path)
    weights, config = tmp_path / "adapter_model.safetensors", tmp_path / "adapter_config.json"
    tensors = load_file(weights)
    save_file({name: tensor for name, tensor in tensors.items() if "1.attention.qkv.lora_B" not in name}, weights)
    with pytest.raises(ModelError, match=r"only one of the two matrices of 'layers.1.attention.qkv'"):
        phalanx.load_adapter(build("gpt"), tmp_path)
    config.write_text(json.dumps({**json.loads(config.read_text()), "use_dora": True}))
    with pytest.raises(ModelError, match="use_dora = True is not supported"):
        phalanx.load_adapter(build("gpt"), tmp_path)


def test_unmerged_adapters_are_not_lost_in_the_hugging_face_layout(tmp_path):
    from phalanx.zoo.models import load_pretrained, save_pretrained

    model = adapted()
    with pytest.raises(ModelError, match=r"has adapters(.|\n)*merge_lora"):
        save_pretrained(model, tmp_path / "hf")
    expected = model(TOKENS)
    save_pretrained(phalanx.merge_lora(model), tmp_path / "hf")
    torch.testing.assert_close(load_pretrained(tmp_path / "hf")(TOKENS), expected, rtol=0, atol=1e-12)


def test_a_merged_model_is_saved_with_what_it_computes(tmp_path):
    model = adapted("gpt")
    expected = model(TOKENS)
    PyTorchDDPTrainer(phalanx.merge_lora(model)).save(tmp_path / "merged.safetensors")
    for other in (phalanx.lora(build("gpt").double(), 4), phalanx.merge_lora(adapted("gpt"))):
        PyTorchDDPTrainer(other).load(tmp_path / "merged.safetensors")
        torch.testing.assert_close(other.eval()(TOKENS), expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(phalanx.unmerge_lora(other)(TOKENS), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(phalanx.unmerge_lora(model)(TOKENS), expected, rtol=0, atol=1e-12)


def test_an_exported_model_of_transformers_has_its_adapters(tmp_path):
    transformers = pytest.importorskip("transformers", reason="pip install transformers")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=256, **sizes)).eval()
    for adapter in adapters(phalanx.lora(model, 2)).values():
        nn.init.normal_(adapter.B)
    expected = model(TOKENS).logits
    export_folder(model, tmp_path / "hf")
    found = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "hf").eval()
    torch.testing.assert_close(found(TOKENS).logits, expected)
    assert adapters(model), "the model itself stays as it was"


def test_an_adapter_of_the_head_takes_part_in_the_loss():
    """In training the head computes the loss itself, unless it has an adapter, whose term belongs to the logits."""
    torch.manual_seed(0)
    model = phalanx.lora(build("llama", layers=2), 2, targets="head")
    nn.init.normal_(adapters(model)["head"].B)
    tokens = torch.randint(256, (2, 9))
    loss = model(tokens[:, :-1], tokens[:, 1:]).loss
    expected = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    assert loss.item() == pytest.approx(expected.item())
