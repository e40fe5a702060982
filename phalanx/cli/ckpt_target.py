"""Which checkpoints the arguments of `phalanx ckpt` name: those of a run, of a directory or URL, or one of them."""

from __future__ import annotations

import re
from pathlib import Path

from phalanx.checkpoint import Checkpoint, read_manifest
from phalanx.checkpoint.find import foreign, looks_like, survey
from phalanx.checkpoint.manifest import MANIFEST
from phalanx.checkpoint.publish import is_published, step_name
from phalanx.errors import EXIT_USAGE, CheckpointError, UsageError, nearest
from phalanx.host.remote import RemotePath, as_path
from phalanx.observe.best_mark import latest_mark
from phalanx.run.stored import StoredRun, find_run, is_run

_CHOSEN = re.compile(r"(?P<place>.+)@(?P<which>\d+|best|last)")


def directory_of(argument: str) -> Path:
    """Return the directory of checkpoints that an argument names; UsageError where there is none."""
    path = _located(argument)
    if _is_checkpoint(path):
        raise UsageError(f"{path} is one checkpoint", hint=f"Give the directory that holds it: {path.parent}")
    if not path.is_dir():
        raise UsageError(f"{path} holds no checkpoints: it does not exist")
    checkpoints, unreadable = survey(path)
    kind = None if checkpoints or unreadable else looks_like(path)
    if kind is not None:
        raise _refused(foreign(path, kind))
    return path


def named_checkpoints(argument: str) -> tuple[list[Checkpoint], list[tuple[Path, CheckpointError]]]:
    """Return the checkpoints that an argument names, the newest first, and those whose manifest cannot be read."""
    match = _CHOSEN.fullmatch(argument)
    if match or _is_checkpoint(_located(argument)):
        return [open_checkpoint(argument)], []
    directory = directory_of(argument)
    checkpoints, unreadable = survey(directory)
    if not checkpoints and not unreadable:
        raise UsageError(f"{directory} holds no checkpoint")
    return checkpoints, unreadable


def open_checkpoint(argument: str) -> Checkpoint:
    """Return the one checkpoint that an argument names, the newest of a directory or run where it names no other."""
    match = _CHOSEN.fullmatch(argument)
    path = _located(match["place"] if match else argument)
    if match is None and _is_checkpoint(path):
        return Checkpoint(path, read_manifest(path))
    checkpoints, unreadable = named_checkpoints(str(path))
    if not checkpoints:
        raise unreadable[0][1]
    which = match["which"] if match else "last"
    best = latest_mark(checkpoint.path for checkpoint in checkpoints) if which == "best" else None
    for checkpoint in checkpoints:
        if which == "last" or str(checkpoint.step) == which or (best is not None and checkpoint.path == best.path):
            return checkpoint
    names = ", ".join(str(checkpoint.step) for checkpoint in checkpoints)
    raise UsageError(f"{path} has no checkpoint '{which}'; it has those of step {names}")


def target_directory(argument: str, source: Checkpoint) -> Path:
    """Return the directory that a copy goes into; the name of the checkpoint may be written after it."""
    path = as_path(argument)
    if path.name == source.path.name:
        return path.parent
    if is_published(path.name) or (not isinstance(path, RemotePath) and path.is_file()):
        raise UsageError(f"{path} is not a directory for checkpoints", hint=f"Write {path.parent}")
    if path.resolve() == source.path.parent.resolve():
        raise UsageError(f"{source.path} is in {path} already")
    return path


def _is_checkpoint(path: Path) -> bool:
    return (path / MANIFEST).exists() or (is_published(path.name) and path.is_dir())


def _located(argument: str) -> Path:
    """Return the path of an argument; a run stands for its directory of checkpoints."""
    path = as_path(argument)
    if isinstance(path, RemotePath):
        if not path.exists():
            raise UsageError(f"there is nothing at {path}")
        return path
    if path.is_dir():
        return _checkpoints_of(StoredRun(path)) if is_run(path) and not _is_checkpoint(path) else path
    if path.exists():
        raise _refused(foreign(path, looks_like(path) or "a file"))
    if "/" not in argument:
        return _checkpoints_of(find_run(argument))
    siblings = [sibling.name for sibling in path.parent.iterdir()] if path.parent.is_dir() else []
    close = nearest(path.name, siblings)
    guess = f" Did you mean {path.parent / close}?" if close else ""
    raise UsageError(f"{path} does not exist.{guess}", hint=f"A checkpoint is named like {step_name(100)}.")


def _checkpoints_of(run: StoredRun) -> Path:
    """Return where a run's checkpoints are; refuse a link of another user, by which others would be removed."""
    directory = run.checkpoint_dir
    if not isinstance(directory, RemotePath) and directory.is_symlink():
        run.require_trust("its checkpoints are a link to another folder")
    return directory


def _refused(error: CheckpointError) -> CheckpointError:
    error.exit_code = EXIT_USAGE
    return error
