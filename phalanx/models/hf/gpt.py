"""GPT in the Hugging Face layout of GPT-2."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor

from phalanx.errors import ModelError
from phalanx.models.gpt import GPT, GPTConfig
from phalanx.models.hf.mapping import HFMapping, TensorRule, needed, require, transposed


def _config_to_hf(config: GPTConfig) -> dict[str, Any]:
    if not config.bias:
        raise ModelError("GPT-2's layout has biases everywhere, this model was built with bias=False.")
    return {
        "vocab_size": config.vocab_size,
        "n_positions": config.seq_len,
        "n_embd": config.hidden,
        "n_layer": config.layers,
        "n_head": config.heads,
        "activation_function": "gelu_new",
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "attn_pdrop": config.dropout,
        "layer_norm_epsilon": config.norm_eps,
        "tie_word_embeddings": config.tie_weights,
        "bos_token_id": None,  # the defaults, 50256, do not exist in a smaller vocabulary
        "eos_token_id": None,
    }


def _config_from_hf(config: Mapping[str, Any]) -> GPTConfig:
    hidden = needed(config, "n_embd")
    require(
        config,
        {
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
            "n_inner": (None, 4 * hidden),
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
        },
    )
    return GPTConfig(
        vocab_size=needed(config, "vocab_size"),
        seq_len=needed(config, "n_positions"),
        layers=needed(config, "n_layer"),
        heads=needed(config, "n_head"),
        hidden=hidden,
        dropout=config.get("resid_pdrop", 0.1),
        norm_eps=config.get("layer_norm_epsilon", 1e-5),
        tie_weights=config.get("tie_word_embeddings", True),
    )


def _export_qkv(tensor: Tensor, heads: int) -> Tensor:
    """Reorder rows (heads, 3, head width) as (3, heads, head width), and a matrix as [in, out]."""
    split = tensor.unflatten(0, (heads, 3, -1))  # type: ignore[no-untyped-call]
    return _transposed_matrix(split.transpose(0, 1).flatten(0, 2))


def _load_qkv(tensor: Tensor, heads: int) -> Tensor:
    split = _transposed_matrix(tensor).unflatten(0, (3, heads, -1))  # type: ignore[no-untyped-call]
    reordered: Tensor = split.transpose(0, 1).flatten(0, 2)
    return reordered


def _transposed_matrix(tensor: Tensor) -> Tensor:
    return tensor.T if tensor.ndim == 2 else tensor


def _rules(config: GPTConfig) -> list[TensorRule]:
    rules = [
        TensorRule("embed.tokens.weight", "transformer.wte.weight"),
        TensorRule("embed.positions.weight", "transformer.wpe.weight"),
        TensorRule("norm.weight", "transformer.ln_f.weight"),
        TensorRule("norm.bias", "transformer.ln_f.bias"),
        TensorRule("head.weight", "lm_head.weight"),
    ]
    qkv = partial(_export_qkv, heads=config.heads), partial(_load_qkv, heads=config.heads)
    matrix = transposed, transposed
    for ours, theirs, there_and_back in (
        ("attention_norm", "ln_1", ()),
        ("attention.qkv", "attn.c_attn", qkv),
        ("attention.project", "attn.c_proj", matrix),
        ("feed_norm", "ln_2", ()),
        ("feed.expand", "mlp.c_fc", matrix),
        ("feed.project", "mlp.c_proj", matrix),
    ):
        rules.append(TensorRule(f"layers.#.{ours}.weight", f"transformer.h.#.{theirs}.weight", *there_and_back))
        of_bias = there_and_back if there_and_back is qkv else ()
        rules.append(TensorRule(f"layers.#.{ours}.bias", f"transformer.h.#.{theirs}.bias", *of_bias))
    return rules


LAYOUT = HFMapping(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    model=GPT,
    build=GPT,
    config_to_hf=_config_to_hf,
    config_from_hf=_config_from_hf,
    rules=_rules,
    prefix="transformer.",
    ignored=(".attn.bias", ".attn.masked_bias"),
)
