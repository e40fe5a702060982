"""Which strategy to choose, in one screen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from phalanx.observe.format import table
from phalanx.tools.plan import presets
from phalanx.tools.plan.planner import default_goal
from phalanx.tools.plan.plans import Layout, Plan
from phalanx.tools.plan.search import Constraints, search
from phalanx.tools.plan.text import gpu_name
from phalanx.tools.plan.what_if import PlanCase

_TREE = """\
Do weights, gradients, optimizer states and activations of one copy fit in one GPU?
|-- yes: DDP. Every GPU has a copy; the simplest, and usually the fastest.
`-- no: train only small adapters of a pretrained model?
    |-- yes: FSDP + LoRA. The frozen weights are sharded; gradients and states are small.
    `-- no: do the states, divided by all GPUs, fit, and does the network carry all weights each step?
        |-- yes: the least sharding that fits: ZeRO-1 (optimizer states), ZeRO-2 (gradients), FSDP (ZeRO-3, parameters).
        |        Add --offload cpu where memory is still short.
        `-- no:  is it a transformer (repeated blocks)?
            |-- yes: 3D. Tensor parallel inside a node, pipeline between nodes, data parallel around both.
            `-- no:  pipeline parallel, where the model can be cut into stages; else a larger GPU."""
_TABLE = [
    ("Strategy", "Best for", "Memory efficiency", "Communication"),
    ("DDP", "models of which a copy fits", "low: all states per GPU", "all-reduce of gradients, once per step"),
    (
        "FSDP / ZeRO-3",
        "transformers that need sharding",
        "high: states / GPUs",
        "all-gather of weights, reduce-scatter",
    ),
    ("ZeRO-1, ZeRO-2", "states too large, weights not", "medium to high", "reduce-scatter, all-gather once per step"),
    ("+ offload to CPU", "few GPUs, much host memory", "very high: states in RAM", "copies over PCIe in every step"),
    (
        "Tensor parallel",
        "wide layers, inside a node",
        "medium: layers / ranks",
        "two all-reduces per layer and pass",
    ),
    (
        "Pipeline parallel",
        "deep models, slow networks",
        "medium: layers / stages",
        "activations to neighbours; idle bubble",
    ),
    ("Context parallel", "long sequences", "activations / ranks", "keys and values around a ring, per layer"),
    ("FSDP + LoRA", "fine-tuning large models", "very high", "as FSDP, with tiny gradients"),
]
CASES: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("ResNet-50", "resnet50", "8xa100-40", {}),
    ("GPT-2 1.5B, batch 64", "gpt2-1.5b", "4xv100-16", {"global_batch": 64}),
    ("LLaMA-7B", "llama-7b", "8xa100-40", {}),
    ("LLaMA-7B, small GPUs", "llama-7b", "8xv100-16", {}),
    ("LLaMA-70B, no InfiniBand", "llama-70b", "8xa2-highgpu-8g", {"global_batch": 1024, "seq_len": 4096}),
    ("fine-tune LLaMA-70B", "llama-70b", "8xa100-80", {"lora_rank": 16, "global_batch": 64, "seq_len": 2048}),
)
"""The scenarios of the matrix: words, model, cluster, and changes of the usual goal and constraints."""


def guide() -> str:
    """Return the decision tree, the table of strategies, and the matrix that the planner computes."""
    rows = [("Scenario", "Recommended strategy", "Why")]
    for title, model, machines, changes in CASES:
        case = case_of(model, machines, changes)
        plan = case.plan()
        words = f"{title}, {plan.cluster.gpus} x {gpu_name(plan)}"
        if plan.best is None:
            rows.append((words, "nothing fits", "; ".join(plan.smallest_change[:1])))
        else:
            rows.append((words, strategy_words(plan.best.layout), why(case, plan)))
    matrix = "Planned now, by `phalanx plan MODEL --gpus N --gpu NAME`:"
    return "\n\n".join([_TREE, table(_TABLE), f"{matrix}\n{table(rows)}"])


def case_of(model: str, machines: str, changes: dict[str, Any]) -> PlanCase:
    """Return a job on a cluster by name, with the model's usual goal but for the changes."""
    shape, cluster = presets.model(model), presets.cluster(machines)
    of_goal = {name: value for name, value in changes.items() if name != "lora_rank"}
    tflops = presets.parts_of(cluster)[0].tflops
    goal = replace(default_goal(shape, cluster), precision="bf16" if "bf16" in tflops else "fp16", **of_goal)
    return PlanCase(shape, cluster, goal, Constraints(lora_rank=changes.get("lora_rank")))


def strategy_words(layout: Layout) -> str:
    """Return a layout by the name of its strategy."""
    sizes = {"tensor": layout.tp, "pipeline": layout.pp, "context": layout.cp}
    axes = [name for name, size in sizes.items() if size > 1]
    data = {0: "DDP", 1: "ZeRO-1", 2: "ZeRO-2 (FSDP grad-op)", 3: "FSDP full shard (ZeRO-3)"}[layout.stage]
    data += " + offload" if layout.offload != "none" else ""
    data += " + LoRA" if layout.lora_rank is not None else ""
    if not axes:
        return data
    kind = "3D: " if len(axes) > 1 and layout.dp > 1 else ""
    return f"{kind}{' x '.join(axes)}" + (f" x {data}" if layout.dp > 1 else "")


def why(case: PlanCase, plan: Plan) -> str:
    """Return why the simpler strategy was not chosen: it does not fit, or takes longer."""
    assert plan.best is not None
    layout, estimate = plan.best.layout, plan.best.estimate
    if layout.stage == 0 and layout.tp * layout.pp * layout.cp == 1:
        return (
            f"a whole copy fits ({estimate.needed_gib:.0f} of {estimate.memory_limit_gib:.0f} GiB), and it is simplest"
        )
    simpler = "ddp" if layout.tp * layout.pp * layout.cp == 1 else "fsdp"
    limits = replace(case.limits, strategy=simpler, offload="none")
    other = search(case.model, case.cluster, case.goal, limits)
    words = {"ddp": "a whole copy (DDP)", "fsdp": "FSDP alone"}[simpler]
    if other.fitting:
        slower = other.fitting[0][0] / estimate.step_seconds - 1
        return f"{words} would fit, but takes {slower:.0%} longer"
    if other.too_large:
        return f"{words} needs {other.too_large[0][0]:.0f} GiB per GPU of {estimate.memory_limit_gib:.0f}"
    return f"{words} cannot run this batch"
