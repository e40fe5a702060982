"""A shard's decisions: when a step is taken, which workers wait, when the state is saved. No sockets here."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from phalanx.engines.parameter_server.gradients import Bundle, Contribution, MergedGradients, merge
from phalanx.engines.parameter_server.membership import ShardSpec, ShardStats, WorkerTable
from phalanx.engines.parameter_server.placement import Piece, piece_from
from phalanx.engines.parameter_server.state import ShardState
from phalanx.errors import ServerError

_SAVING_SHARE = 20
"""Timed saves take at most 1 / this of the time."""


class ShardCore:
    """The shared state behind all connections of a shard; every public method takes its lock."""

    def __init__(self, spec: ShardSpec) -> None:
        self.spec = spec
        self.pieces = spec.placement.shards[spec.number]
        self.stats = ShardStats()
        self._rules = spec.rules
        self._state = ShardState(self.pieces, spec.optimizer)
        self._workers = WorkerTable(set(range(spec.rules.workers)))
        self._contributions: dict[int, Contribution] = {}
        self._commits: dict[int, dict[str, Any]] = {}
        self._merged: tuple[int, MergedGradients] | None = None
        self._versions_seen: dict[int, int] = {}
        self.clock = 0
        self._changed = threading.Condition()
        self._closed = False
        self._storage = spec.storage
        self._saved_at = time.monotonic()
        self._save_cost = 0.0
        self.moved = [0] * len(self.pieces)
        """Bytes of each piece that workers have sent and received."""
        self._restore()

    @property
    def together(self) -> bool:
        """Whether all workers step together."""
        return self._rules.mode == "sync"

    def hello(self, worker: int, connection: int, passed: int | None) -> dict[str, Any]:
        """Register a worker; return the shard's clock and the step after which the worker continues."""
        with self._changed:
            start = self._workers.start_of(worker, self.clock, together=self.together)
            self._workers.come(worker, connection, start if passed is None else passed)
            self._drop_sums_in(self._contributions.get(worker))
            self._versions_seen.pop(worker, None)
            self._complete_rounds()
            self._changed.notify_all()
            return {"clock": self.clock, "start": start, "applied": self._workers.applied.get(worker, 0)}

    def goodbye(self, worker: int, connection: int) -> None:
        """Remove a worker whose connection ended: its committed steps count, anything else is dropped."""
        with self._changed:
            if self._workers.go(worker, connection):
                self._complete_rounds()
                self._changed.notify_all()

    def contribution(self, worker: int, seq: int) -> Contribution:
        """Return the memory that receives a worker's gradients of a step."""
        with self._changed:
            part = self._contributions.get(worker)
            if part is None:
                part = self._contributions[worker] = Contribution(self.pieces)
        part.begin(seq)
        return part

    def norm(self, worker: int, seq: int) -> dict[str, Any]:
        """Return the squared norm of a step's mean gradient, when all workers have pushed all of it."""
        with self._changed:
            self.contribution(worker, seq)
            self._workers.complete[worker] = seq
            self._changed.notify_all()
            self._wait(lambda: self.clock >= seq or self._workers.all_have(self._workers.complete, seq))
            if self.clock >= seq:
                raise ServerError(f"step {seq} has been taken already")
            begin = time.perf_counter()
            square = self._merge(seq).square()
            self.stats.worked(begin)
            return {"square": square}

    def commit(self, worker: int, seq: int, meta: dict[str, Any]) -> dict[str, Any]:
        """Take a worker's step, or its part of the common step; return when it may start the next one."""
        with self._changed:
            if seq <= self._workers.applied.get(worker, 0) or (self.together and seq <= self.clock):
                self.stats.late += seq > self._workers.applied.get(worker, 0)
                self._workers.committed[worker] = max(seq, self._workers.committed.get(worker, 0))
                return {"clock": self.clock}
            self.contribution(worker, seq)  # also where nothing was pushed here: it counts in the mean
            self._workers.committed[worker] = self._workers.complete[worker] = seq
            self._commits[worker] = {**meta, "seq": seq}
            if self.together:
                self._wait(lambda: self.clock >= seq)
            else:
                self._step_alone(worker)
                if self._rules.mode == "bounded":
                    self._wait(lambda: self._workers.gathered and self._workers.ahead(worker) <= self._rules.staleness)
                self.stats.ahead_max = max(self.stats.ahead_max, self._workers.ahead(worker))
            return {"clock": self.clock}

    def values(self, worker: int) -> tuple[dict[str, Any], Bundle, list[memoryview]]:
        """Return the values a worker does not have yet: whole pieces, and the changed rows of lazy ones.

        With synchronous steps the values cannot change before this worker has them, so they are not copied.
        """
        with self._changed:
            state = self._state
            rows = state.changed_rows(self._versions_seen.get(worker, 0))
            self._versions_seen[worker] = state.version
            bundle = Bundle({(-1, "dense"): state.memory.dense if self.together else state.memory.dense.clone()})
            for index, piece in enumerate(self.pieces):
                if index in rows:
                    bundle.tensors[index, "rows"] = rows[index]
                    bundle.tensors[index, "values"] = state.parameters[index].detach()[rows[index]]
                    self.moved[index] += bundle.tensors[index, "values"].nbytes
                else:
                    self.moved[index] += piece.nbytes
            meta = {"clock": self.clock, "rows": [[index, len(changed)] for index, changed in rows.items()]}
        return meta, bundle, bundle.buffers()

    def fetch(self) -> Bundle:
        """Return copies of all values and optimizer states."""
        with self._changed:
            bundle = self._state.bundle()
            return Bundle({key: tensor.clone() for key, tensor in bundle.tensors.items()}, bundle.plain)

    def load(self, bundle: Bundle) -> None:
        """Replace values and optimizer states, and save them at once: the shard can be restored from here on."""
        with self._changed:
            self._state.load(bundle)
            self._save()

    def replace(self, pieces: Sequence[Piece]) -> None:
        """Hold other pieces; their values and states are loaded next."""
        with self._changed:
            self.pieces = tuple(pieces)
            self._state = ShardState(self.pieces, self.spec.optimizer)
            self._contributions.clear()
            self._versions_seen.clear()
            self.moved = [0] * len(self.pieces)

    def close(self) -> None:
        """End the shard: requests that wait for other workers fail."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _wait(self, ready: Callable[[], object]) -> None:
        """Wait for other workers; check the rounds each time, as the wait for an absent worker may have ended."""
        while True:
            self._complete_rounds()
            if ready():
                return
            if self._closed:
                raise ServerError("the shard is closing")
            self._changed.wait(self._workers.patience)

    def _complete_rounds(self) -> None:
        """Take every step that all connected workers have committed, in order."""
        while self.together and self._commits:
            seq = min(commit["seq"] for commit in self._commits.values())
            if not self._workers.all_have(self._workers.committed, seq):
                return
            commits = {w: c for w, c in sorted(self._commits.items()) if c["seq"] == seq}
            self._apply_step(seq, commits)
            self.clock = max(self.clock, seq)
            self._save_if_due()
            self._changed.notify_all()

    def _step_alone(self, worker: int) -> None:
        self.stats.stale(self._state.version - self._versions_seen.get(worker, self._state.version))
        self._apply_step(self._commits[worker]["seq"], {worker: self._commits[worker]})
        self.clock += 1
        self._save_if_due()
        self._changed.notify_all()

    def _apply_step(self, seq: int, commits: dict[int, dict[str, Any]]) -> None:
        begin = time.perf_counter()
        merged = self._merge(seq) if self.together else merge(self._parts(seq, commits), self.pieces)
        first = next(iter(commits.values()))
        if merged.count and first["factor"] is not None:
            self._state.apply(merged, first["factor"], first.get("groups"))
            self.stats.updated()
        self._merged = None
        for worker in commits:
            self._workers.applied[worker] = seq
            del self._commits[worker]
        self.stats.worked(begin)

    def _merge(self, seq: int) -> MergedGradients:
        """Return the sum of a step's gradients, computed once: for its norm, or when the step is taken."""
        if self._merged is None or self._merged[0] != seq:
            self._merged = (seq, merge(self._parts(seq, self._contributions), self.pieces))
        return self._merged[1]

    def _drop_sums_in(self, part: Contribution | None) -> None:
        """Drop sums that lie in the memory of a worker, which will push that step again and overwrite them."""
        if part is not None and self._merged is not None and self._merged[1].base is part:
            self._merged = None

    def _parts(self, seq: int, workers: dict[int, Any]) -> list[Contribution]:
        """Return the complete contributions to a step, in the order of workers."""
        complete = self._workers.complete
        contributions = ((worker, self._contributions.get(worker)) for worker in sorted(workers))
        return [part for worker, part in contributions if part and part.seq == seq and complete.get(worker, 0) >= seq]

    def _save_if_due(self) -> None:
        if self._rules.save_every:
            due = self.clock % self._rules.save_every == 0
        else:
            waited = time.monotonic() - self._saved_at
            due = waited >= max(self._rules.save_seconds, _SAVING_SHARE * self._save_cost)
        if due:
            self._save()

    def _save(self) -> None:
        if self._storage is None:
            return
        begin = time.monotonic()
        pieces = [asdict(piece) for piece in self.pieces]
        meta = {"clock": self.clock, "roster": self._workers.to_dict(), "pieces": pieces}
        self._storage.save(meta, self._state.bundle())
        self._saved_at = time.monotonic()
        self._save_cost = self._saved_at - begin
        self.stats.saves += 1

    def _restore(self) -> None:
        saved = None if self._storage is None else self._storage.load()
        if saved is not None:
            meta, bundle = saved
            self.replace([piece_from(piece) for piece in meta["pieces"]])
            self._state.load(bundle)
            self.clock = meta["clock"]
            self._workers = WorkerTable.restored(meta["roster"], self._rules.rejoin_seconds)
