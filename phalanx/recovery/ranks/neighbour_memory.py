"""Checkpoints in host memory: each rank keeps its own newest shard and that of another rank, on another host if any.

After a loss the survivors, and ranks that replace lost ones, load the newest step of which every shard is left in some
rank's memory: no disk is read. With `W` ranks, shard `r` is with ranks `r` and `r + shift`. To keep a step, each rank
sends to one other rank, and where its tensors are in its shard only when that has changed; all ranks exchange one
number. The index of all shards is put together when they are loaded.
"""

from __future__ import annotations

import math
import pickle
import socket
import threading
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from phalanx.checkpoint import collectives
from phalanx.checkpoint.fetch import read_boxes
from phalanx.checkpoint.hashed_files import LEAF_BYTES, Leaf
from phalanx.checkpoint.index import Index, StoredTensor
from phalanx.checkpoint.layout import FileLayout, Staging, StatePlan, shard_name
from phalanx.checkpoint.manifest import Snapshot
from phalanx.checkpoint.plain import from_plain, rank_content
from phalanx.checkpoint.read import LoadedState, plan_reads
from phalanx.checkpoint.storage import Reader


class _Key(NamedTuple):
    """A step that was kept; the token tells it from the same step after a recovery."""

    step: int
    token: str
    world_size: int


@dataclass
class _Shard:
    """One rank's part of a step."""

    about: dict[str, Any]
    data: torch.Tensor
    part: Index
    """Where the tensors are in `data`."""


class NeighbourMemory:
    """The shards that this rank keeps; two steps of them, so that an exchange that breaks off leaves the one before."""

    def __init__(self, exchange: dist.ProcessGroup) -> None:
        """`exchange`: a gloo group of all ranks that nothing else uses."""
        self._plan = StatePlan()
        self._stagings = [Staging(), Staging()]
        self._shards: dict[_Key, dict[int, _Shard]] = {}
        self._used: dict[_Key, Staging] = {}
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self.rejoin(exchange)

    def rejoin(self, exchange: dist.ProcessGroup) -> None:
        """Use another group from now on, after the ranks have formed it; what is kept stays. Collective."""
        self._group = exchange
        self._plan = StatePlan()
        self._layout: FileLayout | None = None
        self._part = Index({}, {})
        self._sent_index: Index | None = None
        self._received_index: Index | None = None
        hosts = self._gather(socket.gethostname())
        self._shift = _shift(hosts)

    @property
    def bytes(self) -> int:
        """The host memory that the shards take."""
        return sum(shard.data.nbytes for shards in self._shards.values() for shard in shards.values())

    def keep(self, snapshot: Snapshot, *, wait: bool = True) -> None:
        """Keep a step; collective. Without `wait` shards travel in the background, until `finish`."""
        self.finish()
        with collectives.over(self._group):
            token = self._plan.update(snapshot.tensors)
        while len(self._shards) > 1:
            self._drop(next(iter(self._shards)))
        staging = next(one for one in self._stagings if one not in self._used.values())
        staging.fill(self._plan.layout, self._plan.tensors())
        about = {**rank_content(self._plan.values(), snapshot.rank_state), "epoch": snapshot.epoch}
        if collectives.rank() == 0:  # equal on all ranks, or that of rank 0 counts
            about["shared"] = snapshot.shared
        if self._layout is not self._plan.layout:
            self._layout, self._part = self._plan.layout, self._plan.own_part(collectives.rank())
        self._plan.forget()
        shard = _Shard(about, torch.frombuffer(staging.view(), dtype=torch.uint8), self._part)
        key = _Key(snapshot.step, token, collectives.world_size())
        self._used[key] = staging
        self._thread = threading.Thread(target=self._exchange, args=(key, shard), name="phalanx-memory", daemon=True)
        self._thread.start()
        if wait:
            self.finish()

    def finish(self) -> None:
        """Wait until the shards have arrived; raise the error of an exchange that failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def discard_pending(self) -> None:
        """Give up an exchange whose group has ended; the step before is still kept."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._error = None

    def _exchange(self, key: _Key, shard: _Shard) -> None:
        """Send this rank's shard to the rank `shift` behind it, and receive one from the rank `shift` before it."""
        try:
            rank, size = dist.get_rank(self._group), dist.get_world_size(self._group)
            shards = {rank: shard}
            if size > 1:
                source = (rank - self._shift) % size
                shards[source] = self._swap(shard, (rank + self._shift) % size, source)
            self._shards[key] = shards
        except Exception as error:  # noqa: BLE001 - raised again by `finish`
            self._used.pop(key)
            self._error = error

    def _swap(self, shard: _Shard, target: int, source: int) -> _Shard:
        """Send a shard to a rank and receive one: the sizes of two messages, a description, and the data."""
        part = None if shard.part is self._sent_index else shard.part
        header = torch.frombuffer(bytearray(pickle.dumps((shard.about, part))), dtype=torch.uint8)
        messages = (torch.tensor([header.numel(), shard.data.numel()]), header, shard.data)
        sending = [dist.isend(message, group=self._group, group_dst=target) for message in messages]
        sizes = torch.empty(2, dtype=torch.int64)
        dist.recv(sizes, group=self._group, group_src=source)
        description, data = (torch.empty(int(size), dtype=torch.uint8) for size in sizes)
        for message in (description, data):
            dist.recv(message, group=self._group, group_src=source)
        for work in sending:
            assert work is not None
            work.wait()
        about, part = pickle.loads(description.numpy().tobytes())
        self._sent_index, self._received_index = shard.part, part or self._received_index
        assert self._received_index is not None, "sent with the first shard"
        return _Shard(about, data, self._received_index)

    def _drop(self, key: _Key) -> None:
        del self._shards[key]
        self._used.pop(key, None)

    def newest(self) -> int | None:
        """Return the newest step of which all shards are with the ranks of the group; collective."""
        complete = self._complete()
        return None if complete is None else complete[0].step

    def load(self, template: dict[str, Any]) -> LoadedState | None:
        """Fill `template` from the newest complete step, as `checkpoint.load` does; None without one. Collective."""
        complete = self._complete()
        if complete is None:
            return None
        key, holders = complete
        local_shards = self._shards.get(key, {})
        rank = dist.get_rank(self._group)
        offers = {r: (local_shards[r].about, local_shards[r].part) for r, holder in holders.items() if holder == rank}
        shards = {r: shard for part in self._gather(offers) for r, shard in part.items()}
        about = {r: description for r, (description, _) in shards.items()}
        index = _joint_index([shards[r][1] for r in sorted(shards)])
        boxes = plan_reads(index, template, lambda r: from_plain(about[r]["objects"]), f"step {key.step} in memory")
        names = {shard_name(r): r for r in range(key.world_size)}
        data = self._collect(local_shards, holders, {names[box.part.file] for box in boxes})
        read_boxes(index, lambda file, leaf: _MemoryReader(data[names[file]]), boxes)
        notes = []
        same = key.world_size == dist.get_world_size(self._group)
        if not same:
            now = dist.get_world_size(self._group)
            notes = [f"kept by {key.world_size} ranks and loaded by {now}: each rank's random state starts afresh"]
        state = from_plain(about[rank]["state"]) if same else None
        for other in [other for other in self._shards if other != key]:
            self._drop(other)
        return LoadedState(key.step, about[0]["epoch"], about[0]["shared"], state, notes)

    def _complete(self) -> tuple[_Key, dict[int, int]] | None:
        """Return the newest complete step, and for each of its shards a rank that holds it."""
        shards_of_ranks = self._gather({key: sorted(shards) for key, shards in self._shards.items()})
        for key in sorted({key for part in shards_of_ranks for key in part}, reverse=True):
            holders = {r: rank for rank, part in reversed(list(enumerate(shards_of_ranks))) for r in part.get(key, ())}
            if holders.keys() >= set(range(key.world_size)):
                return key, holders
        return None

    def _collect(
        self, local_shards: dict[int, _Shard], holders: dict[int, int], wanted: set[int]
    ) -> dict[int, torch.Tensor]:
        """Return the shards that this rank needs; each that it does not hold is sent by its holder."""
        rank = dist.get_rank(self._group)
        data = {r: shard.data for r, shard in local_shards.items()}
        requests = self._gather(sorted(wanted - data.keys()))
        sizes = {r: n for part in self._gather({r: d.numel() for r, d in data.items()}) for r, n in part.items()}
        sending = [
            dist.isend(data[r], group=self._group, group_dst=receiver, tag=r)
            for receiver, shards in enumerate(requests)
            for r in shards
            if holders[r] == rank
        ]
        for r in requests[rank]:
            data[r] = torch.empty(sizes[r], dtype=torch.uint8)
            dist.recv(data[r], group=self._group, group_src=holders[r], tag=r)
        for work in sending:
            assert work is not None
            work.wait()
        return data

    def _gather(self, item: Any) -> list[Any]:
        items: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(items, item, group=self._group)
        return items


class _MemoryReader(Reader):
    """A shard in memory."""

    def __init__(self, data: torch.Tensor) -> None:
        self.size = data.numel()
        self._view = memoryview(data.numpy())  # type: ignore[arg-type]

    def read_into(self, parts: Any, offset: int) -> None:
        for part in parts:
            part[:] = self._view[offset : offset + part.nbytes]
            offset += part.nbytes

    def close(self) -> None:
        pass


def _joint_index(parts: list[Index]) -> Index:
    """Return the index of all shards from that of each, with leaves that have no hash."""
    tensors: dict[str, StoredTensor] = {}
    for shard_part in parts:
        for name, tensor in shard_part.tensors.items():
            tensors.setdefault(name, StoredTensor(tensor.shape, tensor.dtype, [])).parts.extend(tensor.parts)
    ends: dict[str, int] = {}
    for tensor in tensors.values():
        for part in tensor.parts:
            end = part.start + math.prod(part.sizes) * tensor.torch_dtype.itemsize
            ends[part.file] = max(ends.get(part.file, 0), end)
    leaves = {
        name: [Leaf(at, min(LEAF_BYTES, end - at), "") for at in range(0, end, LEAF_BYTES)]
        for name, end in ends.items()
    }
    return Index(tensors, {name: rank for shard_part in parts for name, rank in shard_part.objects.items()}, leaves)


def _shift(hosts: list[str]) -> int:
    """Return the distance at which every rank's neighbour is on another host; 1 where there is none."""
    size = len(hosts)
    apart = (s for s in range(1, size) if all(hosts[r] != hosts[(r + s) % size] for r in range(size)))
    return next(apart, 1)
