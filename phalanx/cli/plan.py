"""`phalanx plan`: which layout fits a model on a cluster, how fast it trains, what it costs, and why."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from phalanx.cli.flags import FlagParser
from phalanx.cli.json_output import add_json_flag
from phalanx.reliability import PRESETS

_HELP = """Recommend a parallel layout for a model on a cluster, with predicted speed, memory and cost. Needs no GPU.

MODEL is a preset (llama-70b, gpt2-1.5b, resnet50, ...), a Hugging Face config.json or its folder, or a class of
your own (my_package.nets:Net with --input 3x224x224). Exit code 2 if nothing fits, with the smallest changes that
would."""
_EPILOG = """Examples:
  phalanx plan llama-70b --gpus 64 --gpu h100 --tokens 1T
  phalanx plan gpt2-1.5b --instance p4d.24xlarge --nodes 2 --what-if fewest-gpus --what-if gpu=h100
  phalanx plan ./my-model/config.json --gpus 8 --gpu a100-40 --lora-rank 16
  phalanx plan llama-7b --gpus 8 --gpu h100 --fast --memory
  phalanx plan --failures rsc-1 --gpus 1024,4096,16384"""
COSTS = {"checkpoint_cost": "10s", "restart_cost": "5m", "recovery_cost": "10s"}
"""What a checkpoint, a restart and a recovery in place cost where nothing is given."""


def parser() -> FlagParser:
    """Return the parser of the verb."""
    usage = "phalanx plan MODEL --gpus N --gpu NAME | --instance NAME --nodes N [options]"
    parser = FlagParser(prog="phalanx plan", usage=usage, description=_HELP, epilog=_EPILOG)
    parser.add_argument(
        "plan_model", nargs="?", metavar="MODEL", help="a preset, a config.json, or package.module:Class"
    )
    parser.add_argument(
        "--input", metavar="SHAPE", help="shape of one sample, for your own class: 3x224x224, tokens:1024"
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
    add("--instance", metavar="NAME", help="instance type of a provider: p5.48xlarge, a3-megagpu-8g, ...")
    add("--nodes", type=int, metavar="N", help="nodes [1 with --instance]")
    add("--gpus-per-node", type=int, metavar="N", help="GPUs of one node [8, or those of the instance type]")
    add("--intra-node", metavar="LINK", help="link within a node: nvlink4, pcie4, ... [the GPU's]")
    add("--inter-node", metavar="LINK", help="link between nodes: infiniband-ndr, efa, ...")
    add("--inter-node-gbps", type=float, metavar="X", help="Gbit/s per node and direction between nodes")
    add("--oversubscription", type=float, metavar="X", help="a tree network with X times fewer links at its top")
    add("--price", type=float, metavar="X", help="price per GPU and hour [the list price of the instance type]")
    add(
        "--prices",
        metavar="FILE",
        help="your own instance types and prices, in the format of phalanx/tools/plan/data/instances.toml",
    )


def _add_goal(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--global-batch", type=int, metavar="N", help="samples per optimizer step, over all ranks")
    add("--seq-len", type=int, metavar="N", help="tokens per sample [that of the model]")
    add("--tokens", metavar="N", help="tokens of the whole training: 1T, 300B, 5e9 [20 per parameter]")
    add("--samples", metavar="N", help="samples of the data set")
    add("--epochs", type=float, metavar="X", help="passes over --samples [1]")
    add("--precision", metavar="bf16,fp16,fp8,fp32", help="of matrix products [bf16, or the GPU's best]")
    add(
        "--optimizer",
        metavar="adamw,adamw8bit,adam,sgd,rmsprop,adagrad,lars,lamb",
        help="the optimizer whose states are counted [adamw]",
    )
    add("--deadline", metavar="TIME", help="check whether the training ends in time: 30d, 72h")
    add("--budget", type=float, metavar="X", help="check whether the training stays within this budget")
    add("--compile", action="store_true", help="plan for kernels that torch.compile fuses")
    add("--fast", action="store_true", help="plan for speed: matrix products in fp8, compiled")
    add("--memory", action="store_true", help="plan for little memory: states of AdamW in 8 bits, and compiled layers "
        "that keep half of their activations, or less if needed to fit")  # fmt: skip


def _add_limits(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--strategy",
        metavar="ddp,fsdp,zero,tensor,pipeline,context,expert,3d",
        help="only such layouts; fsdp shards all, zero any part",
    )
    add("--max-tensor-parallel", type=int, metavar="N", help="at most this many tensor-parallel ranks")
    add("--max-pipeline-parallel", type=int, metavar="N", help="at most this many pipeline ranks")
    add("--max-context-parallel", type=int, metavar="N", help="at most this many context-parallel ranks")
    add("--micro-batch", type=int, metavar="N", help="samples per data rank in one forward pass")
    add("--recompute", metavar="none,selective,full,'budget 0.5'", help="activation checkpointing [the fastest]")
    add("--zero-stage", type=int, metavar="0,1,2,3", help="states that data ranks shard [the fastest]")
    add("--offload", metavar="none,cpu", help="keep states in host memory [if nothing else fits]")
    add("--lora-rank", type=int, metavar="N", help="train adapters of this rank instead of the weights")


def _add_answers(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--what-if", action="append", default=[], metavar="QUESTION", help="largest-batch, longest-sequence, "
        "fewest-gpus, sharding, offload, recompute, fp8, gpu or gpu=NAME; may be given several times")  # fmt: skip
    names = ", ".join(PRESETS)
    add(
        "--failures",
        metavar="RATE",
        help="effective training time of --gpus N[,N...] at this failure rate, without a model: 3h (between two "
        f"failures of the job), 0.00047 (per GPU and day), 419/54d (seen on them), 419/54d/16384, or {names}",
    )
    for name, default in COSTS.items():
        event = name.removesuffix("_cost")
        add(f"--{event}-cost", metavar="TIME", help=f"--failures: cost of a {event} [{default}]")
    add("--calibrate-from", metavar="RUN", help="keep how far a run was from its prediction, for the next plans")
    add_json_flag(group, "the plan")  # type: ignore[arg-type]


def run(arguments: Sequence[str]) -> int:
    """Run the verb."""
    namespace = parser().parse_all(arguments)
    from phalanx.cli.plan_answer import answer_plan, calibrate_from, report_failures

    if namespace.failures is not None:
        return report_failures(namespace, COSTS)
    return answer_plan(namespace) if namespace.calibrate_from is None else calibrate_from(namespace.calibrate_from)
