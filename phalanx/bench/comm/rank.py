"""Measuring, as a rank executes it: the first rank prints each row as it is there, and leaves all of them in a file."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from phalanx.bench.comm.cases import CannotRunHere, Case, expected_result, input_count, make_case, sample
from phalanx.bench.comm.plan import DTYPE_BYTES, BenchPlan, element_count
from phalanx.bench.comm.report import HEADER, BenchRow
from phalanx.comm.collectives.channel import P2PChannel
from phalanx.comm.collectives.direct import barrier
from phalanx.comm.collectives.topology import find_locations, hosts, measure_links

PLAN_NAME = "plan.json"
RESULT_NAME = "result.json"
_PATIENCE = timedelta(minutes=5)


def run_plan(payload: str) -> None:
    """Measure what the plan in this folder asks for, as a rank that was started for it."""
    folder = Path(payload)
    found = measure(BenchPlan.from_json((folder / PLAN_NAME).read_text()), _say)
    if dist.get_rank() == 0:
        (folder / RESULT_NAME).write_text(json.dumps(found))


def measure(plan: BenchPlan, say: Callable[[str], object]) -> dict[str, Any]:
    """Meet the other ranks and measure; every rank calls it. The first one says what it finds, and has all of it."""
    dist.init_process_group("gloo", timeout=_PATIENCE)
    channel = P2PChannel()
    tell = say if channel.rank == 0 else _keep_quiet
    found: dict[str, Any] = {"ranks": channel.size, "hosts": len(hosts(find_locations(channel)))}
    if plan.p2p:
        if channel.rank == 0:
            found["copy_gbs"] = measure_copy()
        matrix = measure_links(channel)
        found["latency_us"] = [[seconds * 1e6 for seconds in row] for row in matrix.latency_s]
        found["bandwidth_gbs"] = [[rate / 1e9 for rate in row] for row in matrix.bandwidth]
    if plan.sizes:
        tell(f"{plan.op} on {channel.size} ranks\n{HEADER}")
        found["rows"] = [row.to_dict() for row in measure_rows(plan, channel, tell)]
    barrier(channel)  # nobody leaves while another rank still receives from it
    return found


def measure_rows(plan: BenchPlan, channel: P2PChannel, tell: Callable[[str], object]) -> Iterator[BenchRow]:
    """Measure one algorithm after the other; what cannot run here is said in a line."""
    for algo in plan.algos:
        try:
            mover = make_case(algo, plan, channel)
        except CannotRunHere as reason:
            tell(f"{algo:<17}left out: {reason}")
            continue
        for size in plan.sizes:
            row = _measure(algo, mover, plan, size, channel)
            tell(str(row))
            yield row


def _measure(algo: str, mover: Case, plan: BenchPlan, size: int, channel: P2PChannel) -> BenchRow:
    count = element_count(plan.op, size, plan.dtype, channel.size)
    given = mover.allocate(input_count(plan.op, count, channel.size), getattr(torch, plan.dtype))
    given.fill_(1)
    for _ in range(plan.warmup):
        mover.move(given)
    barrier(channel)
    seconds = [_timed(mover, given) for _ in range(plan.iterations(size))]
    slowest = torch.tensor(statistics.median(seconds), dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    wrong = torch.tensor(_count_wrong(mover, given, plan, count, channel))
    dist.all_reduce(wrong)
    nbytes = count * DTYPE_BYTES[plan.dtype]
    return BenchRow(
        plan.op, algo, channel.size, nbytes, count, plan.dtype, plan.redop, slowest.item() * 1e6, int(wrong)
    )


def _timed(mover: Case, given: torch.Tensor) -> float:
    begin = time.perf_counter()
    mover.move(given)
    if given.is_cuda:
        torch.cuda.synchronize(given.device)
    return time.perf_counter() - begin


def _count_wrong(mover: Case, given: torch.Tensor, plan: BenchPlan, count: int, channel: P2PChannel) -> int:
    """Move known values once, and count the elements that did not come out right."""
    if not mover.is_checked:
        return 0
    given.copy_(sample(channel.rank, given.numel(), plan.dtype))
    result = mover.move(given)
    expected = expected_result(plan, count, channel.rank, channel.size)
    if result is None or expected is None:
        return 0 if result is expected else count
    close = torch.isclose(result.cpu().view(-1), expected, rtol=1e-2 if "16" in plan.dtype else 1e-5)
    return int(close.logical_not().sum())


def measure_copy(nbytes: int = 4 << 20) -> float:
    """Return GB/s at which one core copies memory: what no message within a machine can beat."""
    source, target = torch.ones(nbytes, dtype=torch.uint8), torch.ones(nbytes, dtype=torch.uint8)
    times = []
    for _ in range(10):
        begin = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - begin)
    return nbytes / min(times) / 1e9


def _say(text: str) -> None:
    print(text, flush=True)


def _keep_quiet(text: str) -> None:
    """Say nothing: the first rank does."""
