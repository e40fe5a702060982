"""tensor: every layer is split over neighbouring ranks, by the model's plan or by well-known module names.

A model's `tensor_plan()` maps names of modules ("*" matches one part of a dotted name) to words, or to torch's
`ParallelStyle` objects. Between layers each rank has its slice of the sequence, inside them its slice of the heads or
features; all parameters become DTensors of one mesh. Hugging Face decoders like Llama and GPT-2 are recognised by the
names of their modules. Their code counts positions from the length of the embedded sequence: it is not split there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from phalanx.errors import UsageError, nearest, unknown_name
from phalanx.model import SequenceShards, SplitLogits, TensorDivides, TensorPlan, implements
from phalanx.strategies.tensor_overlap import add_bias_apart
from phalanx.torch_compat import pytree
from phalanx.world.splits import uneven_slices, uneven_tensors

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement


class GatherFirstInput(ParallelStyle):
    """Gathers a module's first input along the sequence, once for all column-wise layers inside.

    It stays a DTensor, so that backward adds up the layers' gradients first and scatters them once. Under autocast it
    is sent in the type in which the layers multiply: CUDA's norms return float32, twice the bytes.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            slices = DTensor.from_local(_as_multiplied(inputs[0]), device_mesh, [Shard(1)], run_check=False)
            return (slices.redistribute(placements=[Replicate()]), *inputs[1:])

        module.register_forward_pre_hook(gather)
        return module


def _as_multiplied(inputs: Tensor) -> Tensor:
    """Return the inputs in the type that autocast gives to the inputs of a product."""
    device = inputs.device.type
    casts = torch.is_autocast_enabled(device) and inputs.dtype is torch.float32
    return inputs.to(torch.get_autocast_dtype(device)) if casts else inputs


class TokenEmbedding(RowwiseParallel):
    """Splits an embedding by vocabulary; its vectors are scattered along the sequence, which must divide."""

    def __init__(self) -> None:
        super().__init__(input_layouts=Replicate(), output_layouts=Shard(1))

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        ranks = device_mesh.size()

        def check(_: nn.Module, inputs: tuple[Any, ...]) -> None:
            if (wrong := uneven_slices(inputs[0].shape[1], ranks)) is not None:
                raise wrong

        module.register_forward_pre_hook(check)
        split: nn.Module = super()._apply(module, device_mesh)
        return split

    @staticmethod
    def _prepare_output_fn(layouts: Any, local: bool, module: nn.Module, outputs: DTensor, mesh: DeviceMesh) -> Tensor:
        """Scatter, and wait: compiled layers take a tensor that is still under way, and their backward fails on it."""
        return outputs.redistribute(placements=layouts).to_local()


class PositionEmbedding(RowwiseParallel):
    """Splits an embedding by position; its vectors [time, hidden] or [batch, time, hidden] are scattered along time."""

    def __init__(self) -> None:
        super().__init__(input_layouts=Replicate(), output_layouts=Shard(0))

    @staticmethod
    def _prepare_output_fn(layouts: Any, local: bool, module: nn.Module, outputs: DTensor, mesh: DeviceMesh) -> Tensor:
        return outputs.redistribute(placements=[Shard(outputs.ndim - 2)]).to_local()


class WholeOnEveryRank(ParallelStyle):
    """Keeps a module whole on every rank; all ranks call it with the same inputs."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def enter(_: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            return pytree.tree_map_only(
                torch.Tensor, lambda tensor: DTensor.from_local(tensor, mesh, [Replicate()], run_check=False), inputs
            )

        def leave(_: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
            return pytree.tree_map_only(DTensor, lambda tensor: tensor.to_local(), outputs)

        return distribute_module(module, device_mesh, None, enter, leave)


class _Transposed(ParallelStyle):
    """A layer with a transposed weight; subclasses define the placements of weight, bias, input and output."""

    weight: Placement
    bias: Placement
    enters: Placement
    leaves: Placement

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def partition(_: str, layer: nn.Module, mesh: DeviceMesh) -> None:
            _distribute(layer, mesh, {"weight": self.weight, "bias": self.bias}, self.src_data_rank)

        def enter(_: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            return (DTensor.from_local(inputs[0], mesh, [self.enters], run_check=False), *inputs[1:])

        def leave(_: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
            return outputs.redistribute(placements=[self.leaves]).to_local()

        return distribute_module(module, device_mesh, partition, enter, leave)


class TransposedColwise(_Transposed):
    """Split by output features: whole inputs in, this rank's features out."""

    weight, bias, enters, leaves = Shard(1), Shard(0), Replicate(), Shard(-1)


class TransposedRowwise(_Transposed):
    """Split by input features: this rank's features in, the sum over the ranks out."""

    weight, bias, enters, leaves = Shard(0), Replicate(), Shard(-1), Replicate()


class FusedColumns(ParallelStyle):
    """An attention with one layer for query, key and value, so that a rank's columns are not contiguous.

    The weights are stored as plain slices, which any layout can load, and gathered for the multiplication, in which
    each rank uses the columns of its heads. `width`: the attention's attribute with the features of one part.
    """

    def __init__(self, layer: str, *, parts: int, width: str) -> None:
        super().__init__()
        self.layer = layer
        self.parts = parts
        self.width = width

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        fused = module.get_submodule(self.layer)
        _distribute(fused, device_mesh, {"weight": Shard(1), "bias": Shard(0)}, self.src_data_rank)
        fused.forward = partial(_own_columns, fused, self.parts, device_mesh)
        setattr(module, self.width, getattr(module, self.width) // device_mesh.size())
        return module


def _own_columns(layer: nn.Module, parts: int, mesh: DeviceMesh, inputs: Tensor) -> Tensor:
    """Multiply whole inputs by this rank's share of each part's columns."""
    weight, bias = (_mine(layer.get_parameter(name), parts, mesh) for name in ("weight", "bias"))
    whole = DTensor.from_local(inputs, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])
    return whole @ weight + bias


def _mine(parameter: nn.Parameter, parts: int, mesh: DeviceMesh) -> Tensor:
    """Gather a parameter and take this rank's share of each part of its last dim."""
    assert isinstance(parameter, DTensor), "split by the style"
    whole = parameter.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
    share = whole.unflatten(-1, (parts, mesh.size(), -1))[..., mesh.get_local_rank(), :]  # type: ignore[no-untyped-call]
    return torch.flatten(share, -2)


def _distribute(module: nn.Module, mesh: DeviceMesh, placements: dict[str, Placement], source: int | None) -> None:
    for name, placement in placements.items():
        parameter = module.get_parameter(name)
        split = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=source)
        module.register_parameter(name, nn.Parameter(split, requires_grad=parameter.requires_grad))


_SEQUENCE = Shard(1)
STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": lambda: RowwiseParallel(output_layouts=_SEQUENCE),
    "sequence": lambda: SequenceParallel(use_local_output=True),
    "gather": GatherFirstInput,
    "embedding-rowwise": TokenEmbedding,
    "embedding-positions": PositionEmbedding,
    "head-colwise": lambda: ColwiseParallel(input_layouts=_SEQUENCE, output_layouts=Replicate()),
    "whole": WholeOnEveryRank,
}
"""The words of a plan and what torch does for them."""


def is_split(model: nn.Module) -> bool:
    """Whether an earlier run has split this model."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def split_tensors(model: nn.Module, mesh: DeviceMesh, *, overlaps: bool = False) -> None:
    """Split the model in place over a mesh of one axis. Its weights must be equal on all ranks, or on "meta".

    A model with `takes_split_logits` computes its loss on logits that stay split. `overlaps`: the products will be
    compiled to overlap with their communication.
    """
    split_logits = implements(model, SplitLogits) and model.takes_split_logits
    styles = _styles_by_module(model)
    _check_degree(model, styles, mesh.size())
    before = dict(model.named_parameters(remove_duplicate=False))
    for name, style in styles.items():
        if split_logits and style == "head-colwise":
            parallel_style: ParallelStyle = ColwiseParallel(
                input_layouts=_SEQUENCE, output_layouts=Shard(-1), use_local_output=False
            )
        else:
            parallel_style = STYLES[style]() if isinstance(style, str) else copy.copy(style)
        layer = model.get_submodule(name)
        parallelize_module(layer, mesh, parallel_style, src_data_rank=None)
        # Layers of a subclass (adapters, 8-bit products) have their own products.
        if overlaps and style in ("colwise", "rowwise") and type(layer) is nn.Linear and layer.bias is not None:
            add_bias_apart(layer, style)
    _refuse_unsplit(model)
    _tie_again(model, before)
    if implements(model, SequenceShards):
        model.sequence_shards = mesh.size()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(before[name].requires_grad)  # torch's styles unfreeze parameters


def splits_sequence(model: nn.Module) -> bool:
    """Whether ranks hold different slices of the sequence between layers, rather than equal activations."""
    return "sequence" in _plan_of(model).values()


def _plan_of(model: nn.Module) -> Mapping[str, str | ParallelStyle]:
    if not implements(model, TensorPlan):
        plan = known_plan(model)
        if plan is not None:
            return plan
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
        matching = [name for name in names if _matches(pattern, name)]
        if not matching:
            close = nearest(pattern, names)
            raise UsageError(
                f"tensor_plan() of {type(model).__name__} names '{pattern}', and no module has that name",
                hint=f"Did you mean '{close}'?" if close else f"Its modules: {', '.join(names[:12])}.",
            )
        styles.update(dict.fromkeys(matching, style))
    return styles


def _matches(pattern: str, name: str) -> bool:
    pattern_parts, parts = pattern.split("."), name.split(".")
    return len(pattern_parts) == len(parts) and all(
        w in ("*", part) for w, part in zip(pattern_parts, parts, strict=True)
    )


def _check_degree(model: nn.Module, styles: Mapping[str, str | ParallelStyle], degree: int) -> None:
    """Raise for a degree that does not divide the heads or features evenly."""
    divisors = model.tensor_divides() if implements(model, TensorDivides) else known_divides(model)
    sizes: dict[str, int] = dict(divisors)
    for name, style in styles.items():
        side = {"colwise": "out_features", "rowwise": "in_features"}.get(style) if isinstance(style, str) else None
        size = getattr(model.get_submodule(name), side, None) if side else None
        if isinstance(size, int):
            sizes[f"{name}.{side}"] = size
    if (wrong := uneven_tensors(type(model).__name__, sizes, degree)) is not None:
        raise wrong


def _refuse_unsplit(model: nn.Module) -> None:
    """Raise for parameters outside of the plan: they would get this rank's gradient only."""
    unsplit = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
    if unsplit:
        owner = unsplit[0].rpartition(".")[0]
        raise UsageError(
            f"tensor_plan() of {type(model).__name__} does not name {', '.join(unsplit[:3])}",
            hint=f"Add '{owner or unsplit[0]}' to it: 'whole' keeps a module on every rank, with whole inputs; "
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
        weight, copied = model.get_parameter(original), model.get_parameter(name)
        if getattr(weight, "placements", None) != getattr(copied, "placements", None):
            raise UsageError(
                f"{original} and {name} are tied, but tensor_plan() splits them differently",
                hint="A token embedding split by 'embedding-rowwise' goes with a head split by 'head-colwise'.",
            )
        module, _, key = name.rpartition(".")
        setattr(model.get_submodule(module), key, weight)


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
