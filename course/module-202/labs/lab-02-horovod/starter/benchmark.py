"""Lab 02, task 4: measure Horovod's all-reduce so that the numbers can be trusted.

Start it with `horovodrun --gloo -np 2 -H localhost:1,127.0.0.1:1 --network-interfaces lo python benchmark.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import horovod.torch as hvd

WARM_UP = 2
"""Calls before the first that counts: connections are opened, buffers allocated, the response cache filled."""


@dataclass(frozen=True)
class Row:
    """What was measured for one size."""

    bytes: int
    seconds: float
    busbw: float
    """Bytes per second on the wire of each rank: 2 (n - 1) / n x bytes / seconds."""
    wrong: int
    """Elements of all calls on this rank that are not the sum over the ranks."""


def benchmark(sizes: Sequence[int], repeats: int) -> list[Row]:
    """Return one row per size in bytes, the same seconds and busbw on all ranks.

    Horovod is initialised. Each call sums float32 tensors of that size over all ranks; rank r gives a tensor full of
    r + 1. After two calls that do not count, `repeats` calls are timed one by one with time.perf_counter, each after a
    barrier, which is not timed. A call takes as long as it takes on its slowest rank; a row has the median of that over
    the calls.
    """
    # TODO horovod-benchmark: time the calls, agree on the slowest rank, return the rows.
    #   Hints, one at a time: phalanx learn hint horovod-benchmark
    raise NotImplementedError("benchmark")


def main() -> None:
    """Print the table on rank 0."""
    hvd.init()
    rows = benchmark([2**power for power in range(10, 25, 2)], 15)
    if hvd.rank() == 0:
        print(f"{'bytes':>10} {'us':>10} {'busbw MB/s':>12} {'#wrong':>7}")
        for row in rows:
            print(f"{row.bytes:>10} {row.seconds * 1e6:>10.0f} {row.busbw / 1e6:>12.1f} {row.wrong:>7}", flush=True)


if __name__ == "__main__":
    main()
