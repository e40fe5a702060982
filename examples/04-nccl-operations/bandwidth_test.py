"""How fast bytes move between these ranks: every link by message size, and a collective by algorithm and size.

    phalanx train --script bandwidth_test.py --num-workers 2
    torchrun --standalone --nproc-per-node 8 bandwidth_test.py --sizes 1K:256M:4    # nccl with a GPU a rank, else gloo
    phalanx train --script bandwidth_test.py --num-workers 4 -- --op all_gather --json rates.json
    phalanx bench comm --p2p --link-report                                          # the same, and what to expect

A link's time is half of the quickest round trip. A collective's is the median on the slowest rank. `algbw` is the
tensor's bytes per second; `busbw` is what an ideal link would have carried for that, so it can be compared between
numbers of ranks, and with the figure on the box. The measuring is that of `phalanx bench comm`.
"""

from __future__ import annotations

import argparse
import json
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import phalanx
from phalanx.comm.collectives.channel import P2PChannel
from phalanx.comm.collectives.topology import measure_links
from phalanx.errors import PhalanxError
from phalanx.tools.bench.comm.measure import measure_rows
from phalanx.tools.bench.comm.plan import BenchPlan, parse_algorithms, parse_sizes
from phalanx.tools.bench.comm.report import HEADER, side_by_side


def measure_sizes(channel: P2PChannel, sizes: tuple[int, ...], rounds: int) -> list[dict[str, Any]]:
    """Return one row for each size and pair of ranks; every rank calls it."""
    rows = []
    for size in sizes:
        matrix = measure_links(channel, nbytes=size, rounds=rounds)
        for first, second in combinations(range(channel.size), 2):
            rate = matrix.bandwidth[first][second]
            found = {"size_bytes": size, "time_us": size / rate * 1e6, "gbs": rate / 1e9}
            rows.append({"first": first, "second": second, **found})
    return rows


def links_table(rows: list[dict[str, Any]]) -> str:
    """Return the slowest and the quickest link of each size: where they differ, ranks are not equally near."""
    units = f"{'(us)':>12}{'(GB/s)':>9}"
    lines = [f"{'size (B)':>12}{'slowest link':>16}{units}{'quickest link':>17}{units}"]
    for size in dict.fromkeys(row["size_bytes"] for row in rows):
        by_rate = sorted((row for row in rows if row["size_bytes"] == size), key=lambda row: row["gbs"])
        lines.append(f"{size:>12}{link_cells(by_rate[0], 16)}{link_cells(by_rate[-1], 17)}")
    return "\n".join(lines)


def link_cells(row: dict[str, Any], width: int) -> str:
    pair = f"{row['first']} - {row['second']}"
    return f"{pair:>{width}}{row['time_us']:>12.1f}{row['gbs']:>9.3f}"


def link_channel(formation: phalanx.Formation) -> P2PChannel:
    """Return what connects the ranks: nccl between GPUs when each rank has one, else gloo."""
    local_ranks = formation.world.env.local_world_size
    if formation.device.type == "cuda" and torch.cuda.device_count() >= local_ranks:
        return P2PChannel(dist.new_group(backend="nccl"))
    return P2PChannel()


def choose_algorithms(asked: str | None, op: str, channel: P2PChannel) -> tuple[str, ...]:
    """Return what was asked for, or what runs here: nccl too where the GPUs are there."""
    names = parse_algorithms(asked, op)
    return (*names, "nccl") if asked is None and channel.is_batched else names


def main() -> None:
    args = parse_args()
    # The ranks agree over gloo, on GPUs too; what is measured there goes over nccl.
    with phalanx.Formation(communication_backend="gloo") as formation:
        if formation.world_size == 1:
            raise SystemExit("one rank has no peer: start two, as the first lines of this file say")
        channel = link_channel(formation)
        sizes = parse_sizes(args.sizes)
        plan = BenchPlan(
            op=args.op, algos=choose_algorithms(args.algo, args.op, channel), sizes=sizes, iters=args.iters
        )
        formation.print(f"links between {channel.size} ranks, by {'nccl' if channel.is_batched else 'gloo'}")
        links = measure_sizes(channel, sizes, args.rounds)
        formation.print(f"{links_table(links)}\n\n{args.op} on {channel.size} ranks\n{HEADER}")
        rows = list(measure_rows(plan, P2PChannel(), formation.print))
        if beside := side_by_side(rows):  # nothing for a single algorithm
            formation.print(f"\n{beside}")
        if args.json and formation.is_main:
            document = {"links": links, "collectives": [row.to_dict() for row in rows]}
            Path(args.json).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        wrong = sum(row.wrong for row in rows)
    if wrong:
        raise SystemExit(f"{wrong} elements did not come out right: see the column #wrong")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Bandwidth and latency between ranks.")
    parser.add_argument("--sizes", default="1K:16M:4", help="1K:256M:4 (each four times the last), or 1K,64K,4M")
    parser.add_argument("--op", default="all_reduce", help="the collective, as in phalanx bench comm")
    parser.add_argument("--algo", help="some of its algorithms, with commas (default: those that run here)")
    parser.add_argument("--rounds", type=int, default=10, help="round trips of each size on each link")
    parser.add_argument("--iters", type=int, help="timed calls of each collective (default: fewer for large sizes)")
    parser.add_argument("--json", metavar="FILE", help="write all numbers here")
    parser.add_argument("--local-rank", "--local_rank", type=int, help="from a launcher; the environment says the same")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds is {args.rounds}: it must be 1 or more")
    if args.json and not Path(args.json).parent.is_dir():
        parser.error(f"--json {args.json}: there is no folder {Path(args.json).parent}")
    return args


if __name__ == "__main__":
    try:
        main()
    except PhalanxError as error:
        raise SystemExit(f"error: {error}") from None
