"""Settings of the strategies that replicate the model, against each other and against what cannot stand beside them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from phalanx.config.distributed import DistributedConfig

_FOLLOWED_BY = {
    "fixed_order": ("ring",),
    "sync_every": ("local-sgd", "diloco"),
    "outer_learning_rate": ("diloco",),
    "outer_momentum": ("diloco",),
}
"""Which strategies follow a setting."""
_REPLICATE = ("ring", "local-sgd", "diloco", "horovod")
_AXES = ("tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel", "zero_stage")


def synchronisation_mistakes(
    config: DistributedConfig, defaults: Mapping[str, Any], known: Collection[str]
) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with how and how often ranks are brought together, apart from what is known already."""
    if "strategy" in known or "backend" in known:
        return
    strategy = config.resolved_strategy
    given = [name for name in (*_FOLLOWED_BY, *_AXES) if name not in known and getattr(config, name) != defaults[name]]
    for name in given:
        followers = _FOLLOWED_BY.get(name, ())
        if followers and strategy not in followers:
            names = " or ".join(repr(follower) for follower in followers)
            yield (
                name,
                f"{name} = {getattr(config, name)!r} with strategy = {strategy!r}, which does not follow it: write "
                f"strategy = {names}, or leave {name} out.",
            )
        elif name in _AXES and strategy in _REPLICATE:
            way = "write backend = 'pytorch-ddp'" if strategy == "horovod" else "leave strategy out, or write 'fsdp'"
            yield (
                name,
                f"{name} = {getattr(config, name)!r} does not go with strategy = {strategy!r}, whose ranks hold the "
                f"whole model: {way}.",
            )
    if "outer_momentum" not in known and config.outer_momentum >= 1:
        yield "outer_momentum", f"outer_momentum = {config.outer_momentum}: must be below 1."
    if config.fixed_order and strategy == "ring":
        yield from _fixed_order_mistakes(config, known)


def _fixed_order_mistakes(config: DistributedConfig, known: Collection[str]) -> Iterator[tuple[str, str]]:
    if config.compression != "none" and "compression" not in known:
        yield (
            "compression",
            f"compression = {config.compression!r} with fixed_order: what is rounded off depends on the number of "
            "ranks, so the bits would too. Leave one of them out.",
        )
    ranks = config.total_ranks
    if ranks is not None and ranks & (ranks - 1) and "num_workers" not in known:
        yield (
            "fixed_order",
            f"fixed_order needs 1, 2, 4, 8, ... ranks, and num_workers = {ranks}: the order of additions is a tree "
            "that is halved with every doubling.",
        )
