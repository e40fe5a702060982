"""What limits the speed of a run, in words, with the setting to change; and what a change would gain."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from phalanx.config.strategies import facts_of
from phalanx.tools.profile.merge import merge
from phalanx.tools.profile.split import Analysis, analyse

_CLEAR = 0.1
"""A smaller share of the step is not worth a verdict of its own."""
_AT_ONCE_BYTES = 8 << 20
"""Larger traces are analysed by `phalanx report --profile` only, not by the run itself, whose ranks would wait."""


class WhatIf(NamedTuple):
    """A change, the seconds per step that would be left at best, and the formula."""

    change: str
    seconds: float
    formula: str


def what_if(found: Analysis) -> list[WhatIf]:
    """Return what the step would take at best after a change; the rest stays as it is on the critical path."""
    step, path = found.step_seconds, found.path_seconds
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
    if (slow := straggler(found)) is not None:
        formula = f"step - wait for rank {slow.rank} = {_ms(step)} - {_ms(slow.seconds)}"
        changes.append(WhatIf("no straggler", step - slow.seconds, formula))
    return changes


class Straggler(NamedTuple):
    """A rank that the others wait for, the seconds per step, and the phase in which it works longer, by how much."""

    rank: int
    seconds: float
    phase: str
    extra_seconds: float


def straggler(found: Analysis) -> Straggler | None:
    """Return the rank that the others wait for most; None where that is little."""
    rank, waited = max(found.waits.items(), key=lambda item: item[1], default=(0, 0.0))
    back = max((seconds for other, seconds in found.waits.items() if other != rank), default=0.0)
    net = waited - back  # ranks that wait for each other in turn are not slow
    return Straggler(rank, net, *found.extra_work(rank)) if net > _CLEAR * found.step_seconds else None


def verdict(found: Analysis) -> str:
    """Return what limits the speed, and what to change."""
    step, path = found.step_seconds, found.path_seconds
    shares = {name: seconds / step for name, seconds in path.items()}
    slow = straggler(found)
    candidates = {name: shares[name] for name in ("data", "exposed", "checkpoint", "idle") if shares[name] > _CLEAR}
    if slow is not None:
        candidates["straggler"] = slow.seconds / step
        if slow.phase == "data":  # it is counted as the straggler's, not as everyone's
            candidates.pop("data", None)
        candidates.pop("idle", None)
    if not candidates or max(candidates.values()) < (shares["compute"] + shares["hidden"]) / 3:
        return _compute_bound(found, shares)
    worst = max(candidates, key=lambda name: candidates[name])
    share = f"{candidates[worst]:.0%} of the step"
    if worst == "straggler" and slow is not None:
        return _straggler_bound(found, slow, share)
    return {"data": _data_bound, "exposed": _network_bound, "checkpoint": _saving_bound, "idle": _host_bound}[worst](
        found, share
    )


def conclude(folder: Path) -> str:
    """Merge and analyse a profile that a run has just recorded, and return its verdict."""
    nbytes = sum(path.stat().st_size for path in folder.glob("rank-*.json.gz"))
    if nbytes > _AT_ONCE_BYTES:
        return f"{nbytes >> 20} MB of traces were written; `phalanx report --profile` analyses them"
    found = analyse(folder)
    merge(folder, found)
    return verdict(found)


def _meta(found: Analysis) -> dict[str, Any]:
    return found.timelines[0].meta


def _setting(found: Analysis, name: str) -> Any:
    return _meta(found)["settings"].get(name)


def _data_bound(found: Analysis, share: str) -> str:
    meta = _meta(found)
    workers, cores = int(meta["loader_workers"]), int(meta["cores"])
    ranks = int(meta["local_ranks"])
    used = f"num_workers={workers}" + (f" x {ranks} ranks" if ranks > 1 else "") + f" of {cores} cores are used"
    wanted = max(workers + 1, cores // max(1, ranks) - 1)
    if workers == 0:
        advice = f"Load in other processes: DataLoader(..., num_workers={max(1, wanted)})"
    elif workers * ranks < cores:
        advice = f"Raise it: DataLoader(..., num_workers={wanted})"
    else:
        advice = "All cores load: prepare the data beforehand (decoded, resized), or make each sample cheaper"
    return f"data-bound: {share} waits for the loader; {used}. {advice}."


def _network_bound(found: Analysis, share: str) -> str:
    path, strategy = found.path_seconds, str(_meta(found)["strategy"])
    moved = path["exposed"] + path["hidden"]
    hidden = path["hidden"] / moved if moved else 0.0
    if not _setting(found, "gradient_accumulation_steps") and facts_of(strategy).averages_gradients:
        advice = "gradient_accumulation_steps=4 communicates every fourth micro-batch only"
    else:
        advice = "a larger batch_size communicates less often per sample"
    if facts_of(strategy).compressors and not _setting(found, "compression"):
        advice += "; compression='powersgd' or 'bf16' sends less"
    on_host = str(_meta(found)["comm_backend"]) == "gloo" and _meta(found)["local_ranks"] == _meta(found)["world_size"]
    if on_host:
        advice += "; communication_backend='phalanx' uses shared memory on one machine"
    return f"communication-bound: {share} waits for communication, {hidden:.0%} of which is hidden. {advice}."


def _saving_bound(found: Analysis, share: str) -> str:
    every = _setting(found, "checkpoint_frequency")
    advice = "Write while training goes on: async_checkpoint=true"
    if _setting(found, "async_checkpoint") is not False:
        advice = f"Save less often: checkpoint_frequency={every!r} now, 'auto' weighs its cost against failures"
    return f"checkpoint-bound: {share} waits for checkpoints. {advice}."


def _host_bound(found: Analysis, share: str) -> str:
    if found.timelines[0].on_gpu:
        advice = "Give it more at once: a larger batch_size, or compile=true (fewer, larger kernels)"
        return f"host-bound: in {share} the GPU waits for the Python program. {advice}."
    advice = "Python code, sleeps and waits between operations: a larger batch_size, or look at the callbacks"
    return f"host-bound: in {share} no operation runs. {advice}."


def _straggler_bound(found: Analysis, slow: Straggler, share: str) -> str:
    host = next(timeline.meta["host"] for timeline in found.timelines if timeline.rank == slow.rank)
    where = f"its {slow.phase} phase takes {_ms(slow.extra_seconds)} longer than that of the others"
    advice = "compare that machine with the others (`phalanx doctor`)"
    if slow.phase == "data":
        advice = "look at its data"
    elif len({timeline.meta["host"] for timeline in found.timelines}) == 1:
        advice = "look at what else uses its cores or its GPU"
    return f"straggler-bound: for {share} the other ranks wait for rank {slow.rank} on {host}; {where}: {advice}."


def _compute_bound(found: Analysis, shares: dict[str, float]) -> str:
    meta, busy = _meta(found), shares["compute"] + shares["hidden"]
    advice = "a smaller model or batch_size shortens the step, more ranks share the samples of an epoch"
    if meta["device"] == "cuda" and meta["precision"] == "fp32":
        advice = "mixed_precision='bf16' computes faster"
    elif meta["device"] == "cuda" and not _setting(found, "compile"):
        advice = "compile=true fuses operations"
    return f"compute-bound: {busy:.0%} of the step computes; {advice}."


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
