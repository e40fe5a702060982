"""Time and messages until many machines have formed a group: ours against torchrun's c10d rendezvous.

    unshare -n sh -c 'ip link set lo up; python benchmarks/rendezvous_scale.py --nodes 64 256 1024 4096'

Every simulated machine is a thread with its own connection to a real TCPStore, which runs the code of a launcher
(`phalanx.launch.nodes.NodeGroup`) or torchrun's dynamic rendezvous; no ranks are started. Threads are spread over a few
processes. A message is one operation on the store. Without a network (`unshare`) no name server is asked for the name
of every client.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import queue
import socket
import statistics
import sys
import threading
import time
from collections import Counter
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousError

from phalanx.errors import PhalanxError
from phalanx.launch.nodes import NodeGroup

RIVALS = ("phalanx", "torchrun")
_THREADS = 128
"""Simulated machines per process."""


class Counting:
    """A store that counts the calls to it."""

    def __init__(self, inner: Any, calls: Counter[str]) -> None:
        self._inner, self._calls = inner, calls

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if not callable(found):
            return found

        def call(*arguments: Any, **named: Any) -> Any:
            self._calls[name] += 1
            return found(*arguments, **named)

        return call


class CountedNodes(NodeGroup):
    """A launcher's side of the rendezvous, with its operations counted."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.calls: Counter[str] = Counter()
        super().__init__(request)

    def _sign(self, prefix: str) -> Any:
        return Counting(super()._sign(prefix), self.calls)

    def _open_mailbox(self) -> Any:
        """Send no heartbeats: those of the machines that have joined would use the cores of those that have not."""
        return SimpleNamespace(start=lambda: None)


def join_phalanx(number: int, nodes: int, port: int, seconds: float) -> tuple[int, Any]:
    """Join as one machine; return its messages, and what must live until all have joined."""
    group = CountedNodes(
        {
            "num_nodes": nodes,
            "node_rank": number,
            "endpoint": f"127.0.0.1:{port}",
            "run_id": "scale",
            "launch_id": "scale",
            "ranks_per_node": 8,
            "identity": {"version": "same"},
            "seconds": seconds,
        }
    )
    group.gather(0, lambda message: None)
    return sum(group.calls.values()), group


def join_torchrun(number: int, nodes: int, port: int, seconds: float) -> tuple[int, Any]:
    """Join as one agent of torchrun."""
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

    calls: Counter[str] = Counter()
    wait = timedelta(seconds=min(seconds, 60.0))
    plain = TCPStore("127.0.0.1", port, is_master=number == 0, wait_for_workers=False, timeout=wait)
    store: Any = Counting(plain, calls)
    backend = C10dRendezvousBackend(store, "scale")
    parameters = RendezvousParameters(
        "c10d", f"127.0.0.1:{port}", "scale", nodes, nodes, "127.0.0.1", join_timeout=str(int(seconds)),
        last_call_timeout="1", keep_alive_interval="5", keep_alive_max_attempt="100",
    )  # fmt: skip
    handler = create_handler(plain, backend, parameters)
    info = handler.next_rendezvous()
    return sum(calls.values()), (handler, info)


def _joined(rival: str, numbers: list[int], nodes: int, port: int, seconds: float, results: Any, gate: Any) -> None:
    """Run some machines as threads of this process."""
    join = join_phalanx if rival == "phalanx" else join_torchrun
    kept: list[Any] = []
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # torch reports connections that close at the end

    def one(number: int) -> None:
        began = time.monotonic()
        try:
            messages, alive = join(number, nodes, port, seconds)
            kept.append(alive)
            results.put((number, began, time.monotonic(), messages, ""))
        except (PhalanxError, RendezvousError, RuntimeError, OSError) as error:
            results.put((number, began, time.monotonic(), 0, f"{type(error).__name__}: {error}"[:200]))

    threads = [threading.Thread(target=one, args=(number,), daemon=True) for number in numbers]
    gate.wait()
    for thread in threads:
        thread.start()
    gate.wait()  # all have joined, or time is up


def measure(rival: str, nodes: int, seconds: float) -> dict[str, Any]:
    """Form one group; return its time and messages per machine."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    context = multiprocessing.get_context("fork")
    parts = [list(range(nodes))[first : first + _THREADS] for first in range(0, nodes, _THREADS)]
    gate, results = context.Barrier(len(parts) + 1), context.Queue()
    workers = [
        context.Process(target=_joined, args=(rival, part, nodes, port, seconds, results, gate), daemon=True)
        for part in parts
    ]
    for worker in workers:
        worker.start()
    gate.wait()
    deadline = time.monotonic() + seconds + 30
    rows = []
    while len(rows) < nodes and time.monotonic() < deadline:
        try:
            rows.append(results.get(timeout=max(0.1, deadline - time.monotonic())))
        except queue.Empty:
            break
    gate.wait()
    for worker in workers:
        worker.terminate()
        worker.join()
    good = [row for row in rows if not row[4]]
    wrong = next((row[4] for row in rows if row[4]), "" if len(rows) == nodes else "time is up")
    found: dict[str, Any] = {"rival": rival, "nodes": nodes, "joined": len(good), "error": wrong}
    if good and not wrong:
        counts = sorted(row[3] for row in good)
        found["seconds"] = round(max(row[2] for row in good) - min(row[1] for row in good), 2)
        found["messages per node"] = round(statistics.median(counts), 1)
        found["messages of the host"] = next(row[3] for row in good if row[0] == 0)
    return found


def main(arguments: list[str] | None = None) -> int:
    """Measure every size for both, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--rivals", nargs="+", choices=RIVALS, default=list(RIVALS))
    parser.add_argument("--seconds", type=float, default=120.0, help="give up a group after this many seconds")
    parser.add_argument("--json", metavar="FILE", help="write the numbers, too")
    given = parser.parse_args(arguments)
    rows = []
    print(f"{'nodes':>6} {'rival':<9} {'seconds':>8} {'messages/node':>14} {'of the host':>12}")
    for nodes in given.nodes:
        for rival in given.rivals:
            row = measure(rival, nodes, given.seconds)
            rows.append(row)
            if row["error"]:
                print(f"{nodes:>6} {rival:<9} not formed: {row['joined']} joined; {row['error']}", flush=True)
            else:
                shown = f"{row['seconds']:>8} {row['messages per node']:>14} {row['messages of the host']:>12}"
                print(f"{nodes:>6} {rival:<9} {shown}", flush=True)
    if given.json:
        with open(given.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
