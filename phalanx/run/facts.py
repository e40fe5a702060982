"""Everything by which runs may differ: settings, model, data, versions and results, as one flat table."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from phalanx.config.settings import FIELDS
from phalanx.config.sources import read_settings
from phalanx.run.record import CHANGES, PACKAGES
from phalanx.run.stored import StoredRun

_OF_ONE_PLACE = ("run_dir", "node_rank", "rdzv_endpoint")
"""Settings that differ between any two runs."""


def defaults() -> dict[str, Any]:
    """Return the settings that have a default."""
    values = {name: field.default for name, field in FIELDS.items() if name not in _OF_ONE_PLACE}
    return {name: value for name, value in values.items() if value is not None}


def choices(run: StoredRun) -> dict[str, Any]:
    """Return what was chosen for a run, by name: its settings, model and data."""
    config, recipe = run.path / "config.toml", (run.record.recipe if run.record is not None else None) or {}
    chosen: dict[str, Any] = dict(read_settings(config)) if config.is_file() else {}
    chosen = {name: value for name, value in chosen.items() if name not in _OF_ONE_PLACE}
    return chosen | _flat(recipe.get("model", {}), "model") | _flat(recipe.get("data", {}), "data")


def changed(chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of a run's choices differs from the defaults; None for a default that was unset."""
    usual = defaults()
    unset = {name: None for name in usual if name not in chosen}
    return {**{name: value for name, value in chosen.items() if value != usual.get(name)}, **unset} if chosen else {}


def facts(run: StoredRun) -> dict[str, Any]:
    """Return what describes a run, by name."""
    values, record = choices(run), run.record
    if record is not None:
        target = record.script or record.module
        values |= {"script": target, "arguments": " ".join(record.arguments), "git commit": record.commit}
        values |= {"phalanx": record.phalanx, "python": record.python, **record.environment}
    values |= {name: run.begun.get(name) for name in ("parameters", "world_size", "device", "precision")}
    values |= {"status": run.status, "steps": run.steps[0]}
    values |= {name: run.ended.get(name) for name in ("total_time", "throughput")}
    return values | {f"best {name}": value for name, value in run.ended.get("best", {}).items()}


def surroundings(run: StoredRun) -> dict[str, Any]:
    """Return what else a run's result may depend on: its packages, and the changes to the code since the commit."""
    packages, changes = run.path / PACKAGES, run.path / CHANGES
    lines = packages.read_text(encoding="utf-8").split() if packages.is_file() else []
    values: dict[str, Any] = {
        f"package {name}": version for name, _, version in (line.partition("==") for line in lines)
    }
    if changes.is_file():
        values["changes"] = hashlib.sha256(changes.read_bytes()).hexdigest()[:8]
    return values


def differences(runs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the facts whose values differ, with the value of each run; None where a run lacks one."""
    names = dict.fromkeys(name for run in runs for name in run)
    rows = {name: [run.get(name) for run in runs] for name in names}
    return {name: values for name, values in rows.items() if any(value != values[0] for value in values)}


def _flat(table: Any, prefix: str) -> dict[str, Any]:
    if not isinstance(table, dict):
        return {prefix: table}
    return {name: value for key, inner in table.items() for name, value in _flat(inner, f"{prefix}.{key}").items()}
