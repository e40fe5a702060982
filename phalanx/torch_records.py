"""What torch records: collectives (its flight recorder, groups, timeouts), profiles and allocations.

`tools/private_torch.py` lists the private names.

The recorder keeps operations of gloo and nccl where `TORCH_FR_BUFFER_SIZE` is set: it is read when a run hangs.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

Record = dict[str, Any]
"""One operation: `profiling_name` ("nccl:all_reduce"), group, numbers, sizes, when it was called, whether it ended."""

source_rank: Callable[[dist.Work], int] = dist.Work._source_rank
"""Returns which rank of its group sent the message that a receive from any rank has brought."""


def _recorders() -> list[Callable[[bool, bool, bool], bytes]]:
    """Return what reads the recorder: (entries, their frames, only those that have not ended) to a pickle."""
    from torch._C import _distributed_c10d as c10d

    # torch 2.11 keeps those of nccl apart.
    return [getattr(c10d, name) for name in ("_dump_fr_trace", "_dump_nccl_trace") if hasattr(c10d, name)]


def flight_records() -> list[Record]:
    """Return the operations that the recorder has kept, the oldest first, with their Python frames."""
    kept = [entry for dump in _recorders() for entry in pickle.loads(dump(True, True, False)).get("entries", [])]
    return list({(str(each["process_group"]), each["profiling_name"], each["op_id"]): each for each in kept}.values())


def unfinished_records(backend: str) -> list[Record]:
    """Return the operations of a backend that have not ended, without frames; also all of the messages in batches."""
    found: list[Record] = pickle.loads(_recorders()[-1](True, False, True)).get("entries", [])
    return [each for each in found if each["profiling_name"].startswith(f"{backend}:") and not is_done(each)]


def is_done(record: Mapping[str, Any]) -> bool:
    """Whether an operation has ended; of nccl's, torch's watchdog notes it a moment later."""
    return bool(record["retired"]) or record["state"] == "completed"


def recorded_progress() -> bytes:
    """Return what changes when operations are queued or end; this is quick, and asks CUDA nothing."""
    return _recorders()[-1](False, False, True)


def has_backend(name: str) -> bool:
    """Whether a process group of this process communicates by a backend."""
    return dist.is_initialized() and any(name in kind for kind, _ in list(dist.distributed_c10d._world.pg_map.values()))


def group_timeout(backend: str, group: dist.ProcessGroup | None = None) -> float | None:
    """Return the timeout of a group, or of the default one, in seconds; None where it has another backend."""
    if backend not in str(dist.get_backend(group)):
        return None
    chosen: Any = group if group is not None else dist.distributed_c10d._get_default_group()
    device = torch.device("cuda" if backend == "nccl" else "cpu")
    return float(chosen._get_backend(device).options._timeout.total_seconds())


def group_ranks() -> dict[str, list[int]]:
    """Return the global ranks of every process group of this process, by torch's name of the group."""
    names = dict(dist.distributed_c10d._world.pg_names)
    return {name: dist.get_process_group_ranks(group) for group, name in names.items()}


_COLLECTIVES = (
    "allreduce",
    "allreduce_coalesced",
    "allgather",
    "_allgather_base",
    "allgather_into_tensor_coalesced",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced",
    "alltoall",
    "alltoall_base",
    "broadcast",
    "send",
    "recv",
)


def around_waits(wrap: Callable[[Callable[..., Any]], Callable[..., Any]], *, in_graphs: bool) -> Callable[[], None]:
    """Wrap every place in which Python waits for communication; return what undoes it.

    `in_graphs`: also what torch.compile guards, so that a change would make it compile again.
    """
    places: list[tuple[Any, str]] = [(dist.Work, "wait"), (torch.cuda.Stream, "wait_event")]
    places += [(dist.ProcessGroup, name) for name in _COLLECTIVES if name in vars(dist.ProcessGroup)]
    if in_graphs:
        places.append((import_module("torch.distributed._functional_collectives"), "wait_tensor"))
    # Not by getattr, which returns a method of a C++ class without what makes it a method.
    kept = [(owner, name, vars(owner)[name]) for owner, name in places]
    for owner, name in places:
        setattr(owner, name, wrap(getattr(owner, name)))

    def undo() -> None:
        for owner, name, original in kept:
            setattr(owner, name, original)

    return undo


def profiler_config(*, all_threads: bool) -> Any:
    """Return settings of the profiler: `all_threads` records those that communicate, too, but no allocations."""
    kind = torch.profiler._ExperimentalConfig
    try:
        return kind(profile_all_threads=all_threads, trace_only=True)  # no Python object per event
    except TypeError:  # before torch 2.13
        return kind(profile_all_threads=all_threads)


def record_allocations(entries: int | None) -> None:
    """Record the last allocations on CUDA devices, at most a number, with their Python stacks; None: stop."""
    if entries is None:
        torch.cuda.memory._record_memory_history(enabled=None)
    else:
        torch.cuda.memory._record_memory_history(max_entries=entries, stacks="python")


def allocations() -> dict[str, Any]:
    """Return what `record_allocations` has recorded: the segments of memory, and the history of each device."""
    found: dict[str, Any] = torch.cuda.memory._snapshot()
    return found
