"""`phalanx plan`: which layout fits a model on a cluster, how fast it trains, what it costs, and why."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.cli.failures import add_flags, report_failures
from phalanx.cli.flags import FlagParser
from phalanx.cli.json_output import add_json_flag, print_json
from phalanx.config.settings import parse_duration
from phalanx.errors import EXIT_USAGE, UsageError, unknown_name

if TYPE_CHECKING:
    from phalanx.tools.plan.cluster import Cluster
    from phalanx.tools.plan.memory_trace import DryRun
    from phalanx.tools.plan.model import ModelShape, TracedShape
    from phalanx.tools.plan.plans import Goal, Plan
    from phalanx.tools.plan.what_if import PlanCase

_HELP = """Say which layout fits a model on a cluster, how fast it trains, what it costs, and why. Needs no GPU.

MODEL is a preset (llama-70b, gpt2-1.5b, resnet50, ...), a Hugging Face config.json or its folder, or a class of
your own (my_package.nets:Net with --input 3x224x224). Exit code 2 where nothing fits,
with the smallest changes that would."""
_EPILOG = """Examples:
  phalanx plan llama-70b --gpus 64 --gpu h100 --tokens 1T
  phalanx plan gpt2-1.5b --instance p4d.24xlarge --nodes 2 --what-if fewest-gpus --what-if gpu=h100
  phalanx plan ./my-model/config.json --gpus 8 --gpu a100-40 --lora-rank 16 --html plan.html
  phalanx plan --failures rsc-1 --gpus 1024,4096,16384"""
_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
_DEFAULT_TOKENS = 20
"""Tokens per parameter of a training that gives none (Hoffmann et al., Training Compute-Optimal LLMs)."""
_LIMITS = (
    "strategy",
    "max_tensor_parallel",
    "max_pipeline_parallel",
    "max_context_parallel",
    "micro_batch",
    "recompute",
    "zero_stage",
    "offload",
    "lora_rank",
)

_POSITIVE = ("gpus", "nodes", "gpus_per_node", "inter_node_gbps", "price", "oversubscription", "epochs", "budget")


def parser() -> FlagParser:
    """Return the parser of the verb."""
    usage = "phalanx plan MODEL --gpus N --gpu NAME | --instance NAME --nodes N [options]"
    parser = FlagParser(prog="phalanx plan", usage=usage, description=_HELP, epilog=_EPILOG)
    parser.add_argument(
        "plan_model", nargs="?", metavar="MODEL", help="a preset, a config.json, or package.module:Class"
    )
    parser.add_argument(
        "--input", metavar="SHAPE", help="shape of one sample, for a class of your own: 3x224x224, tokens:1024"
    )
    _add_cluster(parser.add_argument_group("cluster"))
    _add_goal(parser.add_argument_group("goal"))
    _add_limits(parser.add_argument_group("constraints"))
    _add_answers(parser.add_argument_group("answers"))
    return parser


def _add_cluster(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--gpus", metavar="N", help="GPUs of the job")
    add("--gpu", metavar="NAME", help="h100, a100-40, h200, ..., or measured (by phalanx bench machine)")
    add("--instance", metavar="NAME", help="machines of a provider: p5.48xlarge, a3-megagpu-8g, ...")
    add("--nodes", type=int, metavar="N", help="machines [1 with --instance]")
    add("--gpus-per-node", type=int, metavar="N", help="GPUs of one machine [8, or those of the instance type]")
    add("--intra-node", metavar="LINK", help="link within a machine: nvlink4, pcie4, ... [the GPU's]")
    add("--inter-node", metavar="LINK", help="link between machines: infiniband-ndr, efa, ...")
    add("--inter-node-gbps", type=float, metavar="X", help="Gbit/s per machine and direction between machines")
    add("--oversubscription", type=float, metavar="X", help="a tree network with so many times fewer links at its top")
    add("--price", type=float, metavar="X", help="price per GPU and hour [the list price of the instance type]")
    add(
        "--prices",
        metavar="FILE",
        help="instance types and prices of your own, in the form of phalanx/tools/plan/data/instances.toml",
    )


def _add_goal(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--global-batch", type=int, metavar="N", help="samples per optimizer step, over all ranks")
    add("--seq-len", type=int, metavar="N", help="tokens per sample [that of the model]")
    add("--tokens", metavar="N", help="tokens of the whole training: 1T, 300B, 5e9 [20 per parameter]")
    add("--samples", metavar="N", help="samples of the data set")
    add("--epochs", type=float, metavar="X", help="passes over --samples [1]")
    add("--precision", metavar="bf16,fp16,fp32", help="of matrix products [bf16, or the GPU's best]")
    add("--optimizer", metavar="adamw,adam,sgd,rmsprop,adagrad", help="whose states are kept [adamw]")
    add("--deadline", metavar="TIME", help="say whether the training ends in time: 30d, 72h")
    add("--budget", type=float, metavar="X", help="say whether the money suffices")
    add("--compile", action="store_true", help="plan for kernels that torch.compile fuses")


def _add_limits(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--strategy", metavar="ddp,fsdp,tensor,pipeline,context,expert,3d", help="only such layouts")
    add("--max-tensor-parallel", type=int, metavar="N", help="at most this many tensor-parallel ranks")
    add("--max-pipeline-parallel", type=int, metavar="N", help="at most this many pipeline ranks")
    add("--max-context-parallel", type=int, metavar="N", help="at most this many context-parallel ranks")
    add("--micro-batch", type=int, metavar="N", help="samples per data rank in one forward pass")
    add("--recompute", metavar="none,selective,full", help="activation checkpointing [what is fastest]")
    add("--zero-stage", type=int, metavar="0,1,2,3", help="what data ranks shard [what is fastest]")
    add("--offload", metavar="none,cpu", help="keep states in host memory [where nothing else fits]")
    add("--lora-rank", type=int, metavar="N", help="train adapters of this rank instead of the weights")


def _add_answers(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--what-if", action="append", default=[], metavar="QUESTION", help="largest-batch, longest-sequence, "
        "fewest-gpus, sharding, offload, recompute, fp8, gpu or gpu=NAME; may be given several times")  # fmt: skip
    add(
        "--engines",
        action="store_true",
        help="what each engine can do for this job: DeepSpeed, Horovod, Ray, TensorFlow",
    )
    add("--designs", action="store_true", help="compare GPUs per machine, adapters per GPU, and rail or tree networks")
    add("--fake-run", action="store_true", help="run the real code of one rank of each kind, on fake tensors")
    add_flags(group)
    add("--calibrate-from", metavar="RUN", help="keep how far a run was from its prediction, for the next plans")
    add("--html", metavar="FILE", help="write a page with the same as pictures")
    add_json_flag(group, "the plan")  # type: ignore[arg-type]


def run(arguments: Sequence[str]) -> int:
    """Run the verb."""
    namespace = parser().parse_all(arguments)
    if namespace.failures is not None:
        return report_failures(namespace)
    namespace.gpus = _number_of_gpus(namespace.gpus)
    if namespace.calibrate_from is not None:
        return _calibrate_from(namespace.calibrate_from)
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


def _calibrate_from(name: str) -> int:
    from phalanx.cli.report import compare_stored
    from phalanx.observe.goodput import account
    from phalanx.runs.stored import RUNS, find_run
    from phalanx.tools.plan.learning import keep_factors
    from phalanx.tools.plan.presets import measured_file

    stored = find_run(name, RUNS)
    comparison = compare_stored(stored, account(stored.events()))
    if comparison is None:
        raise UsageError(
            f"the events of {stored.name} do not say enough to predict it",
            hint="The planner describes transformers: reference models, and Hugging Face models of known families.",
        )
    kept = keep_factors(comparison, stored.name)
    words = f"kernels x {kept['kernels']:g}, links x {kept['links']:g} in time, memory {kept['memory_gib']:+g} GiB"
    print(f"{comparison.gpu}: {words}, from {stored.name}; kept in {measured_file()}, and applied to later plans")
    return 0


def _show(namespace: argparse.Namespace, case: PlanCase, plan: Plan) -> None:
    from phalanx.tools.plan.guide import engines
    from phalanx.tools.plan.text import plan_data, plan_text
    from phalanx.tools.plan.what_if import answer, designs

    subject = namespace.plan_model
    answers = [answer(question, case, plan) for question in namespace.what_if]
    answers += [designs(case, plan)] if namespace.designs else []
    rows = engines(case, plan) if namespace.engines else None
    tried = _dry_run(subject, plan) if namespace.fake_run and plan.best is not None else None
    if namespace.html is not None:
        from phalanx.tools.plan.page import page

        Path(namespace.html).write_text(page(plan, subject, answers, rows.rows if rows else ()), encoding="utf-8")
    if namespace.json:
        more: dict[str, Any] = {"what_if": [each.data() for each in answers], "engines": rows and rows.data()}
        more["dry_run"] = tried and tried.to_dict()
        print_json({**plan_data(plan, subject), **{name: value for name, value in more.items() if value}})
        return
    limits = limits_words(plan)
    sections = [plan_text(plan, subject), *limits, *(each.text() for each in answers), *([rows.text()] if rows else [])]
    sections += [tried.text()] if tried else []
    print("\n\n".join(sections))
    if namespace.html is not None:
        print(f"\nThe same as pictures: {namespace.html}")


def _dry_run(subject: str, plan: Plan) -> DryRun:
    """Run the chosen layout on fake ranks; a class of the user is built from its import path."""
    from phalanx.recipes.imports import is_import_path, load_import
    from phalanx.tools.plan.fake_layouts import dry_run_layout  # imports torch

    assert plan.best is not None, "only a plan that fits is tried"
    make = load_import(subject, "model") if is_import_path(subject) else None
    return dry_run_layout(plan.model, plan.best.layout, plan.goal, plan.cluster, make)


def limits_words(plan: Plan) -> list[str]:
    """Return whether the deadline and the budget are kept."""
    from phalanx.tools.plan.text import rounded

    found, goal = [], plan.goal
    for limit, spent, what in (
        (goal.deadline_hours, plan.cost.get("days", 0.0) * 24, "{} h of the deadline of {} h"),
        (goal.budget, plan.cost.get("money"), "${} of the budget of ${}"),
    ):
        if limit is not None and spent and plan.fits:
            kept = "kept" if spent <= limit else f"missed by {spent / limit - 1:.0%}: try --what-if gpu, or more GPUs"
            found.append(f"{what.format(rounded(spent), rounded(limit))}: {kept}")
    return found


def read_case(namespace: argparse.Namespace) -> tuple[PlanCase, list[tuple[str, str, str]]]:
    """Return the job that the flags describe, and what was assumed where they say nothing."""
    from phalanx.tools.plan import presets
    from phalanx.tools.plan.search import Constraints
    from phalanx.tools.plan.what_if import PlanCase

    if namespace.plan_model is None:
        raise UsageError("no model was named", hint="Write: phalanx plan llama-7b --gpus 8 --gpu h100")
    for name in _POSITIVE:
        value = getattr(namespace, name)
        if value is not None and not 0 < value < math.inf:
            raise UsageError(f"--{name.replace('_', '-')} {value:g}: must be greater than 0.")
    cluster = _cluster(namespace)
    shape = presets.model(namespace.plan_model, namespace.input)
    limits = Constraints(**{name: getattr(namespace, name) for name in _LIMITS})
    for name in _LIMITS:
        if isinstance(value := getattr(limits, name), int) and value < (0 if name == "zero_stage" else 1):
            raise UsageError(f"--{name.replace('_', '-')} {value}: must be 1 or more.")
    goal, notes = _goal(namespace, shape, cluster)
    return PlanCase(shape, cluster, goal, limits), notes


def _cluster(namespace: argparse.Namespace) -> Cluster:
    from phalanx.tools.plan import presets
    from phalanx.tools.plan.cluster import Cluster

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
    cluster = Cluster(gpu=device, gpus=gpus, gpus_per_node=min(per_node, gpus), name=f"{gpus} x {device}")
    if usual is not None and usual.price is not None:
        cluster = replace(cluster, price_per_gpu_hour=usual.price / usual.gpus, host_memory_gib=usual.host_memory_gib)
        cluster = replace(cluster, instance=f"{usual.name}, {usual.source}, {usual.date}")
    return replace(cluster, **changes)


def _of_instances(namespace: argparse.Namespace, changes: dict[str, Any]) -> Cluster:
    from phalanx.tools.plan import presets

    if namespace.gpu is not None:
        raise UsageError(
            "--gpu and --instance were both given", hint="An instance type has its own GPUs: leave --gpu out."
        )
    found = presets.instance(namespace.instance, namespace.prices)
    nodes = namespace.nodes or math.ceil((namespace.gpus or found.gpus) / found.gpus)
    cluster = presets.of_instances(found.name, nodes, namespace.prices)
    gpus = namespace.gpus or cluster.gpus
    cluster = replace(
        cluster, gpus=gpus, gpus_per_node=min(found.gpus, gpus), instance=f"{found.name}, {found.source}, {found.date}"
    )
    return replace(cluster, **changes)


def _goal(
    namespace: argparse.Namespace, shape: ModelShape | TracedShape, cluster: Cluster
) -> tuple[Goal, list[tuple[str, str, str]]]:
    from phalanx.config.fields import OPTIMIZERS
    from phalanx.tools.plan import presets
    from phalanx.tools.plan.model import ModelShape
    from phalanx.tools.plan.planner import default_goal
    from phalanx.tools.plan.plans import PRECISIONS
    from phalanx.tools.plan.text import count

    notes: list[tuple[str, str, str]] = []
    goal = default_goal(shape, cluster)
    known = presets.parts_of(cluster)[0].tflops
    precision = namespace.precision or next(name for name in ("bf16", "fp16", "fp32") if name in known)
    for name, value, allowed in (("precision", precision, PRECISIONS), ("optimizer", namespace.optimizer, OPTIMIZERS)):
        if value is not None and value not in allowed:
            raise UsageError(unknown_name(name, value, allowed))
    if precision == "fp8":
        raise UsageError(
            "--precision fp8: `phalanx train` has no fp8 yet", hint="--what-if fp8 says what it would bring."
        )
    if precision not in known:
        raise UsageError(f"{cluster.gpu} has no {precision}. It has: {', '.join(known)}.")
    if namespace.seq_len is not None:
        per_step = goal.global_batch * goal.seq_len
        goal = replace(goal, seq_len=_positive("seq-len", namespace.seq_len))
        goal = replace(goal, global_batch=max(cluster.gpus, per_step // goal.seq_len // cluster.gpus * cluster.gpus))
    if namespace.global_batch is None:
        notes.append(("global batch", f"{goal.global_batch} samples", "usual for this size; --global-batch sets it"))
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
        optimizer=namespace.optimizer or goal.optimizer,
        tokens=tokens,
        samples=samples,
        epochs=namespace.epochs,
        deadline_hours=deadline,
        budget=namespace.budget,
        compile=namespace.compile,
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
