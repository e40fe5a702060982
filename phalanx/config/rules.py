"""Rules between settings: reject values that contradict each other or have no effect.

A rule is a function of `Settings` that yields (field, message). `@rule` names the fields that must be correct before it
can judge: with a wrong one it would only report what follows from that mistake. `checking` runs the rules in order
and drops what a rule reports about a field that was wrong before.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any, NamedTuple

from phalanx.config.backends import BACKENDS
from phalanx.config.fields import HYBRID, TORCH_SHARDING, ZERO_SHARDING
from phalanx.config.option import url_problem
from phalanx.config.settings import FIELDS, Settings
from phalanx.config.strategies import AXES, ROWS

Mistakes = Iterator[tuple[str, str]]

STRATEGY = ("strategy", "backend", "zero_stage")
"""What `Settings.resolved_strategy` depends on."""
RANKS = ("num_workers", "num_nodes", "hosts")
"""What `Settings.total_ranks` depends on."""

FOLDERS = ("checkpoint_dir", "resume_from_checkpoint", "run_dir", "tensorboard")
_OF_COMPRESSORS = {"compression_ratio": ("topk", "randomk"), "powersgd_rank": ("powersgd",), "compression_warmup": ()}
"""The compressors that use a setting; empty: all but 'none'."""


def engine_rules(values: Mapping[str, Any]) -> list[ModuleType]:
    """Return the modules with the rules of the engines that settings, checked or not, choose."""
    asked = {name for name, field in FIELDS.items() if values.get(name) not in (None, field.default)}
    engines = [
        backend.engine
        for name, backend in BACKENDS.items()
        if name in (values.get("backend"), values.get("strategy")) or asked.intersection(backend.rules_for)
    ]
    return [importlib.import_module(f"{engine}.rules") for engine in engines if engine]


class Rule(NamedTuple):
    """A check, and the fields that must be correct before it runs."""

    check: Callable[[Settings], Mistakes]
    needs: frozenset[str]


def rule(*needs: str) -> Callable[[Callable[[Settings], Mistakes]], Rule]:
    """Make a rule of a function."""
    return lambda check: Rule(check, frozenset(needs))


@rule("zero_stage", "strategy", "backend", "sharding", *AXES, "pipeline_schedule")
def sharding(settings: Settings) -> Mistakes:
    """Report settings of sharding where nothing is sharded."""
    if settings.facts.shards_by_engine:
        return
    # Plain ddp replicates; with another axis it shards the data axis, unless the schedule keeps stages whole.
    unused = None
    if not settings.facts.shards:
        if settings.pipeline_parallel > 1 and settings.pipeline_schedule == "zero-bubble":
            unused = "pipeline_schedule = 'zero-bubble' keeps whole stages: leave one of them out."
        elif all(getattr(settings, axis) == 1 for axis in AXES):
            unused = f"strategy = {settings.resolved_strategy!r} replicates: write strategy = 'fsdp'."
    groups = settings.sharding.startswith("hybrid")
    for name in settings.changed("sharding", "shard_size", "wrap_class", "offload"):
        if unused is not None:
            yield settings.mistake(name, f" is for what is sharded, but {unused}")
        elif name == "shard_size" and not groups:
            yield (
                name,
                f"shard_size = {settings.shard_size} with sharding = {settings.sharding!r}: only sharding = 'hybrid' "
                "has groups.",
            )
        elif name == "sharding" and groups and settings.expert_parallel > 1:
            yield (
                name,
                f"sharding = {settings.sharding!r} with expert_parallel = {settings.expert_parallel}: the ranks that "
                "share the experts are the groups already: leave sharding and shard_size out.",
            )


@rule(*STRATEGY)
def zero_stage(settings: Settings) -> Mistakes:
    """Check zero_stage against the settings with the same meaning."""
    stage = settings.zero_stage
    if stage is None or settings.facts.shards_by_engine:
        return
    meant, strategy = ZERO_SHARDING[stage], settings.strategy
    if settings.facts.replicates and settings.facts.axes:  # one without axes is refused together with them
        yield (
            "zero_stage",
            f"zero_stage = {stage} shards, but strategy = {strategy!r} replicates: leave strategy out, or write "
            "'fsdp'.",
        )
    elif settings.sharding in TORCH_SHARDING.values() and settings.sharding not in (meant, HYBRID[meant]):
        yield (
            "zero_stage",
            f"zero_stage = {stage} means sharding = {meant!r}, but sharding = {settings.sharding!r} was given: leave "
            "one of them out.",
        )


@rule()
def pipeline_cuts(settings: Settings) -> Mistakes:
    """Check the list of modules."""
    cuts = settings.pipeline_cuts
    if isinstance(cuts, str) and not all(name.strip() for name in cuts.split(",")):
        yield (
            "pipeline_cuts",
            f"pipeline_cuts = {cuts!r}: expected names of modules, separated by commas, such as 'layers.4,layers.8', "
            "and one of them is empty.",
        )


@rule("pipeline_parallel", "pipeline_schedule", "activation_checkpointing")
def pipeline(settings: Settings) -> Mistakes:
    """Report what the schedule of a pipeline cannot run."""
    splits_backward = settings.pipeline_parallel > 1 and settings.pipeline_schedule == "zero-bubble"
    if splits_backward and settings.activation_checkpointing is not False:
        yield settings.mistake(
            "activation_checkpointing",
            " with pipeline_schedule = 'zero-bubble', which computes the gradient of every weight apart and would "
            "recompute the block for each: write pipeline_schedule = 'interleaved', or leave one of them out.",
        )


@rule("optimizer", "mixed_precision", *STRATEGY)
def optimizer(settings: Settings) -> Mistakes:
    """Report an optimizer of this package where an engine or server takes the steps."""
    facts, is_foreign = settings.facts, settings.framework != "torch"
    if settings.mixed_precision == "fp8" and is_foreign:
        yield settings.mistake(
            "mixed_precision", f" with {settings.backend}, which has no products in fp8: write bf16."
        )
    own = settings.optimizer in ("adamw8bit", "lars", "lamb")
    if own and (facts.shards_by_engine or facts.has_servers or is_foreign):
        engine = settings.backend if is_foreign else settings.resolved_strategy
        instead = "sgd" if settings.optimizer == "lars" else "adamw"
        yield settings.mistake("optimizer", f" with {engine}, which takes the steps itself: write {instead}.")
    elif settings.optimizer == "adamw8bit" and not facts.averages_gradients:
        why = (
            f" with {settings.resolved_strategy}, which averages states over ranks, and those of 8 bits have no average"
        )
        yield settings.mistake("optimizer", f"{why}: write adamw.")


@rule()
def companions(settings: Settings) -> Mistakes:
    """Report settings that have no effect without another one."""
    for name in settings.changed(*FIELDS):
        needed = FIELDS[name].metadata["needs"]
        if needed and not settings.changed(needed):
            yield settings.mistake(name, f" without {needed}: set {needed}, or leave {name} out.")


@rule("compression_ratio")
def compression_ratio(settings: Settings) -> Mistakes:
    """Check the upper limit."""
    if settings.compression_ratio > 1:
        yield settings.mistake("compression_ratio", ": a share of the gradient, above 0 and up to 1.")


@rule("compression")
def compressor_settings(settings: Settings) -> Mistakes:
    """Report settings that the chosen compressor does not use."""
    chosen = settings.compression
    for name in settings.changed(*_OF_COMPRESSORS):
        users = _OF_COMPRESSORS[name]
        if chosen in users or (not users and chosen != "none"):
            continue
        wanted = " or ".join(repr(user) for user in users) if users else "another one than 'none'"
        yield settings.mistake(name, f" with compression = {chosen!r}: it is for compression = {wanted}.")


@rule("compression", *STRATEGY, *AXES)
def compression(settings: Settings) -> Mistakes:
    """Compressors average whole gradients: report strategies that do not exchange those."""
    chosen, strategy = settings.compression, settings.resolved_strategy
    if chosen == "none":
        return
    axis = next((axis for axis in AXES if getattr(settings, axis) > 1), None)
    if axis is not None:
        why = (
            f"{axis} = {getattr(settings, axis)}: the data axis is sharded there, and whole gradients are never "
            "exchanged. Leave one of them out; strategy = 'ddp' and 'ring' take compression."
        )
    elif not settings.facts.compressors:
        why = f"strategy = {strategy!r}: only strategy = 'ddp' and 'ring' average gradients through it."
    elif chosen not in settings.facts.compressors:
        names = ", ".join(repr(name) for name in settings.facts.compressors if name != "none")
        why = f"strategy = {strategy!r}, which has {names} only."
    else:
        return
    yield "compression", f"compression = {chosen!r} with {why}"


@rule("strategy", "backend")
def strategy_settings(settings: Settings) -> Mistakes:
    """Report settings that the strategy does not use, and axes that it cannot have."""
    strategy = settings.resolved_strategy
    ignored = {name for engine in engine_rules(settings.to_dict()) for name in getattr(engine, "IGNORED", ())}
    for name in settings.changed(*FIELDS):
        users = FIELDS[name].metadata["strategies"]
        if users and strategy not in users and name not in ignored:  # an engine says what to write instead
            names = " or ".join(repr(user) for user in users)
            yield settings.mistake(
                name,
                f" with strategy = {strategy!r}, which does not follow it: write strategy = {names}, or leave {name} "
                "out.",
            )
    facts = settings.facts
    if facts.axes or facts.shards_by_engine or facts.has_servers or strategy not in ROWS:  # the last: when it is built
        return
    way = "write backend = 'pytorch-ddp'" if ROWS[strategy].backend else "leave strategy out, or write 'fsdp'"
    for name in settings.changed(*AXES, "zero_stage"):
        yield settings.mistake(
            name, f" does not go with strategy = {strategy!r}, whose ranks hold the whole model: {way}."
        )


@rule("strategy", "backend", "fixed_order", *RANKS)
def fixed_order(settings: Settings) -> Mistakes:
    """Check what an order of additions that all numbers of ranks share excludes."""
    if not settings.fixed_order or settings.resolved_strategy not in FIELDS["fixed_order"].metadata["strategies"]:
        return
    if settings.compression != "none":
        yield settings.mistake(
            "compression",
            " with fixed_order: what is rounded off depends on the number of ranks, so the bits would too. Leave one "
            "of them out.",
        )
    ranks = settings.total_ranks
    if ranks is not None and ranks.bit_count() != 1:
        yield (
            "fixed_order",
            f"fixed_order needs 1, 2, 4, 8, ... ranks, and num_workers = {ranks}: the order of additions is a tree "
            "that is halved with every doubling.",
        )


@rule("momentum")
def momentum(settings: Settings) -> Mistakes:
    """Check the upper limit."""
    if settings.optimizer in ("adam", "adamw", "lamb") and settings.momentum >= 1:
        yield settings.mistake("momentum", f": it is beta1 of {settings.optimizer}, and must be below 1.")
    elif settings.optimizer == "lars" and settings.momentum >= 1:
        yield settings.mistake("momentum", ": with lars it must be below 1.")


@rule("strategy", "backend", "server_mode")
def parameter_servers(settings: Settings) -> Mistakes:
    """Report settings of parameter servers without them, and what cannot be combined with them."""
    if not settings.facts.has_servers:
        for name in settings.changed("num_servers", "server_mode", "staleness"):
            yield settings.mistake(
                name, f" without parameter servers: write strategy = 'parameter-server', or leave {name} out."
            )
        return
    for axis in settings.changed(*AXES, "zero_stage"):
        yield settings.mistake(
            axis,
            " does not go with strategy = 'parameter-server', whose shards hold whole parameters for ranks that each "
            "run the whole model: leave one of them out.",
        )
    if settings.mixed_precision == "fp16":
        yield (
            "mixed_precision",
            "mixed_precision = 'fp16' needs loss scaling, which parameter servers do not have: write 'bf16', or leave "
            "it out.",
        )
    if settings.loss_weighting == "tokens" and settings.resolved_server_mode != "sync":
        yield (
            "loss_weighting",
            f"loss_weighting = 'tokens' synchronizes all ranks in every step, which server_mode = "
            f"{settings.resolved_server_mode!r} avoids: write 'samples', or server_mode = 'sync'.",
        )


@rule("strategy", "backend", "server_mode", "staleness")
def staleness(settings: Settings) -> Mistakes:
    """Check how many steps workers may be ahead of each other."""
    if not settings.facts.has_servers:
        return
    mode = settings.server_mode
    if mode in ("sync", "async") and settings.staleness is not None:
        meaning = "all workers step together" if mode == "sync" else "workers do not wait for each other"
        yield settings.mistake(
            "staleness",
            f" with server_mode = {mode!r}, in which {meaning}: write server_mode = 'bounded', or leave staleness out.",
        )
    if mode == "bounded" and settings.staleness is None:
        yield "server_mode", "server_mode = 'bounded' needs a bound: write staleness = 2, for example."


@rule("lora_rank", "lora_base", "tensor_parallel", "pipeline_parallel")
def split_adapters(settings: Settings) -> Mistakes:
    """Report LoRA together with tensor parallelism."""
    if settings.lora_rank is not None and settings.tensor_parallel > 1:
        yield settings.mistake(
            "lora_rank",
            f" with tensor_parallel = {settings.tensor_parallel}: adapters are not split over ranks. Use strategy = "
            "'fsdp', which shards the frozen model.",
        )
    if settings.lora_base is not None and settings.pipeline_parallel > 1:
        yield settings.mistake(
            "lora_base",
            f" with pipeline_parallel = {settings.pipeline_parallel}: a stage is sent weights, not their 4 bits. Use "
            "strategy = 'fsdp', which shards them.",
        )


@rule("backend")
def folders(settings: Settings) -> Mistakes:
    """Report URLs where a path is expected; checkpoints may be at URLs, except those of other frameworks."""
    for name in FOLDERS[2:] if settings.framework == "torch" else FOLDERS:
        wrong = url_problem(name, getattr(settings, name))
        if wrong is not None:
            yield name, wrong


@rule("warmup")
def warmup(settings: Settings) -> Mistakes:
    """Check that it is a share or a number of steps."""
    given = settings.warmup
    if isinstance(given, float) and given >= 1 and not given.is_integer():
        yield "warmup", f"warmup = {given}: a share of the run is below 1 (0.1), a number of steps is whole (500)."


@rule("num_workers", "num_nodes", "node_rank")
def rank_counts(settings: Settings) -> Mistakes:
    """Check the numbers of ranks and machines against each other."""
    total, nodes = settings.num_workers, settings.num_nodes
    if total is not None and total % nodes and settings.hosts is None:  # else each machine has its slots
        yield settings.mistake("num_workers", f" cannot be spread evenly over num_nodes = {nodes}.")
    if settings.node_rank is not None and settings.node_rank >= nodes:
        yield settings.mistake("node_rank", f": must be below num_nodes = {nodes}.")


@rule("device", "communication_backend", *STRATEGY)
def shared_gpus(settings: Settings) -> Mistakes:
    """Report share_gpus where ranks do not use nccl on GPUs."""
    if not settings.share_gpus:
        return
    if settings.device == "cpu":
        ranks = settings.total_ranks or 2
        yield (
            "share_gpus",
            f"share_gpus = True with device = 'cpu': leave it out, --num-workers {ranks} --device cpu is enough.",
        )
    elif settings.communication_backend not in (None, "nccl"):
        yield (
            "share_gpus",
            f"share_gpus = True with communication_backend = {settings.communication_backend!r}: it is for nccl; gloo "
            "needs nothing for several ranks on one GPU. Leave one of them out.",
        )
    elif settings.facts.shards_by_engine:
        strategy = settings.resolved_strategy
        yield (
            "share_gpus",
            f"share_gpus = True with strategy = {strategy!r}: not tried. The same stages on shared GPUs: leave it out "
            "and set zero_stage.",
        )


COMMON_RULES = (
    pipeline_cuts,
    pipeline,
    optimizer,
    companions,
    compression_ratio,
    compressor_settings,
    compression,
    strategy_settings,
    fixed_order,
    momentum,
    folders,
    warmup,
    shared_gpus,
)
