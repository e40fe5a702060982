"""LoRA as a setting: adapters are in the model before it is prepared, and in the optimizer that trains it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.errors import UsageError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from phalanx.config import DistributedConfig


def adapt(model: nn.Module, config: DistributedConfig) -> None:
    """Give the model the adapters that the config asks for, unless it has them; equal on all ranks, by the seed."""
    if config.lora_rank is None:
        return
    from phalanx.models.lora import adapters, lora

    present = adapters(model)
    if not present:
        lora(
            model,
            config.lora_rank,
            alpha=config.lora_alpha,
            dropout=config.lora_dropout,
            targets=config.lora_targets,
            seed=config.seed,
        )
    elif other := [adapter.rank for adapter in present.values() if adapter.rank != config.lora_rank]:
        raise UsageError(
            f"lora_rank = {config.lora_rank}, but the model has adapters of rank {other[0]} already",
            hint="Leave lora_rank out to train those, or take them off with phalanx.remove_lora(model).",
        )


def check_trains_adapters(models: list[nn.Module], optimizer: torch.optim.Optimizer, config: DistributedConfig) -> None:
    """Refuse an optimizer that would train nothing: made before the adapters, or for merged ones."""
    from phalanx.models.lora import adapters

    if any(adapter.merged for model in models for adapter in adapters(model).values()):
        raise UsageError("merged adapters take no part in training", hint="Call phalanx.unmerge_lora(model) first.")
    if config.lora_rank is None:
        return
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if any(id(p) in held for model in models for p in model.parameters() if p.requires_grad):
        return
    raise UsageError(
        "the optimizer was made before the adapters, and holds frozen parameters only",
        hint=f"Call phalanx.lora(model, rank={config.lora_rank}) before you make it, or give the trainer a factory: "
        "optimizer=lambda parameters: AdamW(parameters).",
    )
