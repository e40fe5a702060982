"""What the actions of `phalanx ckpt` do, each with its answer as data and as text."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from phalanx.checkpoint import Checkpoint, copy_checkpoint, stored_tensors, verify
from phalanx.checkpoint.copy import reshard
from phalanx.checkpoint.differences import StateDifference, compare
from phalanx.checkpoint.find import sizes_match, survey
from phalanx.checkpoint.keep import beyond, prune_chunks, remove
from phalanx.checkpoint.lock import runs_under_way
from phalanx.cli.ckpt_target import directory_of, named_checkpoints, open_checkpoint, target_directory
from phalanx.errors import UsageError
from phalanx.observe.best_mark import read_mark
from phalanx.observe.format import duration, size, table

_SHOWN = 20
"""Differing tensors that `diff` shows without --tensors."""
_MATTERS = ("strategy", "num_workers", "mixed_precision", "batch_size", "optimizer", "learning_rate", "seed")
"""Settings that `inspect` shows; --json has all."""


class ActionOutput(NamedTuple):
    """What an action prints: its result as data for --json and as text."""

    data: Any
    text: str
    code: int = 0


def _facts(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return what `ls` and `inspect` both show."""
    manifest, best = checkpoint.manifest, read_mark(checkpoint.path)
    return {
        "path": str(checkpoint.path),
        "step": checkpoint.step,
        "epoch": manifest.epoch,
        "run_id": manifest.run_id,
        "saved": manifest.published_at,
        "bytes": manifest.bytes,
        "ranks": manifest.world_size,
        "kind": manifest.kind,
        "best": None if best is None else {"metric": best.metric, "value": best.value},
    }


def _list(namespace: argparse.Namespace) -> ActionOutput:
    directory = directory_of(namespace.run)
    checkpoints, unreadable = survey(directory)
    data = [
        {**_facts(checkpoint), "status": "complete" if sizes_match(checkpoint) else "damaged"}
        for checkpoint in checkpoints
    ]
    rows = [("name", "step", "age", "size", "ranks", "kind", "best", "status")]
    for checkpoint, row in zip(checkpoints, data, strict=True):
        best = f"{row['best']['metric']} {row['best']['value']:.4g}" if row["best"] else ""
        age = duration(max(0.0, time.time() - row["saved"]))
        cells = str(checkpoint.step), age, size(row["bytes"]), str(row["ranks"]), row["kind"], best, row["status"]
        rows.append((checkpoint.path.name, *cells))
    rows += [(path.name, *"-----", "", "damaged") for path, _ in unreadable]
    data += [{"path": str(path), "status": "damaged", "reason": error.message} for path, error in unreadable]
    reasons = [f"{path.name}: {error.message}" for path, error in unreadable]
    return ActionOutput(data, "\n".join([table(rows), *reasons]) if data else f"no checkpoints in {directory}")


def _inspect(namespace: argparse.Namespace) -> ActionOutput:
    checkpoint = open_checkpoint(namespace.run)
    manifest, facts = checkpoint.manifest, _facts(checkpoint)
    tensors = {name: _described(info.shape, info.dtype) for name, info in stored_tensors(checkpoint).items()}
    facts |= {"phalanx": manifest.phalanx_version, "torch": manifest.torch_version, "format": manifest.format}
    more = {"mesh": manifest.mesh, "continues": manifest.lineage, "config": manifest.config}
    records = sorted(manifest.files.items())
    files = {name: {"bytes": record.size, "hash": record.hash} for name, record in records}
    about = facts | {
        "saved": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.published_at)),
        "bytes": f"{size(manifest.bytes)} in {len(files)} files",
        "best": f"{facts['best']['metric']} {facts['best']['value']:.6g}" if facts["best"] else "",
        "layout": ", ".join(f"{axis} {count}" for axis, count in manifest.mesh.items() if count != 1),
        "continues": ", ".join(f"{run['run_id']} at step {run['step']}" for run in manifest.lineage),
        "settings": ", ".join(f"{n} {manifest.config[n]}" for n in _MATTERS if manifest.config.get(n) is not None),
    }
    parts = [
        table([(name, str(value)) for name, value in about.items() if value != ""]),
        table(_tensor_rows(tensors) if namespace.tensors else _entry_rows(tensors)),
        table([("file", "size", "hash"), *((name, size(entry.size), entry.hash) for name, entry in records)]),
    ]
    return ActionOutput({**facts, **more, "files": files, "tensors": tensors}, "\n\n".join(parts))


def _described(shape: tuple[int, ...], dtype: str) -> dict[str, Any]:
    return {"shape": list(shape), "dtype": dtype, "bytes": math.prod(shape) * getattr(torch, dtype).itemsize}


def _tensor_rows(tensors: dict[str, dict[str, Any]]) -> list[tuple[str, ...]]:
    rows = [(name, str(info["shape"]), info["dtype"], size(info["bytes"])) for name, info in tensors.items()]
    return [("tensor", "shape", "dtype", "size"), *rows]


def _entry_rows(tensors: dict[str, dict[str, Any]]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("entry", "tensors", "elements", "dtypes", "size")]
    for entry in dict.fromkeys(name.split(".")[0] for name in tensors):
        infos = [info for name, info in tensors.items() if name.split(".")[0] == entry]
        elements = sum(math.prod(info["shape"]) for info in infos)
        dtypes = ", ".join(sorted({info["dtype"] for info in infos}))
        rows.append((entry, str(len(infos)), f"{elements:,}", dtypes, size(sum(info["bytes"] for info in infos))))
    return rows


def _check(namespace: argparse.Namespace) -> ActionOutput:
    checkpoints, unreadable = named_checkpoints(namespace.run)
    problems = {str(path): [error.message] for path, error in unreadable}
    lines = [f"{path}: damaged\n  {listed[0]}" for path, listed in problems.items()]
    for checkpoint in checkpoints:
        started = time.monotonic()
        wrong = problems[str(checkpoint.path)] = verify(checkpoint.path, manifest=checkpoint.manifest)
        manifest, seconds = checkpoint.manifest, time.monotonic() - started
        facts = f"{len(manifest.files)} files, {size(manifest.bytes)}, {seconds:.1f} s"
        lines.append(
            "\n  ".join([f"{checkpoint.path}: damaged", *wrong]) if wrong else f"{checkpoint.path}: intact ({facts})"
        )
    data = [{"path": path, "problems": listed} for path, listed in problems.items()]
    return ActionOutput(data, "\n".join(lines), int(any(problems.values())))


def _diff(namespace: argparse.Namespace) -> ActionOutput:
    first, second = open_checkpoint(namespace.run), open_checkpoint(namespace.target)
    result = compare(first, second, f"{namespace.only.rstrip('.')}." if namespace.only else "")
    data: dict[str, Any] = {**vars(result), "same_tensors": result.same_tensors, "unrelated": result.unrelated}
    data["checkpoints"] = [{"path": str(checkpoint.path), "step": checkpoint.step} for checkpoint in (first, second)]
    data["differences"] = [vars(difference) for difference in result.differences]
    places = table([("A", str(first.path), f"step {first.step}"), ("B", str(second.path), f"step {second.step}")])
    lines = _difference_lines(result, None if namespace.tensors else _SHOWN)
    if result.unrelated and not namespace.tensors:
        counts = " and ".join(str(result.tensors + len(only)) for only in (result.only_first, result.only_second))
        lines = [f"different models: of {counts} tensors none has the same name and shape in both; see --tensors"]
    return ActionOutput(data, "\n".join([places, *lines]), int(result.unrelated))


def _difference_lines(result: StateDifference, limit: int | None) -> list[str]:
    lines = []
    for letter, names in (("A", result.only_first), ("B", result.only_second)):
        if names:
            lines.append("\n  ".join([f"only in {letter} ({len(names)}):", *names[:limit]]))
    if result.same_tensors:
        lines.append(f"equal: all {result.tensors} tensors are identical, bit for bit")
    elif not result.differences:
        lines.append(f"the {result.tensors} tensors that both have are identical, bit for bit")
    else:
        ordered = sorted(
            result.differences, key=lambda difference: (not difference.name.startswith("model"), -difference.relative)
        )
        rows = [("tensor", "max abs", "relative", "elements", "")]
        for difference in ordered[:limit]:
            counts = f"{difference.different:,} of {difference.elements:,}"
            rows.append(
                (difference.name, f"{difference.max_abs:.3g}", f"{difference.relative:.2g}", counts, difference.reason)
            )
        lines += [f"{len(ordered)} of {result.tensors} tensors differ:", table(rows)]
        if len(ordered) >= len(rows):
            lines.append(f"... and {len(ordered) - len(rows) + 1} more: add --tensors")
    return lines + [f"setting {name}: {one} and {other}" for name, (one, other) in result.config.items()]


def _reshard(namespace: argparse.Namespace) -> ActionOutput:
    checkpoint = open_checkpoint(namespace.run)
    path = reshard(checkpoint, target_directory(namespace.target, checkpoint), namespace.ranks)
    data = {"source": str(checkpoint.path), "path": str(path), "ranks": namespace.ranks}
    return ActionOutput(data, f"wrote {path} in {namespace.ranks} parts, from {checkpoint.path}")


def _prune(namespace: argparse.Namespace) -> ActionOutput:
    for flag in ("keep_last", "keep_every"):
        if (value := getattr(namespace, flag)) is not None and value < 1:
            raise UsageError(f"--{flag.replace('_', '-')} {value}: it must be 1 or more")
    directory = directory_of(namespace.run)
    if going := runs_under_way(directory):
        hint = "Prune when the run has ended; a run prunes by keep_last itself."
        raise UsageError(f"{directory} is in use by {going[0]}", hint=hint)
    checkpoints = survey(directory)[0]
    chosen = beyond(checkpoints, namespace.keep_last, namespace.keep_every)
    notes: list[str] = []
    if not namespace.dry_run:
        for checkpoint in chosen:
            remove(checkpoint.path)
        notes = prune_chunks(directory)
    paths = [str(checkpoint.path) for checkpoint in chosen]
    done = "would remove" if namespace.dry_run else "removed"
    lines = [f"{done} {checkpoint.path} ({size(checkpoint.manifest.bytes)})" for checkpoint in chosen]
    remaining = len(checkpoints) - len(chosen)
    data = {"removed": paths, "kept": remaining, "dry_run": namespace.dry_run, "notes": notes}
    return ActionOutput(data, "\n".join([*lines, *notes, f"{len(chosen)} {done.split()[-1]}, {remaining} kept"]))


def _copy(namespace: argparse.Namespace) -> ActionOutput:
    checkpoints = named_checkpoints(namespace.run)[0][::-1] if namespace.all else [open_checkpoint(namespace.run)]
    data, lines = [], []
    for checkpoint in checkpoints:
        directory = target_directory(namespace.target, checkpoint)
        copied = copy_checkpoint(checkpoint, directory, lambda file: print(f"  {file}", file=sys.stderr))
        data.append(
            {"source": str(checkpoint.path), "path": str(copied.path), "files": copied.files, "bytes": copied.bytes}
        )
        were = f"copied {checkpoint.path} to {copied.path} ({copied.files} files, {size(copied.bytes)})"
        lines.append(were if copied.files else f"{copied.path} is complete already")
    return ActionOutput(data, "\n".join(lines))


ACTIONS: dict[str, Callable[[argparse.Namespace], ActionOutput]] = {
    "ls": _list,
    "inspect": _inspect,
    "check": _check,
    "diff": _diff,
    "reshard": _reshard,
    "prune": _prune,
    "cp": _copy,
}
"""By the names of `CKPT_ACTIONS`."""
