"""The ring: every rank sends to its right neighbour and receives from its left one, and all links have equal load.

The tensor is cut into one block per rank. In n - 1 steps of *reduce-scatter* each block goes once around the ring, and
every rank adds its own values to it; the last one then has the total of that block. In n - 1 steps of *all-gather* the
totals go around once more. With 4 ranks, rank 0 sends:

    step           0   1   2 | 3   4   5
    sends block    3   2   1 | 0   3   2
    receives       2   1   0 | 3   2   1
                   added     | stored

So a rank sends every block but its own, then every block but its right neighbour's: 2 (n-1)/n of the data when n
divides it, and 2 S - |block r| - |block r+1| always. No rank can send less in an all-reduce whose additions are spread
evenly. Blocks are sent as chunks, and a chunk is sent on when it was added: sending overlaps with arithmetic.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from phalanx.comm.collectives.channel import Handle, P2PChannel
from phalanx.comm.collectives.chunks import bounds, chunk_count, split, start_collective, start_reduction, write_back
from phalanx.comm.collectives.mismatch import INLINE_BYTES
from phalanx.comm.reduction import OPS, Reduction


def all_reduce(tensor: torch.Tensor, channel: P2PChannel, op: str = "sum") -> None:
    """Combine a tensor over all ranks, in place."""
    flat, reduction = start_reduction(
        "ring all_reduce", tensor, channel, op, first=lambda flat: _small_first_block(flat, channel)
    )
    reduce_among(flat, channel, reduction, ranks=channel.size)
    write_back(flat, tensor)


def _small_first_block(flat: torch.Tensor, channel: P2PChannel) -> torch.Tensor | None:
    """Return the block that this rank sends first, where every rank's block is small enough to be sent inline."""
    blocks = split(flat, channel.size)
    return blocks[channel.rank - 1] if 0 < blocks[0].nbytes <= INLINE_BYTES else None


def reduce_among(flat: torch.Tensor, channel: P2PChannel, reduction: Reduction, *, ranks: int) -> None:
    """Combine a flat tensor in place; `ranks`: how many the values are from (for a mean)."""
    _go_round(split(flat, channel.size), channel, reduction, first=0, last=2 * (channel.size - 1), ranks=ranks)


def reduce_scatter(tensor: torch.Tensor, channel: P2PChannel, op: str = "sum") -> torch.Tensor:
    """Combine a tensor over all ranks and return this rank's rows of it; the first ranks may have one more."""
    flat, reduction = start_reduction("ring reduce_scatter", tensor, channel, op)
    edges = bounds(tensor.shape[0] if tensor.dim() else 1, channel.size)
    width = flat.numel() // max(edges[-1], 1)
    flat = flat.clone()  # partial sums are written to it, and the caller's input must not change
    blocks = [flat[low * width : high * width] for low, high in pairwise(edges)]
    _go_round(blocks, channel, reduction, first=0, last=channel.size - 1, ranks=channel.size)
    rows = edges[channel.rank + 1] - edges[channel.rank]
    return blocks[channel.rank].clone().view(rows, *tensor.shape[1:]).to(tensor.device)


def all_gather(tensor: torch.Tensor, channel: P2PChannel) -> torch.Tensor:
    """Return the tensors of all ranks, stacked by rank; all have one shape."""
    contiguous = start_collective("ring all_gather", tensor, channel)
    gathered = contiguous.new_empty(channel.size * contiguous.numel())
    blocks = split(gathered, channel.size)
    blocks[channel.rank].copy_(contiguous)
    pass_round(blocks, channel)
    return gathered.view(channel.size, *tensor.shape).to(tensor.device)


def pass_round(blocks: list[torch.Tensor], channel: P2PChannel) -> None:
    """Send every block to all ranks, in place; each rank has its own block at the start."""
    _go_round(blocks, channel, OPS["sum"], first=channel.size - 1, last=2 * (channel.size - 1), ranks=channel.size)


def _go_round(
    blocks: list[torch.Tensor], channel: P2PChannel, reduction: Reduction, *, first: int, last: int, ranks: int
) -> None:
    """Do the steps `first` to `last` of the table above; those before n - 1 add, the others store."""
    if channel.size == 1:
        reduction.finish(blocks[0], ranks)
    else:
        _Lap(blocks, channel, reduction, first, last, ranks).run()


class _Lap:
    """Some steps of the ring. A step moves one block, as `pieces` chunks; a move is one chunk of one step.

    What arrives in move i is sent on in move i + pieces: a move waits for nothing else.
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
        slots = min(channel.depth, adding)
        longest = -(-largest.numel() // self.pieces)
        memory = channel.scratch(longest * slots, largest)
        self.slots = [memory[slot * longest : (slot + 1) * longest] for slot in range(slots)]
        self.inline = channel.take_inline()  # the first move has started with the header
        self.arrivals: dict[int, tuple[Handle, torch.Tensor]] = {}
        self.departures: list[Handle] = []

    def run(self) -> None:
        """Send the first block, then receive and send on move after move."""
        ahead = self.channel.depth
        for move in self.moves[:ahead]:
            self._expect(move)
        for move in self.moves[: self.pieces]:
            self._depart(move)
        for move in self.moves:
            self._finish(move)
            if move + ahead in self.moves:
                self._expect(move + ahead)
            if move + self.pieces in self.moves:
                self._depart(move + self.pieces)
        for departure in self.departures:
            departure.wait()

    def _adds(self, move: int) -> bool:
        return move // self.pieces < self.channel.size - 1

    def _target(self, move: int) -> torch.Tensor:
        step, piece = divmod(move, self.pieces)
        return self.chunks[(self.channel.rank - 2 - step) % self.channel.size][piece]

    def _expect(self, move: int) -> None:
        """Start to receive a chunk: into a slot if it is added to its target, else into the target.

        A target that this rank still sends is not overwritten early: the total that arrives contains what was sent.
        """
        target = self._target(move)
        if move == 0 and self.inline is not None:
            self.arrivals[move] = self.inline, self.inline.payload(target)
            return
        into = self.slots[move % len(self.slots)][: target.numel()] if self._adds(move) else target
        self.arrivals[move] = self.channel.receive(into, self.left), into

    def _depart(self, move: int) -> None:
        if move == 0 and self.inline is not None:
            return
        step, piece = divmod(move, self.pieces)
        outgoing = self.chunks[(self.channel.rank - 1 - step) % self.channel.size][piece]
        self.departures.append(self.channel.send(outgoing, self.right))

    def _finish(self, move: int) -> None:
        arrival, received = self.arrivals.pop(move)
        arrival.wait()
        if not self._adds(move):
            return
        target = self._target(move)
        self.reduction.combine(target, received)
        if move // self.pieces == self.channel.size - 2:  # the last step that adds: this is the total of the own block
            self.reduction.finish(target, self.ranks)
