"""Draw the pictures of phase 3: python course/pictures/phase3.py [FOLDER]."""

from __future__ import annotations

import sys
from pathlib import Path

from draw import Picture

RANKS = ("blue", "orange", "green", "pink")
"""The color of each rank's part of a sum."""
WORLD = 4


def ring_steps(world: int) -> list[list[list[frozenset[int]]]]:
    """Return after each step of the all-reduce, for each rank and chunk, the ranks whose parts the chunk holds."""
    held = [[frozenset([rank]) for _ in range(world)] for rank in range(world)]
    states = [[list(chunks) for chunks in held]]
    for step in range(2 * (world - 1)):
        first = step < world - 1
        sent = [(rank - step) % world if first else (rank + 1 - (step - world + 1)) % world for rank in range(world)]
        values = [held[rank][sent[rank]] for rank in range(world)]
        for rank in range(world):
            chunk, value = sent[rank - 1], values[rank - 1]
            held[rank][chunk] = held[rank][chunk] | value if first else value
        states.append([list(chunks) for chunks in held])
    return states


def draw_ring(folder: Path) -> None:
    """What each rank holds after each step; a chunk with four colors is the whole sum."""
    states = ring_steps(WORLD)
    picture = Picture(1000, 420, "Ring all-reduce on 4 ranks: which ranks' parts each chunk holds, step by step")
    for step, state in enumerate(states):
        x = 90 + 128 * step
        half = "start" if step == 0 else f"step {step - 1}"
        picture.text(x + 48, 58, half, anchor="middle", bold=True)
        for rank, chunks in enumerate(state):
            y = 76 + 78 * rank
            if step == 0:
                picture.text(16, y + 34, f"rank {rank}")
            for chunk, parts in enumerate(chunks):
                picture.box(x + 25 * chunk, y, 22, 56, "", "grey-outline")
                for place, part in enumerate(sorted(parts)):
                    picture.box(x + 25 * chunk + 2, y + 2 + 13 * place, 18, 12, "", RANKS[part])
    picture.text(90 + 128 * 2, 404, "reduce-scatter: 3 steps, chunks are added", anchor="middle", soft=True)
    picture.text(90 + 128 * 5.4, 404, "all-gather: 3 steps, whole chunks are copied", anchor="middle", soft=True)
    picture.line(90 + 128 * 4 - 14, 44, 90 + 128 * 4 - 14, 408, dashed=True)
    picture.save(folder / "phase3_ring.svg")


def draw_deadlock(folder: Path) -> None:
    """Why a ring of blocking sends stands still, and the two cures."""
    picture = Picture(900, 300, "A ring of blocking sends, and two cures (4 ranks, time from top to bottom)")
    plans = (
        ("all ranks send first: deadlock", [["send", "recv"]] * 4),
        ("even ranks send first", [["send", "recv"], ["recv", "send"]] * 2),
        ("isend, recv, wait", [["isend", "recv", "wait"]] * 4),
    )
    for column, (title, plan) in enumerate(plans):
        left = 20 + 295 * column
        picture.text(left, 58, title, bold=True)
        for rank, calls in enumerate(plan):
            picture.text(left + 34 + 68 * rank, 82, f"rank {rank}", anchor="middle", soft=True)
            for row, call in enumerate(calls):
                stuck = column == 0 and row == 1
                color = "grey-outline" if stuck else RANKS[rank] if "send" in call else "grey"
                picture.box(left + 68 * rank, 94 + 44 * row, 62, 34, call, color, size=11)
    picture.text(20, 212, "each send waits for a recv", soft=True)
    picture.text(20, 230, "that no rank reaches", soft=True)
    picture.text(315, 212, "each send meets a recv", soft=True)
    picture.text(315, 230, "at once, in two rounds", soft=True)
    picture.text(610, 244, "isend returns at once,", soft=True)
    picture.text(610, 262, "so every rank reaches recv", soft=True)
    picture.save(folder / "phase3_deadlock.svg")


def draw_overlap(folder: Path) -> None:
    """One step without and with overlap: four layers, four buckets."""
    compute, message = 60, 44
    picture = Picture(820, 300, "Backward of 4 layers and the all-reduce of their buckets")
    rows = (("after backward", False, 60), ("while backward runs", True, 170))
    for title, overlap, y in rows:
        picture.text(16, y - 2, title, bold=True)
        picture.text(16, y + 24, "compute", soft=True)
        picture.text(16, y + 64, "network", soft=True)
        free = 0.0
        for bucket in range(4):
            picture.box(100 + compute * bucket, y + 4, compute - 4, 30, f"layer {3 - bucket}", "blue", size=11)
        for bucket in range(4):
            ready = compute * (bucket + 1) if overlap else compute * 4
            begin = max(free, ready)
            picture.box(100 + begin, y + 44, message - 4, 30, f"b{bucket}", "orange", size=11)
            free = begin + message
        picture.line(100 + free, y - 4, 100 + free, y + 82, dashed=True)
        picture.text(104 + free, y + 64, f"done at {free:g}", soft=True)
    picture.text(16, 284, "units: a layer's backward takes 60, a bucket's all-reduce 44", soft=True)
    picture.save(folder / "phase3_overlap.svg")


def draw_servers(folder: Path) -> None:
    """Three workers, the last one slow: what each of the three kinds of server does."""
    picture = Picture(900, 430, "Three workers and a server: when each worker computes (blue) and waits (outline)")
    speeds, horizon = (40, 40, 100), 420
    for row, kind in enumerate(("synchronous", "bounded, 1 step ahead", "asynchronous")):
        top = 66 + 118 * row
        picture.text(16, top, kind, bold=True)
        for worker, begins in enumerate(begin_times(kind, speeds, horizon)):
            y = top + 10 + 28 * worker
            picture.text(16, y + 16, f"worker {worker + 1}", soft=True)
            for step, begin in enumerate(begins):
                end = begin + speeds[worker]
                picture.box(110 + 1.7 * begin, y, 1.7 * speeds[worker] - 3, 22, str(step), "blue", size=11)
                following = begins[step + 1] if step + 1 < len(begins) else None
                if following is not None and following > end:
                    picture.box(110 + 1.7 * end, y, 1.7 * (following - end) - 3, 22, "", "grey-outline")
    picture.text(
        16, 416, "the number is the worker's step; worker 3 takes 100 units for a gradient, others 40", soft=True
    )
    picture.save(folder / "phase3_servers.svg")


def begin_times(kind: str, speeds: tuple[int, ...], horizon: int) -> list[list[int]]:
    """Return when each worker begins each step, until the horizon."""
    lead = {"synchronous": 0, "asynchronous": 10**6}.get(kind, 1)
    begins: list[list[int]] = [[0] for _ in speeds]
    for step in range(1, horizon // min(speeds) + 1):
        for worker, speed in enumerate(speeds):
            if len(begins[worker]) < step:
                continue
            ready = begins[worker][step - 1] + speed
            slowest = [push_time(begins[other], speeds[other], step - lead) for other in range(len(speeds))]
            begin = max([ready, *slowest])
            if begin + speed <= horizon + 40:
                begins[worker].append(begin)
    return begins


def push_time(begins: list[int], speed: int, count: int) -> int:
    """Return when a worker has pushed `count` gradients, at its own speed from the last known step on."""
    if count <= 0:
        return 0
    known = min(count, len(begins))
    return begins[known - 1] + speed * (count - known + 1)


def draw_hosts(folder: Path) -> None:
    """The hierarchical all-reduce on two hosts of two ranks."""
    picture = Picture(780, 300, "Hierarchical all-reduce: 4 ranks on 2 hosts, tensor of S bytes")
    for host, x in enumerate((150, 480)):
        picture.box(x - 20, 50, 270, 226, "", "grey-outline")
        picture.text(x - 10, 70, f"host {host}", bold=True)
        for member in range(2):
            picture.box(x + 140 * member, 84, 90, 32, f"rank {2 * host + member}", RANKS[2 * host + member])
        picture.arrow(x + 140, 140, x + 60, 140, "1. S to the leader", "teal")
        picture.box(x, 160, 90, 32, "host's sum", "grey")
        picture.arrow(x + 60, 250, x + 140, 250, "3. total, S", "teal")
    picture.arrow(240, 176, 478, 176, "2. S/2 twice", "orange")
    picture.arrow(478, 196, 240, 196, "", "orange")
    picture.text(16, 180, "between hosts:", soft=True)
    picture.text(16, 196, "2 S in all", soft=True)
    picture.save(folder / "phase3_hosts.svg")


def main() -> None:
    """Draw all pictures."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    for draw in (draw_ring, draw_deadlock, draw_overlap, draw_servers, draw_hosts):
        draw(folder)


if __name__ == "__main__":
    main()
