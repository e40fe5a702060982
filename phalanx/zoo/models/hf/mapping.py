"""Hugging Face layouts of decoders, GPT and Llama: the config of a family of models, and a rule for each parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from phalanx.errors import ModelError
from phalanx.zoo.models.attention import RopeScaling
from phalanx.zoo.models.gpt import GPT, GPTConfig
from phalanx.zoo.models.llama import Llama, LlamaConfig


def same(tensor: Tensor) -> Tensor:
    """Leave a tensor as it is."""
    return tensor


def transposed(tensor: Tensor) -> Tensor:
    """Swap in and out: GPT-2's layout keeps matrices as [in, out]."""
    return tensor.T


class TensorRule(NamedTuple):
    """One parameter: its name in Phalanx and in the file ("#" stands for the layer), and both conversions."""

    ours: str
    theirs: str
    export: Callable[[Tensor], Tensor] = same
    load: Callable[[Tensor], Tensor] = same


@dataclass(frozen=True, kw_only=True)
class HFMapping:
    """A family of models. Functions take its config as `Any`, because each family has its own class."""

    model_type: str
    """The `model_type` of config.json."""

    architecture: str | Callable[[Any], str]
    """The class that `transformers` builds, or a function of the config that names it."""

    model: type[nn.Module]
    config_to_hf: Callable[[Any], dict[str, Any]]
    config_from_hf: Callable[[Mapping[str, Any]], Any]
    rules: Callable[[Any], list[TensorRule]]
    prefix: str
    """The prefix that base models, saved without their head, leave out of names."""

    ignored: tuple[str, ...] = ()
    """Endings of tensors in old files that are not parameters."""

    tied: tuple[str, ...] = ()
    """Endings of tensors that are copies of others, or are not parameters."""

    trained_as: str = "phalanx"
    """Whose class trains a folder that is given as a model: "transformers" where its batches have other names."""

    def expanded(self, config: Any) -> Iterator[TensorRule]:
        """Yield the rules with "#" replaced by every layer, without the head where it is the embedding."""
        for rule in self.rules(config):
            if rule.ours == "head.weight" and getattr(config, "tie_weights", False):
                continue
            for layer in range(config.layers) if "#" in rule.ours else (0,):
                ours, theirs = (name.replace("#", str(layer)) for name in rule[:2])
                yield TensorRule(ours, theirs, rule.export, rule.load)


def require(config: Mapping[str, Any], required: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise for a value in a config under which the model would compute something else."""
    for key, allowed in required.items():
        if (value := config.get(key, allowed[0])) not in allowed:
            raise ModelError(
                f"config.json has {key}={value!r}, which this model does not compute.",
                hint=f"Supported: {key} = {' or '.join(repr(option) for option in allowed)}.",
            )


def needed(config: Mapping[str, Any], key: str) -> Any:
    """Return an entry that a config must have."""
    if key not in config:
        raise ModelError(f"config.json has no '{key}', which a model of type '{config.get('model_type')}' needs.")
    return config[key]


class ConfigName(NamedTuple):
    """A field of our config and the name of the same value in config.json."""

    ours: str
    theirs: str
    default: Any = ...
    """What the value is where config.json has none; ... where it must have one."""


def written(config: Any, names: Sequence[ConfigName]) -> dict[str, Any]:
    """Return the values of our config under their names."""
    return {name.theirs: getattr(config, name.ours) for name in names}


def read(config: Mapping[str, Any], names: Sequence[ConfigName]) -> dict[str, Any]:
    """Return the fields of our config from theirs; an error names a value that is missing."""
    return {
        name.ours: needed(config, name.theirs) if name.default is ... else config.get(name.theirs, name.default)
        for name in names
    }


_GPT_NAMES = (
    ConfigName("vocab_size", "vocab_size"),
    ConfigName("seq_len", "n_positions"),
    ConfigName("hidden", "n_embd"),
    ConfigName("layers", "n_layer"),
    ConfigName("heads", "n_head"),
    ConfigName("dropout", "resid_pdrop", 0.1),
    ConfigName("norm_eps", "layer_norm_epsilon", 1e-5),
    ConfigName("tie_weights", "tie_word_embeddings", True),
)


def _gpt_to_hf(config: GPTConfig) -> dict[str, Any]:
    if not config.bias:
        raise ModelError("GPT-2's layout has biases everywhere, this model was built with bias=False.")
    return {
        **written(config, _GPT_NAMES),
        "activation_function": "gelu_new",
        "embd_pdrop": config.dropout,
        "attn_pdrop": config.dropout,
        "bos_token_id": None,  # the defaults, 50256, do not exist in a smaller vocabulary
        "eos_token_id": None,
    }


def _gpt_from_hf(config: Mapping[str, Any]) -> GPTConfig:
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
    return GPTConfig(**read(config, _GPT_NAMES))


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


def _gpt_rules(config: GPTConfig) -> list[TensorRule]:
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


GPT2 = HFMapping(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    model=GPT,
    config_to_hf=_gpt_to_hf,
    config_from_hf=_gpt_from_hf,
    rules=_gpt_rules,
    prefix="transformer.",
    ignored=(".attn.bias", ".attn.masked_bias"),
)


_LLAMA_NAMES = (
    ConfigName("vocab_size", "vocab_size"),
    ConfigName("seq_len", "max_position_embeddings", 2048),
    ConfigName("layers", "num_hidden_layers"),
    ConfigName("heads", "num_attention_heads"),
    ConfigName("kv_heads", "num_key_value_heads", None),
    ConfigName("hidden", "hidden_size"),
    ConfigName("ffn_hidden", "intermediate_size"),
    ConfigName("norm_eps", "rms_norm_eps", 1e-6),
    ConfigName("tie_weights", "tie_word_embeddings", False),
)


def _llama_to_hf(config: LlamaConfig) -> dict[str, Any]:
    return {
        **written(config, _LLAMA_NAMES),
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        # Two entries, as every version of transformers reads them; newer ones merge them.
        "rope_theta": config.rope_theta,
        "rope_scaling": _scaling_to_hf(config.rope_scaling),
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _llama_from_hf(config: Mapping[str, Any]) -> LlamaConfig:
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
    fields = read(config, _LLAMA_NAMES)
    fields["kv_heads"] = fields["kv_heads"] or heads
    return LlamaConfig(**fields, rope_theta=theta, rope_scaling=scaling)


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


def _llama_rules(config: LlamaConfig) -> list[TensorRule]:
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


LLAMA = HFMapping(
    model_type="llama",
    architecture="LlamaForCausalLM",
    model=Llama,
    config_to_hf=_llama_to_hf,
    config_from_hf=_llama_from_hf,
    rules=_llama_rules,
    prefix="model.",
    ignored=(".rotary_emb.inv_freq",),
)
