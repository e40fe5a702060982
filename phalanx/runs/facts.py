"""Everything by which runs may differ: settings, model, data, versions and results, as one flat table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from phalanx.config.sources import read_settings
from phalanx.runs.stored import StoredRun

_OF_ONE_PLACE = ("run_dir", "node_rank", "rdzv_endpoint")
"""Settings that differ between any two runs."""


def facts(run: StoredRun) -> dict[str, Any]:
    """Return what describes a run, by name."""
    config = run.path / "config.toml"
    found: dict[str, Any] = dict(read_settings(config)) if config.is_file() else {}
    found = {name: value for name, value in found.items() if name not in _OF_ONE_PLACE}
    recipe, record = run.recipe, run.record
    if recipe is not None:
        found |= _flat(recipe.model, "model") | _flat(recipe.data, "data")
    if record is not None:
        target = record.script or record.module
        found |= {"script": target, "arguments": " ".join(record.arguments), "git commit": record.commit}
        found |= {"phalanx": record.phalanx, "python": record.python}
    found |= {name: run.begun.get(name) for name in ("parameters", "world_size", "device", "precision")}
    found |= {"status": run.status, "steps": run.steps[0]}
    found |= {name: run.ended.get(name) for name in ("total_time", "throughput")}
    return found | {f"best {name}": value for name, value in run.ended.get("best", {}).items()}


def differences(runs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the facts whose values differ, with the value of each run; None where a run lacks one."""
    names = dict.fromkeys(name for each in runs for name in each)
    rows = {name: [each.get(name) for each in runs] for name in names}
    return {name: values for name, values in rows.items() if any(value != values[0] for value in values)}


def _flat(table: Any, prefix: str) -> dict[str, Any]:
    if not isinstance(table, dict):
        return {prefix: table}
    return {name: value for key, inner in table.items() for name, value in _flat(inner, f"{prefix}.{key}").items()}
