"""The rows of the tables of backends and strategies. An engine declares its own in its folder, `declaration.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple


class Package(NamedTuple):
    """What an engine imports, and how to install it."""

    module: str
    title: str
    install: str


class Backend(NamedTuple):
    """A launcher and a strategy."""

    launcher: str
    strategy: str
    strategy_of_many: str = ""
    """The default for several ranks, where it is another one."""
    strategies: tuple[str, ...] = ()
    """The only strategies that it has; empty: all of torch."""
    engine: str = ""
    """A package with the engine (`engine.py`) and its rules (`rules.py`); empty for torch alone."""
    package: Package | None = None
    replaces_ranks: bool = False
    """Phalanx's launcher replaces ranks in place."""
    resizes: bool = False
    """The engine itself goes on with fewer ranks, whatever the strategy."""
    framework: str = "torch"
    """What its models are written in."""
    trainer: str = ""
    """What trains the models of another framework than torch, for messages."""
    model_packages: tuple[str, ...] = ()
    """The packages that such models' classes are of."""
    follows: tuple[str, ...] = ()
    """Settings for torch's own backends that it follows too."""
    rules_for: tuple[str, ...] = ()
    """Settings that its rules are asked about, whichever backend is chosen."""
    options: type[Any] | None = None
    """Its own settings: a class of fields, each an `option`."""
    variable: str = ""
    """An environment variable that its launcher sets in ranks."""
    script_imports: str = ""
    """A module that a user's script imports to use it."""


@dataclass(frozen=True)
class StrategyFacts:
    """What a strategy does with weights and gradients."""

    replicates: bool = False
    """Every rank holds the whole model and takes each step together with the others, with equal weights: replicas can
    be compared, and a slow rank holds up the others."""
    averages_gradients: bool = False
    """Gradients are averaged in every step, so the ranks hold the run's weights after it, whole or as shards."""
    shards: bool = False
    """Parameters are sharded over the ranks by the settings `sharding`, `shard_size` and `offload`."""
    shards_by_engine: bool = False
    """Parameters are sharded by an engine with its own settings; its weights are in float32."""
    drifts: bool = False
    """Ranks take their own steps between two averages: the result is not that of one process."""
    has_servers: bool = False
    """Server processes hold the parameters and the optimizer's states."""
    needs_contiguous: bool = False
    """Weights must be contiguous in memory, so not in the layout of `channels_last`."""
    recovery: Literal["resize", "replace", "restart"] = "restart"
    """After a lost rank: go on with another number of ranks too, replace it in place, or start all ranks again."""
    compressors: tuple[str, ...] = ()
    """Values of `compression` that it can send gradients with."""
    axes: tuple[str, ...] = ()
    """The axes that it can be combined with."""


@dataclass(frozen=True)
class StrategyRow:
    """One strategy: its flags, what it does, when to choose it, what it combines with, and its class."""

    name: str
    flag: str
    summary: str
    choose: str
    combines: str
    home: str | None = None
    """`module:Class`; None for an axis, or for a strategy under another name or of another framework."""
    facts: StrategyFacts = StrategyFacts()
    backend: str = ""
    """The backend that it needs."""
    implied_by: tuple[str, ...] = ()
    """Settings that choose it where no strategy is named."""
    settings: tuple[str, ...] = ()
    """Settings that concern it, besides those of its flags and those that only it follows."""
