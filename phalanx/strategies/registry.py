"""Strategies loaded by name; the table with their facts is `phalanx/config/strategies.py`. No torch here."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from phalanx.config import DistributedConfig
from phalanx.config.backends import DEFAULT_STRATEGY
from phalanx.config.option import load_entry_point
from phalanx.config.strategies import ENTRY_POINTS, TABLE
from phalanx.errors import UsageError, unknown_name

if TYPE_CHECKING:
    from importlib.metadata import EntryPoints

    from phalanx.strategies.base import Strategy
    from phalanx.world.world import World

HOMES = {row.name: row.home for row in TABLE if row.home is not None}
_COMPOSED = "phalanx.strategies.compose:Composed"
_AUTO = "phalanx.strategies.ring_ddp:Auto"


def installed_strategies() -> EntryPoints:
    """Return the strategies that other installed packages bring."""
    from importlib.metadata import entry_points  # 30 ms to import

    return entry_points(group=ENTRY_POINTS)


def load_strategy(name: str) -> type[Strategy]:
    """Return a strategy's class, of this package or of another one."""
    if name in HOMES:
        return _load(HOMES[name])
    entries = {entry.name: entry for entry in installed_strategies()}
    if name not in entries:
        raise UsageError(unknown_name("strategy", name, [*HOMES, *entries]))
    loaded = load_entry_point(ENTRY_POINTS, name)
    from phalanx.strategies.base import Strategy

    if not (isinstance(loaded, type) and issubclass(loaded, Strategy)):
        raise UsageError(
            f"strategy = {name!r}: the entry point {name} = {entries[name].value} in the group {ENTRY_POINTS} is not a "
            "subclass of phalanx.strategies.base.Strategy"
        )
    return loaded


def _load(home: str) -> type[Strategy]:
    module, _, name = home.partition(":")
    kind: type[Strategy] = getattr(import_module(module), name)
    return kind


def build_strategy(config: DistributedConfig, world: World) -> Strategy:
    """Return the strategy that the config names."""
    return load_for(config)(config, world)


def load_for(config: DistributedConfig) -> type[Strategy]:
    """Return the class of the strategy that the config names, also of one that composes several axes."""
    name = config.resolved_strategy
    axes = (config.pipeline_parallel, config.context_parallel, config.tensor_parallel, config.expert_parallel)
    if max(axes) > 1:
        if name not in HOMES:
            raise UsageError(
                f"strategy = {name!r} does not compose with other axes: it is not one of {', '.join(HOMES)}",
                hint="Leave out tensor_parallel, pipeline_parallel, context_parallel and expert_parallel.",
            )
        return _load(_COMPOSED)
    if (
        name == DEFAULT_STRATEGY
        and config.strategy == "auto"
        and config.compression == "none"
        and not config.fixed_order
    ):
        return _load(_AUTO)
    return load_strategy(name)
