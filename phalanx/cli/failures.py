"""`phalanx plan --failures RATE`: the effective training time of a job, and how often to save, by its failure rate."""

from __future__ import annotations

import argparse
import re
from typing import Any

from phalanx.cli.json_output import print_json
from phalanx.config.settings import parse_duration
from phalanx.errors import UsageError, unknown_name
from phalanx.observe.format import span, table
from phalanx.reliability import HOUR, PRESETS, FailureRate, Process, best_interval

COSTS = {"checkpoint_cost": "10s", "restart_cost": "5m", "recovery_cost": "10s"}
"""What a checkpoint, a restart and a recovery in place cost where nothing is given."""
_OBSERVED = re.compile(r"(\d+(?:\.\d+)?)/(\d+(?:\.\d+)?)d(?:/(\d+))?")
_STEP = 10.0
"""Seconds of a step, which recovery in place may lose."""


def add_flags(group: argparse._ArgumentGroup) -> None:
    """Add the flags of this answer to those of `phalanx plan`."""
    names = ", ".join(PRESETS)
    group.add_argument(
        "--failures",
        metavar="RATE",
        help="effective training time of --gpus N[,N...] at this failure rate, without a model: 3h (between two "
        f"failures of the job), 0.00047 (per GPU and day), 419/54d (seen on them), 419/54d/16384, or {names}",
    )
    for name, default in COSTS.items():
        what = name.removesuffix("_cost")
        group.add_argument(f"--{what}-cost", metavar="TIME", help=f"--failures: what a {what} costs [{default}]")


def report_failures(namespace: argparse.Namespace) -> int:
    """Print the shares of the wall time for each number of GPUs, with a restart and with recovery in place."""
    sizes = _sizes(namespace.gpus)
    rate = read_rate(namespace.failures, sizes)
    costs = {name: _seconds(name, getattr(namespace, name) or default) for name, default in COSTS.items()}
    rows = [_predict(gpus, rate.mtbf(gpus), costs) for gpus in sizes]
    if namespace.json:
        print_json({"failure_rate": rate.source, "assumed_seconds": costs, "predictions": rows})
        return 0
    print(f"failures: {rate.source}")
    print("assumed:  " + ", ".join(f"{name.replace('_', ' ')} {span(value)}" for name, value in costs.items()))
    print(f"\n{table(_table(rows))}")
    return 0


def _predict(gpus: int, mtbf: float, costs: dict[str, float]) -> dict[str, Any]:
    """Return the predictions for one size, with a restart and in place."""
    for name in ("checkpoint_cost", "restart_cost"):
        if costs[name] >= mtbf:
            what = name.removesuffix("_cost")
            raise UsageError(
                f"a job on {gpus:,} GPUs fails every {span(mtbf)}, and a {what} takes {span(costs[name])}: it would "
                "hardly ever train",
                hint=f"Use fewer GPUs, or make a {what} cheaper.",
            )
    cost = costs["checkpoint_cost"]
    interval = best_interval(cost, mtbf)
    ways = {"restart": Process(mtbf, cost, interval, costs["restart_cost"])}
    if mtbf > _STEP:
        ways["in place"] = Process(mtbf, cost, interval, costs["recovery_cost"], lost=_STEP)
    shares = {name: way.expected() for name, way in ways.items()}
    return {"gpus": gpus, "mtbf_hours": mtbf / HOUR, "interval_seconds": interval, "ways": shares}


def _table(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    head = ("GPUs", "a failure every", "checkpoint every", "recovery", "effective")
    lines: list[tuple[str, ...]] = [(*head, "checkpoints", "lost work", "recovering")]
    for row in rows:
        for name, shares in row["ways"].items():
            size = (f"{row['gpus']:,}", span(row["mtbf_hours"] * HOUR), span(row["interval_seconds"]))
            parts = (f"{shares[part]:.1%}" for part in ("productive", "checkpoint", "lost", "recovery"))
            lines.append((*(size if name == "restart" else ("", "", "")), name, *parts))
    return lines


def _sizes(text: str | None) -> list[int]:
    parts = [part.strip() for part in (text or "").split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise UsageError(f"--gpus {text or ''}: expected a number of GPUs, or several: 1024,4096,16384.")
    return [int(part) for part in parts]


def read_rate(text: str, sizes: list[int]) -> FailureRate:
    """Return the failure rate that a text means; `sizes`: GPUs of the jobs it is for."""
    if text in PRESETS:
        return PRESETS[text]
    if seen := _OBSERVED.fullmatch(text):
        failures, days = float(seen[1]), float(seen[2])
        if seen[3] is None and len(sizes) > 1:
            raise UsageError(
                f"--failures {text} was observed on how many GPUs?", hint=f"Write: --failures {text}/{max(sizes)}"
            )
        gpus = int(seen[3] or sizes[0])
        if not (failures and days and gpus):
            raise UsageError(f"--failures {text}: each number must be greater than 0.")
        return FailureRate.observed(failures, days, gpus, f"{failures:g} in {days:g} days on {gpus:,} GPUs, as given")
    if re.fullmatch(r"[\d.e+-]+", text):
        return _per_gpu_day(text)
    try:
        mtbf = parse_duration(text)
    except ValueError:
        hint = "Or write 3h, 0.00047 (failures per GPU and day), or 419/54d."
        raise UsageError(unknown_name("failure rate", text, PRESETS), hint=hint) from None
    if len(sizes) > 1:
        hint = f"If it is that of {sizes[0]:,}: --failures {86400 / mtbf / sizes[0]:.3g} (per GPU and day)."
        raise UsageError(f"--failures {text} is the time of one job, and several numbers of GPUs are given", hint=hint)
    return FailureRate(((sizes[0], mtbf),), f"every {span(mtbf)} on {sizes[0]:,} GPUs, as given")


def _per_gpu_day(text: str) -> FailureRate:
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 0 < rate < float("inf"):
        raise UsageError(f"--failures {text}: must be greater than 0, in failures per GPU and day.")
    return FailureRate.per_gpu_day(rate, f"{rate:g} per GPU and day, as given")


def _seconds(name: str, text: str) -> float:
    try:
        return parse_duration(text)
    except ValueError:
        flag = name.replace("_", "-")
        raise UsageError(
            f"--{flag} {text}: expected a duration above 0, such as 30s, 5m, 3h, 2d, or seconds (90)."
        ) from None
