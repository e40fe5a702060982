"""A shard's decisions: when a step is taken, who waits for whom, when the state is saved. No sockets here."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from phalanx.comm.ps.bundle import Bundle
from phalanx.comm.ps.gradients import Contribution, Merged, merge
from phalanx.comm.ps.membership import ShardSpec, ShardStats, WorkerTable
from phalanx.comm.ps.placement import Piece, piece_from
from phalanx.comm.ps.state import ShardState
from phalanx.errors import ServerError

_SAVING_SHARE = 20
"""Saving by the clock takes at most one part in so many of the time."""


class ShardCore:
    """The shared state behind all connections of a shard; every public method takes its lock."""

    def __init__(self, spec: ShardSpec) -> None:
        self.spec = spec
        self.pieces = spec.placement.shards[spec.number]
        self.tally = ShardStats()
        self._rules = spec.rules
        self._state = ShardState(self.pieces, spec.optimizer)
        self._roster = WorkerTable(set(range(spec.rules.workers)))
        self._contributions: dict[int, Contribution] = {}
        self._commits: dict[int, dict[str, Any]] = {}
        self._merged: tuple[int, Merged] | None = None
        self._seen: dict[int, int] = {}
        self.clock = 0
        self._changed = threading.Condition()
        self._closed = False
        self._vault = spec.vault
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
        """Take a worker in; tell it how far the shard is and after which step the worker goes on."""
        with self._changed:
            start = self._roster.start_of(worker, self.clock, together=self.together)
            self._roster.come(worker, connection, start if passed is None else passed)
            self._forget_sums_in(self._contributions.get(worker))
            self._seen.pop(worker, None)
            self._complete_rounds()
            self._changed.notify_all()
            return {"clock": self.clock, "start": start, "applied": self._roster.applied.get(worker, 0)}

    def goodbye(self, worker: int, connection: int) -> None:
        """Let a worker go, whose connection ended: what it has handed over counts, what it has not is dropped."""
        with self._changed:
            if self._roster.go(worker, connection):
                self._complete_rounds()
                self._changed.notify_all()

    def contribution(self, worker: int, seq: int) -> Contribution:
        """Return the memory that a worker's gradients of a step are received into."""
        with self._changed:
            part = self._contributions.get(worker)
            if part is None:
                part = self._contributions[worker] = Contribution(self.pieces)
        part.begin(seq)
        return part

    def norm(self, worker: int, seq: int) -> dict[str, Any]:
        """Return the squared norm of the mean gradient of a step, once everyone has pushed all of it."""
        with self._changed:
            self.contribution(worker, seq)
            self._roster.complete[worker] = seq
            self._changed.notify_all()
            self._wait(lambda: self.clock >= seq or self._roster.all_have(self._roster.complete, seq))
            if self.clock >= seq:
                raise ServerError(f"step {seq} has been taken already")
            begin = time.perf_counter()
            square = self._merge(seq).square()
            self.tally.worked(begin)
            return {"square": square}

    def commit(self, worker: int, seq: int, meta: dict[str, Any]) -> dict[str, Any]:
        """Take a worker's step, or its part in everyone's; return when the worker may begin the next one."""
        with self._changed:
            if seq <= self._roster.applied.get(worker, 0) or (self.together and seq <= self.clock):
                self.tally.late += seq > self._roster.applied.get(worker, 0)
                self._roster.committed[worker] = max(seq, self._roster.committed.get(worker, 0))
                return {"clock": self.clock}
            self.contribution(worker, seq)  # also where nothing was pushed here: it counts in the mean
            self._roster.committed[worker] = self._roster.complete[worker] = seq
            self._commits[worker] = {**meta, "seq": seq}
            if self.together:
                self._wait(lambda: self.clock >= seq)
            else:
                self._step_alone(worker)
                if self._rules.mode == "bounded":
                    self._wait(lambda: self._roster.gathered and self._roster.ahead(worker) <= self._rules.staleness)
                self.tally.ahead_max = max(self.tally.ahead_max, self._roster.ahead(worker))
            return {"clock": self.clock}

    def values(self, worker: int) -> tuple[dict[str, Any], Bundle, list[memoryview]]:
        """Return what a worker needs to be up to date: whole pieces, and of lazy ones the rows that changed.

        Where all step together nothing can change before this worker has it, so the memory itself is sent.
        """
        with self._changed:
            state = self._state
            rows = state.changed_rows(self._seen.get(worker, 0))
            self._seen[worker] = state.version
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
            found = self._state.bundle()
            return Bundle({key: tensor.clone() for key, tensor in found.tensors.items()}, found.plain)

    def load(self, bundle: Bundle) -> None:
        """Take over values and optimizer states, and save them at once: from here on the shard can be restored."""
        with self._changed:
            self._state.load(bundle)
            self._save()

    def replace(self, pieces: Sequence[Piece]) -> None:
        """Hold other pieces from now on; their values and states are loaded next."""
        with self._changed:
            self._hold(pieces)

    def _hold(self, pieces: Sequence[Piece]) -> None:
        self.pieces = tuple(pieces)
        self._state = ShardState(self.pieces, self.spec.optimizer)
        self._contributions.clear()
        self._seen.clear()
        self.moved = [0] * len(self.pieces)

    def close(self) -> None:
        """Wake everyone who waits: the shard ends."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _wait(self, ready: Callable[[], object]) -> None:
        """Wait for other workers; rounds are looked at each time, for patience with an absent worker may have ended."""
        while True:
            self._complete_rounds()
            if ready():
                return
            if self._closed:
                raise ServerError("the shard is closing")
            self._changed.wait(self._roster.patience)

    def _complete_rounds(self) -> None:
        """Take every step that all who are here have committed to, in order."""
        while self.together and self._commits:
            seq = min(commit["seq"] for commit in self._commits.values())
            if not self._roster.all_have(self._roster.committed, seq):
                return
            commits = {w: c for w, c in sorted(self._commits.items()) if c["seq"] == seq}
            self._take_step(seq, commits)
            self.clock = max(self.clock, seq)
            self._save_if_due()
            self._changed.notify_all()

    def _step_alone(self, worker: int) -> None:
        self.tally.stale(self._state.version - self._seen.get(worker, self._state.version))
        self._take_step(self._commits[worker]["seq"], {worker: self._commits[worker]})
        self.clock += 1
        self._save_if_due()
        self._changed.notify_all()

    def _take_step(self, seq: int, commits: dict[int, dict[str, Any]]) -> None:
        begin = time.perf_counter()
        merged = self._merge(seq) if self.together else merge(self._parts(seq, commits), self.pieces)
        first = next(iter(commits.values()))
        if merged.count and first["factor"] is not None:
            self._state.apply(merged, first["factor"], first.get("groups"))
            self.tally.updated()
        self._merged = None
        for worker in commits:
            self._roster.applied[worker] = seq
            del self._commits[worker]
        self.tally.worked(begin)

    def _merge(self, seq: int) -> Merged:
        """Add up what came for a step, once: for its norm, or when it is taken."""
        if self._merged is None or self._merged[0] != seq:
            self._merged = (seq, merge(self._parts(seq, self._contributions), self.pieces))
        return self._merged[1]

    def _forget_sums_in(self, part: Contribution | None) -> None:
        """Forget the sums of a step that lie in the memory of a worker which will push that step again.

        The memory of the other workers is as they left it, so the sums are made again. A worker whose memory only was
        read pushes the same values again: there the sums stay.
        """
        if part is not None and self._merged is not None and self._merged[1].base is part:
            self._merged = None

    def _parts(self, seq: int, workers: dict[int, Any]) -> list[Contribution]:
        """Return the whole contributions to a step, by worker: one that died half-way has none."""
        complete = self._roster.complete
        found = ((worker, self._contributions.get(worker)) for worker in sorted(workers))
        return [part for worker, part in found if part and part.seq == seq and complete.get(worker, 0) >= seq]

    def _save_if_due(self) -> None:
        if self._vault is None:
            return
        rules, waited = self._rules, time.monotonic() - self._saved_at
        if rules.save_every:
            due = self.clock % rules.save_every == 0
        else:
            due = waited >= max(rules.save_seconds, _SAVING_SHARE * self._save_cost)
        if due:
            self._save()

    def _save(self) -> None:
        if self._vault is None:
            return
        begin = time.monotonic()
        pieces = [asdict(piece) for piece in self.pieces]
        meta = {"clock": self.clock, "roster": self._roster.to_dict(), "pieces": pieces}
        self._vault.save(meta, self._state.bundle())
        self._saved_at = time.monotonic()
        self._save_cost = self._saved_at - begin
        self.tally.saves += 1

    def _restore(self) -> None:
        found = None if self._vault is None else self._vault.load()
        if found is not None:
            meta, bundle = found
            self._hold([piece_from(piece) for piece in meta["pieces"]])
            self._state.load(bundle)
            self.clock = meta["clock"]
            self._roster = WorkerTable.restored(meta["roster"], self._rules.rejoin_seconds)
