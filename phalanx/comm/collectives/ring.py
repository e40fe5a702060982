"""The ring: every rank sends to its right neighbour and receives from its left one, and all links carry the same.

The tensor is cut into a block for each rank. In n - 1 steps of *reduce-scatter* each block travels once around, and
every rank adds its own values to it; the last to add holds the total of that block. In n - 1 steps of *all-gather* the
totals travel around once more, straight into place. With 4 ranks, rank 0 sends:

    step           0   1   2 | 3   4   5
    sends block    3   2   1 | 0   3   2
    receives       2   1   0 | 3   2   1
                   added     | stored

So a rank sends every block but its own, then every block but its right neighbour's: 2 (n-1)/n of the data when n
divides it, and 2 S - |block r| - |block r+1| always. No rank can send less in an all-reduce whose additions are spread
evenly. Blocks travel as chunks, and a chunk goes on as soon as it was added: the wire does not wait for arithmetic.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from phalanx.comm.collectives.channel import Handle, P2PChannel
from phalanx.comm.collectives.chunks import bounds, chunk_count, split, start_collective, start_reduction, write_back
from phalanx.comm.collectives.mismatch import INLINE_BYTES
from phalanx.comm.collectives.reduction import OPS, Reduction


def all_reduce(tensor: torch.Tensor, channel: P2PChannel, op: str = "sum") -> None:
    """Combine a tensor over all ranks, in place."""
    flat, reduction = start_reduction(
        "ring all_reduce", tensor, channel, op, first=lambda flat: _small_first_block(flat, channel)
    )
    reduce_among(flat, channel, reduction, ranks=channel.size)
    write_back(flat, tensor)


def _small_first_block(flat: torch.Tensor, channel: P2PChannel) -> torch.Tensor | None:
    """Return what this rank sends first, where every rank's block is small enough to travel with a header."""
    blocks = split(flat, channel.size)
    return blocks[channel.rank - 1] if 0 < blocks[0].nbytes <= INLINE_BYTES else None


def reduce_among(flat: torch.Tensor, channel: P2PChannel, reduction: Reduction, *, ranks: int) -> None:
    """Combine a flat tensor in place; `ranks` is how many stand behind those of the wire (for a mean)."""
    _go_round(split(flat, channel.size), channel, reduction, first=0, last=2 * (channel.size - 1), ranks=ranks)


def reduce_scatter(tensor: torch.Tensor, channel: P2PChannel, op: str = "sum") -> torch.Tensor:
    """Combine a tensor over all ranks and return this rank's rows of it; the first ranks have one more if need be."""
    flat, reduction = start_reduction("ring reduce_scatter", tensor, channel, op)
    edges = bounds(tensor.shape[0] if tensor.dim() else 1, channel.size)
    width = flat.numel() // max(edges[-1], 1)
    flat = flat.clone()  # partial sums pass through it, and the input is the caller's
    blocks = [flat[low * width : high * width] for low, high in pairwise(edges)]
    _go_round(blocks, channel, reduction, first=0, last=channel.size - 1, ranks=channel.size)
    rows = edges[channel.rank + 1] - edges[channel.rank]
    return blocks[channel.rank].clone().view(rows, *tensor.shape[1:]).to(tensor.device)


def all_gather(tensor: torch.Tensor, channel: P2PChannel) -> torch.Tensor:
    """Return the tensors of all ranks, stacked by rank; all have one shape."""
    own = start_collective("ring all_gather", tensor, channel)
    gathered = own.new_empty(channel.size * own.numel())
    blocks = split(gathered, channel.size)
    blocks[channel.rank].copy_(own)
    pass_round(blocks, channel)
    return gathered.view(channel.size, *tensor.shape).to(tensor.device)


def pass_round(blocks: list[torch.Tensor], channel: P2PChannel) -> None:
    """Give every rank all blocks, each rank holding its own, in place."""
    _go_round(blocks, channel, OPS["sum"], first=channel.size - 1, last=2 * (channel.size - 1), ranks=channel.size)


def _go_round(
    blocks: list[torch.Tensor], channel: P2PChannel, reduction: Reduction, *, first: int, last: int, ranks: int
) -> None:
    """Take the steps `first` to `last` of the table above; those before n - 1 add, the others store."""
    if channel.size == 1:
        reduction.finish(blocks[0], ranks)
    else:
        _Lap(blocks, channel, reduction, first, last, ranks).run()


class _Lap:
    """Some steps of the ring. A step moves one block, as `pieces` chunks; a move is one chunk of one step.

    What arrives in move i is sent on in move i + pieces: that is all that a move ever waits for.
    """

    def __init__(
        self, blocks: list[torch.Tensor], channel: P2PChannel, reduction: Reduction, first: int, last: int, ranks: int
    ) -> None:
        largest = blocks[0]
        self.pieces = chunk_count(largest.nbytes, channel)
        self.chunks = [split(block, self.pieces) for block in blocks]
        self.channel, self.reduction, self.ranks = channel, reduction, ranks
        self.moves = range(first * self.pieces, last * self.pieces)
        self.left, self.right = (channel.rank - 1) % channel.size, (channel.rank + 1) % channel.size
        adding = max(0, (channel.size - 1 - first) * self.pieces)
        self.slots = self._scratch(largest, min(channel.depth, adding))
        self.inline = channel.take_inline()  # the first move has begun with the header
        self.arrivals: dict[int, tuple[Handle, torch.Tensor]] = {}
        self.departures: list[Handle] = []

    def run(self) -> None:
        """Send what is here, then take in and pass on move after move."""
        ahead = self.channel.depth
        for move in self.moves[:ahead]:
            self._expect(move)
        for move in self.moves[: self.pieces]:
            self._depart(move)
        for move in self.moves:
            self._take_in(move)
            if move + ahead in self.moves:
                self._expect(move + ahead)
            if move + self.pieces in self.moves:
                self._depart(move + self.pieces)
        for departure in self.departures:
            departure.wait()

    def _scratch(self, largest: torch.Tensor, slots: int) -> list[torch.Tensor]:
        longest = -(-largest.numel() // self.pieces)
        memory = self.channel.scratch(longest * slots, largest)
        return [memory[slot * longest : (slot + 1) * longest] for slot in range(slots)]

    def _adds(self, move: int) -> bool:
        return move // self.pieces < self.channel.size - 1

    def _outgoing(self, move: int) -> torch.Tensor:
        step, piece = divmod(move, self.pieces)
        return self.chunks[(self.channel.rank - 1 - step) % self.channel.size][piece]

    def _target(self, move: int) -> torch.Tensor:
        step, piece = divmod(move, self.pieces)
        return self.chunks[(self.channel.rank - 2 - step) % self.channel.size][piece]

    def _landing(self, move: int) -> torch.Tensor:
        """Where a chunk arrives: beside its target if it is added to it, else in its place.

        A place that this rank still sends from is not overwritten early: the total that arrives there contains what was
        sent.
        """
        target = self._target(move)
        return self.slots[move % len(self.slots)][: target.numel()] if self._adds(move) else target

    def _expect(self, move: int) -> None:
        if move == 0 and self.inline is not None:
            self.arrivals[move] = self.inline, self.inline.payload(self._target(move))
            return
        landing = self._landing(move)
        self.arrivals[move] = self.channel.receive(landing, self.left), landing

    def _depart(self, move: int) -> None:
        if move == 0 and self.inline is not None:
            return
        self.departures.append(self.channel.send(self._outgoing(move), self.right))

    def _take_in(self, move: int) -> None:
        arrival, landing = self.arrivals.pop(move)
        arrival.wait()
        if not self._adds(move):
            return
        target = self._target(move)
        self.reduction.combine(target, landing)
        if move // self.pieces == self.channel.size - 2:  # the last step that adds: this is the total of the own block
            self.reduction.finish(target, self.ranks)
