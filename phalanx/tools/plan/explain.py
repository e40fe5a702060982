"""Words for a plan: what binds the chosen layout, why the others lost, how much each assumption matters."""

from __future__ import annotations

from dataclasses import replace

from phalanx.tools.plan.cluster import Cluster, Gpu, Link
from phalanx.tools.plan.estimator import Estimator
from phalanx.tools.plan.layout import Goal, Layout
from phalanx.tools.plan.model import ModelShape, TracedShape
from phalanx.tools.plan.prediction import Estimate
from phalanx.tools.plan.search import HEADROOM, Found

PARTS = {
    "compute": "arithmetic and memory traffic of kernels",
    "recompute": "recomputation",
    "tensor_comm": "tensor-parallel communication",
    "context_comm": "context-parallel communication",
    "expert_comm": "expert-parallel communication",
    "pipeline_comm": "sends between pipeline stages",
    "data_comm": "data-parallel communication",
    "bubble": "pipeline bubble",
    "optimizer": "optimizer step",
    "offload": "copies to and from host memory",
    "variation": "wait for the slowest GPU",
}
"""Parts of a step's time, in words."""


def name(layout: Layout) -> str:
    """Return a short name of a layout: TP4 PP2 FSDP8, micro-batch 2, full recomputation."""
    axes = [f"{axis.upper()}{size}" for axis in ("tp", "pp", "cp", "ep") if (size := getattr(layout, axis)) > 1]
    if layout.stage == 0:
        axes += [f"DDP{layout.dp_replicate}"] if layout.dp_replicate > 1 else []
    else:
        kind = "FSDP" if layout.stage == 3 else f"ZeRO{layout.stage} "
        shards = layout.dp_shard * layout.cp
        axes.append(f"{kind}{shards}" + (f" x {layout.dp_replicate} copies" if layout.dp_replicate > 1 else ""))
    more = [f"micro-batch {layout.micro_batch}"]
    more += [layout.schedule] if layout.pp > 1 else []
    more += [f"{layout.recompute} recomputation"] if layout.recompute != "none" else []
    more += ["states in host memory"] if layout.offload != "none" else []
    more += [f"LoRA {layout.lora_rank}"] if layout.lora_rank else []
    return ", ".join([" ".join(axes) or "one GPU", *more])


def binding(best: Estimate, layout: Layout, found: Found, estimator: Estimator) -> str:
    """Return in words what limits the chosen layout."""
    faster = [(estimator.time(other).seconds, needed, other) for needed, other in found.too_large[:200]]
    faster = [entry for entry in faster if entry[0] < 0.98 * best.step_seconds]
    lost = {part: seconds for part, seconds in best.breakdown.items() if part not in ("compute", "variation")}
    part = max(lost, key=lambda key: lost[key])
    share = lost[part] / best.step_seconds
    if faster:
        seconds, needed, other = min(faster, key=lambda entry: entry[1])
        gain = 1 - seconds / best.step_seconds
        return (
            f"memory: {name(other)} would take {gain:.0%} less time, but needs {needed:.1f} GiB per GPU of "
            f"{HEADROOM * estimator.gpu.memory_gib:.1f} that can be planned with"
        )
    if share > 0.1:
        return f"{PARTS[part]}: {share:.0%} of the step"
    return f"{PARTS['compute']}: {best.breakdown['compute'] / best.step_seconds:.0%} of the step"


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
        return f"TP{layout.tp} crosses machines: +{grew[part] / best.step_seconds:.0%} exposed communication"
    words = PARTS[part]
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
        ("20% less bandwidth within a machine", gpu, _slower(machine.intra), machine.inter),
        ("20% less bandwidth between machines", gpu, machine.intra, _slower(machine.inter)),
    ]
    found = []
    for words, device, intra, inter in changes:
        estimator.machine = replace(machine, gpu=device, intra=intra, inter=inter)
        found.append((words, estimator.time(layout).seconds / base - 1))
    return found


def _slower(link: Link) -> Link:
    return replace(link, gbps=0.8 * link.gbps)


def batch_words(layout: Layout, goal: Goal) -> str:
    """Return the arithmetic of the global batch."""
    count, ranks = layout.accumulation(goal.global_batch), f"{layout.dp} data rank{'s' * (layout.dp > 1)}"
    kind = "pipeline " * (layout.pp > 1) or "accumulated " * (count > 1)
    batches = f"{count} {kind}micro-batch{'es' * (count > 1)}"
    return f"{goal.global_batch} samples = {layout.micro_batch} per micro-batch x {batches} x {ranks}"
