"""A worker's side of the parameter server: push gradients as they are ready, commit the step, pull new values."""

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
from phalanx.engines.parameter_server.connection import ServerConnection
from phalanx.engines.parameter_server.gradients import (
    Bundle,
    GradientPart,
    ShardMemory,
    cut_gradient,
    join_pieces,
    split_pieces,
)
from phalanx.engines.parameter_server.placement import Piece, Placement, rebalance
from phalanx.engines.parameter_server.protocol import FrameKind, Head, bytes_of, dtype_of, receive_into

_BUCKET_BYTES = 1 << 20
_UNEVEN = 1.25
"""How many times the mean a shard may have moved before pieces are relocated."""
_WORTH_MOVING = 0.9
"""What share of its load the busiest shard may keep for a relocation to be worth its bytes."""


class ParameterClient:
    """Communicates with all shards in a background thread, while the worker computes.

    client = ParameterClient(addresses, token, placement, worker=0)
    client.bind(dict(model.named_parameters()))
    client.pull()
    ...
    client.push("layer.weight", gradient)    # each gradient, when it is ready
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
        self.comm_thread = CommThread("phalanx-parameter-client", label="parameter-server")
        self._bucket_bytes = bucket_bytes
        self._connections = [
            ServerConnection(address, token, placement.digest(shard), worker, patience, timeout)
            for shard, address in enumerate(addresses)
        ]
        self.seq = max(link.start for link in self._connections) + 1
        """The number of the current step."""
        self._rows: list[tuple[int, int, torch.Tensor, torch.Tensor]] = []
        self._pending: list[list[GradientPart]] = [[] for _ in addresses]
        self._parameters: dict[str, torch.Tensor] = {}
        self._arriving = False
        self.pushed: set[str] = set()
        """Parameters whose gradients of the current step have been pushed."""
        self.adopt(placement)

    def adopt(self, placement: Placement) -> None:
        """Use another placement, which the shards have now (see `relocate`)."""
        self.placement = placement
        self._homes: dict[str, list[tuple[int, int, Piece]]] = defaultdict(list)
        for shard, pieces in enumerate(placement.shards):
            self._connections[shard].hello["placement"] = placement.digest(shard)
            for index, piece in enumerate(pieces):
                self._homes[piece.name].append((shard, index, piece))
        self._staging = [ShardMemory(pieces) for pieces in placement.shards]

    def relocate(self, placement: Placement) -> None:
        """Move pieces between the shards as a placement says.

        One worker calls this while no other worker is in a step; the others `adopt` the placement afterwards.
        """
        state = self.fetch()

        def replace_all() -> None:
            for link, pieces in zip(self._connections, placement.shards, strict=True):
                link.ask(FrameKind.REPLACE, self.seq, {"pieces": [asdict(piece) for piece in pieces]}, _meta)

        self._now(replace_all)
        self.adopt(placement)
        self.load(state)

    def costs(self) -> dict[tuple[str, int], float]:
        """Return the bytes sent and received for each piece since the shards got their placement."""
        answers = self._now(lambda: self._ask_all(FrameKind.COSTS, self.seq, {}, _meta))
        return {
            piece.key: moved
            for pieces, answer in zip(self.placement.shards, answers, strict=True)
            for piece, moved in zip(pieces, answer["moved"], strict=True)
        }

    def bind(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Name the tensors that pulled values are written into."""
        self._parameters = {name: parameters[name].detach() for name in self._homes}

    def push(self, name: str, gradient: torch.Tensor, *, find_rows: bool = False) -> None:
        """Send a gradient, which must not change before the step is acknowledged; `find_rows`: leave out zero rows."""
        self.pushed.add(name)
        for shard, index, piece in self._homes[name]:
            pending = self._pending[shard]
            pending.append(cut_gradient(gradient, index, piece, find_rows=find_rows))
            if sum(part.nbytes for part in pending) >= self._bucket_bytes:
                self._flush(shard)

    def _flush(self, shard: int) -> None:
        parts, self._pending[shard] = self._pending[shard], []
        if parts:
            link, seq = self._connections[shard], self.seq
            self.comm_thread.submit(lambda: _send_parts(link, seq, parts))

    def _flush_all(self) -> None:
        for shard in range(len(self._connections)):
            self._flush(shard)

    def norm(self) -> float:
        """Return the norm of the mean gradient over all workers; each worker must call it, after pushing all."""
        self._flush_all()
        squares = self._now(lambda: self._ask_all(FrameKind.NORM, self.seq, {}, _meta))
        return math.sqrt(math.fsum(answer["square"] for answer in squares))

    def _now(self, job: Callable[[], Any]) -> Any:
        """Run a job in the communication thread, after the pending ones, and wait for it."""
        future = self.comm_thread.submit(job)
        self.comm_thread.drain()
        return future.wait()

    def commit(self, *, factor: float | None = 1.0, groups: list[dict[str, Any]] | None = None) -> None:
        """Take the step with the mean gradient times `factor` (None: skip it) and these parameter group settings."""
        self._flush_all()
        meta = {"factor": factor, "groups": groups}
        seq, self.seq = self.seq, self.seq + 1
        self.pushed = set()
        self._arriving = True
        self.comm_thread.submit(lambda: self._exchange(FrameKind.COMMIT, seq, meta))

    def limit_retries(self, seconds: float) -> None:
        """Shorten the retry deadline of all shards."""
        for link in self._connections:
            link.patience = min(link.patience, seconds)

    def pull(self) -> None:
        """Write the current values of all parameters into the bound tensors."""
        self._arriving = True
        self.comm_thread.submit(lambda: self._exchange(FrameKind.PULL, self.seq, {}))
        self.wait()

    def wait(self) -> None:
        """Wait for all pending work; then the bound tensors have the new values."""
        self.comm_thread.drain()
        if self._arriving:
            self._arriving = False
            self._write_values()

    @torch.no_grad()
    def _write_values(self) -> None:
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
        for shard, answer in enumerate(self._ask_all(kind, seq, meta, None)):
            self._rows += [(shard, index, rows, values) for index, rows, values in answer]
        if kind is FrameKind.COMMIT:
            for link in self._connections:
                link.acknowledged(seq)

    def _ask_all(self, kind: FrameKind, seq: int, meta: dict[str, Any], read: Any) -> list[Any]:
        """Send a request to all shards, then read all answers: the shards work at the same time."""
        sent = [link.begin(kind, seq, meta) for link in self._connections]
        answers = []
        for shard, link in enumerate(self._connections):
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
        """Return a function that receives a shard's values: whole pieces into staging memory, rows into new tensors."""
        staging, pieces = self._staging[shard], self.placement.shards[shard]

        def read(connection: socket.socket, head: Head) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
            receive_into(connection, bytes_of(staging.dense))
            updates = []
            for index, count in head.meta["rows"]:
                rows = torch.empty(count, dtype=torch.int64)
                values = torch.empty((count, *pieces[index].shape[1:]), dtype=dtype_of(pieces[index].dtype))
                receive_into(connection, bytes_of(rows))
                receive_into(connection, bytes_of(values))
                updates.append((index, rows, values))
            return updates

        return read

    def fetch(self) -> dict[str, dict[str, Any]]:
        """Return the optimizer's states of each parameter, and its values under "=", joined from all shards."""
        bundles: list[Bundle] = self._now(lambda: self._ask_all(FrameKind.FETCH, self.seq, {}, _bundle))
        return join_pieces(self.placement, bundles)

    def load(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Replace values and optimizer states on all shards; `state` has the form that `fetch` returns."""
        bundles = split_pieces(self.placement, state)

        def send_all() -> None:
            for link, bundle in zip(self._connections, bundles, strict=True):
                link.ask(FrameKind.LOAD, self.seq, bundle.describe(), _meta, bundle.buffers())

        self._now(send_all)

    def stats(self) -> list[dict[str, Any]]:
        """Return each shard's `ShardStats`, with the number of lost updates that this worker knows of."""
        answers = self._now(lambda: self._ask_all(FrameKind.STATS, self.seq, {}, _meta))
        return [{**stats, "lost": link.lost_updates} for stats, link in zip(answers, self._connections, strict=True)]

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes sent and received by this worker."""
        return sum(link.bytes_out for link in self._connections), sum(link.bytes_in for link in self._connections)

    def close(self) -> None:
        """Disconnect, and abandon pending requests; the shards continue without this worker."""
        for link in self._connections:
            link.abandon()
        self.comm_thread.close()
        for link in self._connections:
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


def better_placement(client: ParameterClient) -> Placement | None:
    """Return a placement that balances the bytes the shards have moved, or None where they are balanced enough."""
    costs = client.costs()
    loads = [sum(costs[piece.key] for piece in shard) for shard in client.placement.shards]
    if max(loads) <= _UNEVEN * sum(loads) / len(loads):
        return None
    better = rebalance(client.placement, len(loads), costs=costs)
    evened = [sum(costs[piece.key] for piece in shard) for shard in better.shards]
    return better if max(evened) < _WORTH_MOVING * max(loads) else None


def move(source: ParameterClient, target: ParameterClient) -> None:
    """Copy values and optimizer states to another set of shards: how shards are added or removed between steps."""
    target.load(source.fetch())
