"""The rows of `tests.simulation.scale` as a picture against the number of nodes, and as a table.

    python -m tests.simulation.picture benchmarks/results/launchers.json docs/assets/launchers.svg

Beside a quiet run stands torchrun's c10d rendezvous. Its state of that many nodes is pickled with torch's own classes;
each agent compares and sets it every five seconds: sends the value before and the new one, and gets the result.
"""

from __future__ import annotations

import json
import math
import pickle
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from phalanx.tools.svg import COLORS, Axis, Plot, write_picture

_CELL = (460, 320)
_EVENTS = ("start", "a lost rank", "a lost node", "64 nodes at once", "the leader", "a rack of 64 more", "the end")
_RIVAL, _OURS = "torchrun c10d", "Phalanx"
_KEEP_ALIVE_SECONDS = 5.0
_HEARTBEAT_BYTES = 100
_COLUMNS: Mapping[str, tuple[str, str]] = {
    "decided": ("decided, virtual s", "{:.2f} s"),
    "training": ("training, virtual s", "{:.1f} s"),
    "cpu": ("CPU of the leader, s", "{:.2f}"),
    "messages": ("messages", "{:,}"),
    "megabytes": ("MB", "{:.1f}"),
}

Rows = list[dict[str, Any]]


def c10d_bytes_per_second(nodes: int) -> float:
    """Return what agents of torchrun exchange with their store in a quiet second."""
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState

    state = _RendezvousState()
    for number in range(nodes):
        node = _NodeDesc(f"node-{number:05d}.cluster.local", 1000 + number % 30_000, 0)
        state.participants[node] = number
        state.last_heartbeats[node] = datetime.now(UTC)
    return 3 * (4 / 3 * len(pickle.dumps(state))) * nodes / _KEEP_ALIVE_SECONDS


def table(rows: Rows) -> str:
    """Return the rows of events in Markdown."""
    lines = ["| nodes | event | " + " | ".join(name for name, _ in _COLUMNS.values()) + " |"]
    lines.append("|---" * (2 + len(_COLUMNS)) + "|")
    for row in rows:
        if "cpu" in row:
            values = [form.format(row[key]) for key, (_, form) in _COLUMNS.items()]
            lines.append(f"| {row['nodes']:,} | {row['what']} | {' | '.join(values)} |")
    return "\n".join(lines)


def _quiet(rows: Rows) -> Rows:
    return [row for row in rows if "heartbeats per second" in row]


def _events(rows: Rows, key: str) -> str:
    lines = {what: [(row["nodes"], row[key]) for row in rows if row["what"] == what] for what in _EVENTS}
    return _chart(_COLUMNS[key][0], lines)


def _beside_torchrun(rows: Rows) -> str:
    nodes = [row["nodes"] for row in _quiet(rows)]
    ours = [(row["nodes"], row["heartbeats per second"] * _HEARTBEAT_BYTES / 1e6) for row in _quiet(rows)]
    theirs = [(count, c10d_bytes_per_second(count) / 1e6) for count in nodes]
    return _chart("quiet: MB per second at the store", {_OURS: ours, _RIVAL: theirs})


def _chart(name: str, lines: Mapping[str, list[tuple[int, float]]]) -> str:
    points = [point for line in lines.values() for point in line]
    low, high = min(y for _, y in points), max(y for _, y in points)
    x = Axis("nodes", min(x for x, _ in points) / 1.2, max(x for x, _ in points) * 1.2, log=True)
    plot = Plot(x, Axis(name, max(low, 0.005) / 1.5, high * 1.5, log=True), _CELL)
    colors = dict(zip((*_EVENTS, _OURS, _RIVAL), COLORS, strict=False))
    for what, line in lines.items():
        line = [(nodes, max(y, 0.005)) for nodes, y in line]
        plot.line(line, colors[what], what)
        for point in line:
            plot.mark(point, colors[what], f"{what}, {point[0]:,} nodes: {point[1]:g}")
    return plot.svg()


def growth(rows: Rows, key: str) -> dict[str, float]:
    """Return for each event the exponent with which a value grew between the largest two sizes; N log N is 1.1."""
    found = {}
    for what in _EVENTS:
        points = sorted((row["nodes"], row[key]) for row in rows if row["what"] == what)
        if len(points) < 2:
            continue
        (smaller, before), (larger, after) = points[-2:]
        found[what] = round(math.log(max(after, 0.01) / max(before, 0.01)) / math.log(larger / smaller), 2)
    return found


def main() -> None:
    """Write the picture, print the table."""
    with open(sys.argv[1], encoding="utf-8") as file:
        rows: Rows = json.load(file)

    charts = [_events(rows, "decided"), _events(rows, "cpu"), _events(rows, "megabytes"), _beside_torchrun(rows)]
    title = "Launchers of 8 ranks each, simulated: what an event costs the node that leads"
    write_picture(sys.argv[2], title, charts, _CELL, (*_EVENTS, _OURS, _RIVAL))
    print(table(rows))
    for row in _quiet(rows):
        rival = c10d_bytes_per_second(row["nodes"]) / 1e6
        beats = row["heartbeats per second"]
        print(f"{row['nodes']:,}: {beats} heartbeats/s, leader {row['leader MB']} MB; torchrun {rival:,.0f} MB/s")
    for key in ("cpu", "messages", "megabytes"):
        print(key, "grows with N to the power of", growth(rows, key))


if __name__ == "__main__":
    main()
