"""One number of each rank of a node, summed in shared memory: a step's small message without a thread or a socket."""

from __future__ import annotations

import struct

from phalanx.comm.shm.barrier import SLOT, ShmBarrier
from phalanx.comm.shm.pages import AllGatherText, SharedPages, round_up
from phalanx.comm.shm.shared_group import join_ring
from phalanx.observe.call_ring import call_ring

_NUMBER = struct.Struct("d")
_CALL = b"all_reduce sum of (1,) float64"


class SharedNumbers:
    """Sums over the ranks; all of them call `put` and then `total`, in turn.

    A number whose sum is not wanted any more may be followed by the next one: all ranks then leave out that `total`.
    """

    def __init__(self, gather_text: AllGatherText, rank: int, size: int, *, timeout: float) -> None:
        self._barrier = ShmBarrier(SharedPages(gather_text, rank, size, round_up(size * SLOT)), timeout)
        ring = call_ring()
        self._records = None if ring is None else join_ring(ring, gather_text, rank)
        self._is_open = False
        """Whether this rank has shown a number and not waited for those of the others."""

    def put(self, number: float) -> None:
        """Show the others this rank's number, without waiting for them."""
        if self._is_open:  # two ahead, it would overwrite a number that another rank has not read yet
            self.total()
        self._is_open = True
        if self._records is not None:
            self._records.enter(_CALL)
        self._barrier.arrive(_NUMBER.pack(number))

    def total(self) -> float:
        """Wait for the numbers of all ranks; return their sum, which has the same bits on each."""
        self._barrier.await_others()
        self._is_open = False
        if self._records is not None:
            self._records.done = self._records.number
        return float(sum(_NUMBER.unpack_from(signature)[0] for signature in self._barrier.signatures()))
