"""`phalanx simulate`: predict the effective training time of a job from failure rate, checkpoint and restart cost."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from phalanx.cli.flags import FlagParser
from phalanx.cli.json_output import add_json_flag, print_json
from phalanx.config.settings import parse_duration
from phalanx.errors import UsageError, unknown_name
from phalanx.observe.format import span, table
from phalanx.reliability.effective import Process, best_interval
from phalanx.reliability.rates import DAY, HOUR, PRESETS, FailureRate

_HELP = "Predict the effective training time of a job: the share of its wall time in which it makes progress."
_EPILOG = """Failures are independent of each other. Checkpoints come at Young and Daly's best interval unless
--interval is given. Examples:
  phalanx simulate --gpus 16384 --failures 419 --days 54 --checkpoint-cost 10s --restart-cost 5m
  phalanx simulate --gpus 1024,4096,16384 --failure-rate rsc-1 --in-place
  phalanx simulate --gpus 64 --mtbf 3d --checkpoint-cost 0.4s"""


def parser() -> FlagParser:
    """Return the parser of the verb."""
    usage = "phalanx simulate --gpus N[,N...] --mtbf TIME | --failure-rate RATE | --failures N --days N [options]"
    parser = FlagParser(prog="phalanx simulate", usage=usage, description=_HELP, epilog=_EPILOG)
    add = parser.add_argument
    add("--gpus", required=True, metavar="N[,N...]", help="GPUs of the job; several numbers: a row for each")
    add("--mtbf", metavar="TIME", help="mean time between failures of the whole job: 3h, 90m, 2d")
    names = ", ".join(PRESETS)
    add("--failure-rate", metavar="RATE", help=f"failures per GPU and day (0.00047), or a published rate: {names}")
    add("--failures", type=float, metavar="N", help="failures that were observed, in --days on --observed-gpus")
    add("--days", type=float, metavar="N", help="days in which they were observed")
    add("--observed-gpus", type=int, metavar="N", help="GPUs on which they were observed [that of --gpus]")
    add("--checkpoint-cost", default="10s", metavar="TIME", help="how long a checkpoint stalls training [10s]")
    add("--interval", metavar="TIME", help="work between two checkpoints [the best one]")
    add("--restart-cost", default="5m", metavar="TIME", help="from a failure to the first step after a restart [5m]")
    add("--in-place", action="store_true", help="show recovery in place, too: no restart, one step lost")
    add("--recovery-cost", default="10s", metavar="TIME", help="from a failure to the next step, in place [10s]")
    add("--step", default="10s", metavar="TIME", help="duration of a step, which recovery in place may lose [10s]")
    add("--duration", default="54d", metavar="TIME", help="wall time of the simulated runs [54d]")
    add("--trials", type=int, default=200, metavar="N", help="runs that are simulated [200]")
    add("--seed", type=int, default=0, metavar="N", help="seed of the simulation [0]")
    add_json_flag(parser, "the prediction")
    return parser


def run(arguments: Sequence[str]) -> int:
    """Run the verb."""
    namespace = parser().parse_all(arguments)
    sizes = _sizes(namespace.gpus)
    rate = _rate(namespace, sizes)
    if namespace.trials < 1:
        raise UsageError(f"--trials {namespace.trials}: simulate 1 run or more.")
    rows = [_predict(namespace, gpus, rate.mtbf(gpus)) for gpus in sizes]
    assumed = {name: _seconds(namespace, name) for name in ("checkpoint-cost", "restart-cost", "duration")}
    if namespace.in_place:
        assumed |= {name: _seconds(namespace, name) for name in ("recovery-cost", "step")}
    if namespace.json:
        named = {name.replace("-", "_"): value for name, value in assumed.items()}
        print_json({"failure_rate": rate.source, "assumed_seconds": named, "predictions": rows})
        return 0
    print(f"failures: {rate.source}")
    print("assumed:  " + ", ".join(f"{name.replace('-', ' ')} {span(value)}" for name, value in assumed.items()))
    print(f"\n{table(_table(rows))}\n")
    runs = f"{namespace.trials} simulated runs, seed {namespace.seed}"
    print(f"effective: in closed form; simulated: mean of {runs}, and where 90% of them are")
    return 0


def _predict(namespace: argparse.Namespace, gpus: int, mtbf: float) -> dict[str, Any]:
    """Return the predictions for one size, with a restart and in place."""
    cost, restart = _seconds(namespace, "checkpoint-cost"), _seconds(namespace, "restart-cost")
    for name, seconds in (("a checkpoint", cost), ("a restart", restart)):
        if seconds >= mtbf:
            raise UsageError(
                f"a job on {gpus:,} GPUs fails every {span(mtbf)}, and {name} takes {span(seconds)}: it would "
                "hardly ever train",
                hint=f"Use fewer GPUs, or make {name} cheaper.",
            )
    interval = best_interval(cost, mtbf) if namespace.interval is None else _seconds(namespace, "interval")
    ways = {"restart": Process(mtbf, cost, interval, restart)}
    if namespace.in_place:
        step = _seconds(namespace, "step")
        if step >= mtbf:
            raise UsageError(f"--step {namespace.step}: a step takes longer than the job runs between two failures.")
        ways["in place"] = Process(mtbf, cost, interval, _seconds(namespace, "recovery-cost"), lost=step)
    trials = (_seconds(namespace, "duration"), namespace.trials, namespace.seed)
    found = {name: {"shares": way.expected(), "simulated": way.simulate(*trials)} for name, way in ways.items()}
    return {"gpus": gpus, "mtbf_hours": mtbf / HOUR, "interval_seconds": interval, "ways": found}


def _table(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    head = ("GPUs", "a failure every", "checkpoint every", "recovery", "effective", "simulated")
    lines: list[tuple[str, ...]] = [(*head, "checkpoints", "lost work", "recovering")]
    for row in rows:
        for way, found in row["ways"].items():
            shares, runs = found["shares"], found["simulated"]
            begin = (f"{row['gpus']:,}", span(row["mtbf_hours"] * HOUR), span(row["interval_seconds"]), way)
            simulated = f"{runs['mean']:.1%} ({runs['p5']:.1%} to {runs['p95']:.1%})"
            rest = tuple(f"{shares[name]:.2%}" for name in ("checkpoint", "lost", "recovery"))
            lines.append((*begin, f"{shares['productive']:.1%}", simulated, *rest))
    return lines


def _sizes(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise UsageError(f"--gpus {text}: expected a number of GPUs, or several: 1024,4096,16384.")
    return [int(part) for part in parts]


def _rate(namespace: argparse.Namespace, sizes: list[int]) -> FailureRate:
    given = [name for name in ("mtbf", "failure_rate", "failures") if getattr(namespace, name) is not None]
    if len(given) != 1:
        what = "none of them was given" if not given else f"{len(given)} of them were given"
        raise UsageError(
            f"the failure rate comes from --mtbf, --failure-rate or --failures with --days, and {what}",
            hint="For example: --failures 419 --days 54, or --failure-rate rsc-1",
        )
    if namespace.mtbf is not None:
        mtbf = _seconds(namespace, "mtbf")
        if len(sizes) > 1:
            rate = DAY / mtbf / sizes[0]
            hint = f"If it is that of {sizes[0]:,}: --failure-rate {rate:.3g} (failures per GPU and day)."
            raise UsageError("--mtbf is that of one job, and several numbers of GPUs are given", hint=hint)
        return FailureRate(((sizes[0], mtbf),), f"every {span(mtbf)} on {sizes[0]:,} GPUs, as given")
    if namespace.failure_rate is not None:
        return _named_rate(namespace.failure_rate)
    if len(sizes) > 1 and namespace.observed_gpus is None:
        raise UsageError("--failures was observed on how many GPUs?", hint=f"Add --observed-gpus {max(sizes)}.")
    if namespace.days is None:
        raise UsageError("--failures without --days", hint=f"--failures {namespace.failures:g} --days 54, for example")
    gpus = sizes[0] if namespace.observed_gpus is None else namespace.observed_gpus
    for flag, value in (("failures", namespace.failures), ("days", namespace.days), ("observed-gpus", gpus)):
        if not 0 < value < float("inf"):
            raise UsageError(f"--{flag} {value:g}: must be greater than 0.")
    source = f"{namespace.failures:g} in {namespace.days:g} days on {gpus:,} GPUs, as given"
    return FailureRate.observed(namespace.failures, namespace.days, gpus, source)


def _named_rate(text: str) -> FailureRate:
    if text in PRESETS:
        return PRESETS[text]
    try:
        rate = float(text)
    except ValueError:
        raise UsageError(
            unknown_name("failure rate", text, PRESETS), hint="Or give failures per GPU and day, such as 0.00047."
        ) from None
    if not 0 < rate < float("inf"):
        raise UsageError(f"--failure-rate {text}: must be greater than 0, in failures per GPU and day.")
    return FailureRate.per_gpu_day(rate, f"{rate:g} per GPU and day, as given")


def _seconds(namespace: argparse.Namespace, flag: str) -> float:
    text = getattr(namespace, flag.replace("-", "_"))
    try:
        return parse_duration(text)
    except ValueError:
        raise UsageError(
            f"--{flag} {text}: expected a duration above 0, such as 30s, 5m, 3h, 2d, or seconds (90)."
        ) from None
