"""Tensor plans for Hugging Face decoders like Llama and GPT-2, recognised by module names.

Their code counts positions from the length of the embedded sequence, so the heads and features are split, but not the
sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from phalanx.strategies.tensor.styles import FusedColumns, TransposedColwise, TransposedRowwise, WholeOnEveryRank


def _vocabulary() -> ParallelStyle:
    return RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())


def _logits() -> ParallelStyle:
    return ColwiseParallel(output_layouts=Replicate())


LLAMA: dict[str, Callable[[], ParallelStyle]] = {
    "embed_tokens": _vocabulary,
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ColwiseParallel),
    **dict.fromkeys(("o_proj", "down_proj"), RowwiseParallel),
    **dict.fromkeys(("input_layernorm", "post_attention_layernorm", "norm"), WholeOnEveryRank),
    "lm_head": _logits,
}
"""Parallel styles by the last part of a module's name: Llama, Mistral, Qwen2 and similar models."""

GPT2: dict[str, Callable[[], ParallelStyle]] = {
    "wte": _vocabulary,
    **dict.fromkeys(("wpe", "ln_1", "ln_2", "ln_f"), WholeOnEveryRank),
    "attn": lambda: FusedColumns("c_attn", parts=3, width="split_size"),
    "c_fc": TransposedColwise,
    "c_proj": TransposedRowwise,
    "lm_head": _logits,
}
"""The same for GPT-2, whose layers keep their weights transposed, and query, key and value in one."""

_TELLTALES = {("q_proj", "k_proj", "v_proj", "o_proj", "embed_tokens"): LLAMA, ("c_attn", "c_proj", "wte"): GPT2}

_SIZES = ("num_attention_heads", "num_key_value_heads", "intermediate_size")


def known_plan(model: nn.Module) -> dict[str, ParallelStyle] | None:
    """Return a plan for a model whose modules have well-known names, or None."""
    names = [name for name, _ in model.named_modules() if name]
    endings = {_ending(name) for name in names}
    for telltale, styles in _TELLTALES.items():
        if endings.issuperset(telltale):
            return {name: styles[_ending(name)]() for name in names if _ending(name) in styles}
    return None


def known_divides(model: nn.Module) -> dict[str, int]:
    """Return what the number of ranks must divide, from a Hugging Face model's config."""
    config: Any = getattr(model, "config", None)
    sizes = {name: getattr(config, name, None) for name in _SIZES}
    return {name: size for name, size in sizes.items() if isinstance(size, int)}


def _ending(name: str) -> str:
    return name.rpartition(".")[2]
