"""Llama in the Hugging Face layout. Both rotate halves, so no matrix is permuted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phalanx.errors import ModelError
from phalanx.models.attention import RopeScaling
from phalanx.models.hf.mapping import HFMapping, TensorRule, needed, require
from phalanx.models.llama import Llama, LlamaConfig


def _config_to_hf(config: LlamaConfig) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.seq_len,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_size": config.hidden,
        "intermediate_size": config.ffn_hidden,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        # Two entries, as every version of transformers reads them; newer ones merge them.
        "rope_theta": config.rope_theta,
        "rope_scaling": _scaling_to_hf(config.rope_scaling),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": config.tie_weights,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _config_from_hf(config: Mapping[str, Any]) -> LlamaConfig:
    hidden, heads = needed(config, "hidden_size"), needed(config, "num_attention_heads")
    require(
        config,
        {
            "hidden_act": ("silu", "swish"),
            "attention_bias": (False,),
            "mlp_bias": (False,),
            "head_dim": (None, hidden // heads),
        },
    )
    theta, scaling = _rope_from_hf(config)
    return LlamaConfig(
        vocab_size=needed(config, "vocab_size"),
        seq_len=config.get("max_position_embeddings", 2048),
        layers=needed(config, "num_hidden_layers"),
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        hidden=hidden,
        ffn_hidden=needed(config, "intermediate_size"),
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=config.get("rms_norm_eps", 1e-6),
        tie_weights=config.get("tie_word_embeddings", False),
    )


def _scaling_to_hf(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low,
        "high_freq_factor": scaling.high,
        "original_max_position_embeddings": scaling.original_seq_len,
    }


def _rope_from_hf(config: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = rope.get("rope_theta", config.get("rope_theta", 10_000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ModelError(
            f"config.json has rope_type={kind!r}, which this model does not compute.",
            hint="Supported: rope_type = 'default' or 'llama3'.",
        )
    return theta, RopeScaling(
        factor=needed(rope, "factor"),
        low=needed(rope, "low_freq_factor"),
        high=needed(rope, "high_freq_factor"),
        original_seq_len=needed(rope, "original_max_position_embeddings"),
    )


def _rules(config: LlamaConfig) -> list[TensorRule]:
    layer = {
        "attention_norm": "input_layernorm",
        "attention.query": "self_attn.q_proj",
        "attention.key": "self_attn.k_proj",
        "attention.value": "self_attn.v_proj",
        "attention.project": "self_attn.o_proj",
        "feed_norm": "post_attention_layernorm",
        "feed.gate": "mlp.gate_proj",
        "feed.up": "mlp.up_proj",
        "feed.down": "mlp.down_proj",
    }
    return [
        TensorRule("embed.weight", "model.embed_tokens.weight"),
        *(TensorRule(f"layers.#.{ours}.weight", f"model.layers.#.{theirs}.weight") for ours, theirs in layer.items()),
        TensorRule("norm.weight", "model.norm.weight"),
        TensorRule("head.weight", "lm_head.weight"),
    ]


LAYOUT = HFMapping(
    model_type="llama",
    architecture="LlamaForCausalLM",
    model=Llama,
    build=Llama,
    config_to_hf=_config_to_hf,
    config_from_hf=_config_from_hf,
    rules=_rules,
    prefix="model.",
    ignored=(".rotary_emb.inv_freq",),
)
