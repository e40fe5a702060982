"""The measurement on a rank, and the algorithms by name; the first rank prints each row at once."""

from __future__ import annotations

import gc
import inspect
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from phalanx.comm.collectives import ALGORITHMS
from phalanx.comm.collectives.channel import P2PChannel
from phalanx.comm.collectives.direct import barrier
from phalanx.comm.collectives.fixed_order import check_ranks
from phalanx.comm.collectives.topology import find_locations, hosts, measure_links
from phalanx.comm.shm import SharedGroup, on_one_machine
from phalanx.comm.shm.pages import group_text_gatherer
from phalanx.errors import SharedMemoryUnavailable, UsageError, a_type, first_line
from phalanx.host.gpus import HOST_ID
from phalanx.observe.format import speed_note
from phalanx.recipes.imports import is_import_path, load_import
from phalanx.tools.bench.comm.plan import DTYPE_BYTES, PLAN_FILE, RESULT_FILE, BenchPlan, element_count
from phalanx.tools.bench.comm.report import HEADER, BenchRow
from phalanx.world.env import read_rank_env

_TORCH_OPS = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.AVG, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}
_TORCH_OPS["prod"] = dist.ReduceOp.PRODUCT
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""torch 2.13 has new names for them, and warns of the old ones."""
_IN_PLACE = ("all_reduce", "broadcast", "reduce")


class CannotRunHere(Exception):
    """The reason why an algorithm is left out; the others are measured."""


def _fresh(count: int, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    return torch.empty(count, dtype=dtype, device=device)


@dataclass(frozen=True)
class Case:
    """One algorithm. `move` takes the input and returns this rank's result, or None where a rank has none."""

    move: Callable[[torch.Tensor], torch.Tensor | None]
    allocate: Callable[[int, torch.dtype], torch.Tensor] = _fresh
    is_checked: bool = True
    """Whether its result is that of the collective."""


def make_case(algo: str, plan: BenchPlan, channel: P2PChannel) -> Case:
    """Return an algorithm that is ready to run, or raise `CannotRunHere`, on all ranks alike."""
    if algo in ALGORITHMS[plan.op]:
        return _collective(algo, plan, channel)
    if is_import_path(algo):
        return Case(partial(_move_collective, _own_function(algo), plan, channel))
    if algo in ("shm", "shm-copy"):
        return _shared_memory(plan, channel, in_place=algo == "shm" and plan.op == "all_reduce")
    if algo == "copy":
        room = torch.empty(max(plan.sizes), dtype=torch.uint8)
        return Case(lambda tensor: room[: tensor.nbytes].view(tensor.dtype).copy_(tensor), is_checked=False)
    return _torch_backend(algo, plan, channel)


def _collective(algo: str, plan: BenchPlan, channel: P2PChannel) -> Case:
    function = ALGORITHMS[plan.op][algo]
    if algo == "fixed-order":
        try:
            check_ranks(channel.size)
        except UsageError as error:
            raise CannotRunHere(error.message) from None
    if algo == "hierarchical" and plan.ranks_per_host is not None:
        ranks = range(channel.size)
        groups = [list(ranks[first : first + plan.ranks_per_host]) for first in ranks[:: plan.ranks_per_host]]
        function = partial(function, groups=groups)
    return Case(partial(_move_collective, function, plan, channel))


def _own_function(path: str) -> Callable[..., Any]:
    """Return a function of the user, called like those of `phalanx.comm.collectives`.

    One that takes the tensor alone moves it by `torch.distributed`, whose default group is gloo here.
    """
    function = load_import(path, "--algo")
    if not callable(function):
        raise UsageError(f"--algo {path} is {a_type(function)}, and a function of a tensor is expected")
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    positional = [parameter for parameter in inspect.signature(function).parameters.values() if parameter.kind in kinds]
    return lambda *given: function(*given[: len(positional)])


def _move_collective(
    function: Callable[..., Any], plan: BenchPlan, channel: P2PChannel, tensor: torch.Tensor
) -> torch.Tensor | None:
    if plan.op == "scatter":
        block = tensor.new_empty(tensor.numel() // channel.size)
        function(block, channel, tensor.view(channel.size, -1) if channel.rank == 0 else None)
        return block
    if plan.op == "all_to_all":
        tensor = tensor.view(channel.size, -1)
    extra = (plan.redop,) if plan.op in ("all_reduce", "reduce_scatter", "reduce") else ()
    result: torch.Tensor | None = function(tensor, channel, *extra)
    if plan.op in _IN_PLACE:
        moved = tensor if result is None else result  # a function of the user may return another tensor
        return moved if plan.op != "reduce" or channel.rank == 0 else None
    return result


def _shared_memory(plan: BenchPlan, channel: P2PChannel, *, in_place: bool) -> Case:
    gather = group_text_gatherer(None)
    if not on_one_machine(gather, channel.rank):
        raise CannotRunHere("the ranks are not on one machine")
    try:
        group = SharedGroup(gather, channel.rank, channel.size, timeout=60.0, room=max(plan.sizes) if in_place else 0)
    except SharedMemoryUnavailable as error:
        raise CannotRunHere(error.message) from None
    if in_place:
        room = group.empty(max(plan.sizes), torch.uint8)
        return Case(partial(_move_shared, group, plan), lambda count, dtype: room[: count * dtype.itemsize].view(dtype))
    return Case(partial(_move_shared, group, plan))


def _move_shared(group: Any, plan: BenchPlan, tensor: torch.Tensor) -> torch.Tensor:
    if plan.op == "all_reduce":
        group.all_reduce(tensor, plan.redop)
        return tensor
    if plan.op == "broadcast":
        group.broadcast(tensor)
        return tensor
    if plan.op == "reduce_scatter":
        out = tensor.new_empty(tensor.numel() // group.size)
        group.reduce_scatter(out, tensor, plan.redop)
        return out
    out = tensor.new_empty(tensor.numel() * (group.size if plan.op == "all_gather" else 1))
    getattr(group, plan.op)(out, tensor)
    return out


def _torch_backend(name: str, plan: BenchPlan, channel: P2PChannel) -> Case:
    group = dist.group.WORLD
    device = "cpu"
    if name == "nccl":
        device = f"cuda:{_check_nccl() % torch.cuda.device_count()}"
        torch.cuda.set_device(device)
        group = dist.new_group(backend="nccl")
    case = Case(partial(_move_by_torch, plan, channel, group), partial(_fresh, device=device))
    dtype = getattr(torch, plan.dtype)
    try:  # a backend that cannot do it fails at the first call, on every rank
        case.move(torch.ones(channel.size, dtype=dtype, device=device))
    except RuntimeError as error:
        raise CannotRunHere(first_line(error)) from error
    return case


def _check_nccl() -> int:
    """Refuse where the ranks of this machine cannot use nccl; return the rank's number here."""
    if not dist.is_nccl_available():
        raise CannotRunHere("this torch was built without nccl")
    if not torch.cuda.is_available():
        raise CannotRunHere("torch sees no GPU here")
    env = read_rank_env()
    local, here = (0, 1) if env is None else (env.local_rank, env.local_world_size)
    gpus = torch.cuda.device_count()
    if gpus < here and HOST_ID not in os.environ:
        raise CannotRunHere(f"nccl needs a GPU for each rank: {gpus} for {here} ranks; see --share-gpus")
    return local


def _move_by_torch(plan: BenchPlan, channel: P2PChannel, group: Any, tensor: torch.Tensor) -> torch.Tensor | None:
    op, size, root = _TORCH_OPS[plan.redop], channel.size, channel.rank == 0
    if plan.op == "all_reduce":
        dist.all_reduce(tensor, op, group=group)
        return tensor
    if plan.op == "broadcast":
        dist.broadcast(tensor, 0, group=group)
        return tensor
    if plan.op == "reduce":
        dist.reduce(tensor, 0, op, group=group)
        return tensor if root else None
    if plan.op == "gather":
        parts = [torch.empty_like(tensor) for _ in range(size)] if root else None
        dist.gather(tensor, parts, 0, group=group)
        return torch.cat(parts) if parts is not None else None
    share = tensor.numel() // size
    counts = {"reduce_scatter": share, "scatter": share, "all_gather": tensor.numel() * size}
    out = tensor.new_empty(counts.get(plan.op, tensor.numel()))
    if plan.op == "reduce_scatter":
        _REDUCE_SCATTER(out, tensor, op, group=group)
    elif plan.op == "scatter":
        dist.scatter(out, list(torch.tensor_split(tensor, size)) if root else None, 0, group=group)
    elif plan.op == "all_gather":
        _ALL_GATHER(out, tensor, group=group)
    else:
        dist.all_to_all_single(out, tensor, group=group)
    return out


def input_count(op: str, count: int, ranks: int) -> int:
    """Return the number of input elements per rank: its share where the result is the concatenation."""
    return count // ranks if op in ("all_gather", "gather") else count


def sample(rank: int, count: int, dtype: str) -> torch.Tensor:
    """Return a rank's input for the check: small whole numbers that every rank can compute."""
    assert dtype in DTYPE_BYTES
    return ((torch.arange(count) * 7 + rank) % 3 + 1).to(getattr(torch, dtype))


def expected_result(plan: BenchPlan, count: int, rank: int, ranks: int) -> torch.Tensor | None:
    """Return the result that a rank must have for the `sample` of all ranks."""
    inputs = [sample(peer, input_count(plan.op, count, ranks), plan.dtype) for peer in range(ranks)]
    part = slice(rank * count // ranks, (rank + 1) * count // ranks)
    if plan.op in ("all_reduce", "reduce", "reduce_scatter"):
        total = _reduced(inputs, plan.redop)
        return {"all_reduce": total, "reduce": total if rank == 0 else None}.get(plan.op, total[part])
    if plan.op in ("all_gather", "gather"):
        return torch.cat(inputs) if plan.op == "all_gather" or rank == 0 else None
    if plan.op == "all_to_all":
        return torch.cat([one[part] for one in inputs])
    return inputs[0] if plan.op == "broadcast" else inputs[0][part]


def _reduced(inputs: list[torch.Tensor], redop: str) -> torch.Tensor:
    total = inputs[0].clone()
    for other in inputs[1:]:
        total = {"min": torch.minimum, "max": torch.maximum, "prod": torch.mul}.get(redop, torch.add)(total, other)
    return total / len(inputs) if redop == "mean" else total


_TIMEOUT = timedelta(minutes=5)


def run_plan(payload: str) -> None:
    """Measure what the plan in this folder asks for, as a rank that was started for it."""
    folder = Path(payload)
    measured = measure(BenchPlan.from_json((folder / PLAN_FILE).read_text()), partial(print, flush=True))
    if dist.get_rank() == 0:
        (folder / RESULT_FILE).write_text(json.dumps(measured))


def measure(plan: BenchPlan, say: Callable[[str], object]) -> dict[str, Any]:
    """Join the other ranks and measure; every rank calls this. The first one prints the rows and returns them."""
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    channel = P2PChannel()
    show = say if channel.rank == 0 else lambda text: None
    measured: dict[str, Any] = {"ranks": channel.size, "hosts": len(hosts(find_locations(channel)))}
    if plan.p2p:
        if channel.rank == 0:
            measured["copy_gbs"] = measure_copy()
        matrix = measure_links(channel)
        measured["latency_us"] = [[seconds * 1e6 for seconds in row] for row in matrix.latency_s]
        measured["bandwidth_gbs"] = [[rate / 1e9 for rate in row] for row in matrix.bandwidth]
    if plan.sizes:
        note = f", {speed_note(plan.ranks_per_gpu)}" if plan.ranks_per_gpu > 1 else ""
        show(f"{plan.op} on {channel.size} ranks{note}\n{HEADER}")
        measured["rows"] = [row.to_dict() for row in measure_rows(plan, channel, show)]
    barrier(channel)  # no rank exits while another still receives from it
    return measured


def leave_group() -> None:
    """Leave the group in a process that ends as Python does: threads of gloo that still run would abort it."""
    gc.collect()  # nothing may hold the group
    dist.destroy_process_group()


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
    tensor = case.allocate(input_count(plan.op, count, channel.size), getattr(torch, plan.dtype))
    tensor.fill_(1)
    for _ in range(plan.warmup):
        case.move(tensor)
    barrier(channel)
    seconds = [_timed(case, tensor) for _ in range(plan.iterations(size))]
    slowest = torch.tensor(statistics.median(seconds), dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    wrong = torch.tensor(_count_wrong(case, tensor, plan, count, channel))
    dist.all_reduce(wrong)
    nbytes = count * DTYPE_BYTES[plan.dtype]
    shared = plan.ranks_per_gpu if tensor.is_cuda else 1
    return BenchRow(
        plan.op, algo, channel.size, nbytes, count, plan.dtype, plan.redop, slowest.item() * 1e6, int(wrong), shared
    )


def _timed(case: Case, tensor: torch.Tensor) -> float:
    begin = time.perf_counter()
    case.move(tensor)
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
    return time.perf_counter() - begin


def _count_wrong(case: Case, tensor: torch.Tensor, plan: BenchPlan, count: int, channel: P2PChannel) -> int:
    """Move known values once, and count the wrong elements."""
    if not case.is_checked:
        return 0
    tensor.copy_(sample(channel.rank, tensor.numel(), plan.dtype))
    result = case.move(tensor)
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
