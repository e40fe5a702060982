"""Where chunks that are added to something land first: a few slots of scratch, filled again when they were read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.comm.pieces import split

if TYPE_CHECKING:
    import torch

    from phalanx.comm.wire import Handle, Wire


class Landing:
    """The chunks that one peer sends, shaped as `parts`, in their order. It is number `place` of `total` at once."""

    def __init__(self, parts: list[torch.Tensor], peer: int, wire: Wire, place: int = 0, total: int = 1) -> None:
        self._parts, self._peer, self._wire = parts, peer, wire
        longest = parts[0].numel()
        slots = min(wire.depth, len(parts))
        memory = wire.scratch(total * slots * longest, parts[0])
        self._slots = split(split(memory, total)[place], slots)
        self._arrivals = [self._expect(number) for number in range(slots)]

    def take(self, number: int) -> torch.Tensor:
        """Return a chunk, once it is here. Chunks are taken in order; one is valid until the next is taken."""
        if number:
            self._refill(number - 1)
        self._arrivals[number % len(self._slots)].wait()
        return self._place(number)

    def _refill(self, number: int) -> None:
        later = number + len(self._slots)
        if later < len(self._parts):
            self._arrivals[number % len(self._slots)] = self._expect(later)

    def _expect(self, number: int) -> Handle:
        return self._wire.receive(self._place(number), self._peer)

    def _place(self, number: int) -> torch.Tensor:
        return self._slots[number % len(self._slots)][: self._parts[number].numel()]
