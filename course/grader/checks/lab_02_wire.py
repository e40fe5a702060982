"""Lab 02, tasks 3 and 4: settings that a real timeline proves, and a benchmark under the grader's clock."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from grader.exercise import Attempt, Mistake
from grader.horovod_ranks import joined, rendezvous

_HOSTS = "host-a:1,host-b:1"
_STEPS = 8
_GRADIENTS, _EACH, _BACKWARD_MS, _MESSAGES = 24, 4096, 120.0, 3
"""The step of the real run: 24 gradients of 4 KiB, one every 5 ms, to be sent in about 3 messages."""


def listed(value: Any, target: str, holds: str) -> list[Any]:
    """Return what the learner's function returned, if it is a list; a str would be taken for a list of letters."""
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"{target} returned {repr(value)[:80]}; it should return a list of {holds}")
    return list(value)


def chosen(module: ModuleType, **job: Any) -> dict[str, str]:
    """Return the learner's settings for a job."""
    found = module.settings(module.Job(**job))
    if not isinstance(found, dict):
        raise TypeError(f"settings returned {repr(found)[:80]}; it should return a dict of variables")
    return found


def settings_of(module: ModuleType, jobs: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """Return the learner's settings for several jobs."""
    return [chosen(module, **job) for job in jobs]


def run_settings(
    module: ModuleType, rank: int, world: int, slots: list[dict[str, str]], timeline: str
) -> dict[str, Any]:
    """Send gradients as a backward pass does, with the learner's settings; return what the learner reads of it."""
    job = {"gradients": [_EACH] * _GRADIENTS, "backward_ms": _BACKWARD_MS, "messages": _MESSAGES, "memory": 2**20}
    variables = chosen(module, **job)
    hvd = joined({**slots[rank], **variables, "HOROVOD_TIMELINE": timeline})
    taken = []
    for _ in range(_STEPS):
        hvd.barrier()
        handles, began = [], time.monotonic()
        for number in range(_GRADIENTS):
            time.sleep(_BACKWARD_MS / _GRADIENTS / 1000)
            handles.append(hvd.allreduce_async_(torch.ones(_EACH // 4), name=f"layer{number}"))
        taken.append(time.monotonic() - began)
        for handle in handles:
            hvd.synchronize(handle)
    hvd.shutdown()
    found = []
    if rank == 0:
        all_reduces = listed(module.operations(Path(timeline)), "operations", "all-reduces")
        found = [listed(names, "operations", "lists of names") for names in all_reduces]
    return {"variables": variables, "found": found, "backward": statistics.median(taken)}


def operations(timeline: Path) -> list[list[str]]:
    """Return the all-reduces of a timeline: the tensors whose transfer overlaps were sent together."""
    events = json.loads(timeline.read_text())
    names = {event["pid"]: event["args"]["name"] for event in events if "name" in event.get("args", {})}
    begun: dict[int, list[Any]] = {pid: [] for pid in names}
    spans: list[list[Any]] = []
    for event in events:
        if event["ph"] == "B":
            span = [event["ts"], math.inf, names[event["pid"]]]  # the last ends of a run may be missing
            begun[event["pid"]].append(span)
            if event["name"] == "GLOO_ALLREDUCE":
                spans.append(span)
        elif event["ph"] == "E" and begun[event["pid"]]:  # a barrier ends once more than it begins
            begun[event["pid"]].pop()[1] = event["ts"]
    found: list[list[str]] = []
    until = -1.0
    for begin, end, name in sorted(spans):
        if begin >= until:
            found.append([])
        found[-1].append(name)
        until = max(until, end)
    return found


def grade_settings(attempt: Attempt) -> None:
    """The numbers fit the job, and a real run with them sends what was asked for."""
    base = {"gradients": [2**20] * 50, "backward_ms": 90.0, "messages": 5, "memory": 64 * 2**20}
    many = {**base, "gradients": [1000] * attempt.random.randrange(1500, 3000)}
    tight = {**base, "memory": attempt.random.randrange(4, 9) * 2**20}
    layouts = [
        {**base, "nccl": nccl, "hosts": hosts, "ranks_per_host": ranks}
        for nccl, hosts, ranks in ((True, 4, 8), (True, 1, 8), (True, 4, 1), (False, 4, 8))
    ]
    with rendezvous(_HOSTS) as slots:
        plain, cached, held, *placed = attempt.call(settings_of, [base, many, tight, *layouts])
        _check_numbers(plain, base)
        _check_numbers(cached, many)
        _check_numbers(held, tight)
        for job, found in zip(layouts, placed, strict=True):
            _check_layout(found, job)
        timeline = attempt.folder / "timeline.json"
        answers = attempt.run(run_settings, 2, (slots, str(timeline)), timeout=40)
    _check_run(operations(timeline), answers[0].value)


def _number(found: dict[str, str], name: str) -> float:
    if name not in found:
        raise Mistake(f"settings returned {sorted(found)}: {name} is missing")
    if not isinstance(found[name], str):
        raise Mistake(f"{name} is {found[name]!r}, a {type(found[name]).__name__}: the environment holds text")
    try:
        return float(found[name])
    except ValueError:
        raise Mistake(f"{name} is {found[name]!r}: it must be a number, as text") from None


def _check_numbers(found: dict[str, str], job: dict[str, Any]) -> None:
    total, wanted = sum(job["gradients"]), job["backward_ms"] / job["messages"]
    cycle = _number(found, "HOROVOD_CYCLE_TIME")
    if not 0.5 * wanted <= cycle <= 1.5 * wanted:
        raise Mistake(
            f"HOROVOD_CYCLE_TIME is {cycle:g} ms; a backward pass of {job['backward_ms']:g} ms in {job['messages']}"
            f" messages has one about every {wanted:g} ms"
        )
    buffer = _number(found, "HOROVOD_FUSION_THRESHOLD")
    if not buffer <= job["memory"]:  # so written, NaN is wrong too
        raise Mistake(f"HOROVOD_FUSION_THRESHOLD is {buffer:.0f} bytes; the buffer may take {job['memory']}")
    least = min(job["memory"], total / job["messages"])
    if buffer < least:
        raise Mistake(
            f"HOROVOD_FUSION_THRESHOLD is {buffer:.0f} bytes; {total} bytes in {job['messages']} messages need a"
            f" buffer of {least:.0f} at least (the variable counts bytes, --fusion-threshold-mb megabytes)"
        )
    entries = _number(found, "HOROVOD_CACHE_CAPACITY")
    if not entries >= max(1024, len(job["gradients"])):
        raise Mistake(
            f"HOROVOD_CACHE_CAPACITY is {entries:.0f} for {len(job['gradients'])} gradients: those that do not fit"
            " are negotiated again in each step; take one entry per gradient, and 1024 at least"
        )


def _check_layout(found: dict[str, str], job: dict[str, Any]) -> None:
    on = found.get("HOROVOD_HIERARCHICAL_ALLREDUCE", "0") != "0"
    wanted = job["nccl"] and job["hosts"] > 1 and job["ranks_per_host"] > 1
    if on != wanted:
        where = f"{job['hosts']} hosts with {job['ranks_per_host']} ranks each, {'NCCL' if job['nccl'] else 'gloo'}"
        why = (
            "it adds up inside a host first"
            if wanted
            else "there is nothing to add up first, or gloo, which ignores it"
        )
        raise Mistake(f"HOROVOD_HIERARCHICAL_ALLREDUCE is {'on' if on else 'off'} for {where}: {why}")


def _check_run(wanted: list[list[str]], value: dict[str, Any]) -> None:
    count = sum(len(names) for names in wanted)
    found = value["found"]
    if sum(len(names) for names in found) != count:
        raise Mistake(
            f"operations found {sum(len(names) for names in found)} tensors in a timeline that has {count}: count the"
            " events GLOO_ALLREDUCE that begin"
        )
    if [sorted(names) for names in found] != [sorted(names) for names in wanted]:
        raise Mistake(
            f"operations found {len(found)} all-reduces in a timeline that has {len(wanted)}, the largest with"
            f" {max(map(len, wanted))} tensors: those that begin before the first one ends travelled together"
        )
    cycle = float(value["variables"]["HOROVOD_CYCLE_TIME"]) / 1000
    # A busy machine stretches the pass, and a pass may begin in the middle of a cycle.
    most = 2 * (value["backward"] / cycle + 2) * _STEPS
    if len(wanted) > most:
        raise Mistake(
            f"a run of {_STEPS} steps with your settings sent {count} gradients in {len(wanted)} all-reduces; about"
            f" {_MESSAGES} per step were asked for"
        )


class Clock:
    """The time of a rank: it moves only while an all-reduce runs, or a barrier waits."""

    def __init__(self, hvd: Any, module: ModuleType, rank: int, sizes: Sequence[int]) -> None:
        self.now = 1000.0
        self._rank, self._calls = rank, dict.fromkeys(sizes, 0)
        self._sizes: dict[int, int] = {}
        self._operations = import_module("horovod.torch.mpi_ops")
        self._begin, self._finish = self._operations._allreduce_async, self._operations.synchronize
        self._operations._allreduce_async = self._began
        self._operations.synchronize = hvd.synchronize = self._ended
        barrier = hvd.barrier

        def waits(*args: Any, **kwargs: Any) -> Any:
            self.now += 3.0
            return barrier(*args, **kwargs)

        hvd.barrier = waits
        for name in ("perf_counter", "monotonic", "time"):
            self._replace(module, name, lambda: self.now)
            self._replace(module, f"{name}_ns", lambda: int(self.now * 1e9))

    def _replace(self, module: ModuleType, name: str, clock: Callable[[], float]) -> None:
        """Put a clock in the place of one of Python's, also where the learner's file has imported it by its name."""
        real = getattr(time, name)
        for own in [own for own, value in vars(module).items() if value is real]:
            setattr(module, own, clock)
        setattr(time, name, clock)

    def _began(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> int:
        handle: int = self._begin(tensor, *args, **kwargs)
        self._sizes[handle] = tensor.numel() * tensor.element_size()
        return handle

    def _ended(self, handle: int) -> Any:
        result = self._finish(handle)
        size = self._sizes.pop(handle, 0)
        if size in self._calls:
            self.now += planted(size, self._calls[size], self._rank)
            if self._calls[size] == 4 and size == min(self._calls):
                result[1] += 1  # what a broken network card would do
            self._calls[size] += 1
        return result


def planted(size: int, call: int, rank: int) -> float:
    """Return the seconds of one call on a rank: slow at first, one far outlier, and the slower rank changes."""
    seconds = 1e-4 + size / 1e8
    if call < 2:
        return seconds + 1.0
    if call == 6:
        return seconds * 400
    return seconds * (1.5 if call % 3 == rank else 1.0) * (1 + (call * 37 % 29) / 100)


def expected(size: int, repeats: int) -> float:
    """Return the median over the calls of the slowest rank."""
    return statistics.median(max(planted(size, call, rank) for rank in (0, 1)) for call in range(2, 2 + repeats))


def run_benchmark(
    module: ModuleType, rank: int, world: int, slots: list[dict[str, str]], sizes: list[int], repeats: int
) -> list[tuple[int, float, float, int]]:
    """Return the learner's rows under the grader's clock."""
    hvd = joined(slots[rank])
    Clock(hvd, module, rank, sizes)
    rows = listed(module.benchmark(sizes, repeats), "benchmark", "rows")
    return [(int(row.bytes), float(row.seconds), float(row.busbw), int(row.wrong)) for row in rows]


def grade_benchmark(attempt: Attempt) -> None:
    """The rows are those of the planted times: without warm-up, of the slowest rank, the median."""
    sizes = [4096, 2**15 + 4 * attempt.random.randrange(100), 2**18]
    repeats = 2 * attempt.random.randrange(5, 8) + 1
    with rendezvous(_HOSTS) as slots:
        answers = attempt.run(run_benchmark, 2, (slots, sizes, repeats), timeout=40)
    for answer in answers:
        if [row[0] for row in answer.value] != sizes:
            raise Mistake(f"the rows have the sizes {[row[0] for row in answer.value]}; {sizes} were asked for")
        for row in answer.value:
            _check_row(row, repeats, answer.rank)


def _check_row(row: tuple[int, float, float, int], repeats: int, rank: int) -> None:
    size, seconds, busbw, wrong = row
    slowest = expected(size, repeats)
    if not abs(seconds / slowest - 1) <= 1e-3:  # so written, NaN is wrong too
        why = _why(row, repeats, rank)
        raise Mistake(f"{size} bytes: seconds is {seconds:.6f} on rank {rank}, and {slowest:.6f} is right: {why}")
    if not abs(busbw * seconds / size - 1) <= 1e-3:
        raise Mistake(
            f"{size} bytes in {seconds:.6f} s: busbw is {busbw:.0f} bytes per second; 2 (n - 1) / n x bytes / seconds"
            f" of 2 ranks is {size / seconds:.0f}"
        )
    planted_wrong = int(size == 4096)
    if wrong != planted_wrong:
        raise Mistake(
            f"{size} bytes: {wrong} wrong elements are counted on rank {rank}; {planted_wrong} was changed on the way:"
            " compare each element of each call with the sum over the ranks"
        )


def _why(row: tuple[int, float, float, int], repeats: int, rank: int) -> str:
    size, seconds = row[0], row[1]
    own = [planted(size, call, rank) for call in range(2 + repeats)]
    worst = [max(planted(size, call, each) for each in (0, 1)) for call in range(2, 2 + repeats)]
    guesses = (
        (statistics.median(own[2:]), "it is the median of the own rank; a call ends when its slowest rank has the sum"),
        (statistics.fmean(worst), "it is the mean, which a single outlier moves; take the median"),
        (statistics.fmean(own[2:]), "it is the mean of the own rank; take the median of the slowest"),
        (min(worst), "it is the fastest call; take the median"),
    )
    for value, text in guesses:
        if abs(seconds / value - 1) < 1e-3:
            return text
    if seconds > 2.9:
        return "the barrier, which waits for the other ranks, is timed too"
    if seconds > 0.05:
        return "the first two calls, which open connections and fill caches, are among those that count"
    return "it is neither the median nor the mean of the calls: time each call by itself with time.perf_counter"
