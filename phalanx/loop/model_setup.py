"""What is done to a model before its strategy wraps it: LoRA adapters, fp8, SyncBatchNorm, channels last."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from phalanx.config import DistributedConfig
from phalanx.errors import UsageError
from phalanx.features import feature
from phalanx.loop import optional
from phalanx.loop.gradients import Gradients
from phalanx.loop.precision import Precision
from phalanx.model import AdapterLayer, WrapsModel, implements
from phalanx.strategies.tensors import find_blocks
from phalanx.world.groups import build_axis_group
from phalanx.world.world import World


def adapt(model: nn.Module, config: DistributedConfig) -> None:
    """Add the adapters that the config asks for, unless the model has them; the seed makes them equal on all ranks."""
    _check_shapes(model)
    if config.lora_rank is not None:
        _add_lora(model, config, config.lora_rank)
    if implements(model, WrapsModel):
        model.begin()


def _check_shapes(model: nn.Module) -> None:
    """Refuse parameters and buffers of lazy modules that no batch has given a shape yet."""
    unshaped = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if is_lazy(tensor)]
    if unshaped:
        more = f" and {len(unshaped) - 3} more" if len(unshaped) > 3 else ""
        raise UsageError(
            f"{type(model).__name__} has lazy modules without shapes: {', '.join(unshaped[:3])}{more}",
            hint="Call the model on one batch first, model(inputs): ranks and optimizers need the shapes.",
        )


def _add_lora(model: nn.Module, config: DistributedConfig, rank: int) -> None:
    lora = feature("lora")
    present = lora.adapters(model)
    if not present:
        lora.lora(
            model,
            rank,
            alpha=config.lora_alpha,
            dropout=config.lora_dropout,
            targets=config.lora_targets,
            seed=config.seed,
        )
    elif other := [adapter.rank for adapter in present.values() if adapter.rank != rank]:
        raise UsageError(
            f"lora_rank = {rank}, but the model has adapters of rank {other[0]} already",
            hint="Leave lora_rank out to train those, or take them off with phalanx.remove_lora(model).",
        )
    if config.lora_base is not None:
        feature("nf4").quantise_base(model, find_blocks(model).values())


def check_trains_adapters(models: list[nn.Module], optimizer: torch.optim.Optimizer, config: DistributedConfig) -> None:
    """Raise for an optimizer that would train nothing: made before the adapters, or for merged ones."""
    modules = (module for model in models for module in model.modules() if implements(module, AdapterLayer))
    if any(getattr(module, "merged", False) for module in modules):
        raise UsageError("merged adapters take no part in training", hint="Call phalanx.unmerge_lora(model) first.")
    if config.lora_rank is None:
        return
    ids = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    trained = [parameter for model in models for parameter in model.parameters() if parameter.requires_grad]
    if not trained or any(id(parameter) in ids for parameter in trained):  # a pipeline stage may have no adapter
        return
    raise UsageError(
        "the optimizer was made before the adapters, and holds frozen parameters only",
        hint=f"Call phalanx.lora(model, rank={config.lora_rank}) before you make it, or give the trainer a factory: "
        "optimizer=lambda parameters: AdamW(parameters).",
    )


def convert_layers(
    model: nn.Module, config: DistributedConfig, world: World, gradients: Gradients, precision: Precision
) -> tuple[list[Callable[[], None]], list[str]]:
    """Let a model's layers compute in other ways, if the config asks for it; return what undoes it, and notes.

    The layout of weights stays: an optimizer that the user made has its states in it.
    """
    notes: list[str] = []
    if config.channels_last:
        _store_channels_last(model, notes)
    undo = [_multiply_in_fp8(model, notes)] if precision.fp8 else []
    if config.sync_batch_norm and world.world_size > 1:
        undo.append(_synchronise_norms(model, world, gradients, notes))
    return undo, notes


def _multiply_in_fp8(model: nn.Module, notes: list[str]) -> Callable[[], None]:
    """Let the linear layers of the model's blocks multiply in 8 bits, and say so; return what undoes it."""
    layers, undo = feature("fp8-layers")(model, list(find_blocks(model).values()))
    notes.append(f"mixed_precision = 'fp8': {layers} layers multiply in 8 bits if that is faster")
    return undo  # type: ignore[no-any-return]


def _synchronise_norms(model: nn.Module, world: World, gradients: Gradients, notes: list[str]) -> Callable[[], None]:
    """Let batch norms use the statistics of all ranks, or say that there are none; return what undoes it."""

    def is_placeholder() -> bool:
        micro = gradients.micro
        return micro is not None and micro.samples == 0

    # On GPUs the group of the gradients: two groups at once on one device may wait for each other. Only there it is
    # certain that no thread of a strategy uses it meanwhile.
    group = None
    if world.device.type != "cuda":
        group = build_axis_group(world.mesh, ("dp_replicate", "dp_shard"), world.rank, "gloo")
    layers, undo = optional.synchronise(model, optional.NormRanks(group, world.world_size, is_placeholder))
    if not layers:
        notes.append("sync_batch_norm: the model has no BatchNorm layer, so it changes nothing")
    return undo


_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def _store_channels_last(model: nn.Module, notes: list[str]) -> None:
    """Lay out the weights of convolutions with the channels last, in place; an optimizer keeps its parameters.

    Batches stay as they are: a convolution whose weight is channels last computes so, and what follows keeps the layout
    (torch documents this at nn.utils.convert_conv2d_weight_memory_format). `to`, not `contiguous`, which leaves a 1x1
    kernel's strides as they are.
    """
    weights = [parameter for parameter in model.parameters() if parameter.ndim in _CHANNELS_LAST]
    for weight in weights:
        if not isinstance(weight, DTensor):  # one that an earlier call has sharded
            weight.data = weight.data.to(memory_format=_CHANNELS_LAST[weight.ndim])
    if not weights:
        notes.append("channels_last: no weight of the model has 4 or 5 dimensions, so it changes nothing")
