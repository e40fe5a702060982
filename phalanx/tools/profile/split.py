"""Where the time of each step went on each rank, which rank the others waited for, and the critical path."""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.errors import UsageError
from phalanx.tools.profile.read import find_files
from phalanx.tools.profile.timeline import RankTimeline, Span, Spans, both, clip, read_timeline, total, union, without

CATEGORIES = ("compute", "hidden", "exposed", "data", "checkpoint", "idle")
"""They add up to the wall time. `hidden`: computation while communication ran; `exposed`: waiting for communication."""
_NOTICEABLE = 20e-6
"""Seconds: a shorter wait for another rank is as long as the error of comparing clocks."""
_CLOCK_ERROR = 1e-3
_PHASES = ("data", "forward", "backward", "optimizer", "checkpoint", "evaluation", "other")


@dataclass
class StepSplit:
    """One step of one rank: seconds by category, and by which other rank it waited."""

    rank: int
    step: int
    wall: float
    seconds: dict[str, float]
    waited_for: dict[int, float] = field(default_factory=dict)
    """By rank: the part of `exposed` in which this rank waited until that one entered the collective."""
    work: dict[str, float] = field(default_factory=dict)
    """Seconds by phase of the loop, without waiting for communication."""


@dataclass
class PathPart:
    """A part of a step's critical path: what happened on which rank, in seconds by category."""

    rank: int
    seconds: dict[str, float]


@dataclass
class Analysis:
    """Everything that `phalanx report --profile` shows."""

    timelines: list[RankTimeline]
    splits: list[StepSplit]
    paths: dict[int, list[PathPart]]
    """By step, from its begin to its end."""
    missing: list[int] = field(default_factory=list)
    """Ranks that were to be recorded and have no file."""

    @property
    def steps(self) -> list[int]:
        """The recorded steps."""
        return sorted(self.paths)

    @property
    def step_seconds(self) -> float:
        """The mean duration of a step, along its critical path."""
        return sum(self.path_seconds.values())

    @property
    def path_seconds(self) -> dict[str, float]:
        """Mean seconds per step on the critical path, by category."""
        return {
            name: sum(part.seconds[name] for path in self.paths.values() for part in path) / len(self.paths)
            for name in CATEGORIES
        }

    def mean(self, rank: int) -> dict[str, float]:
        """Return a rank's mean seconds per step by category."""
        splits = [split for split in self.splits if split.rank == rank]
        return {name: statistics.fmean(split.seconds[name] for split in splits) for name in CATEGORIES}

    @property
    def waits(self) -> dict[int, float]:
        """By rank: the seconds that each of the others waited for it in a usual step (the median), on average."""
        medians: dict[int, list[float]] = defaultdict(list)
        for waiting in (timeline.rank for timeline in self.timelines):
            waits_of_rank = [split.waited_for for split in self.splits if split.rank == waiting]
            for rank in {rank for waited in waits_of_rank for rank in waited}:
                medians[rank].append(statistics.median(waited.get(rank, 0.0) for waited in waits_of_rank))
        return {rank: sum(values) / (len(self.timelines) - 1) for rank, values in medians.items()}

    def extra_work(self, rank: int) -> tuple[str, float]:
        """Return the phase in which a rank works longer than the median of the others, and by how many seconds."""
        extra = {}
        for phase in _PHASES:
            by_rank: dict[int, list[float]] = defaultdict(list)
            for split in self.splits:
                by_rank[split.rank].append(split.work.get(phase, 0.0))
            usual = {category: statistics.median(values) for category, values in by_rank.items()}
            extra[phase] = usual.pop(rank) - statistics.median(usual.values())
        phase = max(extra, key=lambda name: extra[name])
        return phase, extra[phase]


@dataclass
class LinkedCall:
    """A collective of several ranks: when each entered and left it, and which entered last."""

    key: str
    number: int
    spans: dict[int, Span]
    threads: dict[int, Any]
    """By rank: the thread or stream that ran it."""

    @property
    def last(self) -> int:
        """The rank that the others waited for."""
        return max(self.spans, key=lambda rank: self.spans[rank][0])


def analyse(folder: Path) -> Analysis:
    """Read the traces of a run's profile, one rank at a time."""
    files = find_files(folder)
    if not files:
        raise UsageError(f"{folder} holds no traces", hint="Record some: phalanx train ... --profile steps=10:15")
    timelines = [read_timeline(file, files[0].base_ns) for file in files]
    analysis = analyse_timelines(timelines)
    analysis.missing = sorted(set(files[0].meta["ranks"]) - {file.rank for file in files})
    return analysis


def analyse_timelines(timelines: list[RankTimeline]) -> Analysis:
    """Split the steps that all ranks recorded."""
    steps = sorted(set.intersection(*(set(timeline.steps) for timeline in timelines)))
    if not steps:
        raise UsageError(
            "the ranks recorded no step in common", hint="Record the run again: phalanx train ... --profile steps=10:15"
        )
    splits, paths = [], {}
    for step in steps:
        links = find_links(timelines, step)
        views = {timeline.rank: _View(timeline, step) for timeline in timelines}
        waits = {rank: view.waits(links) for rank, view in views.items()}
        for rank, view in views.items():
            splits.append(view.split(step, waits[rank]))
        paths[step] = _critical_path(views, links)
    return Analysis(timelines, splits, paths)


def find_links(timelines: list[RankTimeline], step: int) -> list[LinkedCall]:
    """Return the collectives of a step that several ranks took part in, in the order of their ends."""
    links: dict[tuple[str, int], LinkedCall] = {}
    for timeline in timelines:
        for call in timeline.collectives.get(step, ()):
            link = links.setdefault((call.key, call.number), LinkedCall(call.key, call.number, {}, {}))
            link.spans[timeline.rank] = (call.begin, call.end)
            link.threads[timeline.rank] = call.thread
    shared = [link for link in links.values() if len(link.spans) > 1 and _overlaps(link)]
    return sorted(shared, key=lambda link: max(span[1] for span in link.spans.values()))


def _overlaps(link: LinkedCall) -> bool:
    """Whether no rank left before the last one entered, as it is in one collective; else these are of other groups."""
    first_end = min(span[1] for span in link.spans.values())
    return link.spans[link.last][0] <= first_end + _CLOCK_ERROR


class _View:
    """One step of one rank, cut into categories of time."""

    def __init__(self, timeline: RankTimeline, step: int) -> None:
        self.rank, self.span = timeline.rank, timeline.steps[step]
        window: Spans = [self.span]
        data, saving = (clip(timeline.phases.get(name, []), *self.span) for name in ("data", "checkpoint"))
        talk, busy = clip(timeline.communication, *self.span), clip(timeline.busy, *self.span)
        if not timeline.on_gpu:  # the loop's own thread loads and saves: what it runs meanwhile is a part of that
            apart = union([*data, *saving])
            talk, busy = without(talk, apart), without(busy, apart)
        self.parts: dict[str, Spans] = {
            "hidden": both(talk, busy),
            "exposed": without(talk, busy),
            "compute": without(busy, talk),
        }
        rest = without(window, union([*talk, *busy]))
        self.parts["data"], self.parts["checkpoint"] = both(rest, data), both(rest, saving)
        self.parts["idle"] = without(rest, union([*data, *saving]))
        self._phases = {name: clip(timeline.phases.get(name, []), *self.span) for name in _PHASES}

    def waits(self, links: list[LinkedCall]) -> dict[int, Spans]:
        """Return by rank when this one waited until that one entered a collective."""
        spans_of: dict[int, list[Span]] = defaultdict(list)
        for link in links:
            if self.rank in link.spans and link.last != self.rank:
                spans_of[link.last].append((link.spans[self.rank][0], link.spans[link.last][0]))
        return {rank: both(union(spans), self.parts["exposed"]) for rank, spans in spans_of.items()}

    def split(self, step: int, waits: dict[int, Spans]) -> StepSplit:
        """Return the seconds by category."""
        work = {name: total(without(spans, self.parts["exposed"])) for name, spans in self._phases.items()}
        waited = {rank: seconds for rank, spans in waits.items() if (seconds := total(spans)) > _NOTICEABLE}
        return StepSplit(self.rank, step, self.span[1] - self.span[0], self.within(*self.span), waited, work)

    def within(self, begin: float, end: float) -> dict[str, float]:
        """Return the seconds by category between two times."""
        return {name: total(clip(self.parts[name], begin, end)) for name in CATEGORIES}


def _critical_path(views: dict[int, _View], links: list[LinkedCall]) -> list[PathPart]:
    """Follow a step from its end to its begin: where a rank waited, go on with the rank that it waited for."""
    rank = max(views, key=lambda candidate: views[candidate].span[1])
    now, path = views[rank].span[1], []
    for link in reversed(links):
        if rank not in link.spans or link.last == rank:
            continue
        entered, exited = link.spans[link.last][0], link.spans[rank][1]
        waited = clip(views[rank].parts["exposed"], link.spans[rank][0], entered)
        if exited > now or entered < views[link.last].span[0] or total(waited) < _NOTICEABLE:
            continue
        path.append(PathPart(rank, views[rank].within(entered, now)))
        rank, now = link.last, entered
    path.append(PathPart(rank, views[rank].within(views[rank].span[0], now)))
    return path[::-1]
