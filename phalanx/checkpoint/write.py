"""Save checkpoints: copy the state aside, write and hash it in the background, publish it, remove old ones.

All ranks call `Saver.begin`, which returns as soon as the state may change, and later `Saver.finish`. In between a
thread of each rank writes its files and posts their records in the ranks' store; that of rank 0 waits for them,
writes index and manifest and publishes. These threads run no collectives.
"""

from __future__ import annotations

import dataclasses
import json
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from phalanx.checkpoint import chunks, collectives
from phalanx.checkpoint.fetch import write_full
from phalanx.checkpoint.find import Checkpoint, Stamp, read_stamps, sizes_match, stamp_of
from phalanx.checkpoint.hashed_files import FileRecord, Leaf, write_failed
from phalanx.checkpoint.index import INDEX, Index
from phalanx.checkpoint.keep import check_keep_last, keep_newest
from phalanx.checkpoint.layout import FULL, Staging, StatePlan, model_tensors, shard_name
from phalanx.checkpoint.locations import storage_at
from phalanx.checkpoint.lock import pass_fence
from phalanx.checkpoint.manifest import MANIFEST, Manifest, SavedCheckpoint, Snapshot, TensorInfo
from phalanx.checkpoint.plain import from_json, rank_content, rank_file_name, to_json
from phalanx.checkpoint.storage import Draft, Storage, not_a_directory
from phalanx.errors import CheckpointError, PhalanxError
from phalanx.host.remote import as_path
from phalanx.observe.heartbeat import current as current_heartbeat
from phalanx.version import __version__
from phalanx.world.abort import raise_if_aborted

_MOMENT_SECONDS = 1e-3
_POLL_SECONDS = 0.005
_WAIT_SECONDS = 3600.0
_GRACE_SECONDS = 3.0
_ABORT_SECONDS = 0.05
_PIECE_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class Request:
    """Where and how a snapshot is saved."""

    directory: Path
    run_id: str
    group: tuple[int, ...] = ()
    """Which group of the run saves: attempt, term and generation; an earlier one does not publish any more."""
    kind: str = "sharded"
    keep_last: int | None = None
    keep_every: int | None = None
    best: Path | None = None
    """A checkpoint that `keep_last` does not remove."""
    lineage: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    mesh: dict[str, Any] = dataclasses.field(default_factory=dict)
    config: dict[str, Any] = dataclasses.field(default_factory=dict)


def save(directory: Path | str, snapshot: Snapshot, **request: Any) -> SavedCheckpoint:
    """Save a snapshot under `directory` (the rest is that of `Request`); collective with a process group.

    An error on any rank is raised on all of them, and earlier checkpoints are unchanged.
    """
    saver = Saver()
    try:
        saver.begin(snapshot, Request(directory=as_path(directory), **request))
        saved = saver.finish()
    finally:
        saver.release()
    assert saved is not None
    return saved


class Saver:
    """Saves snapshots of one run, one at a time, with memory and plans that are reused."""

    def __init__(self) -> None:
        self._plan = StatePlan()
        self._staging = Staging()
        self._job: _Job | None = None
        self._known_chunks: set[str] = set()
        self._stamps: dict[Path, Stamp] = {}
        self.token = ""
        """Names the save in flight, equal on all ranks."""

    @property
    def in_flight(self) -> bool:
        """Whether a save was begun and not finished."""
        return self._job is not None

    @property
    def is_written(self) -> bool:
        """Whether this rank's thread has ended, so that `finish` does not wait for it."""
        return self._job is not None and not self._job.is_alive()

    def warm(self, size: int, *, pinned: bool) -> None:
        """Get about the memory that this rank's saves will need, in the background; on any rank, at any time."""
        if self._job is None:
            self._staging.warm(size, pinned=pinned)

    def begin(self, snapshot: Snapshot, request: Request) -> None:
        """Copy the state aside and start writing it; collective with a process group."""
        assert self._job is None, "finish the save before"
        check_keep_last(request.keep_last)
        started = time.monotonic()
        self.token = self._plan.update(snapshot.tensors)
        job = _Job(self, snapshot, request, self.token)
        try:
            job.stage()
        except Exception as error:  # noqa: BLE001 - raised again by `finish`, on all ranks
            job.failure = error
        self._plan.forget()
        job.stall = time.monotonic() - started
        job.started = started
        self._job = job
        job.start()

    def finish(self) -> SavedCheckpoint | None:
        """Wait until the save in flight is published; return it, or raise its error, on all ranks."""
        if self._job is None:
            return None
        job, waited = self._job, time.monotonic()
        while job.is_alive():  # not one join: a rank whose part is missing may be lost
            job.join(_ABORT_SECONDS)
            raise_if_aborted()
        self._job = None  # not before: after Ctrl-C the memory is still being written from
        try:
            saved: SavedCheckpoint = collectives.from_rank_zero(job.outcome)
        except BaseException:
            self._known_chunks.clear()
            raise
        return dataclasses.replace(saved, stall=job.stall + time.monotonic() - waited)

    def release(self, seconds: float = _GRACE_SECONDS, *, ranks_lost: bool = False) -> None:
        """Release the memory; a save in flight is completed, or given up where another rank does not answer so long.

        `ranks_lost`: given up in any case. A thread that its disk holds up is then left behind, with its memory.
        """
        job = self._job
        if job is not None:
            seconds_left = seconds if collectives.world_size() > 1 else None
            job.join(seconds_left)
            job.abandoned.set()
            job.gives_up = ranks_lost
            job.join(seconds_left if ranks_lost else None)
            self._job = None
            if job.is_alive():
                self._staging, self._known_chunks = Staging(), set()
        self._staging.release()


class _Job(threading.Thread):
    """One save on one rank."""

    def __init__(self, saver: Saver, snapshot: Snapshot, request: Request, token: str) -> None:
        super().__init__(name="phalanx-checkpoint", daemon=True)
        self._saver, self._snapshot, self._request = saver, snapshot, request
        self._prefix = f"phalanx/checkpoint/{token}"
        self._rank, self._ranks = collectives.rank(), collectives.world_size()
        self._store = collectives.store() if self._ranks > 1 else None
        self._storage: Storage = storage_at(request.directory)
        self._staging, self._known_chunks = saver._staging, saver._known_chunks
        self._board = current_heartbeat()
        self.abandoned = threading.Event()
        """Set where other ranks are not waited for any longer."""
        self.gives_up = False
        """Whether nothing is written or published any more."""
        self.failure: Exception | None = None
        self.stall = self.started = 0.0
        self._published: SavedCheckpoint | None = None
        self._index: Index | None = None

    def outcome(self) -> SavedCheckpoint:
        """Return the published checkpoint, or raise the error; on rank 0."""
        if self.failure is not None:
            raise self.failure
        assert self._published is not None
        return self._published

    def stage(self) -> None:
        """Copy everything that training will change."""
        plan = self._saver._plan
        self._layout, self._index = plan.layout, plan.index
        self._rank_file = rank_content(plan.values(), self._snapshot.rank_state)
        self._staging.fill(plan.layout, plan.tensors())
        shared = from_json(to_json(self._snapshot.shared, "shared"))
        self._snapshot = dataclasses.replace(self._snapshot, tensors={}, rank_state=None, shared=shared)

    def run(self) -> None:
        """Write this rank's files; on rank 0 also publish."""
        try:
            if self._rank == 0:
                self._lead()
            else:
                self._follow()
        except Exception as error:  # noqa: BLE001 - raised again by `finish`, on all ranks
            self.failure = error if isinstance(error, PhalanxError) else _explained(error, self._rank)

    def _lead(self) -> None:
        draft: Draft | None = None
        try:
            if self.failure is None:
                draft = self._begun()
                self._post("begun", {"token": draft.token})
                mine = self._written(draft)
        except Exception as error:  # noqa: BLE001 - raised again by `finish`, on all ranks
            self.failure = _explained(error, 0)
        try:
            if draft is None:
                self._post("begun", {"token": None})
            # Also after an error: nothing is removed while another rank writes.
            parts = [self._awaited(f"rank-{rank}") for rank in range(1, self._ranks)]
            failed = next((part for part in parts if "error" in part), None)
            if self.failure is not None:
                raise self.failure
            if failed is not None:
                raise CheckpointError(failed["error"], hint=failed["hint"])
            assert draft is not None
            self._complete(draft, [mine, *parts])
        except Exception:
            if draft is not None:
                draft.discard()
            raise

    def _follow(self) -> None:
        try:
            token = self._awaited("begun")["token"]
            if token is None:
                self._post(f"rank-{self._rank}", {})
                return
            if self.failure is not None:
                raise self.failure
            self._post(f"rank-{self._rank}", self._written(self._joined(token)))
        except Exception as error:  # noqa: BLE001 - raised again by `finish`, on all ranks
            explained = _explained(error, self._rank)
            self._post(f"rank-{self._rank}", {"error": explained.message, "hint": explained.hint})

    def _begun(self) -> Draft:
        directory = self._request.directory
        try:
            return self._storage.begin(self._snapshot.step)
        except (FileExistsError, NotADirectoryError):
            raise not_a_directory(directory) from None
        except OSError as error:
            raise write_failed(error, rank=0, path=directory, needed=0) from error

    def _joined(self, token: str) -> Draft:
        try:
            return self._storage.join(token)
        except FileNotFoundError:
            raise CheckpointError(
                f"rank {self._rank} on {socket.gethostname()} does not see {self._storage.path(token)}, "
                "which rank 0 has just created",
                hint="Set checkpoint_dir to a file system that all hosts share.",
            ) from None

    def _written(self, draft: Draft) -> dict[str, Any]:
        """Write this rank's files; return their records."""
        name = rank_file_name(self._rank)
        leaves: list[Any] = []
        written = 0
        try:
            with draft.create(name) as stream:
                torch.save(self._rank_file, stream)  # type: ignore[arg-type]
            if self._layout.pieces and self._request.kind == "incremental":
                folder, view = chunks.folder_of(self._request.run_id), self._staging.view()
                leaves, written = chunks.write(
                    self._storage, folder, view, self._layout.cuts(), self._known_chunks, self._advance
                )
            elif self._layout.pieces:
                name = self._data_name(self._rank)
                with draft.create(name) as stream:
                    view = self._staging.view()
                    for start in range(0, view.nbytes, _PIECE_BYTES):
                        self._advance()
                        stream.write(view[start : start + _PIECE_BYTES])
        except OSError as error:
            path = as_path(error.filename) if error.filename else self._storage.path(draft.token) / name
            raise write_failed(error, rank=self._rank, path=path, needed=self._layout.size) from error
        records = {key: [record.size, record.hash, list(record.leaves)] for key, record in draft.records.items()}
        return {"records": records, "leaves": leaves, "written": written}

    def _advance(self) -> None:
        """Let the bytes so far count as progress; raise where the save was given up."""
        self._board.alive()
        if self.gives_up:
            raise CheckpointError("the save was given up")

    def _complete(self, draft: Draft, parts: list[dict[str, Any]]) -> None:
        """Write index and manifest, publish, verify, and remove old checkpoints; on rank 0."""
        request, snapshot = self._request, self._snapshot
        records = {
            name: FileRecord(size, digest, tuple(leaves))
            for part in parts
            for name, (size, digest, leaves) in part["records"].items()
        }
        assert self._index is not None
        index = self._completed_index(parts, records)
        try:
            if request.kind == "full":
                index = write_full(draft, index, records)
            with draft.create(INDEX) as stream:
                stream.write(index.dump())
            records |= {name: record for name, record in draft.records.items() if name not in records}
            stored = 0 if index.chunk_folder is None else sum(leaf.size for of in index.leaves.values() for leaf in of)
            new = sum(record.size for record in records.values())
            manifest = Manifest(
                step=snapshot.step,
                epoch=snapshot.epoch,
                shared=snapshot.shared,
                tensors={n: TensorInfo(tensor.shape, tensor.dtype) for n, tensor in model_tensors(index).items()},
                world_size=self._ranks,
                torch_version=torch.__version__,
                phalanx_version=__version__,
                files=records,
                run_id=request.run_id,
                lineage=request.lineage,
                published_at=self._publication_time(),
                mesh=request.mesh,
                config=request.config,
                kind=request.kind,
                bytes=new + stored,
            )
            self._advance()
            with pass_fence(request.directory, request.run_id, request.group):
                name = draft.publish(manifest)
        except OSError as error:
            raise write_failed(error, rank=0, path=self._storage.path(draft.token) / MANIFEST, needed=0) from error
        published = Checkpoint(self._storage.path(name), manifest)
        if not sizes_match(published):
            raise CheckpointError(
                f"{published.path} was published, and its files do not have the sizes that were written",
                hint="The file system loses data. Earlier checkpoints were not removed; use another checkpoint_dir.",
            )
        stamps = self._saver._stamps
        stamps[published.path] = stamp_of(published)  # also where it has replaced one that was known
        notes = keep_newest(published, request.keep_last, request.best, request.keep_every, stamps)
        written = new + sum(part["written"] for part in parts)
        seconds = time.monotonic() - self.started
        self._published = SavedCheckpoint(
            published.path, snapshot.step, seconds, manifest.bytes, tuple(notes), written=written
        )

    def _completed_index(self, parts: list[dict[str, Any]], records: dict[str, FileRecord]) -> Index:
        assert self._index is not None
        if self._request.kind == "incremental":
            cut = {shard_name(rank): part["leaves"] for rank, part in enumerate(parts) if part["leaves"]}
            leaves = {name: [Leaf(*leaf) for leaf in listed] for name, listed in cut.items()}
            return dataclasses.replace(self._index, leaves=leaves, chunk_folder=chunks.folder_of(self._request.run_id))
        written = {shard_name(rank): self._data_name(rank) for rank in range(self._ranks)}
        leaves = {name: records[name].cut() for name in written.values() if name in records}
        tensors = self._index.tensors
        if FULL in leaves:
            moved = {n: [part._replace(file=FULL) for part in tensor.parts] for n, tensor in tensors.items()}
            tensors = {n: dataclasses.replace(tensor, parts=moved[n]) for n, tensor in tensors.items()}
        return dataclasses.replace(self._index, tensors=tensors, leaves=leaves)

    def _data_name(self, rank: int) -> str:
        return FULL if self._request.kind == "full" and self._ranks == 1 else shard_name(rank)

    def _publication_time(self) -> float:
        """Return a time that is later than those of all present checkpoints, also where this clock is behind."""
        present = read_stamps(self._request.directory, self._saver._stamps)
        return max([time.time(), *(stamp.published_at + _MOMENT_SECONDS for stamp in present)])

    def _post(self, name: str, message: dict[str, Any]) -> None:
        if self._store is not None:
            self._store.set(f"{self._prefix}/{name}", json.dumps(message))

    def _awaited(self, name: str) -> dict[str, Any]:
        """Return another rank's message. Not by `get` alone, which would block the store for other threads."""
        assert self._store is not None
        key, until = f"{self._prefix}/{name}", time.monotonic() + _WAIT_SECONDS
        while not self._store.check([key]):
            if self.abandoned.wait(_POLL_SECONDS):
                raise CheckpointError("the save was given up")
            if time.monotonic() > until:
                raise CheckpointError(f"{name} has not answered for {_WAIT_SECONDS:.0f} s: the save was given up")
        message: dict[str, Any] = json.loads(self._store.get(key))
        if self._rank == 0:
            self._store.delete_key(key)
        return message


def _explained(error: Exception, rank: int) -> PhalanxError:
    if isinstance(error, PhalanxError):
        return error
    return CheckpointError(f"rank {rank} could not save: {type(error).__name__}: {error}")
