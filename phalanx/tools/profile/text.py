"""An analysis as text and as plain data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from phalanx.observe.format import size, table
from phalanx.tools.profile.memory import MemoryOwners
from phalanx.tools.profile.split import CATEGORIES, Analysis
from phalanx.tools.profile.timeline import RankTimeline, Usage
from phalanx.tools.profile.verdict import straggler, verdict, what_if

_TITLES = ("compute", "hidden comm.", "exposed comm.", "data wait", "checkpoint", "idle")
_SHOWN_RANKS = 16
_TOP = 8
MEMRAY = "python -m memray run --follow-fork -o memory.bin -m phalanx train ..."


def lines(found: Analysis, rank: int | None, folder: Path) -> list[str]:
    """Return the report: of all ranks, or step by step of one."""
    shown = next((each for each in found.timelines if each.rank == rank), found.timelines[0])
    meta = shown.meta
    first, last = found.steps[0], found.steps[-1]
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    ranks = f"{len(found.timelines)} of {meta['world_size']} rank{'s' * (meta['world_size'] > 1)}"
    parts = [
        f"{steps} of {ranks} on {meta['device']}, {meta['strategy']}: {_ms(found.step_seconds)} per step",
        "",
        _split_table(found, rank),
        *_footnotes(found),
        "",
        *_path_lines(found),
        *_straggler_lines(found),
        "",
        f"operations of rank {shown.rank} that took longest, per step (without what they call)",
        _usage_table(shown.operations, found, "calls"),
    ]
    if shown.modules:
        title = f"modules of rank {shown.rank} that took longest, forward and backward, per step"
        parts += ["", title, _usage_table(shown.modules, found, "operations")]
    parts += _memory_lines(shown, folder)
    rows = [("what would change if, at best", "step", "gain", "")]
    for each in what_if(found):
        gain = 1 - each.seconds / found.step_seconds
        rows.append((each.change, _ms(each.seconds), f"{gain:.0%}", each.formula))
    return [*parts, "", table(rows), "", verdict(found)]


def document(found: Analysis, folder: Path) -> dict[str, Any]:
    """Return everything as plain data."""
    slow = straggler(found)
    return {
        "steps": found.steps,
        "ranks": [timeline.rank for timeline in found.timelines],
        "missing_ranks": found.missing,
        "step_seconds": found.step_seconds,
        "splits": [vars(split) for split in found.splits],
        "critical_path": {step: [vars(part) for part in path] for step, path in found.paths.items()},
        "critical_path_seconds": found.path_seconds,
        "overlap": _overlap(found),
        "waits": found.waits,
        "straggler": None if slow is None else slow._asdict(),
        "operations": {each.rank: _top(each.operations) for each in found.timelines},
        "modules": {each.rank: _top(each.modules) for each in found.timelines},
        "memory": {each.rank: owners._asdict() for each in found.timelines if (owners := _owners(each, folder))},
        "what_if": [each._asdict() for each in what_if(found)],
        "verdict": verdict(found),
    }


def _split_table(found: Analysis, rank: int | None) -> str:
    rows: list[tuple[str, ...]] = [("ms per step" if rank is None else f"rank {rank}", *_TITLES, "step")]
    if rank is not None:
        own = [split for split in found.splits if split.rank == rank]
        rows += [_row(f"step {split.step}", split.seconds) for split in own]
        return table(rows)
    means = {timeline.rank: found.mean(timeline.rank) for timeline in found.timelines}
    # In lock-step the rank that waits least for communication is the slowest.
    chosen = sorted(sorted(means, key=lambda each: means[each]["exposed"])[:_SHOWN_RANKS])
    rows += [_row(f"rank {each}", means[each]) for each in chosen]
    if len(chosen) < len(means):
        rows.append((f"and {len(means) - len(chosen)} ranks that wait longer", *[""] * 7))
    rows.append(_row("critical path", found.path_seconds))
    return table(rows)


def _row(name: str, seconds: dict[str, float]) -> tuple[str, ...]:
    values = [seconds[category] for category in CATEGORIES]
    return (name, *(f"{value * 1e3:.2f}" for value in values), f"{sum(values) * 1e3:.2f}")


def _footnotes(found: Analysis) -> list[str]:
    notes = [f"overlap: {_overlap(found):.0%} of the communication is hidden behind computation"]
    if found.missing:
        notes.append(f"not found: the traces of ranks {', '.join(map(str, found.missing))}")
    torches = sorted({timeline.meta["torch"] for timeline in found.timelines})
    if len(torches) > 1:
        notes.append(f"the ranks ran different versions of torch: {', '.join(torches)}")
    return notes


def _overlap(found: Analysis) -> float:
    hidden, exposed = (sum(split.seconds[name] for split in found.splits) for name in ("hidden", "exposed"))
    return hidden / (hidden + exposed) if hidden + exposed else 0.0


def _path_lines(found: Analysis) -> list[str]:
    def length(step: int) -> float:
        return sum(sum(part.seconds.values()) for part in found.paths[step])

    step = max(found.paths, key=length)
    parts = []
    for part in found.paths[step]:
        named = zip(_TITLES, part.seconds.values(), strict=True)
        large = sorted(((value, title) for title, value in named if value > 0.01 * length(step)), reverse=True)
        inside = ", ".join(f"{title} {value * 1e3:.1f}" for value, title in large)
        parts.append(f"rank {part.rank} {_ms(sum(part.seconds.values()))} ({inside})")
    return [f"critical path of step {step}, the longest: " + " -> ".join(parts)]


def _straggler_lines(found: Analysis) -> list[str]:
    shown = sorted(found.waits.items(), key=lambda item: -item[1])[:3]
    return [
        f"rank {rank}: each of the others waits {_ms(seconds)} per step for it ({seconds / found.step_seconds:.0%})"
        for rank, seconds in shown
        if seconds > 0.01 * found.step_seconds
    ]


def _top(usages: dict[str, Usage]) -> list[dict[str, Any]]:
    ranked = sorted(usages.items(), key=lambda item: -item[1].seconds)[:_TOP]
    return [{"name": name, **usage._asdict()} for name, usage in ranked]


def _usage_table(usages: dict[str, Usage], found: Analysis, counted: str) -> str:
    count = len(found.steps)
    rows = [("name", "ms", counted)]
    rows += [
        (each["name"][:70], f"{each['seconds'] / count * 1e3:.3f}", f"{each['calls'] / count:.0f}")
        for each in _top(usages)
    ]
    return table(rows)


def _owners(timeline: RankTimeline, folder: Path) -> MemoryOwners | None:
    """Return the owners of memory: on a CPU from the trace, on a GPU from the file beside it."""
    path = folder / f"rank-{timeline.rank}.memory.json"
    if timeline.memory is None and path.is_file():
        content = json.loads(path.read_text(encoding="utf-8"))
        return MemoryOwners(content["peak"], [tuple(each) for each in content["owners"]])
    return timeline.memory


def _memory_lines(timeline: RankTimeline, folder: Path) -> list[str]:
    owners = _owners(timeline, folder)
    if owners is None:
        return []
    rows = [("owner", "bytes", "allocations")]
    rows += [(name[-70:], size(nbytes), str(count)) for name, nbytes, count in owners.owners[:_TOP]]
    title = f"memory of rank {timeline.rank} at its peak: {size(owners.peak)} of what was allocated in these steps"
    if timeline.on_gpu:
        note = f"the whole history: {folder}/rank-{timeline.rank}.memory.pickle, at https://pytorch.org/memory_viz"
    else:
        note = f"tensors only; for all memory of the processes: {MEMRAY}"
    return ["", title, table(rows), note]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
