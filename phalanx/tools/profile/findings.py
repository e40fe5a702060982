"""What an analysis says: the verdict, what a change would gain, the report as text and as plain data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from phalanx.config.strategies import facts_of
from phalanx.observe.format import size, table
from phalanx.tools.profile.pictures import merge
from phalanx.tools.profile.read import MemoryOwners
from phalanx.tools.profile.split import CATEGORIES, Analysis, analyse
from phalanx.tools.profile.timeline import RankTimeline, Usage

_CLEAR = 0.1
"""A smaller share of the step is not worth its own verdict."""
_AT_ONCE_BYTES = 8 << 20
"""Larger traces are analysed by `phalanx report --profile` only, not by the run itself, whose ranks would wait."""


class WhatIf(NamedTuple):
    """A change, the seconds per step that would be left at best, and the formula."""

    change: str
    seconds: float
    formula: str


def what_if(analysis: Analysis) -> list[WhatIf]:
    """Return what the step would take at best after a change; the rest stays as it is on the critical path."""
    step, path = analysis.step_seconds, analysis.path_seconds
    exposed, data = path["exposed"], path["data"]
    moved = exposed + path["hidden"]
    overlapped = max(step - exposed, moved)
    changes = [
        WhatIf("no data wait", step - data, f"step - data wait = {_ms(step)} - {_ms(data)}"),
        WhatIf("network twice as fast", step - exposed / 2, f"step - exposed / 2 = {_ms(step)} - {_ms(exposed)} / 2"),
        WhatIf(
            "perfect overlap",
            overlapped,
            f"max(step - exposed, exposed + hidden) = max({_ms(step)} - {_ms(exposed)}, {_ms(moved)})",
        ),
    ]
    if (slow := straggler(analysis)) is not None:
        formula = f"step - wait for rank {slow.rank} = {_ms(step)} - {_ms(slow.seconds)}"
        changes.append(WhatIf("no straggler", step - slow.seconds, formula))
    return changes


class Straggler(NamedTuple):
    """A rank that the others wait for, the seconds per step, and the phase in which it works longer, by how much."""

    rank: int
    seconds: float
    phase: str
    extra_seconds: float


def straggler(analysis: Analysis) -> Straggler | None:
    """Return the rank that the others wait for most; None where that is little."""
    rank, waited = max(analysis.waits.items(), key=lambda item: item[1], default=(0, 0.0))
    back = max((seconds for other, seconds in analysis.waits.items() if other != rank), default=0.0)
    net = waited - back  # ranks that wait for each other in turn are not slow
    return Straggler(rank, net, *analysis.extra_work(rank)) if net > _CLEAR * analysis.step_seconds else None


def verdict(analysis: Analysis) -> str:
    """Return what limits the speed, and what to change."""
    step, path = analysis.step_seconds, analysis.path_seconds
    shares = {name: seconds / step for name, seconds in path.items()}
    slow = straggler(analysis)
    candidates = {name: shares[name] for name in ("data", "exposed", "checkpoint", "idle") if shares[name] > _CLEAR}
    if slow is not None:
        candidates["straggler"] = slow.seconds / step
        if slow.phase == "data":  # it is counted as the straggler's, not as everyone's
            candidates.pop("data", None)
        candidates.pop("idle", None)
    if not candidates or max(candidates.values()) < (shares["compute"] + shares["hidden"]) / 3:
        return _compute_bound(analysis, shares)
    worst = max(candidates, key=lambda name: candidates[name])
    share = f"{candidates[worst]:.0%} of the step"
    if worst == "straggler" and slow is not None:
        return _straggler_bound(analysis, slow, share)
    return {"data": _data_bound, "exposed": _network_bound, "checkpoint": _saving_bound, "idle": _host_bound}[worst](
        analysis, share
    )


def conclude(folder: Path) -> str:
    """Merge and analyse a profile that a run has just recorded, and return its verdict."""
    nbytes = sum(path.stat().st_size for path in folder.glob("rank-*.json.gz"))
    if nbytes > _AT_ONCE_BYTES:
        return f"{nbytes >> 20} MB of traces were written; `phalanx report --profile` analyses them"
    analysis = analyse(folder)
    merge(folder, analysis)
    return verdict(analysis)


def _meta(analysis: Analysis) -> dict[str, Any]:
    return analysis.timelines[0].meta


def _setting(analysis: Analysis, name: str) -> Any:
    return _meta(analysis)["settings"].get(name)


def _data_bound(analysis: Analysis, share: str) -> str:
    meta = _meta(analysis)
    workers, cores = int(meta["loader_workers"]), int(meta["cores"])
    ranks = int(meta["local_ranks"])
    used = f"num_workers={workers}" + (f" x {ranks} ranks" if ranks > 1 else "") + f" of {cores} cores are used"
    workers_needed = max(workers + 1, cores // max(1, ranks) - 1)
    if workers == 0:
        advice = f"Load in other processes: DataLoader(..., num_workers={max(1, workers_needed)})"
    elif workers * ranks < cores:
        advice = f"Raise it: DataLoader(..., num_workers={workers_needed})"
    else:
        advice = "All cores load: prepare the data beforehand (decoded, resized), or make each sample cheaper"
    return f"data-bound: {share} waits for the loader; {used}. {advice}."


def _network_bound(analysis: Analysis, share: str) -> str:
    path, strategy = analysis.path_seconds, str(_meta(analysis)["strategy"])
    moved = path["exposed"] + path["hidden"]
    hidden = path["hidden"] / moved if moved else 0.0
    if not _setting(analysis, "gradient_accumulation_steps") and facts_of(strategy).averages_gradients:
        advice = "gradient_accumulation_steps=4 communicates every fourth micro-batch only"
    else:
        advice = "a larger batch_size communicates less often per sample"
    if facts_of(strategy).compressors and not _setting(analysis, "compression"):
        advice += "; compression='powersgd' or 'bf16' sends less"
    on_host = (
        str(_meta(analysis)["comm_backend"]) == "gloo"
        and _meta(analysis)["local_ranks"] == _meta(analysis)["world_size"]
    )
    if on_host:
        advice += "; communication_backend='phalanx' uses shared memory on one node"
    return f"communication-bound: {share} waits for communication, {hidden:.0%} of which is hidden. {advice}."


def _saving_bound(analysis: Analysis, share: str) -> str:
    every = _setting(analysis, "checkpoint_frequency")
    advice = "Write while training goes on: async_checkpoint=true"
    if _setting(analysis, "async_checkpoint") is not False:
        advice = f"Save less often: checkpoint_frequency={every!r} now, 'auto' weighs its cost against failures"
    return f"checkpoint-bound: {share} waits for checkpoints. {advice}."


def _host_bound(analysis: Analysis, share: str) -> str:
    if analysis.timelines[0].on_gpu:
        advice = "Give it more at once: a larger batch_size, or compile=true (fewer, larger kernels)"
        return f"host-bound: in {share} the GPU waits for the Python program. {advice}."
    advice = "Python code, sleeps and waits between operations: a larger batch_size, or look at the callbacks"
    return f"host-bound: in {share} no operation runs. {advice}."


def _straggler_bound(analysis: Analysis, slow: Straggler, share: str) -> str:
    host = next(timeline.meta["host"] for timeline in analysis.timelines if timeline.rank == slow.rank)
    where = f"its {slow.phase} phase takes {_ms(slow.extra_seconds)} longer than that of the others"
    advice = "compare that node with the others (`phalanx doctor`)"
    if slow.phase == "data":
        advice = "look at its data"
    elif len({timeline.meta["host"] for timeline in analysis.timelines}) == 1:
        advice = "look at what else uses its cores or its GPU"
    return f"straggler-bound: for {share} the other ranks wait for rank {slow.rank} on {host}; {where}: {advice}."


def _compute_bound(analysis: Analysis, shares: dict[str, float]) -> str:
    meta, busy = _meta(analysis), shares["compute"] + shares["hidden"]
    timeline = analysis.timelines[0]
    usages = timeline.modules or timeline.operations
    advice = "no wait is left to remove; more ranks share the samples of an epoch"
    if usages:
        name, most = max(usages.items(), key=lambda item: item[1].seconds)
        share = most.seconds / len(analysis.steps) / analysis.step_seconds
        advice = f"{name} takes {share:.0%} of it: begin there. More ranks share the samples of an epoch"
    if meta["device"] == "cuda" and meta["precision"] == "fp32":
        advice = "mixed_precision='bf16' computes faster"
    elif meta["device"] == "cuda" and not _setting(analysis, "compile"):
        advice = "compile=true fuses operations"
    return f"compute-bound: {busy:.0%} of the step computes; {advice}."


_TITLES = ("compute", "hidden comm.", "exposed comm.", "data wait", "checkpoint", "idle")
_SHOWN_RANKS = 16
_TOP = 8
MEMRAY = "python -m memray run --follow-fork -o memory.bin -m phalanx train ..."


def lines(analysis: Analysis, rank: int | None, folder: Path) -> list[str]:
    """Return the report: of all ranks, or step by step of one."""
    timeline = next((change for change in analysis.timelines if change.rank == rank), analysis.timelines[0])
    meta = timeline.meta
    first, last = analysis.steps[0], analysis.steps[-1]
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    ranks = f"{len(analysis.timelines)} of {meta['world_size']} rank{'s' * (meta['world_size'] > 1)}"
    parts = [
        f"{steps} of {ranks} on {meta['device']}, {meta['strategy']}: {_ms(analysis.step_seconds)} per step",
        "",
        _split_table(analysis, rank),
        *_footnotes(analysis),
        "",
        *_path_lines(analysis),
        *_straggler_lines(analysis),
        "",
        f"operations of rank {timeline.rank} that took longest, per step (without what they call)",
        _usage_table(timeline.operations, analysis, "calls"),
    ]
    if timeline.modules:
        title = f"modules of rank {timeline.rank} that took longest, forward and backward, per step"
        parts += ["", title, _usage_table(timeline.modules, analysis, "operations")]
    parts += _host_wait_lines(timeline, analysis)
    parts += _memory_lines(timeline, folder)
    rows = [("what would change if, at best", "step", "gain", "")]
    for change in what_if(analysis):
        gain = 1 - change.seconds / analysis.step_seconds
        rows.append((change.change, _ms(change.seconds), f"{gain:.0%}", change.formula))
    return [*parts, "", table(rows), "", verdict(analysis)]


def document(analysis: Analysis, folder: Path) -> dict[str, Any]:
    """Return everything as plain data."""
    slow = straggler(analysis)
    return {
        "steps": analysis.steps,
        "ranks": [timeline.rank for timeline in analysis.timelines],
        "missing_ranks": analysis.missing,
        "step_seconds": analysis.step_seconds,
        "splits": [vars(split) for split in analysis.splits],
        "critical_path": {step: [vars(part) for part in path] for step, path in analysis.paths.items()},
        "critical_path_seconds": analysis.path_seconds,
        "overlap": _overlap(analysis),
        "waits": analysis.waits,
        "straggler": None if slow is None else slow._asdict(),
        "operations": {rank_timeline.rank: _top(rank_timeline.operations) for rank_timeline in analysis.timelines},
        "modules": {rank_timeline.rank: _top(rank_timeline.modules) for rank_timeline in analysis.timelines},
        "host_waits": {rank_timeline.rank: _top(rank_timeline.host_waits) for rank_timeline in analysis.timelines},
        "memory": {
            rank_timeline.rank: owners._asdict()
            for rank_timeline in analysis.timelines
            if (owners := _owners(rank_timeline, folder))
        },
        "what_if": [rank_timeline._asdict() for rank_timeline in what_if(analysis)],
        "verdict": verdict(analysis),
    }


def _split_table(analysis: Analysis, rank: int | None) -> str:
    rows: list[tuple[str, ...]] = [("ms per step" if rank is None else f"rank {rank}", *_TITLES, "step")]
    if rank is not None:
        splits = [split for split in analysis.splits if split.rank == rank]
        rows += [_row(f"step {split.step}", split.seconds) for split in splits]
        return table(rows)
    means = {timeline.rank: analysis.mean(timeline.rank) for timeline in analysis.timelines}
    # In lock-step the rank that waits least for communication is the slowest.
    chosen = sorted(sorted(means, key=lambda other_rank: means[other_rank]["exposed"])[:_SHOWN_RANKS])
    rows += [_row(f"rank {other_rank}", means[other_rank]) for other_rank in chosen]
    if len(chosen) < len(means):
        rows.append((f"and {len(means) - len(chosen)} ranks that wait longer", *[""] * 7))
    rows.append(_row("critical path", analysis.path_seconds))
    return table(rows)


def _row(name: str, seconds: dict[str, float]) -> tuple[str, ...]:
    values = [seconds[category] for category in CATEGORIES]
    return (name, *(f"{value * 1e3:.2f}" for value in values), f"{sum(values) * 1e3:.2f}")


def _footnotes(analysis: Analysis) -> list[str]:
    notes = [f"overlap: {_overlap(analysis):.0%} of the communication is hidden behind computation"]
    if analysis.missing:
        notes.append(f"not found: the traces of ranks {', '.join(map(str, analysis.missing))}")
    torches = sorted({timeline.meta["torch"] for timeline in analysis.timelines})
    if len(torches) > 1:
        notes.append(f"the ranks ran different versions of torch: {', '.join(torches)}")
    return notes


def _overlap(analysis: Analysis) -> float:
    hidden, exposed = (sum(split.seconds[name] for split in analysis.splits) for name in ("hidden", "exposed"))
    return hidden / (hidden + exposed) if hidden + exposed else 0.0


def _path_lines(analysis: Analysis) -> list[str]:
    def length(step: int) -> float:
        return sum(sum(part.seconds.values()) for part in analysis.paths[step])

    step = max(analysis.paths, key=length)
    parts = []
    for part in analysis.paths[step]:
        named = zip(_TITLES, part.seconds.values(), strict=True)
        large = sorted(((value, title) for title, value in named if value > 0.01 * length(step)), reverse=True)
        inside = ", ".join(f"{title} {value * 1e3:.1f}" for value, title in large)
        parts.append(f"rank {part.rank} {_ms(sum(part.seconds.values()))} ({inside})")
    return [f"critical path of step {step}, the longest: " + " -> ".join(parts)]


def _straggler_lines(analysis: Analysis) -> list[str]:
    longest = sorted(analysis.waits.items(), key=lambda item: -item[1])[:3]
    return [
        f"rank {rank}: each of the others waits {_ms(seconds)} per step for it ({seconds / analysis.step_seconds:.0%})"
        for rank, seconds in longest
        if seconds > 0.01 * analysis.step_seconds
    ]


def _top(usages: dict[str, Usage]) -> list[dict[str, Any]]:
    ranked = sorted(usages.items(), key=lambda item: -item[1].seconds)[:_TOP]
    return [{"name": name, **usage._asdict()} for name, usage in ranked]


def _usage_table(usages: dict[str, Usage], analysis: Analysis, counted: str) -> str:
    count = len(analysis.steps)
    rows = [("name", "ms", counted)]
    rows += [
        (usage["name"][:70], f"{usage['seconds'] / count * 1e3:.3f}", f"{usage['calls'] / count:.0f}")
        for usage in _top(usages)
    ]
    return table(rows)


def _host_wait_lines(timeline: RankTimeline, analysis: Analysis) -> list[str]:
    if not timeline.on_gpu:
        return []
    title = f"host waits for the device, rank {timeline.rank}, per step"
    if not timeline.host_waits:
        return ["", f"{title}: none"]
    return ["", f"{title} (it launches nothing meanwhile)", _usage_table(timeline.host_waits, analysis, "waits")]


def _owners(timeline: RankTimeline, folder: Path) -> MemoryOwners | None:
    """Return the owners of memory: on a CPU from the trace, on a GPU from the file beside it."""
    path = folder / f"rank-{timeline.rank}.memory.json"
    if timeline.memory is None and path.is_file():
        content = json.loads(path.read_text(encoding="utf-8"))
        return MemoryOwners(content["peak"], [tuple(owner) for owner in content["owners"]])
    return timeline.memory


def _memory_lines(timeline: RankTimeline, folder: Path) -> list[str]:
    owners = _owners(timeline, folder)
    if owners is None:
        return []
    rows = [("owner", "bytes", "allocations")]
    rows += [(name[-70:], size(nbytes), str(count)) for name, nbytes, count in owners.owners[:_TOP]]
    title = f"memory of rank {timeline.rank} at its peak: {size(owners.peak)} allocated in these steps"
    if timeline.on_gpu:
        note = f"the whole history: {folder}/rank-{timeline.rank}.memory.pickle, at https://pytorch.org/memory_viz"
    else:
        note = f"tensors only; for all memory of the processes: {MEMRAY}"
    return ["", title, table(rows), note]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
