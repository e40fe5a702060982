"""A worker's side of the parameter server: push gradients as they come, commit the step, find new values waiting."""

from __future__ import annotations

import math
import socket
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from phalanx import torch_compat
from phalanx.comm.comm_thread import CommThread
from phalanx.comm.ps.bundle import Bundle, ShardMemory, dtype_of
from phalanx.comm.ps.connection import ServerConnection
from phalanx.comm.ps.gradients import GradientPart, cut_gradient
from phalanx.comm.ps.placement import Piece, Placement, join_pieces, split_pieces
from phalanx.comm.ps.protocol import FrameKind, Head, bytes_of, receive_into

_BUCKET_BYTES = 1 << 20


class ParameterClient:
    """Talks to all shards from a thread of its own, so that the worker computes meanwhile.

    client = ParameterClient(addresses, token, placement, worker=0)
    client.bind(dict(model.named_parameters()))
    client.pull()
    ...
    client.push("layer.weight", gradient)    # as many as there are, as they come
    client.commit()                          # the step; new values arrive in the background
    client.wait()                            # now they are in the model
    """

    def __init__(
        self,
        addresses: Sequence[tuple[str, int]],
        token: str,
        placement: Placement,
        worker: int,
        *,
        patience: float = 30.0,
        timeout: float | None = None,
        bucket_bytes: int = _BUCKET_BYTES,
    ) -> None:
        self.worker = worker
        self.courier = CommThread("phalanx-parameter-client")
        self._bucket_bytes = bucket_bytes
        self._links = [
            ServerConnection(address, token, placement.digest(shard), worker, patience, timeout)
            for shard, address in enumerate(addresses)
        ]
        self.seq = max(link.start for link in self._links) + 1
        """The number of the step under way."""
        self._rows: list[tuple[int, int, torch.Tensor, torch.Tensor]] = []
        self._pending: list[list[GradientPart]] = [[] for _ in addresses]
        self._parameters: dict[str, torch.Tensor] = {}
        self._arriving = False
        self.pushed: set[str] = set()
        """Names whose gradients of the step under way have gone out."""
        self.adopt(placement)

    def adopt(self, placement: Placement) -> None:
        """Go by another placement, which the shards have taken on (see `relocate`)."""
        self.placement = placement
        self._homes: dict[str, list[tuple[int, int, Piece]]] = defaultdict(list)
        for shard, pieces in enumerate(placement.shards):
            self._links[shard].expect(placement.digest(shard))
            for index, piece in enumerate(pieces):
                self._homes[piece.name].append((shard, index, piece))
        self._staging = [ShardMemory(pieces) for pieces in placement.shards]

    def relocate(self, placement: Placement) -> None:
        """Let the shards exchange pieces until they hold what a placement says.

        One worker does this while no other has a step under way; the others `adopt` the placement afterwards.
        """
        state = self.fetch()

        def replace_all() -> None:
            for link, pieces in zip(self._links, placement.shards, strict=True):
                link.ask(FrameKind.REPLACE, self.seq, {"pieces": [asdict(piece) for piece in pieces]}, _meta)

        self._now(replace_all)
        self.adopt(placement)
        self.load(state)

    def costs(self) -> dict[tuple[str, int], float]:
        """Return the bytes that each piece has moved, in and out, since the shards took on their placement."""
        found = self._now(lambda: self._ask_all(FrameKind.COSTS, self.seq, {}, _meta))
        return {
            piece.key: moved
            for pieces, answer in zip(self.placement.shards, found, strict=True)
            for piece, moved in zip(pieces, answer["moved"], strict=True)
        }

    def bind(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Name the tensors that pulled values are written into."""
        self._parameters = {name: parameters[name].detach() for name in self._homes}

    def push(self, name: str, gradient: torch.Tensor, *, find_rows: bool = False) -> None:
        """Send a parameter's gradient; it must not be changed before the step is acknowledged.

        `find_rows`: look for rows that are all zero, and leave them out where that saves bytes.
        """
        self.pushed.add(name)
        for shard, index, piece in self._homes[name]:
            pending = self._pending[shard]
            pending.append(cut_gradient(gradient, index, piece, find_rows=find_rows))
            if sum(part.nbytes for part in pending) >= self._bucket_bytes:
                self._flush(shard)

    def _flush(self, shard: int) -> None:
        parts, self._pending[shard] = self._pending[shard], []
        if parts:
            link, seq = self._links[shard], self.seq
            self.courier.submit(lambda: _send_parts(link, seq, parts))

    def _flush_all(self) -> None:
        for shard in range(len(self._links)):
            self._flush(shard)

    def norm(self) -> float:
        """Return the norm of the mean gradient over all workers; everyone must ask, after pushing all."""
        self._flush_all()
        squares = self._now(lambda: self._ask_all(FrameKind.NORM, self.seq, {}, _meta))
        return math.sqrt(math.fsum(found["square"] for found in squares))

    def _now(self, job: Callable[[], Any]) -> Any:
        """Have something done by the courier, after all that it has in hand, and wait for it."""
        future = self.courier.submit(job)
        self.courier.drain()
        return future.wait()

    def commit(self, *, factor: float | None = 1.0, groups: list[dict[str, Any]] | None = None) -> None:
        """Hand the step over: the mean gradient times `factor`, or nothing at all where it is None.

        `groups`: settings of the optimizer's parameter groups, such as the current learning rate.
        """
        self._flush_all()
        meta = {"factor": factor, "groups": groups}
        seq, self.seq = self.seq, self.seq + 1
        self.pushed = set()
        self._arriving = True
        self.courier.submit(lambda: self._exchange(FrameKind.COMMIT, seq, meta))

    def pull(self) -> None:
        """Get the current values of all parameters, and put them into the bound tensors."""
        self._arriving = True
        self.courier.submit(lambda: self._exchange(FrameKind.PULL, self.seq, {}))
        self.wait()

    def wait(self) -> None:
        """Wait for everything that is under way; new values are in the bound tensors then."""
        self.courier.drain()
        if self._arriving:
            self._arriving = False
            self._place()

    @torch.no_grad()
    def _place(self) -> None:
        targets, values = [], []
        for shard, pieces in enumerate(self.placement.shards):
            for piece, view in zip(pieces, self._staging[shard].views, strict=True):
                if not piece.lazy:
                    targets.append(self._part_of(piece))
                    values.append(view)
        if targets:
            torch_compat.foreach_copy_(targets, values)
        for shard, index, rows, changed in self._rows:
            target = self._part_of(self.placement.shards[shard][index])
            target.index_copy_(0, rows.to(target.device), changed.to(target.device))
        self._rows = []

    def _part_of(self, piece: Piece) -> torch.Tensor:
        parameter = self._parameters[piece.name]
        return parameter[piece.start : piece.stop] if piece.shape else parameter

    def _exchange(self, kind: FrameKind, seq: int, meta: dict[str, Any]) -> None:
        """Ask all shards first, then read all answers: they work side by side."""
        for shard, found in enumerate(self._ask_all(kind, seq, meta, None)):
            self._rows += [(shard, index, rows, values) for index, rows, values in found]
        if kind is FrameKind.COMMIT:
            for link in self._links:
                link.acknowledged(seq)

    def _ask_all(self, kind: FrameKind, seq: int, meta: dict[str, Any], read: Any) -> list[Any]:
        sent = [link.begin(kind, seq, meta) for link in self._links]
        answers = []
        for shard, link in enumerate(self._links):
            reader = read or self._reader(shard)
            if sent[shard]:
                try:
                    answers.append(link.answer(reader))
                    continue
                except (OSError, EOFError) as error:
                    link.reconnect(error)
            else:
                link.reconnect(ConnectionError("the connection is closed"))
            answers.append(link.ask(kind, seq, meta, reader))
        return answers

    def _reader(self, shard: int) -> Any:
        """Return what reads values of a shard: whole pieces into their place, rows beside."""
        staging, pieces = self._staging[shard], self.placement.shards[shard]

        def read(connection: socket.socket, head: Head) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
            receive_into(connection, bytes_of(staging.dense))
            found = []
            for index, count in head.meta["rows"]:
                rows = torch.empty(count, dtype=torch.int64)
                values = torch.empty((count, *pieces[index].shape[1:]), dtype=dtype_of(pieces[index].dtype))
                receive_into(connection, bytes_of(rows))
                receive_into(connection, bytes_of(values))
                found.append((index, rows, values))
            return found

        return read

    def fetch(self) -> dict[str, dict[str, Any]]:
        """Return, by parameter, the optimizer's states (and the values, under "="), put together from all shards."""
        bundles: list[Bundle] = self._now(lambda: self._ask_all(FrameKind.FETCH, self.seq, {}, _bundle))
        return join_pieces(self.placement, bundles)

    def load(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Replace values and optimizer states on all shards by what `fetch` returned, or something like it."""
        bundles = split_pieces(self.placement, state)

        def send_all() -> None:
            for link, bundle in zip(self._links, bundles, strict=True):
                link.ask(FrameKind.LOAD, self.seq, bundle.describe(), _meta, bundle.buffers())

        self._now(send_all)

    def stats(self) -> list[dict[str, Any]]:
        """Return every shard's figures (see `ShardStats`), with the updates that this worker knows to be lost."""
        found = self._now(lambda: self._ask_all(FrameKind.STATS, self.seq, {}, _meta))
        return [{**stats, "lost": link.lost_updates} for stats, link in zip(found, self._links, strict=True)]

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes sent and received by this worker."""
        return sum(link.bytes_out for link in self._links), sum(link.bytes_in for link in self._links)

    def close(self) -> None:
        """Leave: the shards go on without this worker. What is under way is given up."""
        for link in self._links:
            link.abandon()
        self.courier.close()
        for link in self._links:
            link.close()


def _meta(connection: socket.socket, head: Head) -> dict[str, Any]:
    return head.meta


def _bundle(connection: socket.socket, head: Head) -> Bundle:
    bundle = Bundle.allocate(head.meta, head.payload)
    for view in bundle.buffers():
        receive_into(connection, view)
    return bundle


def _send_parts(link: ServerConnection, seq: int, parts: list[GradientPart]) -> None:
    for part in parts:
        part.arrive()
    meta = {"parts": [[part.index, part.count, part.sparse] for part in parts]}
    link.push(seq, meta, [view for part in parts for view in part.buffers()], parts)
