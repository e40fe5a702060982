"""The shape of a model that was built: by the config of a reference model, or of a Hugging Face model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from phalanx.errors import UsageError
from phalanx.tools.plan.hf_config import FAMILIES, from_config
from phalanx.tools.plan.model import ModelShape


def shape_of(model: object, name: str = "") -> ModelShape | None:
    """Return the dimensions of a transformer of Phalanx or Hugging Face; None for another model.

    Also of a model that was wrapped, split or sharded since: its config stays that of the whole.
    """
    module = getattr(model, "module", model)
    config: Any = getattr(module, "config", None)
    name = name or type(module).__name__.removeprefix("FSDP")
    if type(config).__module__.startswith("phalanx.models.") and hasattr(config, "heads"):
        return _own_shape(config, name)
    if hasattr(config, "to_dict") and getattr(config, "model_type", None) in FAMILIES:
        try:
            return from_config(config.to_dict(), Path(name), name)
        except UsageError:  # a variant of the family that the dimensions do not describe
            return None
    return None


def _own_shape(config: Any, name: str) -> ModelShape:
    sizes = {"name": name, "layers": config.layers, "hidden": config.width, "heads": config.heads}
    if hasattr(config, "patches"):
        patch = config.channels * config.patch_size**2
        sizes |= {"patches": config.patches, "patch_inputs": patch, "outputs": config.classes, "vocab": 0}
        return ModelShape(**sizes, ffn_hidden=config.feed_width, causal=False)
    sizes |= {"vocab": config.vocab_size, "tied_embeddings": config.tie_weights}
    if not hasattr(config, "kv_heads"):
        return ModelShape(**sizes, positions=config.block_size, biases=config.bias, rms_norm=not config.bias)
    sizes |= {"kv_heads": config.kv_heads, "ffn_hidden": config.feed_width}
    if hasattr(config, "experts"):
        sizes |= {"experts": config.experts, "active_experts": config.top_k}
    return ModelShape(**sizes, gated_mlp=True, biases=False, rms_norm=True)
