"""One rank's trace as a timeline: steps, phases, computation, communication, operations, modules; sets of time."""

from __future__ import annotations

import bisect
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from phalanx.tools.profile.read import MemoryOwners, RankFile, owners_at_peak

Span = tuple[float, float]
Spans = list[Span]


def union(spans: Iterable[Span]) -> Spans:
    """Return the times that lie in any of the spans."""
    merged: Spans = []
    for begin, end in sorted(spans):
        if end <= begin:
            continue
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def both(first: Spans, second: Spans) -> Spans:
    """Return the times that lie in both sets."""
    common: Spans = []
    i = j = 0
    while i < len(first) and j < len(second):
        begin, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if begin < end:
            common.append((begin, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return common


def clip(spans: Spans, begin: float, end: float) -> Spans:
    """Return the times of a set between two times; what lies outside is not looked at."""
    first = bisect.bisect_right(spans, begin, key=lambda span: span[1])
    last = bisect.bisect_left(spans, end, lo=first, key=lambda span: span[0])
    return [(max(a, begin), min(b, end)) for a, b in spans[first:last]]


def without(first: Spans, second: Spans) -> Spans:
    """Return the times of the first set that are not in the second."""
    remaining: Spans = []
    j = 0
    for begin, end in first:
        while j < len(second) and second[j][1] <= begin:
            j += 1
        k = j
        while k < len(second) and second[k][0] < end:
            if second[k][0] > begin:
                remaining.append((begin, second[k][0]))
            begin = max(begin, second[k][1])
            k += 1
        if begin < end:
            remaining.append((begin, end))
    return remaining


def total(spans: Spans) -> float:
    """Return the seconds of a set."""
    return sum(end - begin for begin, end in spans)


LOOP = "phalanx:"
MODULE = "phalanx.module:"
_HOST_COLLECTIVE = ("c10d::", "_c10d_functional::", "c10d_functional::")
_BACKWARD = "autograd::engine::evaluate_function"
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
RECORDER = "phalanx.profile:wait"
"""The range in which the recorder itself waits for the device, at the end of a step."""
_PYTHON = "python:"
_WAITS = re.compile(r"(cuda|hip)(Stream|Device|Event)Synchronize")
"""Calls in which the host does nothing until the device has come so far: `item()`, `nonzero()`, copies to the host."""
_PAIRED = re.compile(r"send|recv|barrier", re.IGNORECASE)
"""Communication that not all ranks of a group see, or that moves no data: it is not linked."""


class CollectiveCall(NamedTuple):
    """A collective of one rank. Those of other ranks with the same step, `key` and `number` are its counterparts."""

    key: str
    number: int
    begin: float
    end: float
    thread: Any


class Usage(NamedTuple):
    """How often something ran, and for how long without what ran within it."""

    seconds: float
    calls: int


@dataclass
class RankTimeline:
    """Times are in seconds on rank 0's clock."""

    rank: int
    meta: dict[str, Any]
    steps: dict[int, Span] = field(default_factory=dict)
    phases: dict[str, Spans] = field(default_factory=dict)
    busy: Spans = field(default_factory=list)
    """When the device computed; on a CPU, when the loop's thread ran an operation."""
    communication: Spans = field(default_factory=list)
    collectives: dict[int, list[CollectiveCall]] = field(default_factory=dict)
    """By step."""
    operations: dict[str, Usage] = field(default_factory=dict)
    modules: dict[str, Usage] = field(default_factory=dict)
    host_waits: dict[str, Usage] = field(default_factory=dict)
    """By operation, with its Python line or module: how long the host waited for the device within steps."""
    memory: MemoryOwners | None = None

    @property
    def on_gpu(self) -> bool:
        """Whether the rank computed on a GPU."""
        return bool(self.meta["device"] == "cuda")


_Call = tuple[Any, str, Span]
"""Communication: thread or stream, name, time."""


class _Item(NamedTuple):
    """An operation or a module's range on one thread; `bytes` and `address` of an allocation."""

    begin: float
    end: float
    name: str
    sequence: int | None
    external: int | None
    bytes: int = 0
    address: int = 0


def read_timeline(file: RankFile, origin_ns: int) -> RankTimeline:
    """Read a rank's trace."""
    return _Builder(file, origin_ns).build()


class _Builder:
    def __init__(self, file: RankFile, origin_ns: int) -> None:
        self._file, self._origin = file, origin_ns
        self._main = int(file.meta["main_thread"])
        self._timeline = RankTimeline(file.rank, file.meta)
        self._phases: dict[str, list[Span]] = defaultdict(list)
        self._threads: dict[Any, list[_Item]] = defaultdict(list)
        self._kernels: list[_Item] = []
        self._calls: list[_Call] = []
        self._by_operation: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
        self._by_module: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
        self._waits: list[tuple[str, Span]] = []
        self._own_waits: list[Span] = []
        self._module_of: dict[int, str] = {}
        self._allocations: list[tuple[int, int, str]] = []

    def build(self) -> RankTimeline:
        for event in self._file.events():
            kind = event.get("ph")
            if kind == "X":
                self._add(event)
            elif kind == "i" and event["name"] == "[memory]":
                self._add_memory(event)
        self._sweep_threads()
        for item in self._kernels:
            self._count(item.name, item.end - item.begin, self._module_of.get(item.external or -1, ""))
        return self._finish()

    def _span(self, event: dict[str, Any]) -> Span:
        begin = self._file.seconds(float(event["ts"]), self._origin)
        return begin, begin + float(event.get("dur", 0.0)) / 1e6

    def _add(self, event: dict[str, Any]) -> None:
        name, kind, thread = str(event["name"]), event.get("cat"), event.get("tid")
        if kind == "gpu_user_annotation":  # a range of the host once more, as long as its kernels ran
            return
        span = self._span(event)
        args = event.get("args") or {}
        if kind == "cpu_op":  # most are
            if name.startswith(_HOST_COLLECTIVE):
                self._calls.append((thread, name, span))
            else:
                self._threads[thread].append(_Item(*span, name, args.get("Sequence number"), args.get("External id")))
        elif kind in _DEVICE:
            item = _Item(*span, name, None, args.get("External id"))
            if "nccl" in name.lower():
                self._calls.append((thread, str(args.get("Collective name") or name) + _group(args), span))
            else:
                self._kernels.append(item)
        elif kind in ("cuda_runtime", "python_function"):
            if _WAITS.fullmatch(name):
                self._threads[thread].append(_Item(*span, name, None, None))
            elif kind == "python_function" and self._timeline.on_gpu:
                self._threads[thread].append(_Item(*span, _PYTHON + name, None, None))
        elif name == RECORDER:
            self._own_waits.append(span)
        elif name.startswith(LOOP + "step "):
            self._timeline.steps[int(name.rpartition(" ")[2])] = span
        elif name.startswith(LOOP) and "#" in name:
            self._calls.append((thread, name.removeprefix(LOOP).partition(" #")[0], span))
        elif name.startswith(LOOP):
            self._phases[name.removeprefix(LOOP)].append(span)
        elif name.startswith("gloo:"):
            self._calls.append((thread, name, span))
        elif name.startswith(MODULE):
            self._threads[thread].append(_Item(*span, name, None, None))

    def _add_memory(self, event: dict[str, Any]) -> None:
        begin, args = self._span(event)[0], event["args"]
        item = _Item(begin, begin, "", None, None, int(args["Bytes"]), int(args["Addr"]))
        self._threads[event.get("tid")].append(item)

    def _sweep_threads(self) -> None:
        """Find the module of each operation: forward by nesting, backward by the sequence number of its forward."""
        sequences: dict[int, str] = {}
        for thread in sorted(self._threads, key=lambda thread: thread != self._main):
            self._sweep(self._threads[thread], sequences, is_main=thread == self._main)

    def _sweep(self, items: list[_Item], sequences: dict[int, str], *, is_main: bool) -> None:
        counts = is_main and not self._timeline.on_gpu
        stack: list[tuple[_Item, str, list[float]]] = []  # the item, its module, the time of what is within it

        def close(until: float) -> None:
            while stack and stack[-1][0].end <= until:
                item, module, inner = stack.pop()
                seconds = item.end - item.begin
                if stack:
                    stack[-1][2][0] += seconds
                if counts and not item.name.startswith(MODULE):
                    self._count(item.name, seconds - inner[0], module)

        for item in sorted(items, key=lambda item: (item.begin, -item.end)):
            close(item.begin)
            module = stack[-1][1] if stack else ""
            if item.bytes:
                owner = module or (stack[-1][0].name if stack else "outside of operations")
                self._allocations.append((item.address, item.bytes, owner))
                continue
            if _WAITS.fullmatch(item.name):
                around = [outer.name for outer, _, _ in stack]
                if is_main or any(name.startswith(_BACKWARD) for name in around):  # others may wait beside the loop
                    self._waits.append((_wait_cause(item.name, around, module), item[:2]))
                continue
            if item.name.startswith(MODULE):
                module = item.name.removeprefix(MODULE)
            elif item.name.startswith(_BACKWARD):
                module = sequences.get(item.sequence or -1, "")
            elif item.sequence is not None and module:
                sequences.setdefault(item.sequence, module)
            if item.external is not None:
                self._module_of[item.external] = module
            stack.append((item, module, [0.0]))
        close(float("inf"))

    def _count(self, name: str, seconds: float, module: str) -> None:
        tables = [(self._by_operation, name)] + ([(self._by_module, module)] if module else [])
        for table, key in tables:
            table[key][0] += seconds
            table[key][1] += 1

    def _finish(self) -> RankTimeline:
        timeline = self._timeline
        timeline.phases = {name: union(spans) for name, spans in self._phases.items()}
        calls = [call for call in self._calls if not (timeline.on_gpu and call[1].startswith(_HOST_COLLECTIVE))]
        if timeline.on_gpu:
            timeline.busy = union((item.begin, item.end) for item in self._kernels)
        else:
            # A call on the loop's thread blocks it; a range of gloo (send, recv) lasts until the data has moved.
            of_collectives = union(
                span for thread, name, span in calls if thread == self._main and not name.startswith("gloo:")
            )
            items = self._threads.get(self._main, [])
            operations = union((i.begin, i.end) for i in items if not i.name.startswith(MODULE))
            timeline.busy = without(operations, of_collectives)  # what runs within a collective is a part of it
        timeline.communication = union(span for _, _, span in calls)
        timeline.collectives = _by_step(timeline, _linkable(timeline, calls))
        timeline.operations = {name: Usage(value[0], int(value[1])) for name, value in self._by_operation.items()}
        timeline.modules = {name: Usage(value[0], int(value[1])) for name, value in self._by_module.items()}
        timeline.host_waits = self._host_waits(union(timeline.steps.values()), union(self._own_waits))
        if self._allocations:
            timeline.memory = owners_at_peak(self._allocations)
        return timeline

    def _host_waits(self, steps: Spans, recorder: Spans) -> dict[str, Usage]:
        """Add up the waits within steps, without those of the recorder."""
        waits: dict[str, Usage] = {}
        for call, (begin, end) in self._waits:
            if clip(steps, begin, end) and not clip(recorder, begin, end):
                before = waits.get(call, Usage(0.0, 0))
                waits[call] = Usage(before.seconds + end - begin, before.calls + 1)
        return waits


def _wait_cause(call: str, around: list[str], module: str) -> str:
    """Return what made a call wait: the outermost operation around it, the line of the program or else the module.

    For example aten::item in train.py(12): log_loss.
    """
    operations = [name for name in around if not name.startswith((MODULE, _PYTHON, _BACKWARD))]
    python = [name.removeprefix(_PYTHON) for name in around if name.startswith(_PYTHON)]
    lines = [name for name in python if ".py(" in name and "torch/" not in name]
    where = lines[-1] if lines else module
    return (operations[0] if operations else call) + (f" in {where}" if where else "")


def _group(args: dict[str, Any]) -> str:
    """Return what tells the groups of nccl's collectives apart."""
    ranks = args.get("Process Group Ranks") or args.get("Process Group Name")
    return f" {ranks}" if ranks is not None else ""


def _linkable(timeline: RankTimeline, calls: list[_Call]) -> list[_Call]:
    """Return the calls that stand for one collective each: of nested or queued ones, the one that moves the data."""
    ours = [call for call in calls if ":" not in call[1]]
    if ours and not timeline.on_gpu:  # reducers of Phalanx; what they call is within these
        return ours
    is_phalanx = timeline.meta.get("comm_backend") == "phalanx"
    prefix: tuple[str, ...] = ("c10d::",) if is_phalanx else ("gloo:",)
    chosen = [call for call in calls if timeline.on_gpu or call[1].startswith(prefix)]
    return [call for call in chosen if not _PAIRED.search(call[1])]


def _by_step(timeline: RankTimeline, calls: list[_Call]) -> dict[int, list[CollectiveCall]]:
    """Number the collectives of each kind within each step."""
    steps = sorted((span, step) for step, span in timeline.steps.items())
    calls_of_step: dict[int, list[CollectiveCall]] = {step: [] for _, step in steps}
    counts: dict[tuple[int, str], int] = defaultdict(int)
    for thread, name, (begin, end) in sorted(calls, key=lambda call: call[2]):
        step = next((step for span, step in steps if span[0] <= begin < span[1]), None)
        if step is None:
            continue
        counts[step, name] += 1
        calls_of_step[step].append(CollectiveCall(name, counts[step, name], begin, end, thread))
    return calls_of_step
