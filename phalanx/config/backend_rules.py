"""Rules of backends: which settings and strategies go with each, and the rules that engines bring.

The rules of an engine are in its folder, `rules.py`: `RULES`, and optionally `unused` with `instead`, `IGNORED`,
`reconcile` with `FILLS_FROM`, and `FOR_SCRIPTS` (settings by which it starts the ranks of a script). They are loaded
where its backend, its strategy or a setting of it is chosen.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from phalanx.config.backends import BACKENDS
from phalanx.config.rows import Backend
from phalanx.config.rules import RANKS, Mistakes, engine_rules, rule
from phalanx.config.settings import FIELDS, Host, Settings, parse_hosts
from phalanx.config.strategies import ROWS, strategies_that


def missing_engine(values: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return which package of an engine is not installed, and how to install it, by settings, checked or not."""
    row = BACKENDS.get(str(values.get("backend")))
    if row is not None and row.package is not None and importlib.util.find_spec(row.package.module) is None:
        named = f"backend = {values['backend']!r} needs {row.package.title}"
        return f"{named}, which is not installed", row.package.install
    missing = [engine.missing(values) for engine in engine_rules(values) if hasattr(engine, "missing")]
    return next(filter(None, missing), None)


@rule("backend", "strategy")
def backend_settings(settings: Settings) -> Mistakes:
    """Report settings that the backend does not use."""
    for name in settings.changed(*FIELDS):
        users = _users(name)
        if users and settings.backend not in users:
            names = " or ".join(repr(user) for user in users)
            yield settings.mistake(
                name,
                f" with backend = {settings.backend!r}, which does not follow it: write backend = {names}, or leave "
                f"{name} out.",
            )


def _users(name: str) -> tuple[str, ...]:
    """Return the only backends that use a setting; empty: all."""
    declared = FIELDS[name].metadata["backends"]
    return (*declared, *(backend for backend, row in BACKENDS.items() if name in row.follows)) if declared else ()


@rule("backend", "strategy", "node_rank", *RANKS)
def host_slots(settings: Settings) -> Mistakes:
    """Check the list of nodes, and that it has room for the ranks."""
    if settings.hosts is None or settings.backend not in _users("hosts"):
        return
    try:
        hosts = parse_hosts(settings.hosts)
    except ValueError as error:
        yield settings.mistake("hosts", f": {error}")
        return
    slots, ranks = sum(host.slots for host in hosts), settings.total_ranks
    if ranks is not None and ranks > slots:
        yield settings.mistake("hosts", f" has {slots} slots, but {ranks} ranks were asked for.")
    if not BACKENDS[settings.backend].resizes:  # else the engine starts the ranks of all nodes
        yield from _ssh_hosts(settings, hosts)


def _ssh_hosts(settings: Settings, hosts: tuple[Host, ...]) -> Mistakes:
    """Check what one launcher per node requires: ranks for each, and a list that alone numbers the nodes."""
    total, are_equal = settings.total_ranks, len({host.slots for host in hosts}) == 1
    if are_equal and (total or len(hosts)) % len(hosts):
        yield settings.mistake("hosts", f": {total} ranks cannot be spread evenly over {len(hosts)} nodes.")
    if not are_equal and total != sum(host.slots for host in hosts):
        text = f": {total} ranks do not fill nodes with different slots: change the slots, or leave the number out."
        yield settings.mistake("hosts", text)
    if not are_equal and settings.resolved_sharding.startswith("hybrid") and settings.shard_size is None:
        yield settings.mistake("hosts", " has nodes with different slots, so hybrid sharding needs shard_size.")
    # A launcher that was started for one of the nodes knows its number and where the others are.
    rank_rule = () if settings.rdzv_endpoint else (("node_rank", None),)
    for name, says in (("num_nodes", 1), *rank_rule):
        if getattr(settings, name) not in (says, len(hosts) if name == "num_nodes" else says):
            yield settings.mistake(name, f" with hosts = {settings.hosts!r}, which says it: leave {name} out.")


@rule("backend", "strategy", "min_workers", *RANKS)
def min_workers(settings: Settings) -> Mistakes:
    """Check the smallest number of ranks against the largest."""
    least, most = settings.min_workers, settings.total_ranks
    if least is None:
        return
    if most is None:
        yield "min_workers", f"min_workers = {least} without num_workers: set the largest number of ranks, too."
    elif least > most:
        pair = f"{least}:{most} (min_workers = {least}, num_workers = {most})"
        yield "min_workers", f"num_workers = {pair}: the smaller one comes first. Write num_workers = {most}:{least}."
    elif not _row(settings).resizes and least < most and settings.recovery != "resize":
        yield settings.mistake(
            "min_workers",
            f" with strategy = {settings.resolved_strategy!r}: it cannot go on with fewer ranks. Strategies that can: "
            f"{', '.join(strategies_that('recovery', 'resize'))}. With max_restarts a lost rank "
            "is replaced, or all ranks start again from the last checkpoint.",
        )


@rule("backend", "strategy")
def strategy_of_backend(settings: Settings) -> Mistakes:
    """Check that backend and strategy go together."""
    if settings.strategy == "auto":
        return
    allowed = _row(settings).strategies
    if allowed and settings.strategy not in allowed:
        names = ", ".join(repr(name) for name in allowed)
        yield settings.mistake(
            "strategy",
            f" does not go with backend = {settings.backend!r}, which has {names}: leave strategy out, or write "
            "backend = 'pytorch-ddp'.",
        )
    needed = _needed_backend(settings.strategy)
    if needed and settings.backend != needed:
        yield settings.mistake("strategy", f" with backend = {settings.backend!r}: write backend = {needed!r}.")


def _row(settings: Settings) -> Backend:
    """Return the facts of a backend; one of another package has no others than its name."""
    return BACKENDS.get(settings.backend) or Backend(settings.backend, settings.resolved_strategy)


def _needed_backend(strategy: str) -> str:
    """Return the backend that a strategy needs; empty where torch has it."""
    if strategy in ROWS:
        return ROWS[strategy].backend
    return next((name for name, backend in BACKENDS.items() if strategy in backend.strategies), "")


BACKEND_RULES = (backend_settings, host_slots, min_workers, strategy_of_backend)
"""The last one comes last: with a wrong strategy the others could not judge."""
