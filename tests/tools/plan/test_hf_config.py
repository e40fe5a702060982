"""Hugging Face config.json as the shape of a model: exact parameter counts, and errors that name file and field."""

from __future__ import annotations

import json
import re

import pytest
import torch
from packages import on_first_use

from phalanx.errors import UsageError
from phalanx.tools.plan import presets
from phalanx.tools.plan.hf_config import read_config

transformers = on_first_use("transformers")

_SMALL = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 1000}
_GATED = {**_SMALL, "intermediate_size": 176, "num_key_value_heads": 2}
_MLA = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_CASES = [
    ("llama", _GATED, {}),
    ("llama", {**_GATED, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}, {}),
    ("mistral", {**_GATED, "head_dim": 32}, {}),
    ("mixtral", {**_GATED, "num_local_experts": 4}, {}),
    ("phi3", {**_GATED, "pad_token_id": 0}, {}),
    ("qwen2", _GATED, {}),
    ("qwen2_moe", {**_GATED, **_MOE, "shared_expert_intermediate_size": 80}, {}),
    ("qwen3", {**_GATED, "head_dim": 32}, {}),
    ("qwen3_moe", {**_GATED, **_MOE, "head_dim": 16}, {}),
    ("gemma", {**_GATED, "head_dim": 32}, {}),
    ("gemma2", {**_GATED, "head_dim": 32}, {}),
    ("gemma3_text", {**_GATED, "head_dim": 32}, {}),
    ("deepseek_v2", {**_GATED, **_MLA}, {}),
    ("deepseek_v3", {**_GATED, **_MLA, "num_key_value_heads": 4}, {}),
    ("gpt2", {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 1000, "n_positions": 128}, {}),
    ("gpt_neox", {**_SMALL, "intermediate_size": 256}, {}),
    ("opt", {**_SMALL, "ffn_dim": 256, "max_position_embeddings": 128, "word_embed_proj_dim": 64}, {}),
    ("opt", {**_SMALL, "ffn_dim": 256, "word_embed_proj_dim": 32, "do_layer_norm_before": False}, {}),
    ("bloom", {"hidden_size": 64, "n_layer": 3, "n_head": 4, "vocab_size": 1000}, {}),
    ("bert", {**_SMALL, "intermediate_size": 256}, {"auto": "AutoModelForMaskedLM"}),
    ("roberta", {**_SMALL, "intermediate_size": 256}, {"auto": "AutoModelForMaskedLM"}),
    ("vit", {**_SMALL, "intermediate_size": 256}, {"auto": "AutoModelForImageClassification"}),
    ("phi", {**_SMALL, "intermediate_size": 256}, {}),
    ("falcon", _SMALL, {}),
    ("falcon", {**_SMALL, "new_decoder_architecture": True, "num_kv_heads": 2}, {}),
    ("falcon", {**_SMALL, "multi_query": False, "parallel_attn": False, "bias": True}, {}),
    ("mpt", {"d_model": 64, "n_layers": 3, "n_heads": 4, "vocab_size": 1000}, {}),
]


@pytest.mark.parametrize(
    ("kind", "values", "options"), _CASES, ids=lambda value: value if isinstance(value, str) else ""
)
def test_parameters_are_those_of_transformers(tmp_path, kind, values, options):
    config = transformers.AutoConfig.for_model(kind, **values)
    auto = getattr(transformers, options.get("auto", "AutoModelForCausalLM"))
    with torch.device("meta"):
        model = auto.from_config(config)
    config.save_pretrained(tmp_path)
    expected = sum(parameter.numel() for parameter in model.parameters())
    assert read_config(tmp_path).parameters == expected


def test_a_preset_and_a_config_of_the_same_model_agree(tmp_path):
    values = {
        "model_type": "llama",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "intermediate_size": 11008,
        "vocab_size": 32000,
    }
    folder = tmp_path / "my-llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    shape = presets.model(str(folder))
    assert (shape.name, shape.parameters) == ("my-llama", presets.model("llama-7b").parameters)
    assert presets.model(str(folder / "config.json")) == shape


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "lacks 'hidden_size', which a model of type 'llama' needs"),
        ({"hidden_size": "64"}, "hidden_size = '64': expected a whole number"),
        ({"num_hidden_layers": -1}, "num_hidden_layers = -1: expected a whole number"),
        ({"num_attention_heads": 5}, "hidden_size 64 is not a multiple of num_attention_heads 5"),
        ({"hidden_size": None, "hiden_size": 64}, "Is it 'hiden_size'"),
    ],
)
def test_a_missing_or_wrong_field_is_named_with_its_file(tmp_path, change, message):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", **_GATED, **change}))
    with pytest.raises(UsageError, match=message) as caught:
        read_config(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model_type": "lama"}, ": unknown model_type 'lama'. Did you mean 'llama'? Allowed: bert, bloom, "),
        ({}, " lacks 'model_type'"),
        ({"text_config": _GATED}, " lacks 'model_type'"),
    ],
)
def test_an_unknown_family_is_one_error_that_says_what_to_write(tmp_path, given, message, recwarn):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**_GATED, **given}))
    with pytest.raises(UsageError, match=re.escape(f"{path}{message}")) as caught:
        read_config(path)
    assert re.search('(Write|Add) "model_type": ("llama"|one of bert)', caught.value.hint)
    assert not recwarn.list


@pytest.mark.parametrize(
    ("text", "message"), [("{", "not a JSON file"), ("[]", "holds a list"), (None, "no such file")]
)
def test_a_file_that_is_not_a_config_is_refused(tmp_path, text, message):
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError, match=message):
        presets.model(str(path))
