"""The measurement on a rank; the first rank prints each row at once, and writes all of them to a file."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from phalanx.comm.collectives.channel import P2PChannel
from phalanx.comm.collectives.direct import barrier
from phalanx.comm.collectives.topology import find_locations, hosts, measure_links
from phalanx.observe.format import speed_note
from phalanx.tools.bench.comm.cases import CannotRunHere, Case, expected_result, input_count, make_case, sample
from phalanx.tools.bench.comm.plan import DTYPE_BYTES, BenchPlan, element_count
from phalanx.tools.bench.comm.report import HEADER, BenchRow

PLAN_NAME = "plan.json"
RESULT_NAME = "result.json"
_TIMEOUT = timedelta(minutes=5)


def run_plan(payload: str) -> None:
    """Measure what the plan in this folder asks for, as a rank that was started for it."""
    folder = Path(payload)
    found = measure(BenchPlan.from_json((folder / PLAN_NAME).read_text()), partial(print, flush=True))
    if dist.get_rank() == 0:
        (folder / RESULT_NAME).write_text(json.dumps(found))


def measure(plan: BenchPlan, say: Callable[[str], object]) -> dict[str, Any]:
    """Join the other ranks and measure; every rank calls this. The first one prints the rows and returns them."""
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    channel = P2PChannel()
    show = say if channel.rank == 0 else lambda text: None
    found: dict[str, Any] = {"ranks": channel.size, "hosts": len(hosts(find_locations(channel)))}
    if plan.p2p:
        if channel.rank == 0:
            found["copy_gbs"] = measure_copy()
        matrix = measure_links(channel)
        found["latency_us"] = [[seconds * 1e6 for seconds in row] for row in matrix.latency_s]
        found["bandwidth_gbs"] = [[rate / 1e9 for rate in row] for row in matrix.bandwidth]
    if plan.sizes:
        note = f", {speed_note(plan.ranks_per_gpu)}" if plan.ranks_per_gpu > 1 else ""
        show(f"{plan.op} on {channel.size} ranks{note}\n{HEADER}")
        found["rows"] = [row.to_dict() for row in measure_rows(plan, channel, show)]
    barrier(channel)  # no rank exits while another still receives from it
    return found


def measure_rows(plan: BenchPlan, channel: P2PChannel, show: Callable[[str], object]) -> Iterator[BenchRow]:
    """Measure one algorithm after the other; one that cannot run is reported in a line."""
    for algo in plan.algos:
        try:
            case = make_case(algo, plan, channel)
        except CannotRunHere as reason:
            show(f"{algo:<17}left out: {reason}")
            continue
        for size in plan.sizes:
            row = _measure(algo, case, plan, size, channel)
            show(str(row))
            yield row


def _measure(algo: str, case: Case, plan: BenchPlan, size: int, channel: P2PChannel) -> BenchRow:
    count = element_count(plan.op, size, plan.dtype, channel.size)
    given = case.allocate(input_count(plan.op, count, channel.size), getattr(torch, plan.dtype))
    given.fill_(1)
    for _ in range(plan.warmup):
        case.move(given)
    barrier(channel)
    seconds = [_timed(case, given) for _ in range(plan.iterations(size))]
    slowest = torch.tensor(statistics.median(seconds), dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    wrong = torch.tensor(_count_wrong(case, given, plan, count, channel))
    dist.all_reduce(wrong)
    nbytes = count * DTYPE_BYTES[plan.dtype]
    shared = plan.ranks_per_gpu if given.is_cuda else 1
    return BenchRow(
        plan.op, algo, channel.size, nbytes, count, plan.dtype, plan.redop, slowest.item() * 1e6, int(wrong), shared
    )


def _timed(case: Case, given: torch.Tensor) -> float:
    begin = time.perf_counter()
    case.move(given)
    if given.is_cuda:
        torch.cuda.synchronize(given.device)
    return time.perf_counter() - begin


def _count_wrong(case: Case, given: torch.Tensor, plan: BenchPlan, count: int, channel: P2PChannel) -> int:
    """Move known values once, and count the wrong elements."""
    if not case.is_checked:
        return 0
    given.copy_(sample(channel.rank, given.numel(), plan.dtype))
    result = case.move(given)
    expected = expected_result(plan, count, channel.rank, channel.size)
    if result is None or expected is None:
        return 0 if result is expected else count
    close = torch.isclose(result.cpu().view(-1), expected, rtol=1e-2 if "16" in plan.dtype else 1e-5)
    return int(close.logical_not().sum())


def measure_copy(nbytes: int = 4 << 20) -> float:
    """Return the GB/s at which one core copies memory: the upper bound of messages within a machine."""
    source, target = torch.ones(nbytes, dtype=torch.uint8), torch.ones(nbytes, dtype=torch.uint8)
    times = []
    for _ in range(10):
        begin = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - begin)
    return nbytes / min(times) / 1e9
