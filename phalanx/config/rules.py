"""Rules between settings that need more than a row of the table in `pairs`.

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
    changed = {name for name, field in FIELDS.items() if values.get(name) not in (None, field.default)}
    engines = [
        backend.engine
        for name, backend in BACKENDS.items()
        if name in (values.get("backend"), values.get("strategy")) or changed.intersection(backend.rules_for)
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


@rule("optimizer", *STRATEGY)
def optimizer(settings: Settings) -> Mistakes:
    """Report an optimizer of this package where an engine or server takes the steps."""
    facts, is_foreign = settings.facts, settings.framework != "torch"
    is_ours = settings.optimizer in ("adamw8bit", "lars", "lamb")
    if is_ours and (facts.shards_by_engine or facts.has_servers or is_foreign):
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


@rule("compression")
def compressor_settings(settings: Settings) -> Mistakes:
    """Report settings that the chosen compressor does not use."""
    chosen = settings.compression
    for name in settings.changed(*_OF_COMPRESSORS):
        users = _OF_COMPRESSORS[name]
        if chosen in users or (not users and chosen != "none"):
            continue
        compressors = " or ".join(repr(user) for user in users) if users else "another one than 'none'"
        yield settings.mistake(name, f" with compression = {chosen!r}: it is for compression = {compressors}.")


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


@rule("backend")
def folders(settings: Settings) -> Mistakes:
    """Report URLs where a path is expected; checkpoints may be at URLs, except those of other frameworks."""
    for name in FOLDERS[2:] if settings.framework == "torch" else FOLDERS:
        wrong = url_problem(name, getattr(settings, name))
        if wrong is not None:
            yield name, wrong


@rule("num_workers", "num_nodes", "node_rank")
def rank_counts(settings: Settings) -> Mistakes:
    """Check the numbers of ranks and nodes against each other."""
    total, nodes = settings.num_workers, settings.num_nodes
    if total is not None and total % nodes and settings.hosts is None:  # else each node has its slots
        yield settings.mistake("num_workers", f" cannot be spread evenly over num_nodes = {nodes}.")
    if settings.node_rank is not None and settings.node_rank >= nodes:
        yield settings.mistake("node_rank", f": must be below num_nodes = {nodes}.")


@rule("keep_best", "early_stopping", "eval_every")
def watched_metrics(settings: Settings) -> Mistakes:
    """Check the names of metrics, and that they are measured."""
    for name in ("keep_best", "early_stopping"):
        metric = getattr(settings, name)
        if metric is True:  # keep_best follows early_stopping, which is checked too
            continue
        try:
            watched = settings.best_metric if name == "keep_best" else settings.stopping_metric
        except ValueError as error:
            yield settings.mistake(name, f": {error}")
            continue
        if isinstance(metric, str) and watched and watched.name.startswith("val/") and settings.evaluate_every is None:
            yield settings.mistake(
                name, f" with eval_every = 0, which never measures it: leave eval_every out, or {name}."
            )


@rule("profile", "max_steps", *RANKS)
def profile(settings: Settings) -> Mistakes:
    """Check the words, and that the run has these steps and ranks where that is known."""
    try:
        profiling = settings.profiling
    except ValueError as error:
        yield settings.mistake("profile", f": {error}")
        return
    if profiling is None:
        return
    if settings.max_steps is not None and profiling.first > settings.max_steps:
        yield settings.mistake(
            "profile",
            f" records from step {profiling.first} on, but the run has {settings.max_steps} steps (max_steps): write "
            f"steps=1:{settings.max_steps}, for example.",
        )
    ranks = settings.total_ranks
    if ranks is not None and profiling.ranks and profiling.ranks[-1] >= ranks:
        yield settings.mistake(
            "profile", f": there is no rank {profiling.ranks[-1]}; the {ranks} ranks of this run are 0 to {ranks - 1}."
        )


_TEXTS = {
    "checkpoint_frequency": "checkpoint_every",
    "eval_every": "evaluate_every",
    "max_time": "max_seconds",
    "metrics_port": "metrics_address",
    "activation_checkpointing": "recompute",
}
"""Settings that are read from text, and the property that reads one: its ValueError says what to write."""


def _text_rule(name: str) -> Rule:
    """Return the rule that a setting's text can be read."""

    def check(settings: Settings) -> Mistakes:
        try:
            getattr(settings, _TEXTS[name])
        except ValueError as error:
            yield settings.mistake(name, f": {error}")

    return Rule(check, frozenset({name}))


COMMON_RULES = (
    pipeline_cuts,
    optimizer,
    companions,
    compressor_settings,
    compression,
    strategy_settings,
    folders,
    rank_counts,
    *map(_text_rule, _TEXTS),
    watched_metrics,
    profile,
)
