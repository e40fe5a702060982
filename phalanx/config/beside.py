"""Settings that do something only beside another one: alone they would be passed over in silence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from phalanx.config.distributed import DistributedConfig

_OF_THE_PIPELINE = ("pipeline_schedule", "microbatches", "pipeline_cuts", "pipeline_balance")
_OF_SHARDING = ("sharding", "shard_size", "wrap_class", "offload")
_OF_COMPRESSORS = {"compression_ratio": ("topk", "randomk"), "powersgd_rank": ("powersgd",), "compression_warmup": ()}
"""Which compressors follow a setting; none named: all but 'none'."""
_TAKE_COMPRESSION = ("ddp", "ring")
_OF_SERVERS = ("num_servers", "server_mode", "staleness")
_OTHER_AXES = ("tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel")


def pipeline_mistakes(
    config: DistributedConfig, defaults: Mapping[str, Any], known: Collection[str]
) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with the settings of a pipeline, apart from the mistakes that are known already."""
    given = [name for name in _OF_THE_PIPELINE if name not in known and getattr(config, name) != defaults[name]]
    if "pipeline_cuts" in given and not all(name.strip() for name in str(config.pipeline_cuts).split(",")):
        yield (
            "pipeline_cuts",
            f"pipeline_cuts = {config.pipeline_cuts!r}: expected names of modules with commas between, such as "
            "'layers.4,layers.8', and one of them is empty.",
        )
        given.remove("pipeline_cuts")
    if "pipeline_parallel" in known or config.pipeline_parallel > 1:
        return
    for name in given:
        yield (
            name,
            f"{name} = {getattr(config, name)!r} without pipeline_parallel: write pipeline_parallel = 2 or more, or "
            f"leave {name} out.",
        )


def sharding_mistakes(
    config: DistributedConfig, defaults: Mapping[str, Any], known: Collection[str]
) -> Iterator[tuple[str, str]]:
    """Yield the settings of sharding that nothing is there to follow."""
    if config.resolved_strategy == "deepspeed" or {*_OTHER_AXES, "pipeline_schedule"} & set(known):
        return
    given = [name for name in _OF_SHARDING if name not in known and getattr(config, name) != defaults[name]]
    unused = _why_nothing_is_sharded(config)
    for name in given:
        if unused is not None:
            yield name, f"{name} = {getattr(config, name)!r} is for what is sharded, but {unused}"
        elif name == "shard_size" and not config.sharding.startswith("hybrid"):
            yield (
                name,
                f"shard_size = {config.shard_size} with sharding = {config.sharding!r}: only sharding = 'hybrid' has "
                "groups.",
            )
        elif name == "sharding" and config.sharding.startswith("hybrid") and config.expert_parallel > 1:
            yield (
                name,
                f"sharding = {config.sharding!r} with expert_parallel = {config.expert_parallel}: the ranks that share "
                "the experts are the groups already: leave sharding and shard_size out.",
            )


def compression_mistakes(
    config: DistributedConfig, defaults: Mapping[str, Any], known: Collection[str]
) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with the settings of compression."""
    if "compression_ratio" not in known and config.compression_ratio > 1:
        ratio = config.compression_ratio
        yield "compression_ratio", f"compression_ratio = {ratio}: a share of the gradient, above 0 and up to 1."
    if "compression" in known:
        return
    for name, owners in _OF_COMPRESSORS.items():
        given = getattr(config, name)
        if (
            name in known
            or given == defaults[name]
            or (config.compression in owners if owners else _compresses(config))
        ):
            continue
        wanted = " or ".join(repr(owner) for owner in owners) if owners else "another one than 'none'"
        yield name, f"{name} = {given} with compression = {config.compression!r}: it is for compression = {wanted}."
    if _compresses(config) and not {*_OTHER_AXES, "strategy", "backend", "zero_stage"} & set(known):
        obstacle = _why_nothing_is_compressed(config)
        if obstacle is not None:
            yield "compression", f"compression = {config.compression!r} with {obstacle}"


def _compresses(config: DistributedConfig) -> bool:
    return config.compression != "none"


def _why_nothing_is_compressed(config: DistributedConfig) -> str | None:
    """Compressors average whole gradients; only two strategies leave that to them."""
    for axis in _OTHER_AXES:
        if getattr(config, axis) > 1:
            return (
                f"{axis} = {getattr(config, axis)}: the data axis is sharded there, and whole gradients never meet. "
                f"Leave one of them out; strategy = 'ddp' and 'ring' take compression."
            )
    if config.resolved_strategy in _TAKE_COMPRESSION:
        return None
    if config.resolved_strategy == "horovod":
        return None if config.compression == "fp16" else "backend = 'horovod', which has 'fp16' only."
    return f"strategy = {config.resolved_strategy!r}: only strategy = 'ddp' and 'ring' average gradients through it."


def _why_nothing_is_sharded(config: DistributedConfig) -> str | None:
    """Plain ddp replicates; beside another axis it shards the data axis, unless the schedule keeps stages whole."""
    if config.resolved_strategy == "fsdp":
        return None
    if config.pipeline_parallel > 1 and config.pipeline_schedule == "zero-bubble":
        return "pipeline_schedule = 'zero-bubble' keeps whole stages: leave one of them out."
    if any(getattr(config, axis) > 1 for axis in _OTHER_AXES):
        return None
    return f"strategy = {config.resolved_strategy!r} replicates: write strategy = 'fsdp'."


def server_mistakes(
    config: DistributedConfig, defaults: Mapping[str, Any], known: Collection[str]
) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with the settings of parameter servers, and what cannot stand beside them."""
    if config.resolved_strategy != "parameter-server":
        for name in _OF_SERVERS:
            if name not in known and getattr(config, name) != defaults[name]:
                yield (
                    name,
                    f"{name} = {getattr(config, name)!r} without parameter servers: write strategy = "
                    f"'parameter-server', or leave {name} out.",
                )
        return
    for axis in (*_OTHER_AXES, "zero_stage"):
        if axis not in known and getattr(config, axis) != defaults[axis]:
            yield (
                axis,
                f"{axis} = {getattr(config, axis)!r} does not go with strategy = 'parameter-server', whose shards hold "
                "whole parameters for ranks that each run the whole model: leave one of them out.",
            )
    yield from _pace_mistakes(config, known)


def _pace_mistakes(config: DistributedConfig, known: Collection[str]) -> Iterator[tuple[str, str]]:
    """Check what says how far workers may run apart."""
    mode = config.server_mode
    if mode in ("sync", "async") and config.staleness is not None and "staleness" not in known:
        meaning = "all workers step together" if mode == "sync" else "no worker waits for another"
        yield (
            "staleness",
            f"staleness = {config.staleness} with server_mode = {mode!r}, in which {meaning}: write server_mode = "
            "'bounded', or leave staleness out.",
        )
    if mode == "bounded" and config.staleness is None:
        yield "server_mode", "server_mode = 'bounded' needs its bound: write staleness = 2, say."
    if config.mixed_precision == "fp16":
        yield (
            "mixed_precision",
            "mixed_precision = 'fp16' needs loss scaling, which parameter servers have not: write 'bf16', or leave it "
            "out.",
        )
    if config.loss_weighting == "tokens" and config.resolved_server_mode != "sync":
        yield (
            "loss_weighting",
            f"loss_weighting = 'tokens' makes all ranks meet in every step, which server_mode = "
            f"{config.resolved_server_mode!r} is there to avoid: write 'samples', or server_mode = 'sync'.",
        )
