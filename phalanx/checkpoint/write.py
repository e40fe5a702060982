"""Save a checkpoint: write and hash the files, publish them by one rename, then remove old checkpoints."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from phalanx.checkpoint import group
from phalanx.checkpoint.files import FileRecord, hashed_file, write_failed
from phalanx.checkpoint.find import Checkpoint, list_checkpoints
from phalanx.checkpoint.keep import check_keep_last, clear_leftovers, keep_newest
from phalanx.checkpoint.manifest import MANIFEST, Manifest, SavedCheckpoint, Snapshot, TensorInfo, dump_manifest
from phalanx.checkpoint.publish import publish, writing_name
from phalanx.checkpoint.storage import PlainSavePlanner, ShardWriter, first_cause, quiet_without_group
from phalanx.errors import CheckpointError
from phalanx.host.files import make_private
from phalanx.version import __version__

_MOMENT_SECONDS = 1e-3
_OF_A_MODEL = re.compile(r"model\d*\.")


def save(
    directory: Path | str,
    snapshot: Snapshot,
    *,
    run_id: str,
    keep_last: int | None = None,
    best: Path | None = None,
    lineage: list[dict[str, Any]] | None = None,
    mesh: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
) -> SavedCheckpoint:
    """Save a snapshot under `directory`; collective with a process group.

    An error on any rank is raised on all of them, and earlier checkpoints are unchanged. `best`: one that `keep_last`
    does not remove.
    """
    started = time.monotonic()
    check_keep_last(keep_last)
    directory = Path(directory)
    written = group.from_rank_zero(lambda: _begin(directory, snapshot.step))
    with _removed_on_failure(written):
        metadata, files = _write_shards(written, snapshot)

        def complete() -> Checkpoint:
            # Later than all present ones, also where this machine's clock is behind theirs.
            present = list_checkpoints(directory)
            published_at = max([time.time(), *(one.manifest.published_at + _MOMENT_SECONDS for one in present)])
            manifest = Manifest(
                step=snapshot.step,
                epoch=snapshot.epoch,
                shared=snapshot.shared,
                tensors=_model_tensors(metadata),
                world_size=group.world_size(),
                torch_version=torch.__version__,
                phalanx_version=__version__,
                files=files,
                run_id=run_id,
                lineage=lineage or [],
                published_at=published_at,
                mesh=mesh or {},
                config=config or {},
            )
            return Checkpoint(_publish(written, manifest), manifest)

        published = group.from_rank_zero(complete)
    notes = group.from_rank_zero(lambda: keep_newest(published, keep_last, best))
    seconds = time.monotonic() - started
    return SavedCheckpoint(published.path, snapshot.step, seconds, published.manifest.bytes, tuple(notes))


def check_writable(directory: Path | str) -> None:
    """Check before training that checkpoints can be written: create the directory, and a file in it."""
    directory = Path(directory)
    probe = directory / f".probe-{os.getpid()}-{secrets.token_hex(3)}"
    try:
        make_private(directory)
        try:
            with probe.open("xb") as file:
                file.write(b"phalanx")
                file.flush()
                os.fsync(file.fileno())
        finally:
            probe.unlink(missing_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise _not_a_directory(directory) from None
    except OSError as error:
        raise write_failed(error, rank=group.rank(), path=directory, needed=0) from error


def _not_a_directory(directory: Path) -> CheckpointError:
    culprit = next((path for path in (directory, *directory.parents) if path.exists()), directory)
    return CheckpointError(
        f"checkpoint_dir is {directory}, but {culprit} is a file",
        hint="Set checkpoint_dir to a directory; it is created when it does not exist.",
    )


def _begin(directory: Path, step: int) -> Path:
    """Create the directory to write into, after removing what failed saves left."""
    written = directory / writing_name(step)
    try:
        make_private(directory)
        clear_leftovers(directory, older_than=time.time())
        written.mkdir()
    except (FileExistsError, NotADirectoryError):
        raise _not_a_directory(directory) from None
    except OSError as error:
        raise write_failed(error, rank=0, path=written, needed=0) from error
    return written


@contextlib.contextmanager
def _removed_on_failure(written: Path) -> Iterator[None]:
    """Remove the incomplete directory when the save fails: all ranks have stopped writing then."""
    try:
        yield
    except BaseException:
        if group.rank() == 0:
            shutil.rmtree(written, ignore_errors=True)
        raise


def _write_shards(written: Path, snapshot: Snapshot) -> tuple[Metadata, dict[str, FileRecord]]:
    """Write this rank's share; on rank 0 return the records of all ranks' files."""
    writer = ShardWriter(written, rank=group.rank(), rank_state=snapshot.rank_state)
    _require_shared(written)
    try:
        with quiet_without_group():
            metadata = dcp.save(
                snapshot.tensors, storage_writer=writer, planner=PlainSavePlanner(), no_dist=not group.has_peers()
            )
    except CheckpointException as failure:
        rank, cause = first_cause(failure)
        if isinstance(cause, CheckpointError):
            raise CheckpointError(cause.message, hint=cause.hint) from failure
        raise CheckpointError(f"rank {rank} could not save: {type(cause).__name__}: {cause}") from failure
    parts = group.gather_to_zero(writer.files.records)
    return metadata, {name: record for part in parts for name, record in part.items()}


def _require_shared(written: Path) -> None:
    """Raise for a directory that is not visible on every host."""
    missing = None if written.is_dir() else f"rank {group.rank()} on {socket.gethostname()}"
    blind = next((name for name in group.gather_to_all(missing) if name), None)
    if blind:
        raise CheckpointError(
            f"{blind} does not see {written}, which rank 0 has just created",
            hint="Set checkpoint_dir to a file system that all hosts share.",
        )


def _model_tensors(metadata: Metadata) -> dict[str, TensorInfo]:
    """Return the tensors of all ranks under "model" by canonical name; names of other models begin with "model1."."""
    described: dict[str, TensorInfo] = {}
    for flat_name, entry in metadata.state_dict_metadata.items():
        if _OF_A_MODEL.match(flat_name) and isinstance(entry, TensorStorageMetadata):
            dtype = str(entry.properties.dtype).removeprefix("torch.")
            described[flat_name.removeprefix("model.")] = TensorInfo(tuple(entry.size), dtype)
    return described


def _publish(written: Path, manifest: Manifest) -> Path:
    """Write the manifest, the last file of a checkpoint, and publish it."""
    text = dump_manifest(manifest).encode()
    try:
        with hashed_file(written / MANIFEST, {}) as file:
            file.write(text)
        return publish(written, step=manifest.step, run_id=manifest.run_id)
    except OSError as error:
        raise write_failed(error, rank=0, path=written / MANIFEST, needed=len(text)) from error
