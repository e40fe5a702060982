"""The planner's shape of a model that was built: by the config of a reference model, or of a Hugging Face model."""

from __future__ import annotations

import warnings
from typing import Any

from phalanx.errors import UsageError
from phalanx.plan.hf_config import from_config
from phalanx.plan.model import ModelShape


def shape_of(model: object) -> ModelShape | None:
    """Return the shape of a transformer; None for a model whose `config` does not say it.

    Also of a model that was split or sharded since: its config stays that of the whole.
    """
    config = getattr(getattr(model, "module", model), "config", None)
    name = type(model).__name__.removeprefix("FSDP")
    if hasattr(config, "num_parameters") and hasattr(config, "width") and hasattr(config, "heads"):
        return _vision(config, name) if hasattr(config, "patches") else _decoder(config, name)
    if callable(getattr(config, "to_dict", None)) and hasattr(config, "model_type"):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # a family that the planner does not know is not guessed at
                return from_config(config.to_dict(), name=str(config.model_type))
        except (UsageError, UserWarning):
            return None
    return None


def _decoder(config: Any, name: str) -> ModelShape:
    """Return the shape of our GPT, Llama or mixture."""
    is_llama = hasattr(config, "kv_heads")
    biases = not is_llama and config.bias
    mixture = {"experts": config.experts, "active_experts": config.top_k} if hasattr(config, "experts") else {}
    return ModelShape(
        name=name,
        layers=config.layers,
        hidden=config.width,
        heads=config.heads,
        vocab=config.vocab_size,
        kv_heads=config.kv_heads if is_llama else None,
        ffn_hidden=config.feed_width if is_llama else 4 * config.width,
        gated_mlp=is_llama,
        tied_embeddings=config.tie_weights,
        positions=0 if is_llama else config.block_size,
        biases=biases,
        rms_norm=not biases,
        **mixture,
    )


def _vision(config: Any, name: str) -> ModelShape:
    """Return the shape of our vision transformer."""
    return ModelShape(
        name=name,
        layers=config.layers,
        hidden=config.width,
        heads=config.heads,
        vocab=0,
        ffn_hidden=config.feed_width,
        causal=False,
        patches=config.patches,
        patch_inputs=config.patch_size**2 * config.channels,
        outputs=config.classes,
    )
