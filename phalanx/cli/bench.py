"""`phalanx bench`: measure collectives and links, this machine, and training under gradient compression."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from phalanx.cli.flags import FlagParser
from phalanx.cli.json_output import add_json_flag, add_output_flag, print_json
from phalanx.config import DistributedConfig
from phalanx.config.strategies import COMPRESSORS
from phalanx.errors import UsageError, unknown_name
from phalanx.host.gpus import count_gpus
from phalanx.launch import PlainConsole, prestart
from phalanx.tools.bench.comm.plan import (
    ALGORITHMS_OF,
    DTYPE_BYTES,
    OPS,
    BenchPlan,
    parse_algorithms,
    parse_sizes,
    run_bench,
)
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
from phalanx.tools.bench.compression.run import LINKS, RECIPES, bench_table, plot, probe, read_link, read_names
from phalanx.tools.bench.compression.run import run_bench as run_recipes
from phalanx.world.env import read_rank_env
from phalanx.world.mesh import plan_layout

SUBJECTS = {
    "comm": "collectives by algorithm and size, links between ranks",
    "machine": "this machine's kernels, memory and links, for phalanx plan --gpu measured",
    "compression": "training under each compressor over slow links; which one is worth it on yours",
}
_HERE = "here"
"""The link between two ranks of this machine, for the adviser."""


def parser(subject: str) -> FlagParser:
    """Return the parser of a subject."""
    return {"comm": _comm_parser, "machine": _machine_parser, "compression": _compression_parser}[subject]()


def run(arguments: Sequence[str]) -> int:
    """Run the subject."""
    if not arguments or arguments[0] in {"-h", "--help"}:
        subjects = "\n".join(f"  {name:<12} {text}" for name, text in SUBJECTS.items())
        print(f"usage: phalanx bench <subject> [options]\n\nsubjects:\n{subjects}\n\nphalanx bench <subject> --help")
        return 0
    subject = arguments[0]
    if subject not in SUBJECTS:
        raise UsageError(unknown_name("subject", subject, SUBJECTS, of="phalanx bench"))
    asked = parser(subject).parse_all(arguments[1:])
    return {"comm": _comm, "machine": _machine, "compression": _compression}[subject](asked)


def _machine_parser() -> FlagParser:
    text = "Measure matrix products, memory and links of this machine, and keep them for `phalanx plan --gpu measured`."
    usage = "phalanx bench machine [--output FILE] [--json]"
    parser = FlagParser(prog="phalanx bench machine", usage=usage, description=text)
    add_output_flag(parser, "--output", endings=(), help="where to write [the user's folder]")
    add_json_flag(parser, "what was measured")
    return parser


def _machine(asked: argparse.Namespace) -> int:
    prestart()
    from phalanx.tools.bench.calibrate import calibrate  # imports torch

    out = sys.stderr if asked.json else sys.stdout
    path = calibrate(asked.output, lambda text: print(text, file=out, flush=True))
    print(f"kept in {path}; a plan for this machine: phalanx plan MODEL --gpus 1 --gpu measured", file=out)
    if asked.json:
        print_json(json.loads(path.read_text(encoding="utf-8")))
    return 0


_COMM = """Measure collectives by algorithm and size, or the links between ranks.

Columns are those of nccl-tests: algbw is the tensor's bytes per second, busbw what an ideal link would have carried, so
that it can be compared between numbers of ranks. The time is the median of the iterations, on the slowest rank; #wrong
counts wrong elements of the result. An algorithm that cannot run here is left out, with the reason.
Started by torchrun, srun or mpirun it measures the ranks of that job, on several hosts too."""


def _comm(asked: argparse.Namespace) -> int:
    plan = _comm_plan(asked)
    if read_rank_env() is None:
        prestart()
    console = PlainConsole(out=sys.stderr if asked.json else None)
    found = run_bench(plan, asked.num_workers, console, threads=asked.threads_per_rank)
    if found is None:  # a rank of a job that torchrun, srun or mpirun started, and not the first one
        return 0
    print(_comm_summary(found, link_report=asked.link_report), end="", file=sys.stderr if asked.json else sys.stdout)
    if asked.json:
        print_json(found.get("rows", found))
    if asked.plot:
        _comm_plot(found, asked.plot)
    return 1 if any(row["wrong"] for row in found.get("rows", ())) else 0


def _comm_parser() -> FlagParser:
    parser = FlagParser(
        prog="phalanx bench comm",
        usage="phalanx bench comm [--op NAME] [--algo A,B] [--sizes 1K:64M] [--p2p] [--link-report] [options]",
        description=_COMM,
    )
    add = parser.add_argument
    add("--op", default="all_reduce", metavar="NAME", help=f"{', '.join(ALGORITHMS_OF)} [all_reduce]")
    algos = ", ".join(dict.fromkeys(algo for known in ALGORITHMS_OF.values() for algo in known))
    add("--algo", metavar="A,B", help=f"which of {algos} (default: those that run anywhere)")
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
    add_json_flag(parser, "what was measured")
    add_output_flag(parser, "--plot", endings=(".svg",), help="draw it as SVG; with --p2p as heat maps")
    return parser


def _comm_plan(asked: argparse.Namespace) -> BenchPlan:
    only_links = (asked.p2p or asked.link_report) and asked.sizes is None and asked.algo is None
    if asked.ranks_per_host is not None and asked.ranks_per_host < 1:
        raise UsageError(f"--ranks-per-host is {asked.ranks_per_host}", hint="It must be 1 or more.")
    return BenchPlan(
        op=asked.op,
        algos=parse_algorithms(asked.algo, asked.op, "cuda" if asked.share_gpus else asked.device),
        sizes=() if only_links else parse_sizes(asked.sizes or "1K:64M:4"),
        dtype=asked.dtype,
        redop=asked.redop,
        iters=asked.iters,
        warmup=asked.warmup,
        ranks_per_host=asked.ranks_per_host,
        p2p=asked.p2p or asked.link_report,
        ranks_per_gpu=_ranks_per_gpu(asked),
    )


def _ranks_per_gpu(asked: argparse.Namespace) -> int:
    """Return how many ranks will share a GPU; refuse what needs a GPU where there is none."""
    if asked.device != "cuda" and not asked.share_gpus:
        return 1
    if not count_gpus():
        flag = "--share-gpus" if asked.share_gpus else "--device cuda"
        hint = f"Without a GPU: phalanx bench comm --num-workers {asked.num_workers} --algo gloo,shm"
        raise UsageError(f"{flag}, but no GPU was found on this machine", hint=hint)
    if not asked.share_gpus:
        return 1
    if (started := read_rank_env()) is not None:
        raise UsageError("--share-gpus is for ranks that Phalanx starts", hint=f"Run it without {started.started_by}.")
    return plan_layout(DistributedConfig(num_workers=asked.num_workers, share_gpus=True), count_gpus()).ranks_per_gpu


def _comm_summary(found: dict[str, Any], *, link_report: bool) -> str:
    """Return what is shown below the rows, which the ranks printed themselves."""
    parts = [side_by_side([make_row(row) for row in found.get("rows", ())])]
    if "latency_us" in found:
        parts.append(matrix_table("latency, one way", found["latency_us"], "us"))
        parts.append(matrix_table("bandwidth", found["bandwidth_gbs"], "GB/s"))
    if link_report:
        best = max((value for row in found["bandwidth_gbs"] for value in row), default=0.0)
        links = [*network_links(), *gpu_links()]
        parts.append(link_table(best, found["copy_gbs"], one_host=found["hosts"] == 1, links=links))
    return "".join(f"\n{part}\n" for part in parts if part)


def _comm_plot(found: dict[str, Any], path: str) -> None:
    if found.get("rows"):
        plot_rows([make_row(row) for row in found["rows"]], path)
    elif "latency_us" in found:
        plot_links(found["latency_us"], found["bandwidth_gbs"], path)


_COMPRESSION = """Train recipes under each gradient compressor over slow links; show time to a target loss, and bytes.

Two ranks, one in each of two network namespaces whose link the kernel limits, where root and the kernel allow; else an
exchange that sleeps for as long as its bytes would take. Which of the two was used is printed. With --advise nothing
is trained: a step and the compressors are timed, and each compressor's step is predicted for each link."""


def _compression(asked: argparse.Namespace) -> int:
    recipes = read_names(asked.recipes, "recipe", RECIPES)
    compressors = read_names(asked.compressors, "compressor", COMPRESSORS)
    compressors = compressors if "none" in compressors else ["none", *compressors]  # the reference for the others
    links = [link.strip() for link in asked.links.split(",")]
    for link in links:
        if not (asked.advise and link == _HERE):
            read_link(link)
    settings = _compressor_settings(asked)
    prestart()
    say = partial(print, file=sys.stderr if asked.json else sys.stdout, flush=True)
    if asked.advise:
        records = _advise(recipes, compressors, links, asked, settings, say)
    else:
        records = run_recipes(recipes, compressors, links, steps=asked.steps, settings=settings, say=say)
        say(bench_table(records))
    if asked.json:
        print_json(records)
    if asked.plot and not asked.advise:
        plot(records, asked.plot)
        print(f"picture: {asked.plot}", file=sys.stderr)
    return 0


def _compression_parser() -> FlagParser:
    parser = FlagParser(prog="phalanx bench compression", description=_COMPRESSION)
    add = parser.add_argument
    add("--recipes", default=",".join(RECIPES), metavar="NAMES", help=f"separated by commas [{','.join(RECIPES)}]")
    add("--compressors", default=",".join(COMPRESSORS), metavar="NAMES", help="separated by commas [all of them]")
    add("--links", default=",".join(LINKS), metavar="RATES", help=f"bits per second, by commas [{','.join(LINKS)}]; "
        f"with --advise also '{_HERE}': measured between two ranks of this machine")  # fmt: skip
    add("--steps", type=int, default=120, metavar="N", help="optimizer steps of each run [120]")
    add("--compression-ratio", type=float, metavar="X", help="topk, randomk [0.01]")
    add("--powersgd-rank", type=int, metavar="N", help="powersgd [4]")
    add("--compression-warmup", type=int, metavar="N", help="steps before compression begins [0]")
    add("--advise", action="store_true", help="predict which compressor is worth it, without training")
    add("--ranks", type=int, default=2, metavar="N", help="--advise: ranks of the job [2]")
    add("--latency-us", type=float, default=50.0, metavar="X", help="--advise: delay of a message [50]")
    add_json_flag(parser, "the records")
    add_output_flag(parser, "--plot", endings=(".svg",), help="draw the picture as SVG")
    return parser


def _compressor_settings(namespace: argparse.Namespace) -> dict[str, Any]:
    """Return the given settings of compressors, checked by the rules of the config."""
    owners = {"compression_ratio": "topk", "powersgd_rank": "powersgd", "compression_warmup": "topk"}
    given = {name: getattr(namespace, name) for name in owners if getattr(namespace, name) is not None}
    for name, value in given.items():
        DistributedConfig(**{"compression": owners[name], name: value})
    for name, value in (("--steps", namespace.steps), ("--ranks", namespace.ranks - 1)):
        if value < 1:
            raise UsageError(f"{name} is too small: {value + (name == '--ranks')}")
    return given


def _advise(
    recipes: list[str],
    compressors: list[str],
    links: list[str],
    asked: argparse.Namespace,
    settings: dict[str, Any],
    say: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Print the adviser's answer for each recipe and link; return all predictions."""
    from phalanx.tools.bench.compression.advise import LinkSpeed, advice, advise, measure_costs  # imports torch

    measured = probe(recipes)
    records = []
    for recipe in recipes:
        shapes = [tuple(shape) for shape in measured["recipes"][recipe]["shapes"]]
        costs = measure_costs(compressors, shapes, asked.ranks, **settings)
        job = {"compute_s": measured["recipes"][recipe]["compute_s"], "ranks": asked.ranks}
        job["model_bytes"] = 4 * sum(math.prod(shape) for shape in shapes)
        for text in links:
            speed = measured["link"] if text == _HERE else {}
            link = LinkSpeed(**speed) if speed else LinkSpeed(read_link(text), asked.latency_us / 1e6)
            found = advise(link, costs=costs, **job)
            say(advice(recipe, link, found, **job) + "\n")
            records += [{"recipe": recipe, "link": text, **asdict(item)} for item in found]
    return records
