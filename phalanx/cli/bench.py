"""`phalanx bench`: measure collectives and links, and this machine."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from phalanx.cli.flags import FlagParser
from phalanx.cli.json_output import add_json_flag, add_output_flag, print_json
from phalanx.config import DistributedConfig
from phalanx.errors import UsageError, unknown_name
from phalanx.host.gpus import count_gpus
from phalanx.launch import PlainConsole, prestart
from phalanx.tools.bench.comm.plan import ALGORITHMS_OF, DTYPE_BYTES, OPS, BenchPlan, parse_algorithms, parse_sizes
from phalanx.tools.bench.comm.report import (
    gpu_links,
    link_table,
    make_row,
    matrix_table,
    network_links,
    plot_links,
    plot_rows,
    side_by_side,
)
from phalanx.tools.bench.comm.run import run_bench
from phalanx.world.env import read_rank_env
from phalanx.world.mesh import plan_layout

SUBJECTS = {
    "comm": "collectives by algorithm and size, links between ranks",
    "machine": "this machine's kernels, memory and links, for phalanx plan --gpu measured",
}


def parser(subject: str) -> FlagParser:
    """Return the parser of a subject."""
    return {"comm": _comm_parser, "machine": _machine_parser}[subject]()


def run(arguments: Sequence[str]) -> int:
    """Run the subject."""
    if not arguments or arguments[0] in {"-h", "--help"}:
        subjects = "\n".join(f"  {name:<12} {text}" for name, text in SUBJECTS.items())
        print(f"usage: phalanx bench <subject> [options]\n\nsubjects:\n{subjects}\n\nphalanx bench <subject> --help")
        return 0
    subject = arguments[0]
    if subject not in SUBJECTS:
        raise UsageError(unknown_name("subject", subject, SUBJECTS, of="phalanx bench"))
    namespace = parser(subject).parse_all(arguments[1:])
    return {"comm": _comm, "machine": _machine}[subject](namespace)


def _machine_parser() -> FlagParser:
    text = "Measure matrix products, memory and links of this machine, and keep them for `phalanx plan --gpu measured`."
    usage = "phalanx bench machine [--output FILE] [--json]"
    parser = FlagParser(prog="phalanx bench machine", usage=usage, description=text)
    add_output_flag(parser, "--output", endings=(), help="where to write [the user's folder]")
    add_json_flag(parser, "the measurements")
    return parser


def _machine(namespace: argparse.Namespace) -> int:
    prestart()
    from phalanx.tools.bench.calibrate import calibrate  # imports torch

    out = sys.stderr if namespace.json else sys.stdout
    path = calibrate(namespace.output, lambda text: print(text, file=out, flush=True))
    print(f"kept in {path}; a plan for this machine: phalanx plan MODEL --gpus 1 --gpu measured", file=out)
    if namespace.json:
        print_json(json.loads(path.read_text(encoding="utf-8")))
    return 0


_COMM = """Measure collectives by algorithm and size, or the links between ranks.

Columns are those of nccl-tests: algbw is the tensor's bytes per second, busbw what an ideal link would have carried, so
that it can be compared between numbers of ranks. The time is the median of the iterations, on the slowest rank; #wrong
counts wrong elements of the result. An algorithm that cannot run here is left out, with the reason.
Started by torchrun, srun or mpirun it measures the ranks of that job, on several hosts too."""


def _comm(namespace: argparse.Namespace) -> int:
    plan = _comm_plan(namespace)
    if read_rank_env() is None:
        prestart()
    console = PlainConsole(out=sys.stderr if namespace.json else None)
    measured = run_bench(plan, namespace.num_workers, console, threads=namespace.threads_per_rank)
    if measured is None:  # a rank of a job that torchrun, srun or mpirun started, and not the first one
        return 0
    print(
        _comm_summary(measured, link_report=namespace.link_report),
        end="",
        file=sys.stderr if namespace.json else sys.stdout,
    )
    if namespace.json:
        print_json(measured.get("rows", measured))
    if namespace.plot:
        _comm_plot(measured, namespace.plot)
    return 1 if any(row["wrong"] for row in measured.get("rows", ())) else 0


def _comm_parser() -> FlagParser:
    parser = FlagParser(
        prog="phalanx bench comm",
        usage="phalanx bench comm [--op NAME] [--algo A,B] [--sizes 1K:64M] [--p2p] [--link-report] [options]",
        description=_COMM,
    )
    add = parser.add_argument
    add("--op", default="all_reduce", metavar="NAME", help=f"{', '.join(ALGORITHMS_OF)} [all_reduce]")
    algos = ", ".join(dict.fromkeys(algo for algos_of_op in ALGORITHMS_OF.values() for algo in algos_of_op))
    add("--algo", metavar="A,B", help=f"which of {algos}, or my_module:function (default: those that run anywhere)")
    add("--sizes", metavar="FIRST:LAST", help="1K:256M, 1K:256M:4 (each four times the last), or 1K,64K,4M [1K:64M:4]")
    add("--num-workers", type=int, default=2, metavar="N", help="ranks on this machine [2]")
    add("--device", default="cpu", metavar="NAME", help="cuda: over nccl, where --algo names no algorithm [cpu]")
    add("--share-gpus", action="store_true", help="several ranks on each GPU over nccl; speed is not representative")
    add("--dtype", default="float32", metavar="NAME", help=f"{', '.join(DTYPE_BYTES)} [float32]")
    add("--redop", default="sum", metavar="NAME", help=f"{', '.join(OPS)} [sum]")
    add("--iters", type=int, metavar="N", help="timed iterations (default: 100 for small sizes, 5 for large ones)")
    add("--warmup", type=int, default=2, metavar="N", help="iterations before the timed ones [2]")
    add("--threads-per-rank", type=int, metavar="N", help="compute threads per rank (default: an equal share)")
    add("--ranks-per-host", type=int, metavar="N", help="hierarchical: N ranks are one host (default: real hosts)")
    add("--p2p", action="store_true", help="measure latency and bandwidth between every pair of ranks instead")
    add("--link-report", action="store_true", help="show the expected bandwidth of the links next to the measured one")
    add_json_flag(parser, "the measurements")
    add_output_flag(parser, "--plot", endings=(".svg",), help="draw it as SVG; with --p2p as heat maps")
    return parser


def _comm_plan(namespace: argparse.Namespace) -> BenchPlan:
    only_links = (namespace.p2p or namespace.link_report) and namespace.sizes is None and namespace.algo is None
    if namespace.ranks_per_host is not None and namespace.ranks_per_host < 1:
        raise UsageError(f"--ranks-per-host is {namespace.ranks_per_host}", hint="It must be 1 or more.")
    return BenchPlan(
        op=namespace.op,
        algos=parse_algorithms(namespace.algo, namespace.op, "cuda" if namespace.share_gpus else namespace.device),
        sizes=() if only_links else parse_sizes(namespace.sizes or "1K:64M:4"),
        dtype=namespace.dtype,
        redop=namespace.redop,
        iters=namespace.iters,
        warmup=namespace.warmup,
        ranks_per_host=namespace.ranks_per_host,
        p2p=namespace.p2p or namespace.link_report,
        ranks_per_gpu=_ranks_per_gpu(namespace),
    )


def _ranks_per_gpu(namespace: argparse.Namespace) -> int:
    """Return how many ranks will share a GPU; refuse what needs a GPU where there is none."""
    if namespace.device != "cuda" and not namespace.share_gpus:
        return 1
    if not count_gpus():
        flag = "--share-gpus" if namespace.share_gpus else "--device cuda"
        hint = f"Without a GPU: phalanx bench comm --num-workers {namespace.num_workers} --algo gloo,shm"
        raise UsageError(f"{flag}, but no GPU was found on this machine", hint=hint)
    if not namespace.share_gpus:
        return 1
    if (started := read_rank_env()) is not None:
        raise UsageError("--share-gpus is for ranks that Phalanx starts", hint=f"Run it without {started.started_by}.")
    return plan_layout(
        DistributedConfig(num_workers=namespace.num_workers, share_gpus=True), count_gpus()
    ).ranks_per_gpu


def _comm_summary(measured: dict[str, Any], *, link_report: bool) -> str:
    """Return what is shown below the rows, which the ranks printed themselves."""
    parts = [side_by_side([make_row(row) for row in measured.get("rows", ())])]
    if "latency_us" in measured:
        parts.append(matrix_table("latency, one way", measured["latency_us"], "us"))
        parts.append(matrix_table("bandwidth", measured["bandwidth_gbs"], "GB/s"))
    if link_report:
        best = max((value for row in measured["bandwidth_gbs"] for value in row), default=0.0)
        links = [*network_links(), *gpu_links()]
        parts.append(link_table(best, measured["copy_gbs"], one_host=measured["hosts"] == 1, links=links))
    return "".join(f"\n{part}\n" for part in parts if part)


def _comm_plot(measured: dict[str, Any], path: str) -> None:
    if measured.get("rows"):
        plot_rows([make_row(row) for row in measured["rows"]], path)
    elif "latency_us" in measured:
        plot_links(measured["latency_us"], measured["bandwidth_gbs"], path)
