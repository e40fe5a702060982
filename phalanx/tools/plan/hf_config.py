"""A Hugging Face `config.json` as the shape of a model, without transformers and without torch.

Each family is a function from its fields to those of `ModelShape`; a family that is not known here is refused: guessed
dimensions would give a wrong plan without a sign of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from phalanx.errors import UsageError, a_type, nearest, unknown_name
from phalanx.model import recorded_dimensions
from phalanx.tools.plan.model import ModelShape

_LLAMA = {"gated_mlp": True, "biases": False, "rms_norm": True, "tied_embeddings": False}
_REQUIRED = object()


class Fields:
    """The values of a config.json; a missing or wrong one is an error that names file and field."""

    def __init__(self, values: dict[str, Any], path: Path) -> None:
        self.values = values
        self.path = path

    def number(self, *names: str, default: Any = _REQUIRED) -> Any:
        """Return the first field of these names that is there; without a default there must be one."""
        for name in names:
            value = self.values.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise UsageError(f"{self.path}: {name} = {value!r}: expected a whole number of 0 or more.")
            return value
        if default is not _REQUIRED:
            return default
        close = nearest(names[0], [key for key, value in self.values.items() if value is not None], 0.75)
        guess = f" Is it '{close}'?" if close else ""
        raise UsageError(
            f"{self.path} lacks '{names[0]}', which a model of type '{self.kind}' needs.{guess}",
            hint=f'Add "{names[0]}": a whole number.',
        )

    def flag(self, name: str, *, default: bool) -> bool:
        """Return a field that is true or false."""
        value = self.values.get(name)
        return default if value is None else bool(value)

    @property
    def kind(self) -> str:
        """The family: model_type."""
        return str(self.values["model_type"])


def read_config(path: Path) -> ModelShape:
    """Return the shape of the model that a config.json, or a folder with one, describes."""
    file = path / "config.json" if path.is_dir() else path
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"model '{path}': {file}: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"{file} is not a JSON file: {error}") from None
    if not isinstance(values, dict):
        raise UsageError(f"{file} holds {a_type(values)}, not an object with the fields of a model.")
    name = path.name if path.is_dir() else path.parent.name if path.name == "config.json" else path.stem
    return from_config(values, file, name or "model")


def from_config(values: dict[str, Any], path: Path = Path("config.json"), name: str = "model") -> ModelShape:
    """Return the shape of the model that the fields of a config.json describe."""
    if isinstance(values.get("text_config"), dict):  # a model of text and images: the text part is the large one
        values = {"model_type": values.get("model_type"), **values["text_config"]}
    fields = Fields(values, path)
    if not values.get("model_type"):
        raise UsageError(f"{path} lacks 'model_type'", hint=f'Add "model_type": one of {", ".join(sorted(FAMILIES))}.')
    family = FAMILIES.get(fields.kind)
    if family is None:
        raise UsageError(
            f"{path}: {unknown_name('model_type', fields.kind, FAMILIES)}",
            hint='Write "model_type": "llama" where its layers are like those of Llama (RMSNorm, rotary positions, '
            "gated feed-forward layers), or plan its class: `phalanx plan my_package.nets:Net --input tokens:2048`.",
        )
    shape = {key: value for key, value in family(fields).items() if value is not None}
    described = ModelShape(name=name, **shape)
    if described.hidden % described.heads and "head_dim" not in shape:
        raise UsageError(
            f"{path}: hidden_size {described.hidden} is not a multiple of num_attention_heads {described.heads}."
        )
    return described


def _common(f: Fields) -> dict[str, Any]:
    return {
        "layers": f.number("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
        "hidden": f.number("hidden_size", "n_embd", "d_model"),
        "heads": f.number("num_attention_heads", "n_head", "n_heads"),
        "vocab": f.number("vocab_size"),
    }


def _tied(f: Fields, default: bool) -> dict[str, bool]:
    return {"tied_embeddings": f.flag("tie_word_embeddings", default=default)}


def _width(f: Fields) -> int:
    """Return the features of one head."""
    common = _common(f)
    return int(f.number("head_dim", default=None) or common["hidden"] // max(1, common["heads"]))


def _attention_widths(f: Fields) -> tuple[int, int]:
    """Return the features of all queries, and of all keys."""
    heads = _common(f)["heads"]
    return heads * _width(f), f.number("num_key_value_heads", default=heads) * _width(f)


def _llama(f: Fields) -> dict[str, Any]:
    """Llama, Mistral, and those that differ from them in details only."""
    common, (queries, keys) = _common(f), _attention_widths(f)
    extra = queries + 2 * keys + common["hidden"] if f.flag("attention_bias", default=False) else 0
    ffn = f.number("intermediate_size", default=4 * common["hidden"])
    extra += 2 * ffn + common["hidden"] if f.flag("mlp_bias", default=False) else 0
    return {
        **_LLAMA,
        **common,
        "kv_heads": f.number("num_key_value_heads", default=None),
        "head_dim": f.number("head_dim", default=None),
        "ffn_hidden": ffn,
        **_tied(f, False),
        "layer_extra": extra,
    }


def _qwen2(f: Fields) -> dict[str, Any]:
    queries, keys = _attention_widths(f)
    return {**_llama(f), "layer_extra": queries + 2 * keys}


def _qwen3(f: Fields) -> dict[str, Any]:
    base = _llama(f)
    return {**base, "layer_extra": base["layer_extra"] + 2 * _width(f)}


def _gemma(norms: int, *, head_norms: bool = False) -> Callable[[Fields], dict[str, Any]]:
    """Return the family whose layers have this number of norms."""

    def read(f: Fields) -> dict[str, Any]:
        base = _llama(f)
        more = (norms - 2) * base["hidden"] + (2 * _width(f) if head_norms else 0)
        return {**base, **_tied(f, True), "layer_extra": base["layer_extra"] + more}

    return read


def _mixtral(f: Fields) -> dict[str, Any]:
    active = f.number("num_experts_per_tok", default=2)
    return {**_llama(f), "experts": f.number("num_local_experts"), "active_experts": active}


def _qwen_moe(base: Callable[[Fields], dict[str, Any]]) -> Callable[[Fields], dict[str, Any]]:
    """Return the mixture whose layers are otherwise those of another family."""

    def read(f: Fields) -> dict[str, Any]:
        shape = base(f)
        if f.number("decoder_sparse_step", default=1) != 1 or f.values.get("mlp_only_layers"):
            raise UsageError(
                f"{f.path}: the planner reads mixtures whose layers are all mixtures, or all but the first."
            )
        shared = f.number("shared_expert_intermediate_size", default=0)
        more = 3 * shape["hidden"] * shared + shape["hidden"] if shared else 0  # the shared expert, and its gate
        return {
            **shape,
            "ffn_hidden": f.number("moe_intermediate_size"),
            "experts": f.number("num_experts", "num_local_experts"),
            "active_experts": f.number("num_experts_per_tok"),
            "layer_extra": shape["layer_extra"] + more,
        }

    return read


def _deepseek(f: Fields) -> dict[str, Any]:
    """DeepSeek V2 and V3: attention through narrow inner projections, which `layer_extra` accounts for."""
    common, hidden = _common(f), _common(f)["hidden"]
    nope, rope, value = (f.number(name) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    inner, query_rank = f.number("kv_lora_rank"), f.number("q_lora_rank", default=None)
    queries = common["heads"] * (nope + rope)
    latent = hidden * queries if query_rank is None else query_rank * (hidden + queries + 1)
    latent += (
        hidden * (inner + rope) + inner + inner * common["heads"] * (nope + value) + common["heads"] * value * hidden
    )
    width = (nope + rope + value) // 2
    return {
        **_LLAMA,
        **common,
        "head_dim": width,
        "ffn_hidden": f.number("moe_intermediate_size"),
        "experts": f.number("n_routed_experts"),
        "active_experts": f.number("num_experts_per_tok"),
        "shared_experts": f.number("n_shared_experts", default=0),
        "dense_layers": f.number("first_k_dense_replace", default=0),
        "dense_ffn_hidden": f.number("intermediate_size"),
        **_tied(f, False),
        "layer_extra": latent - 4 * hidden * common["heads"] * width,
    }


def _gpt2(f: Fields) -> dict[str, Any]:
    positions = f.number("n_positions", "max_position_embeddings")
    return {**_common(f), **_tied(f, True), "positions": positions, "ffn_hidden": f.number("n_inner", default=None)}


def _gpt_neox(f: Fields) -> dict[str, Any]:
    common, ffn = _common(f), f.number("intermediate_size")
    no_bias = 0 if f.flag("attention_bias", default=True) else -4 * common["hidden"]
    return {**common, **_tied(f, False), "ffn_hidden": ffn, "layer_extra": no_bias}


def _opt(f: Fields) -> dict[str, Any]:
    common = _common(f)
    narrow = f.number("word_embed_proj_dim", default=common["hidden"])
    extra = 0
    if narrow != common["hidden"]:  # a narrower embedding with two projections
        extra = common["vocab"] * (narrow - common["hidden"]) + 2 * narrow * common["hidden"]
    if not f.flag("do_layer_norm_before", default=True):  # then there is no last norm
        extra -= 2 * common["hidden"]
    positions = f.number("max_position_embeddings") + 2
    return {**common, **_tied(f, True), "ffn_hidden": f.number("ffn_dim"), "positions": positions, "extra": extra}


def _bloom(f: Fields) -> dict[str, Any]:
    common = _common(f)
    return {**common, **_tied(f, True), "extra": 2 * common["hidden"]}  # a norm of the embedding


def _bert(f: Fields) -> dict[str, Any]:
    """BERT and RoBERTa with the output layer of masked tokens; the embedding's norm stands for the last norm."""
    common = _common(f)
    positions = f.number("max_position_embeddings") + f.number("type_vocab_size", default=2)
    output = common["hidden"] * (common["hidden"] + 3) + common["vocab"]
    ffn = f.number("intermediate_size")
    return {**common, "ffn_hidden": ffn, "positions": positions, "causal": False, "extra": output}


def _vit(f: Fields) -> dict[str, Any]:
    image, patch, channels = f.number("image_size"), f.number("patch_size"), f.number("num_channels", default=3)
    labels = f.values.get("id2label")
    names = {"layers": "num_hidden_layers", "hidden": "hidden_size", "heads": "num_attention_heads"}
    shape = {key: f.number(name) for key, name in {**names, "ffn_hidden": "intermediate_size"}.items()}
    return {
        **shape,
        "vocab": 0,
        "causal": False,
        "patches": (image // patch) ** 2,
        "patch_inputs": patch * patch * channels,
        "outputs": len(labels) if isinstance(labels, dict) else f.number("num_labels", default=2),
        "layer_extra": 0 if f.flag("qkv_bias", default=True) else -3 * shape["hidden"],
    }


def _phi(f: Fields) -> dict[str, Any]:
    """Phi 1 and 2: attention and feed-forward layer side by side behind one norm, and an output bias."""
    common = _common(f)
    sizes = {"kv_heads": f.number("num_key_value_heads", default=None), "ffn_hidden": f.number("intermediate_size")}
    return {**common, **_tied(f, False), **sizes, "layer_extra": -2 * common["hidden"], "extra": common["vocab"]}


def _falcon(f: Fields) -> dict[str, Any]:
    common = _common(f)
    is_new = f.flag("new_decoder_architecture", default=False)
    one_key = f.flag("multi_query", default=True) and not is_new
    kv_heads = 1 if one_key else f.number("num_kv_heads", default=common["heads"]) if is_new else common["heads"]
    parallel = f.flag("parallel_attn", default=True)
    norms = 2 if (is_new and f.number("num_ln_in_parallel_attn", default=2) == 2) or not parallel else 1
    sizes = {"kv_heads": kv_heads, "ffn_hidden": f.number("ffn_hidden_size", default=None)}
    extra = {"biases": f.flag("bias", default=False), "layer_extra": (norms - 2) * 2 * common["hidden"]}
    return {**common, **_tied(f, True), **sizes, **extra}


def _mpt(f: Fields) -> dict[str, Any]:
    common = _common(f)
    ffn = f.number("expansion_ratio", default=4) * common["hidden"]
    return {**common, **_tied(f, True), "ffn_hidden": ffn, "biases": False, "rms_norm": True}  # norms without a bias


FAMILIES: dict[str, Callable[[Fields], dict[str, Any]]] = {
    "llama": _llama,
    "mistral": _llama,
    "phi3": _llama,
    "mixtral": _mixtral,
    "qwen2": _qwen2,
    "qwen2_moe": _qwen_moe(_qwen2),
    "qwen3": _qwen3,
    "qwen3_moe": _qwen_moe(_qwen3),
    "gemma": _gemma(2),
    "gemma2": _gemma(4),
    "gemma3_text": _gemma(4, head_norms=True),
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "opt": _opt,
    "bloom": _bloom,
    "bert": _bert,
    "roberta": _bert,
    "vit": _vit,
    "phi": _phi,
    "falcon": _falcon,
    "mpt": _mpt,
}
"""How the fields of each model_type are read."""


def shape_of(model: object, name: str = "") -> ModelShape | None:
    """Return the dimensions of a transformer of Phalanx or Hugging Face; None for another model."""
    return recorded_shape(recorded_dimensions(model), name)


def recorded_shape(recorded: Mapping[str, Any], name: str = "") -> ModelShape | None:
    """Return the shape of what `recorded_dimensions` gave; None where it does not describe the model."""
    name = name or recorded.get("name", "")
    if "dimensions" in recorded:
        return ModelShape(name=name, **recorded["dimensions"])
    if recorded.get("config", {}).get("model_type") not in FAMILIES:
        return None
    try:
        return from_config(recorded["config"], Path(name), name)
    except UsageError:  # a variant of the family that the dimensions do not describe
        return None
