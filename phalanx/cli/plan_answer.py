"""What `phalanx plan` answers: the plan of the flags, questions beside it, failures of a job, factors of a run."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from phalanx.cli.json_output import print_json
from phalanx.cli.report import compare_stored
from phalanx.config.fields import OPTIMIZERS
from phalanx.config.settings import parse_duration
from phalanx.errors import EXIT_USAGE, UsageError, unknown_name
from phalanx.observe.format import span, table
from phalanx.observe.goodput import account
from phalanx.reliability import HOUR, PRESETS, FailureRate, Process, best_interval
from phalanx.run.stored import RUNS, find_run
from phalanx.tools.plan import presets
from phalanx.tools.plan.cluster import Cluster
from phalanx.tools.plan.learning import keep_factors
from phalanx.tools.plan.model import ModelShape, TracedShape
from phalanx.tools.plan.planner import default_goal
from phalanx.tools.plan.plans import PRECISIONS, Goal, Plan
from phalanx.tools.plan.search import Constraints
from phalanx.tools.plan.text import count, plan_data, plan_text, rounded
from phalanx.tools.plan.what_if import PlanCase, answer

_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
_DEFAULT_TOKENS = 20
"""Tokens per parameter of a training that gives none (Hoffmann et al., Training Compute-Optimal LLMs)."""
_LIMITS = tuple(field.name for field in fields(Constraints))
_POSITIVE = ("gpus", "nodes", "gpus_per_node", "inter_node_gbps", "price", "oversubscription", "epochs", "budget")
_OBSERVED = re.compile(r"(\d+(?:\.\d+)?)/(\d+(?:\.\d+)?)d(?:/(\d+))?")
_STEP = 10.0
"""Seconds of a step, which recovery in place may lose."""


def answer_plan(namespace: argparse.Namespace) -> int:
    """Make the plan that the flags ask for, and print it."""
    namespace.gpus = _number_of_gpus(namespace.gpus)
    case, notes = read_case(namespace)
    plan = case.plan()
    plan = replace(plan, assumptions=(*plan.assumptions, *notes))
    _show(namespace, case, plan)
    return 0 if plan.fits else EXIT_USAGE


def _number_of_gpus(text: str | None) -> int | None:
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"--gpus {text}: expected a whole number; several are for --failures.") from None


def calibrate_from(name: str) -> int:
    """Keep how far a run was from its prediction."""
    stored = find_run(name, RUNS)
    comparison = compare_stored(stored, account(stored.events()))
    if comparison is None:
        raise UsageError(
            f"the events of {stored.name} do not say enough to predict it",
            hint="The planner describes transformers: reference models, and Hugging Face models of known families.",
        )
    factors = keep_factors(comparison, stored.name)
    words = (
        f"kernels x {factors['kernels']:g}, links x {factors['links']:g} in time, memory {factors['memory_gib']:+g} GiB"
    )
    print(
        f"{comparison.gpu}: {words}, from {stored.name}; kept in {presets.measured_file()}, and applied to later plans"
    )
    return 0


def _show(namespace: argparse.Namespace, case: PlanCase, plan: Plan) -> None:
    subject = namespace.plan_model
    answers = [answer(question, case, plan) for question in namespace.what_if]
    if namespace.json:
        answered = {"what_if": [reply.data() for reply in answers]} if answers else {}
        print_json({**plan_data(plan, subject), **answered})
        return
    print("\n\n".join([plan_text(plan, subject), *limits_words(plan), *(reply.text() for reply in answers)]))


def limits_words(plan: Plan) -> list[str]:
    """Return whether the deadline and the budget are kept."""

    lines, goal = [], plan.goal
    for limit, spent, form, instead in (
        (goal.deadline_hours, plan.cost.get("days", 0.0) * 24, "{} h of the deadline of {} h", "--fast, or more GPUs"),
        (goal.budget, plan.cost.get("money"), "${} of the budget of ${}", "--what-if fewest-gpus, --fast"),
    ):
        if limit is not None and spent and plan.fits:
            missed = f"missed by {spent / limit - 1:.0%}: try --what-if gpu, {instead}"
            verdict = "kept" if spent <= limit else missed
            lines.append(f"{form.format(rounded(spent), rounded(limit))}: {verdict}")
    return lines


def read_case(namespace: argparse.Namespace) -> tuple[PlanCase, list[tuple[str, str, str]]]:
    """Return the job that the flags describe, and what was assumed where they say nothing."""
    if namespace.plan_model is None:
        raise UsageError("no model was named", hint="Write: phalanx plan llama-7b --gpus 8 --gpu h100")
    for name in _POSITIVE:
        value = getattr(namespace, name)
        if value is not None and not 0 < value < math.inf:
            raise UsageError(f"--{name.replace('_', '-')} {value:g}: must be greater than 0.")
    cluster = _cluster(namespace)
    shape = presets.model(namespace.plan_model, namespace.input)
    limits = Constraints(**{name: getattr(namespace, name) for name in _LIMITS})
    if limits.recompute is not None:  # what is given beside a mode wins
        limits = replace(limits, memory=False)
    for name in _LIMITS:
        value = getattr(limits, name)
        if isinstance(value, int) and name != "memory" and value < (0 if name == "zero_stage" else 1):
            raise UsageError(f"--{name.replace('_', '-')} {value}: must be 1 or more.")
    goal, notes = _goal(namespace, shape, cluster)
    return PlanCase(shape, cluster, goal, limits), notes


def _cluster(namespace: argparse.Namespace) -> Cluster:
    links = {"intra_node": namespace.intra_node, "inter_node": namespace.inter_node}
    links = {name: presets.link(value).name for name, value in links.items() if value is not None}
    others = {name: getattr(namespace, name) for name in ("gpus_per_node", "inter_node_gbps", "oversubscription")}
    changes: dict[str, Any] = {**links, **{name: value for name, value in others.items() if value is not None}}
    if namespace.price is not None:
        changes |= {"price_per_gpu_hour": namespace.price, "instance": None}
    if namespace.instance is not None:
        return _of_instances(namespace, changes)
    if namespace.gpu is None or (namespace.gpus is None and namespace.nodes is None):
        raise UsageError(
            "the cluster is not known: --gpu and --gpus, or --instance",
            hint="Write --gpus 64 --gpu h100, or --instance p5.48xlarge --nodes 8.",
        )
    device = presets.gpu(namespace.gpu).name
    usual = presets.usual_instance(device, namespace.prices)
    per_node = changes.pop("gpus_per_node", None) or (8 if usual is None else usual.gpus)
    gpus = namespace.gpus if namespace.gpus is not None else namespace.nodes * per_node
    if namespace.nodes is not None and namespace.gpus_per_node is None and gpus % namespace.nodes == 0:
        per_node = gpus // namespace.nodes
    _check_count(namespace, gpus, per_node, "")
    cluster = Cluster(gpu=device, gpus=gpus, gpus_per_node=min(per_node, gpus), name=f"{gpus} x {device}")
    if usual is not None and usual.price is not None:
        cluster = replace(cluster, price_per_gpu_hour=usual.price / usual.gpus, host_memory_gib=usual.host_memory_gib)
        cluster = replace(cluster, instance=f"{usual.name}, {usual.source}, {usual.date}")
    return replace(cluster, **changes)


def _of_instances(namespace: argparse.Namespace, changes: dict[str, Any]) -> Cluster:
    if namespace.gpu is not None:
        raise UsageError(
            "--gpu and --instance were both given", hint="An instance type has its own GPUs: leave --gpu out."
        )
    instance = presets.instance(namespace.instance, namespace.prices)
    nodes = namespace.nodes or math.ceil((namespace.gpus or instance.gpus) / instance.gpus)
    _check_count(namespace, namespace.gpus or nodes * instance.gpus, instance.gpus, f" of {instance.name}")
    cluster = presets.of_instances(instance.name, nodes, namespace.prices)
    gpus = namespace.gpus or cluster.gpus
    cluster = replace(
        cluster,
        gpus=gpus,
        gpus_per_node=min(instance.gpus, gpus),
        instance=f"{instance.name}, {instance.source}, {instance.date}",
    )
    return replace(cluster, **changes)


def _check_count(namespace: argparse.Namespace, gpus: int, per_node: int, kind: str) -> None:
    """Refuse numbers of nodes and GPUs that contradict each other."""
    if namespace.nodes not in (None, math.ceil(gpus / per_node)):
        raise UsageError(
            f"--nodes {namespace.nodes} --gpus {gpus}: {namespace.nodes} nodes{kind} have "
            f"{namespace.nodes * per_node} GPUs, {per_node} in each",
            hint=f"Leave --gpus out, or write --nodes {math.ceil(gpus / per_node)}.",
        )


def _goal(
    namespace: argparse.Namespace, shape: ModelShape | TracedShape, cluster: Cluster
) -> tuple[Goal, list[tuple[str, str, str]]]:
    notes: list[tuple[str, str, str]] = []
    goal = default_goal(shape, cluster)
    tflops = presets.parts_of(cluster)[0].tflops
    best = "fp8" if namespace.fast else next(name for name in ("bf16", "fp16", "fp32") if name in tflops)
    precision = namespace.precision or best
    optimizer = namespace.optimizer or ("adamw8bit" if namespace.memory else goal.optimizer)
    for name, value, allowed in (("precision", precision, PRECISIONS), ("optimizer", optimizer, OPTIMIZERS)):
        if value not in allowed:
            raise UsageError(unknown_name(name, value, allowed))
    if precision not in tflops and precision != "fp8":  # which the planner refuses with what to write
        raise UsageError(f"{cluster.gpu} has no {precision}. It has: {', '.join(tflops)}.")
    if namespace.seq_len is not None:
        per_step = goal.global_batch * goal.seq_len
        goal = replace(goal, seq_len=_positive("seq-len", namespace.seq_len))
        goal = replace(goal, global_batch=max(cluster.gpus, per_step // goal.seq_len // cluster.gpus * cluster.gpus))
    if namespace.global_batch is None:
        rounded_up = cluster.gpus.bit_count() > 1
        usual = f"rounded to a multiple of {cluster.gpus}" if rounded_up else "usual for this size"
        notes.append(("global batch", f"{goal.global_batch} samples", f"{usual}; --global-batch sets it"))
    else:
        goal = replace(goal, global_batch=_positive("global-batch", namespace.global_batch))
    tokens = _amount("tokens", namespace.tokens)
    samples = _amount("samples", namespace.samples)
    if namespace.epochs is not None and samples is None:
        raise UsageError("--epochs without --samples", hint="Write --samples 1.28M --epochs 90.")
    is_language = isinstance(shape, ModelShape) and not shape.patches
    if tokens is None and samples is None and is_language and namespace.lora_rank is None:
        tokens = float(_DEFAULT_TOKENS * shape.parameters)
        notes.append(("tokens", count(tokens), "20 per parameter (Hoffmann et al. 2022); --tokens sets it"))
    deadline = None if namespace.deadline is None else _duration(namespace.deadline) / 3600
    return replace(
        goal,
        precision=precision,
        optimizer=optimizer,
        tokens=tokens,
        samples=samples,
        epochs=namespace.epochs,
        deadline_hours=deadline,
        budget=namespace.budget,
        compile=namespace.compile or namespace.fast or namespace.memory,
    ), notes


def _positive(flag: str, value: int) -> int:
    if value < 1:
        raise UsageError(f"--{flag} {value}: must be 1 or more.")
    return value


def _duration(text: str) -> float:
    try:
        return parse_duration(text)
    except ValueError:
        raise UsageError(f"--deadline {text}: expected a duration above 0, such as 30d, 72h, or seconds.") from None


def _amount(flag: str, text: str | None) -> float | None:
    """Return a number such as 1T, 300B, 1.28M or 5e9."""
    if text is None:
        return None
    match = re.fullmatch(r"([0-9.]+(?:e\+?\d+)?)\s*([kmbgt]?)", text.strip().lower().replace(",", "").replace("_", ""))
    try:
        value = float(match[1]) * _UNITS[match[2]] if match else 0.0
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise UsageError(f"--{flag} {text}: expected a number above 0, such as 1T, 300B, 1.28M or 5e9.")
    return value


def report_failures(namespace: argparse.Namespace, usual: Mapping[str, str]) -> int:
    """Print the shares of the wall time for each number of GPUs, with a restart and with recovery in place.

    `usual`: what a checkpoint, a restart and a recovery cost where nothing is given.
    """
    sizes = _sizes(namespace.gpus)
    rate = read_rate(namespace.failures, sizes)
    costs = {name: _seconds(name, getattr(namespace, name) or default) for name, default in usual.items()}
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
            event = name.removesuffix("_cost")
            raise UsageError(
                f"a job on {gpus:,} GPUs fails every {span(mtbf)}, and a {event} takes {span(costs[name])}: it would "
                "hardly ever train",
                hint=f"Use fewer GPUs, or make a {event} cheaper.",
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
    if match := _OBSERVED.fullmatch(text):
        failures, days = float(match[1]), float(match[2])
        if match[3] is None and len(sizes) > 1:
            raise UsageError(
                f"--failures {text} was observed on how many GPUs?", hint=f"Write: --failures {text}/{max(sizes)}"
            )
        gpus = int(match[3] or sizes[0])
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
