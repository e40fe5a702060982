"""tensor: every layer is split over neighbouring ranks, by the model's plan or by well-known module names.

A model's `tensor_plan()` maps names of modules ("*" matches one part of a dotted name) to words, or to torch's
`ParallelStyle` objects. Between layers each rank has its slice of the sequence, inside them its slice of the heads or
features; all parameters become DTensors of one mesh. Hugging Face decoders like Llama and GPT-2 are recognised by the
names of their modules. Their code counts positions from the length of the embedded sequence: it is not split there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from phalanx.errors import UsageError, nearest, unknown_name
from phalanx.models.contract import SplitLogits, TensorDivides, TensorPlan, implements
from phalanx.strategies.tensor.styles import (
    FusedColumns,
    GatherFirstInput,
    TokenEmbedding,
    TransposedColwise,
    TransposedRowwise,
    WholeOnEveryRank,
)
from phalanx.world.splits import uneven_tensors

_SEQUENCE = Shard(1)
STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": lambda: RowwiseParallel(output_layouts=_SEQUENCE),
    "sequence": lambda: SequenceParallel(use_local_output=True),
    "gather": GatherFirstInput,
    "embedding-rowwise": TokenEmbedding,
    "embedding-positions": lambda: RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
    "head-colwise": lambda: ColwiseParallel(input_layouts=_SEQUENCE, output_layouts=Replicate()),
    "whole": WholeOnEveryRank,
}
"""The words of a plan and what torch does for them."""


def is_split(model: nn.Module) -> bool:
    """Whether an earlier run has split this model."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def split_tensors(model: nn.Module, mesh: DeviceMesh) -> None:
    """Split the model in place over a mesh of one axis. Its weights must be equal on all ranks, or on "meta".

    A model with `takes_split_logits` computes its loss on logits that stay split.
    """
    split_logits = implements(model, SplitLogits) and model.takes_split_logits
    styles = _styles_by_module(model)
    _check_degree(model, styles, mesh.size())
    before = dict(model.named_parameters(remove_duplicate=False))
    for name, style in styles.items():
        if split_logits and style == "head-colwise":
            made: ParallelStyle = ColwiseParallel(
                input_layouts=_SEQUENCE, output_layouts=Shard(-1), use_local_output=False
            )
        else:
            made = STYLES[style]() if isinstance(style, str) else copy.copy(style)
        parallelize_module(model.get_submodule(name), mesh, made, src_data_rank=None)
    _refuse_unsplit(model)
    _tie_again(model, before)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(before[name].requires_grad)  # torch's styles unfreeze parameters


def splits_sequence(model: nn.Module) -> bool:
    """Whether ranks hold different slices of the sequence between layers, rather than equal activations."""
    return "sequence" in _plan_of(model).values()


def _plan_of(model: nn.Module) -> Mapping[str, str | ParallelStyle]:
    if not implements(model, TensorPlan):
        known = known_plan(model)
        if known is not None:
            return known
        raise UsageError(
            f"tensor_parallel needs to know how {type(model).__name__} is split, and it has no tensor_plan()",
            hint="Give the class a method tensor_plan() that returns {'layers.*.feed.up': 'colwise', ...} "
            f"(words: {', '.join(STYLES)}; or torch ParallelStyle objects), or train with strategy='fsdp'.",
        )
    return model.tensor_plan()


def _styles_by_module(model: nn.Module) -> dict[str, str | ParallelStyle]:
    """Return the plan with its patterns resolved; UsageError for unknown words and names."""
    names = [name for name, _ in model.named_modules() if name]
    styles: dict[str, str | ParallelStyle] = {}
    for pattern, style in _plan_of(model).items():
        if isinstance(style, str) and style not in STYLES:
            raise UsageError(unknown_name(f"word for {pattern} in tensor_plan()", style, STYLES))
        found = [name for name in names if _matches(pattern, name)]
        if not found:
            close = nearest(pattern, names)
            raise UsageError(
                f"tensor_plan() of {type(model).__name__} names '{pattern}', and no module has that name",
                hint=f"Did you mean '{close}'?" if close else f"Its modules: {', '.join(names[:12])}.",
            )
        styles.update(dict.fromkeys(found, style))
    return styles


def _matches(pattern: str, name: str) -> bool:
    wanted, parts = pattern.split("."), name.split(".")
    return len(wanted) == len(parts) and all(w in ("*", part) for w, part in zip(wanted, parts, strict=True))


def _check_degree(model: nn.Module, styles: Mapping[str, str | ParallelStyle], degree: int) -> None:
    """Raise for a degree that does not divide the heads or features evenly."""
    given = model.tensor_divides() if implements(model, TensorDivides) else known_divides(model)
    sizes: dict[str, int] = dict(given)
    for name, style in styles.items():
        side = {"colwise": "out_features", "rowwise": "in_features"}.get(style) if isinstance(style, str) else None
        size = getattr(model.get_submodule(name), side, None) if side else None
        if isinstance(size, int):
            sizes[f"{name}.{side}"] = size
    if (wrong := uneven_tensors(type(model).__name__, sizes, degree)) is not None:
        raise wrong


def _refuse_unsplit(model: nn.Module) -> None:
    """Raise for parameters outside of the plan: they would get this rank's gradient only."""
    left = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
    if left:
        owner = left[0].rpartition(".")[0]
        raise UsageError(
            f"tensor_plan() of {type(model).__name__} does not name {', '.join(left[:3])}",
            hint=f"Add '{owner or left[0]}' to it: 'whole' keeps a module on every rank, with whole inputs; "
            "'sequence' does so for one that sees slices of the sequence."
            if owner
            else "Move the parameter into a separate module, and name that in the plan.",
        )


def _tie_again(model: nn.Module, before: Mapping[str, nn.Parameter]) -> None:
    """Tie parameters again that were one object; UsageError where the plan splits them differently."""
    first: dict[int, str] = {}
    for name, old in before.items():
        original = first.setdefault(id(old), name)
        if original == name:
            continue
        kept, copied = model.get_parameter(original), model.get_parameter(name)
        if getattr(kept, "placements", None) != getattr(copied, "placements", None):
            raise UsageError(
                f"{original} and {name} are tied, but tensor_plan() splits them differently",
                hint="A token embedding split by 'embedding-rowwise' goes with a head split by 'head-colwise'.",
            )
        module, _, key = name.rpartition(".")
        setattr(model.get_submodule(module), key, kept)


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
