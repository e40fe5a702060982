"""What it costs to record every collective: on against off, in turn, as a share of a step of 2 ms.

    python benchmarks/collective_records.py

The groups have one rank, so that no time of waiting for others hides the cost. gloo: torch's flight recorder; processes
with and without it take turns. Messages (a send and a recv of two ranks over gloo) and shared memory: steps with and
without it take turns. Times are CPU time of the calling thread, which other processes of the machine disturb little.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

CALLS = 2
"""Collectives in a step: a gradient bucket and a metric."""
STEP = 2e-3
DEPTH = 20
"""Python frames between the collective and the program's first line."""


def deep(depth: int, function: Callable[[], float]) -> float:
    """Call a function from this many frames."""
    return function() if depth == 0 else deep(depth - 1, function)


def time_gloo(repeat: int) -> float:
    """Return the seconds of an all-reduce in a group of one rank."""
    import torch
    import torch.distributed as dist

    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        tensor = torch.ones(4)

        def loop() -> float:
            begin = time.thread_time()
            for _ in range(repeat):
                dist.all_reduce(tensor)
            return (time.thread_time() - begin) / repeat

        deep(DEPTH, loop)
        seconds = min(deep(DEPTH, loop) for _ in range(10))
        dist.destroy_process_group()
    return seconds


def time_messages(steps: int) -> tuple[float, float]:
    """Return the seconds of a send and a recv over gloo with and without records; steps take turns."""
    import torch
    import torch.distributed as dist

    os.environ["TORCH_FR_BUFFER_SIZE"] = "1000"
    from phalanx.diagnosis.point_to_point import record_messages

    methods = [(dist.ProcessGroup, "send"), (dist.ProcessGroup, "recv"), (dist.Work, "wait")]
    plain = [vars(kind)[name] for kind, name in methods]
    record_messages()
    recorded = [vars(kind)[name] for kind, name in methods]
    found: dict[bool, list[float]] = {True: [], False: []}
    with tempfile.TemporaryDirectory() as folder:
        there = subprocess.Popen([sys.executable, "-c", _ECHO, folder, str(steps)])
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=2)
        tensor, weights = torch.ones(256), torch.ones(256, 256)

        def messages() -> float:
            begin = time.thread_time()
            dist.send(tensor, 1)
            dist.recv(tensor, 1)
            return time.thread_time() - begin

        for number in range(steps):
            for (kind, name), method in zip(methods, recorded if number % 2 else plain, strict=True):
                setattr(kind, name, method)
            begin = time.perf_counter()
            while time.perf_counter() - begin < STEP:
                weights @ weights
            found[bool(number % 2)].append(deep(DEPTH, messages))
        there.wait()
        dist.destroy_process_group()
    return median(found[True]), median(found[False])


_ECHO = """
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=1, world_size=2)
tensor = torch.ones(256)
for _ in range(int(sys.argv[2])):
    dist.recv(tensor, 0)
    dist.send(tensor, 0)
"""


def time_shared_memory(steps: int, *, in_trainer: bool, in_turn: bool = False) -> tuple[float, float]:
    """Return the seconds of the collectives of a step with and without records.

    In a trainer no frame of the stack is the user's. With `in_turn` each step is at another depth than the last.
    """
    import torch

    os.environ["TORCH_FR_BUFFER_SIZE"] = "1000"
    from phalanx.comm.shm import SharedGroup
    from phalanx.observe.call_ring import _USERS

    _USERS[__file__] = not in_trainer

    group = SharedGroup(lambda text: [text], 0, 1)
    records, tensor, weights = group._records, torch.ones(256), torch.ones(256, 256)
    assert records is not None
    found: dict[bool, list[float]] = {True: [], False: []}

    def collectives() -> float:
        begin = time.thread_time()
        for _ in range(CALLS):
            group.all_reduce(tensor)
        return time.thread_time() - begin

    for number in range(steps):
        group._records = records if number % 2 else None
        begin = time.perf_counter()
        while time.perf_counter() - begin < STEP:  # what a step does in between clears the caches
            weights @ weights
        found[bool(number % 2)].append(deep(DEPTH + 5 * in_turn * (number // 2 % 2), collectives))
    return median(found[True]), median(found[False])


def measure_gloo(rounds: int) -> tuple[float, float]:
    """Return the median seconds of a call with and without the recorder."""
    found: dict[str, list[float]] = {"1000": [], "0": []}
    for _ in range(rounds):
        for size, times in found.items():
            env = {**os.environ, "TORCH_FR_BUFFER_SIZE": size}
            command = [sys.executable, __file__, "--in-rank", "gloo"]
            times.append(float(subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout))
    return median(found["1000"]), median(found["0"])


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--in-rank", choices=("gloo",), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.in_rank == "gloo":
        print(time_gloo(500))
        return
    print(f"{'over':<14} {'on':>9} {'off':>9} {'per call':>9}  share of a step of 2 ms with {CALLS} collectives")
    on, off = measure_gloo(options.rounds)
    _print("gloo", on * CALLS, off * CALLS)
    _print("messages", *time_messages(3000))
    _print("shared memory", *time_shared_memory(3000, in_trainer=False))
    _print("in a trainer", *time_shared_memory(3000, in_trainer=True))
    _print("two depths", *time_shared_memory(3000, in_trainer=True, in_turn=True))


def _print(name: str, on: float, off: float) -> None:
    each = (on - off) / CALLS
    print(f"{name:<14} {on * 1e6:>6.1f} us {off * 1e6:>6.1f} us {each * 1e6:>6.1f} us  {(on - off) / STEP:.2%}")


if __name__ == "__main__":
    main()
