"""`phalanx bench compression`: recipes under each compressor over slow links, or a prediction of it."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from phalanx.cli.flags import FlagParser
from phalanx.cli.json_output import write_json
from phalanx.config import DistributedConfig
from phalanx.config.strategies import COMPRESSORS
from phalanx.errors import UsageError
from phalanx.launch import prestart
from phalanx.tools.bench.compression.plan import HERE, LINKS, RECIPES, read_compressors, read_link, read_names

_HELP = """Train recipes under each gradient compressor over slow links, and show the time to a target loss and bytes.

Two ranks, one in each of two network namespaces whose link the kernel limits, where root and the kernel allow; else an
exchange that sleeps for as long as its bytes would take. Which of the two was used is printed. With --advise nothing
is trained: a step and the compressors are timed, and each compressor's step is predicted for each link."""


def run(arguments: Sequence[str]) -> int:
    """Run the bench."""
    namespace = parser().parse_all(arguments)
    recipes = read_names(namespace.recipes, "recipe", RECIPES)
    compressors = read_compressors(namespace.compressors)
    links = [link.strip() for link in namespace.links.split(",")]
    for link in links:
        if not (namespace.advise and link == HERE):
            read_link(link)
    settings = _settings(namespace)
    prestart()
    return (_advise if namespace.advise else _bench)(recipes, compressors, links, namespace, settings)


def parser() -> FlagParser:
    """Return the parser of the subject."""
    parser = FlagParser(prog="phalanx bench compression", description=_HELP)
    add = parser.add_argument
    add("--recipes", default=",".join(RECIPES), metavar="NAMES", help=f"separated by commas [{','.join(RECIPES)}]")
    add("--compressors", default=",".join(COMPRESSORS), metavar="NAMES", help="separated by commas [all of them]")
    add("--links", default=",".join(LINKS), metavar="RATES", help=f"bits per second, by commas [{','.join(LINKS)}]; "
        f"with --advise also '{HERE}': measured between two ranks of this machine")  # fmt: skip
    add("--steps", type=int, default=120, metavar="N", help="optimizer steps of each run [120]")
    add("--compression-ratio", type=float, metavar="X", help="topk, randomk [0.01]")
    add("--powersgd-rank", type=int, metavar="N", help="powersgd [4]")
    add("--compression-warmup", type=int, metavar="N", help="steps before compression begins [0]")
    add("--advise", action="store_true", help="predict which compressor is worth it, without training")
    add("--ranks", type=int, default=2, metavar="N", help="--advise: ranks of the job [2]")
    add("--latency-us", type=float, default=50.0, metavar="X", help="--advise: delay of a message [50]")
    add("--json", metavar="FILE", help="write the records (- for standard output)")
    add("--plot", metavar="FILE", help="draw the picture as PNG (extra: phalanx[bench])")
    return parser


def _settings(namespace: argparse.Namespace) -> dict[str, Any]:
    """Return the given settings of compressors, checked by the rules of the config."""
    owners = {"compression_ratio": "topk", "powersgd_rank": "powersgd", "compression_warmup": "topk"}
    given = {name: getattr(namespace, name) for name in owners if getattr(namespace, name) is not None}
    for name, value in given.items():
        DistributedConfig(**{"compression": owners[name], name: value})
    for name, value in (("--steps", namespace.steps), ("--ranks", namespace.ranks - 1)):
        if value < 1:
            raise UsageError(f"{name} is too small: {value + (name == '--ranks')}")
    return given


def _bench(
    recipes: list[str],
    compressors: list[str],
    links: list[str],
    asked: argparse.Namespace,
    settings: dict[str, Any],
) -> int:
    from phalanx.tools.bench.compression.report import check_can_plot, plot, table
    from phalanx.tools.bench.compression.run import run_bench

    if asked.plot:
        check_can_plot()
    to_stdout = asked.json == "-"
    records = run_bench(
        recipes, compressors, links, steps=asked.steps, settings=settings,
        say=lambda text: print(text, file=sys.stderr if to_stdout else sys.stdout, flush=True),
    )  # fmt: skip
    if not to_stdout:
        print(table(records))
    if asked.json:
        write_json(records, asked.json)
    if asked.plot:
        plot(records, Path(asked.plot))
        print(f"picture: {asked.plot}", file=sys.stderr)
    return 0


def _advise(
    recipes: list[str],
    compressors: list[str],
    links: list[str],
    asked: argparse.Namespace,
    settings: dict[str, Any],
) -> int:
    from dataclasses import asdict

    from phalanx.tools.bench.compression.advise import LinkSpeed, advise, measure_costs
    from phalanx.tools.bench.compression.report import advice
    from phalanx.tools.bench.compression.run import probe

    measured = probe(recipes)
    records = []
    for recipe in recipes:
        shapes = [tuple(shape) for shape in measured["recipes"][recipe]["shapes"]]
        compute_s = measured["recipes"][recipe]["compute_s"]
        costs = measure_costs(compressors, shapes, asked.ranks, **settings)
        nbytes = 4 * sum(math.prod(shape) for shape in shapes)
        for text in links:
            here = text == HERE
            link = LinkSpeed(**measured["link"]) if here else LinkSpeed(read_link(text), asked.latency_us / 1e6)
            if asked.json != "-":
                print(advice(recipe, link, compute_s, nbytes, asked.ranks, costs) + "\n")
            found = advise(link, model_bytes=nbytes, compute_s=compute_s, ranks=asked.ranks, costs=costs)
            records += [{"recipe": recipe, "link": text, **asdict(item)} for item in found]
    if asked.json:
        write_json(records, asked.json)
    return 0
