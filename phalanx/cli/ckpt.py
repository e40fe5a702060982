"""`phalanx ckpt`: list, inspect, verify, compare, reshard, export, prune and copy checkpoints."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from phalanx.cli.flags import FlagParser
from phalanx.cli.json_output import print_json
from phalanx.cli.parsers import CKPT_ACTIONS, ckpt_parser
from phalanx.errors import UsageError, unknown_name
from phalanx.observe.format import duration, size, table

if TYPE_CHECKING:
    from phalanx.checkpoint import Checkpoint, StateDifference

_SHOWN = 20
"""Differing tensors that `diff` shows without --tensors."""
_MATTERS = (
    "strategy",
    "num_workers",
    "num_nodes",
    "mixed_precision",
    "batch_size",
    "optimizer",
    "learning_rate",
    "seed",
)
"""Settings that `inspect` shows; --json has all."""


def parser() -> FlagParser:
    """Return the parser of the first action, for help and completion."""
    return ckpt_parser("ls")


def run(arguments: Sequence[str]) -> int:
    """Run the verb."""
    words = list(arguments)
    if words and words[0] in ("-h", "--help"):
        parser().print_help()
        return 0
    action = words.pop(0) if words and not words[0].startswith("-") else ""
    if action not in CKPT_ACTIONS:
        known = ", ".join(CKPT_ACTIONS)
        given = unknown_name("action of phalanx ckpt", action, CKPT_ACTIONS) if action else "ckpt needs an action"
        raise UsageError(given, hint=f"Write: phalanx ckpt ACTION PATH, with one of {known}")
    if action == "export":
        return int(import_module("phalanx.cli.export").run(words))
    namespace = ckpt_parser(action).parse_all(words)
    actions = {"ls": _list, "inspect": _inspect, "verify": _verify, "diff": _diff}
    actions |= {"reshard": _reshard, "prune": _prune, "cp": _copy}
    return actions[action](namespace)


def _list(namespace: argparse.Namespace) -> int:
    from phalanx.checkpoint.find import sizes_match, survey
    from phalanx.cli.ckpt_target import directory_of
    from phalanx.observe.best import read_mark

    directory = directory_of(namespace.run)
    found, unreadable = survey(directory)
    rows: list[dict[str, Any]] = []
    for one in found:
        manifest, best = one.manifest, read_mark(one.path)
        rows.append(
            {
                "name": one.path.name,
                "path": str(one.path),
                "step": one.step,
                "epoch": manifest.epoch,
                "saved": manifest.published_at,
                "bytes": manifest.bytes,
                "ranks": manifest.world_size,
                "kind": manifest.kind,
                "best": None if best is None else {"metric": best.metric, "value": best.value},
                "status": "complete" if sizes_match(one) else "damaged",
                "run_id": manifest.run_id,
            }
        )
    rows += [{"name": p.name, "path": str(p), "status": "damaged", "reason": e.message} for p, e in unreadable]
    if namespace.json:
        print_json(rows)
        return 0
    if not rows:
        print(f"no checkpoints in {directory}")
        return 0
    shown = [("name", "step", "age", "size", "ranks", "kind", "best", "status"), *map(_row, rows)]
    print(table(shown))
    for row in rows:
        if "reason" in row:
            print(f"{row['name']}: {row['reason']}")
    return 0


def _row(row: dict[str, Any]) -> tuple[str, ...]:
    if "step" not in row:
        return (row["name"], "-", "-", "-", "-", "-", "", row["status"])
    best = f"{row['best']['metric']} {row['best']['value']:.4g}" if row["best"] else ""
    age = duration(max(0.0, time.time() - row["saved"]))
    kept = str(row["step"]), age, size(row["bytes"]), str(row["ranks"]), row["kind"]
    return (row["name"], *kept, best, row["status"])


def _inspect(namespace: argparse.Namespace) -> int:
    from phalanx.checkpoint import stored_tensors
    from phalanx.cli.ckpt_target import open_checkpoint

    one = open_checkpoint(namespace.run)
    manifest = one.manifest
    tensors = {n: _described(info.shape, info.dtype) for n, info in stored_tensors(one).items()}
    about = {
        "path": str(one.path),
        "step": manifest.step,
        "epoch": manifest.epoch,
        "run_id": manifest.run_id,
        "saved": manifest.published_at,
        "kind": manifest.kind,
        "ranks": manifest.world_size,
        "mesh": manifest.mesh,
        "phalanx": manifest.phalanx_version,
        "torch": manifest.torch_version,
        "format": manifest.format,
        "bytes": manifest.bytes,
        "continues": manifest.lineage,
    }
    if namespace.json:
        files = {name: {"bytes": record.size, "hash": record.hash} for name, record in manifest.files.items()}
        print_json({**about, "config": manifest.config, "files": files, "tensors": tensors})
        return 0
    about["saved"] = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.published_at))
    about["bytes"] = f"{size(manifest.bytes)} in {len(manifest.files)} files"
    about["mesh"] = ", ".join(f"{axis} {count}" for axis, count in manifest.mesh.items() if count != 1) or "one rank"
    about["continues"] = ", ".join(f"{run['run_id']} at step {run['step']}" for run in manifest.lineage)
    config = {n: manifest.config[n] for n in _MATTERS if manifest.config.get(n) is not None}
    about["settings"] = ", ".join(f"{name} {value}" for name, value in config.items())
    print(table([(name, str(value)) for name, value in about.items() if value not in ("", None)]))
    print()
    print(table(_tensor_rows(tensors) if namespace.tensors else _entry_rows(tensors)))
    print()
    print(table([("file", "size", "hash"), *((n, size(r.size), r.hash) for n, r in sorted(manifest.files.items()))]))
    return 0


def _described(shape: tuple[int, ...], dtype: str) -> dict[str, Any]:
    import torch

    return {"shape": list(shape), "dtype": dtype, "bytes": math.prod(shape) * getattr(torch, dtype).itemsize}


def _tensor_rows(tensors: dict[str, dict[str, Any]]) -> list[tuple[str, ...]]:
    rows = [(name, str(info["shape"]), info["dtype"], size(info["bytes"])) for name, info in tensors.items()]
    return [("tensor", "shape", "dtype", "size"), *rows]


def _entry_rows(tensors: dict[str, dict[str, Any]]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("entry", "tensors", "elements", "dtypes", "size")]
    for entry in dict.fromkeys(name.split(".")[0] for name in tensors):
        own = [info for name, info in tensors.items() if name.split(".")[0] == entry]
        elements = sum(math.prod(info["shape"]) for info in own)
        dtypes = ", ".join(sorted({info["dtype"] for info in own}))
        rows.append((entry, str(len(own)), f"{elements:,}", dtypes, size(sum(info["bytes"] for info in own))))
    return rows


def _verify(namespace: argparse.Namespace) -> int:
    from phalanx.checkpoint import verify
    from phalanx.cli.ckpt_target import named_checkpoints

    found, unreadable = named_checkpoints(namespace.run)
    results: list[dict[str, Any]] = [{"path": str(p), "problems": [e.message]} for p, e in unreadable]
    for one in found:
        started = time.monotonic()
        problems = verify(one.path, manifest=one.manifest)
        results.append({"path": str(one.path), "problems": problems, "bytes": one.manifest.bytes})
        if not namespace.json and not problems:
            files, seconds = len(one.manifest.files), time.monotonic() - started
            print(f"{one.path}: intact ({files} files, {size(one.manifest.bytes)}, {seconds:.1f} s)")
    damaged = [each for each in results if each["problems"]]
    if namespace.json:
        print_json(results)
    else:
        for each in damaged:
            print(f"{each['path']}: damaged", *each["problems"], sep="\n  ")
    return 1 if damaged else 0


def _diff(namespace: argparse.Namespace) -> int:
    from phalanx.checkpoint import compare
    from phalanx.cli.ckpt_target import open_checkpoint

    first, second = open_checkpoint(namespace.run), open_checkpoint(namespace.target)
    prefix = namespace.only or ""
    result = compare(first, second, prefix if not prefix or prefix.endswith(".") else f"{prefix}.")
    if namespace.json:
        both = [{"path": str(one.path), "step": one.step} for one in (first, second)]
        print_json(
            {"checkpoints": both, "same_tensors": result.same_tensors, **vars(result)}
            | {"differences": [vars(each) for each in result.differences]}
        )
    else:
        _print_comparison(first, second, result, all_tensors=namespace.tensors)
    return 0


def _print_comparison(first: Checkpoint, second: Checkpoint, result: StateDifference, *, all_tensors: bool) -> None:
    print(table([("A", str(first.path), f"step {first.step}"), ("B", str(second.path), f"step {second.step}")]))
    for letter, names in (("A", result.only_first), ("B", result.only_second)):
        if names:
            shown = names if all_tensors else names[:_SHOWN]
            print(f"only in {letter} ({len(names)}):", *shown, sep="\n  ")
    if result.same_tensors:
        print(f"equal: all {result.tensors} tensors are identical, bit for bit")
    elif not result.differences:
        print(f"the {result.tensors} tensors that both have are identical, bit for bit")
    else:
        ordered = sorted(result.differences, key=lambda each: each.max_abs, reverse=True)
        rows = [("tensor", "max abs", "relative", "elements", "")]
        for each in ordered if all_tensors else ordered[:_SHOWN]:
            counts = f"{each.different:,} of {each.elements:,}"
            rows.append((each.name, f"{each.max_abs:.3g}", f"{each.relative:.2g}", counts, each.reason))
        print(f"{len(ordered)} of {result.tensors} tensors differ, the largest difference first:")
        print(table(rows))
        if len(ordered) > len(rows) - 1:
            print(f"... and {len(ordered) - len(rows) + 1} more: add --tensors")
    for name, (one, other) in result.config.items():
        print(f"setting {name}: {one} and {other}")


def _prune(namespace: argparse.Namespace) -> int:
    from phalanx.checkpoint.find import survey
    from phalanx.checkpoint.keep import beyond, remove, remove_unused_chunks
    from phalanx.checkpoint.lock import runs_under_way
    from phalanx.cli.ckpt_target import directory_of

    for flag in ("keep_last", "keep_every"):
        if (given := getattr(namespace, flag)) is not None and given < 1:
            raise UsageError(f"--{flag.replace('_', '-')} {given}: it must be 1 or more")
    directory = directory_of(namespace.run)
    found, _ = survey(directory)
    going = runs_under_way(directory)
    if going:
        raise UsageError(
            f"{directory} is in use by {going[0]}",
            hint="Prune when the run has ended; a run prunes by keep_last itself.",
        )
    chosen = beyond(found, namespace.keep_last, namespace.keep_every)
    freed = sum(one.manifest.bytes for one in chosen)
    if not namespace.dry_run:
        for one in chosen:
            remove(one.path)
        remove_unused_chunks(directory, {one.manifest.run_id for one in found if one.manifest.kind == "incremental"})
    result = {"removed": [str(one.path) for one in chosen], "bytes": freed, "kept": len(found) - len(chosen)}
    if namespace.json:
        print_json({**result, "dry_run": namespace.dry_run})
        return 0
    for one in chosen:
        print(f"{'would remove' if namespace.dry_run else 'removed'} {one.path} ({size(one.manifest.bytes)})")
    print(f"{len(chosen)} removed, {result['kept']} kept" if not namespace.dry_run else f"{result['kept']} stay")
    return 0


def _copy(namespace: argparse.Namespace) -> int:
    from phalanx.checkpoint.copy import copy_checkpoint
    from phalanx.cli.ckpt_target import named_checkpoints, open_checkpoint, target_directory

    found = named_checkpoints(namespace.run)[0][::-1] if namespace.all else [open_checkpoint(namespace.run)]
    results = []
    for one in found:
        directory = target_directory(namespace.target, one)
        copied = copy_checkpoint(one, directory, lambda file: print(f"  {file}", file=sys.stderr))
        results.append(
            {"source": str(one.path), "path": str(copied.path), "files": copied.files, "bytes": copied.bytes}
        )
        if not namespace.json:
            were = f"{copied.files} of {len(one.manifest.files)} files, {size(copied.bytes)}"
            print(
                f"copied {one.path} to {copied.path} ({were})" if copied.files else f"{copied.path} is complete already"
            )
    if namespace.json:
        print_json(results)
    return 0


def _reshard(namespace: argparse.Namespace) -> int:
    from phalanx.checkpoint.reshard import reshard
    from phalanx.cli.ckpt_target import open_checkpoint, target_directory

    one = open_checkpoint(namespace.run)
    path = reshard(one, target_directory(namespace.target, one), namespace.ranks)
    if namespace.json:
        print_json({"source": str(one.path), "path": str(path), "ranks": namespace.ranks})
    else:
        print(f"wrote {path} in {namespace.ranks} parts, from {one.path}")
    return 0
