"""`make_plan`: the search, and everything that explains its answer."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from phalanx.errors import UsageError
from phalanx.reliability import DAY, HOUR, Process, best_interval
from phalanx.reliability import PRESETS as FAILURE_RATES
from phalanx.tools.plan import presets
from phalanx.tools.plan.cluster import FITTED, Cluster, Gpu, Link
from phalanx.tools.plan.estimator import Estimator, check_modes, check_values
from phalanx.tools.plan.kernels import FP8
from phalanx.tools.plan.model import ModelShape, TracedShape
from phalanx.tools.plan.plans import TIME_PARTS, Candidate, Estimate, Goal, Layout, Plan, budget_of, repeated_share
from phalanx.tools.plan.rules import USUAL, accepted, length, settings_of, usual_rate
from phalanx.tools.plan.search import HEADROOM, Candidates, Constraints, host_gib, search, simplest


def binding(best: Estimate, layout: Layout, candidates: Candidates, estimator: Estimator) -> str:
    """Return in words what limits the chosen layout."""
    faster = [(estimator.time(other).seconds, needed, other) for needed, other in candidates.too_large[:200]]
    faster = [entry for entry in faster if entry[0] < 0.98 * best.step_seconds]
    lost = {part: seconds for part, seconds in best.breakdown.items() if part not in ("compute", "variation")}
    part = max(lost, key=lambda key: lost[key])
    share = lost[part] / best.step_seconds
    if faster:
        seconds, needed, other = min(faster, key=lambda entry: entry[1])
        gain = 1 - seconds / best.step_seconds
        return (
            f"memory: {other.title} would take {gain:.0%} less time, but needs {needed:.1f} GiB per GPU of "
            f"{HEADROOM * estimator.gpu.memory_gib:.1f} that can be planned with"
        )
    if share > 0.1:
        return f"{TIME_PARTS[part]}: {share:.0%} of the step"
    return f"{TIME_PARTS['compute']}: {best.breakdown['compute'] / best.step_seconds:.0%} of the step"


def why_lost(layout: Layout, estimate: Estimate, best: Estimate, cluster: Cluster) -> str:
    """Return why a layout is not the chosen one: the part of its step that grew most."""
    if not estimate.fits:
        return f"needs {estimate.needed_gib:.1f} GiB per GPU of {estimate.memory_limit_gib:.1f}"
    slower = estimate.step_seconds / best.step_seconds - 1
    grew = {part: estimate.breakdown[part] - best.breakdown[part] for part in estimate.breakdown}
    part = max(grew, key=lambda key: grew[key])
    if slower <= 0.0005:
        faster = f"{-slower:.1%} faster" if slower < -0.0005 else "as fast"
        return f"{faster}, which is too little for a layout with more to set up"
    if part == "tensor_comm" and layout.tp > cluster.gpus_per_node:
        return f"TP{layout.tp} crosses nodes: +{grew[part] / best.step_seconds:.0%} exposed communication"
    words = TIME_PARTS[part]
    if part == "compute" and layout.pp > 1:
        words = "uneven stages (the last has the output layer)"
    return f"+{slower:.1%} step time: +{grew[part] / best.step_seconds:.0%} {words}"


def sensitivity(
    model: ModelShape | TracedShape, cluster: Cluster, layout: Layout, goal: Goal
) -> list[tuple[str, float]]:
    """Return by how much the step time changes when an assumption is wrong by a fifth (a tenth for kernels)."""
    estimator = Estimator(model, cluster, goal)
    machine, base = estimator.machine, estimator.time(layout).seconds
    gpu = machine.gpu
    changes: list[tuple[str, Gpu, Link, Link]] = [
        ("10% slower matrix products", replace(gpu, matmul=0.9 * gpu.matmul), machine.intra, machine.inter),
        ("10% less memory bandwidth", replace(gpu, bandwidth=0.9 * gpu.bandwidth), machine.intra, machine.inter),
        ("20% less bandwidth within a node", gpu, _slower(machine.intra), machine.inter),
        ("20% less bandwidth between nodes", gpu, machine.intra, _slower(machine.inter)),
    ]
    rows = []
    for words, device, intra, inter in changes:
        estimator.machine = replace(machine, gpu=device, intra=intra, inter=inter)
        rows.append((words, estimator.time(layout).seconds / base - 1))
    return rows


def _slower(link: Link) -> Link:
    return replace(link, gbps=0.8 * link.gbps)


def batch_words(layout: Layout, goal: Goal) -> str:
    """Return the arithmetic of the global batch."""
    count, ranks = layout.accumulation(goal.global_batch), f"{layout.dp} data rank{'s' * (layout.dp > 1)}"
    kind = "pipeline " * (layout.pp > 1) or "accumulated " * (count > 1)
    batches = f"{count} {kind}micro-batch{'es' * (count > 1)}"
    return f"{goal.global_batch} samples = {layout.micro_batch} per micro-batch x {batches} x {ranks}"


def doubt_words(model: ModelShape | TracedShape, goal: Goal) -> str:
    """Return that no published training has had such a batch, or an empty text."""
    is_language = isinstance(model, ModelShape) and not model.patches
    size, (largest, unit, source) = goal.global_batch * (goal.seq_len if is_language else 1), LARGEST[is_language]
    if size <= largest:
        return ""
    return f"[implausible: {size:,} {unit} per step; {source} trained with {largest:,}. Plan for fewer GPUs]"


LARGEST = {True: (2**24, "tokens", "Llama 3 405B"), False: (2**16, "samples", "ResNet-50 on 4,096 TPUs")}
"""Large batches that were published: arXiv 2407.21783 for language models, arXiv 2011.03641 for others."""
RUNNERS_UP = 5
MAX_GPUS, MAX_BATCH = 10**6, 10**8
"""Larger values are typos, and the search would not finish."""
FAILURES = "llama-3"
RESTART_SECONDS = 300.0
HOST_COPY_GBPS = 20.0
"""GB/s per GPU of copying states to pinned host memory, which is how long an asynchronous checkpoint stalls."""
SHOWN_REASONS = 8


def make_plan(
    model: str | Path | ModelShape | TracedShape,
    cluster: str | Cluster,
    goal: Goal | None = None,
    limits: Constraints | None = None,
) -> Plan:
    """Return the fastest layout that fits, with the runners-up and reasons; `best` is None where nothing fits."""
    shape, machines = presets.resolve(model, cluster)
    limits = limits or Constraints()
    _check_cluster(machines)
    goal = replace(goal or default_goal(shape, machines), reduce_bytes=4)  # train adds gradients up in fp32
    check_values(shape, machines, goal)
    check_modes(machines, goal, has_budget=limits.memory or budget_of(limits.recompute or "") is not None)
    if goal.global_batch > MAX_BATCH:
        raise UsageError(f"a global batch of {goal.global_batch}: plan for {MAX_BATCH:,} or less.")
    candidates = search(shape, machines, goal, limits)
    layout = simplest(candidates)
    common: dict[str, Any] = {
        "model": shape,
        "cluster": machines,
        "goal": goal,
        "searched": candidates.searched,
        "refused": tuple(candidates.refused.most_common(SHOWN_REASONS)),
        "assumptions": assumptions(shape, machines, goal, layout),
    }
    if layout is None:
        return Plan(best=None, smallest_change=smallest_change(shape, machines, goal, limits, candidates), **common)
    estimator = Estimator(shape, machines, goal)
    best = estimator(layout)
    accepted(layout, goal, machines)  # what is printed as a command must start
    reliability = reliability_of(estimator, layout)
    spent = cost(best, reliability, shape, machines, goal)
    return Plan(
        best=Candidate(layout, best),
        runners_up=_runners_up(candidates, layout, best, estimator),
        binding=binding(best, layout, candidates, estimator),
        batch=batch_words(layout, goal),
        doubt=doubt_words(shape, goal),
        cost=spent,
        reliability=reliability,
        sensitivity=tuple(sensitivity(shape, machines, layout, goal)),
        settings={
            **settings_of(layout, goal, machines),
            **usual_rate(shape, goal, layout),
            **length(spent, reliability, best),
        },
        **common,
    )


def default_goal(model: ModelShape | TracedShape, cluster: Cluster) -> Goal:
    """Return a usual batch, sequence length and precision where none is given."""
    gpu = presets.parts_of(cluster)[0]
    precision = next((name for name in ("bf16", "fp16") if name in gpu.tflops), "fp32")
    if isinstance(model, TracedShape) or model.patches:
        seq_len = model.patches + 1 if isinstance(model, ModelShape) else 1
        return Goal(global_batch=64 * cluster.gpus, seq_len=seq_len, precision=precision)
    seq_len = presets.train_names(model.name).seq_len or model.positions or 2048
    tokens = next(tokens for size, tokens, _ in USUAL if model.parameters < size)
    doubled = max(0, round(math.log2(tokens / seq_len / cluster.gpus)))
    return Goal(global_batch=cluster.gpus * 2**doubled, seq_len=seq_len, precision=precision)


def _check_cluster(cluster: Cluster) -> None:
    if cluster.gpus < 1:
        raise UsageError(f"gpus = {cluster.gpus}: plan for 1 GPU or more.")
    if cluster.gpus > MAX_GPUS:
        raise UsageError(f"gpus = {cluster.gpus}: plan for {MAX_GPUS:,} GPUs or less.")
    if cluster.gpus > cluster.gpus_per_node and cluster.gpus % cluster.gpus_per_node:
        fewer = cluster.gpus // cluster.gpus_per_node * cluster.gpus_per_node
        raise UsageError(
            f"{cluster.gpus} GPUs are not whole nodes of {cluster.gpus_per_node}",
            hint=f"Write --gpus {fewer} or {fewer + cluster.gpus_per_node}, or set --gpus-per-node.",
        )


def _runners_up(candidates: Candidates, chosen: Layout, best: Estimate, estimator: Estimator) -> tuple[Candidate, ...]:
    """Return the best layout of each of the next five combinations of axes and sharding."""
    kinds, others = {_kind(chosen)}, list[Candidate]()
    for _, layout in candidates.fitting:
        if _kind(layout) in kinds or len(others) == RUNNERS_UP:
            continue
        kinds.add(_kind(layout))
        estimate = estimator(layout)
        reason = why_lost(layout, estimate, best, estimator.cluster)
        others.append(Candidate(layout, estimate, reason))
    return tuple(others)


def _kind(layout: Layout) -> tuple[int, ...]:
    return (layout.tp, layout.pp, layout.cp, layout.ep, layout.dp_shard, layout.stage)


def cost(
    best: Estimate, reliability: dict[str, float], model: ModelShape | TracedShape, cluster: Cluster, goal: Goal
) -> dict[str, float]:
    """Return steps, days, GPU hours and money of the whole training, with the time that failures cost."""
    tokens = goal.tokens
    per_step = goal.global_batch * (goal.seq_len if isinstance(model, ModelShape) and not model.patches else 1)
    if tokens is None and goal.samples is not None:
        tokens = goal.samples * (goal.epochs or 1) * per_step / goal.global_batch
    if tokens is None:
        return {}
    steps = tokens / per_step
    seconds = steps * best.step_seconds / reliability["effective"]
    totals = {"steps": steps, "days": seconds / DAY, "gpu_hours": seconds / HOUR * cluster.gpus}
    price = cluster.price_per_gpu_hour
    return totals if price is None else {**totals, "money": totals["gpu_hours"] * price}


def reliability_of(estimator: Estimator, layout: Layout) -> dict[str, float]:
    """Return failures per day, the best interval between checkpoints, and the effective training time."""
    mtbf = FAILURE_RATES[FAILURES].mtbf(estimator.cluster.gpus)
    rank = next(iter(estimator.memory(replace(layout, offload="none")).values()))  # states are saved wherever they are
    written = (rank["parameters"] + rank["optimizer"]) * 2**30
    if layout.stage == 0:
        written /= layout.dp_replicate  # replicas share the writing
    stall = written / (HOST_COPY_GBPS * 1e9)
    interval = best_interval(max(stall, 1e-3), mtbf)
    shares = Process(mtbf, stall, interval, RESTART_SECONDS).expected()
    return {
        "failures_per_day": DAY / mtbf,
        "checkpoint_seconds": stall,
        "checkpoint_interval_seconds": interval,
        "effective": shares["productive"],
    }


def assumptions(
    model: ModelShape | TracedShape, cluster: Cluster, goal: Goal, layout: Layout | None
) -> tuple[tuple[str, str, str], ...]:
    """Return what the numbers rest on, with its origin."""
    gpu, intra, inter = presets.parts_of(cluster)
    peak = gpu.tflops.get(goal.precision) or max(gpu.tflops.values())
    origin = FITTED.get(gpu.name.split("-")[0], "assumed: --calibrate")
    fitted = "measured with it" if "measured:" in gpu.name else origin
    rows = [
        ("GPU", f"{gpu.name}: {peak:g} TFLOP/s, {gpu.memory_gbps:g} GB/s, {gpu.memory_gib:g} GiB", gpu.source),
        ("kernels", f"products at {gpu.matmul:.0%} of peak, memory at {gpu.bandwidth:.0%}", fitted),
        ("within a node", f"{intra.name}: {intra.gbps:g} GB/s per GPU", intra.source),
        ("between nodes", f"{inter.name}: {inter.gbps:.3g} GB/s per GPU", inter.source),
        ("failures", f"one per {FAILURE_RATES[FAILURES].mtbf(1) / DAY / 365:.1f} GPU-years", "Llama 3, table 5"),
    ]
    if goal.precision == "fp8":
        words = f"products of whole linear layers where it pays, at {FP8 * gpu.matmul:.0%} of peak"
        rows.append(("fp8", words, "fitted to other libraries, docs/planning.md"))
    if layout is not None and budget_of(layout.recompute) is not None:
        words = f"{repeated_share(layout.recompute):.0%} of a layer's forward pass is repeated"
        rows.append((layout.recompute, words, "assumed, docs/planning.md"))
    if learned := presets.measured("factors").get(gpu.name):
        words = f"kernels x {learned['kernels']:g}, links x {learned['links']:g}, memory {learned['memory_gib']:+g} GiB"
        rows.append(("learned", words, f"--calibrate-from {learned['run']}, {learned['date']}"))
    if layout is not None and layout.offload == "cpu":
        words = f"{host_gib(model, cluster):,.0f} of {cluster.host_memory_gib:,.0f} GiB per node for states"
        rows.append(("host memory", words, cluster.instance or "assumed"))
    if layout is not None and (rate := usual_rate(model, goal, layout)):
        origin = "Brown et al. 2020" if layout.lora_rank is None else "Dettmers et al. 2023"
        rows.append(("learning rate", f"{rate['learning_rate']:g}", f"usual, {origin}; train's --learning-rate"))
    if cluster.price_per_gpu_hour is not None:
        rows.append(("price", f"{cluster.price_per_gpu_hour:.2f} per GPU and hour", cluster.instance or "as given"))
    return tuple(rows)


def smallest_change(
    model: ModelShape | TracedShape, cluster: Cluster, goal: Goal, limits: Constraints, candidates: Candidates
) -> tuple[str, ...]:
    """Return the changes that would let a layout fit, each found by another search."""
    batch = -(-goal.global_batch // cluster.gpus) * cluster.gpus
    if not candidates.too_large and search(model, cluster, replace(goal, global_batch=batch), limits).fitting:
        return (f"a global batch of {batch} instead of {goal.global_batch}",)
    changes = []
    if candidates.too_large:
        needed, layout = candidates.too_large[0]
        have = presets.parts_of(cluster)[0].memory_gib
        changes.append(f"the smallest layout, {layout.title}, needs {needed:.1f} GiB per GPU of {have:.1f}")
    open_limits = replace(limits, micro_batch=None, recompute=None, zero_stage=None, strategy=None)
    if open_limits != limits and search(model, cluster, goal, open_limits).fitting:
        changes.append("leave the constraints out: another layout fits")
    if (count := _enough_gpus(model, cluster, goal, limits)) is not None:
        changes.append(f"{count} GPUs instead of {cluster.gpus}")
    changes += _other_gpus(model, cluster, goal, limits)
    if isinstance(model, ModelShape) and limits.lora_rank is None:
        if search(model, cluster, goal, replace(limits, lora_rank=16)).fitting:
            changes.append("LoRA adapters instead of all weights: --lora-rank 16")
        shorter = goal.seq_len // 2
        while shorter >= 128 and not search(model, cluster, replace(goal, seq_len=shorter), limits).fitting:
            shorter //= 2
        if shorter >= 128 and not model.patches:
            changes.append(f"sequences of {shorter} tokens instead of {goal.seq_len}")
    if len(changes) == bool(candidates.too_large):
        largest = replace(cluster, gpu="b200", intra_node=None, inter_node=None)
        count = _enough_gpus(model, largest, goal, limits)
        both = "" if count is None else f"; {count} x b200 are"
        changes.append(f"more GPUs, a larger GPU, LoRA or shorter sequences alone are not enough{both}")
    return tuple(changes)


def _enough_gpus(model: ModelShape | TracedShape, cluster: Cluster, goal: Goal, limits: Constraints) -> int | None:
    """Return the fewest GPUs, by doubling those of a cluster, on which a layout fits."""
    for more in (2, 4, 8, 16, 32, 64, 128):
        wider = replace(cluster, gpus=cluster.gpus * more)
        wider = replace(wider, gpus_per_node=max(cluster.gpus_per_node, min(8, wider.gpus)))
        bigger = replace(goal, global_batch=max(goal.global_batch, wider.gpus))
        if search(model, wider, bigger, limits).fitting:
            return wider.gpus
    return None


def _other_gpus(model: ModelShape | TracedShape, cluster: Cluster, goal: Goal, limits: Constraints) -> list[str]:
    """Return the smallest GPU type with more memory on which a layout fits."""
    have = presets.parts_of(cluster)[0]
    larger = [presets.gpu(name) for name in ("a100-40", "l40s", "h100", "h200", "b200")]
    for gpu in sorted((gpu for gpu in larger if gpu.memory_gib > have.memory_gib), key=lambda gpu: gpu.memory_gib):
        if search(model, replace(cluster, gpu=gpu, intra_node=None), goal, limits).fitting:
            return [f"{gpu.name} ({gpu.memory_gib:g} GiB) instead of {have.name}"]
    return []
