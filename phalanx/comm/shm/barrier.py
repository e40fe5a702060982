"""A barrier in shared memory on Linux futexes, which also detects ranks that failed or call another collective."""

from __future__ import annotations

import ctypes
import os
import time
import zlib

from phalanx.comm.shm import futex
from phalanx.comm.shm.memory import SharedPages
from phalanx.errors import CommunicationError
from phalanx.world.abort import abortable

SLOT = 256
"""Bytes of each rank's slot: a counter, and two signatures in turn. Whole cache lines, which ranks do not share."""
SIGNATURE = 112
_SPIN_S = 50e-6
_CHECK_S = 0.5
_WRAP = 2**32


class ShmBarrier:
    """A barrier for the ranks that share `pages`, in the first `size` slots."""

    def __init__(self, pages: SharedPages, timeout: float) -> None:
        self.pages = pages
        self.timeout = timeout
        self.count = 0
        self._rank, self._size = pages.rank, pages.size
        self._bytes = memoryview(pages.memory)[: self._size * SLOT]
        self._words = self._bytes.cast("I")
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(pages.memory))
        self._others = [rank for rank in range(self._size) if rank != self._rank]
        self._aborted = ""
        abortable(self)
        # Spinning occupies a core: only for a moment, and only where every rank has a core.
        self._spin_s = _SPIN_S if self._size <= len(os.sched_getaffinity(0)) else 0.0

    def wait(self, signature: bytes = b"") -> None:
        """Wait until all ranks have called this, and check that their signatures are equal."""
        if self._aborted:
            raise self._abort_error()
        self.count = (self.count + 1) % _WRAP
        own = self._signature_at(self._rank)
        self._bytes[own : own + SIGNATURE] = signature = _fitted(signature)
        futex.count_and_wake(self._address + self._rank * SLOT)
        for rank in self._others:
            self._await(rank)
        for rank in self._others:
            at = self._signature_at(rank)
            if self._bytes[at : at + SIGNATURE] != signature:
                raise self._mismatch()

    def abort(self, why: str) -> None:
        """Let this rank's waiting call raise, and every later one; called by another thread."""
        self._aborted = why
        for rank in self._others:
            futex.wake(self._address + rank * SLOT)

    def _abort_error(self) -> CommunicationError:
        return CommunicationError(f"rank {self._rank} waited for others in shared memory: {self._aborted}")

    def _signature_at(self, rank: int) -> int:
        """Return the offset of a signature; two take turns, so that a rank in the next barrier overwrites none."""
        return rank * SLOT + 16 + SIGNATURE * (self.count & 1)

    def _await(self, rank: int) -> None:
        word = rank * SLOT // 4
        words, count = self._words, self.count
        if (words[word] - count) % _WRAP < _WRAP // 2:
            return
        begin = time.perf_counter()
        while time.perf_counter() - begin < self._spin_s:
            if (words[word] - count) % _WRAP < _WRAP // 2:
                return
        while True:
            seen = words[word]
            if (seen - count) % _WRAP < _WRAP // 2:
                return
            futex.wait(self._address + rank * SLOT, seen, _CHECK_S)
            if self._aborted:
                raise self._abort_error()
            if words[word] == seen:
                self._check_peer(rank, time.perf_counter() - begin)

    def _check_peer(self, rank: int, waited: float) -> None:
        if not self.pages.is_alive(rank) and self._is_missing(rank):  # it may have arrived and then ended normally
            raise CommunicationError(f"rank {rank} has died: rank {self._rank} waited for it in shared memory")
        if waited > self.timeout:
            late = [str(peer) for peer in self._others if self._is_missing(peer)]
            raise CommunicationError(
                f"rank {self._rank} waited {waited:.0f} s in shared memory for rank{'s' * (len(late) > 1)} "
                f"{', '.join(late)}",
                hint="That rank hangs, or does not take part in this collective; `timeout` sets how long ranks wait.",
            )

    def _is_missing(self, rank: int) -> bool:
        """Whether a rank has not reached this barrier."""
        return (self._words[rank * SLOT // 4] - self.count) % _WRAP >= _WRAP // 2

    def _mismatch(self) -> CommunicationError:
        ranks_by_text: dict[str, list[str]] = {}
        for rank in range(self._size):
            at = self._signature_at(rank)
            text = bytes(self._bytes[at : at + SIGNATURE]).rstrip(b"\0").decode(errors="replace")
            ranks_by_text.setdefault(text, []).append(str(rank))
        parts = [f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}: {text}" for text, ranks in ranks_by_text.items()]
        return CommunicationError(
            f"ranks called different collectives: {'; '.join(parts)}",
            hint="Every rank must call the same collectives in one order, with equal shapes, dtypes and operations.",
        )


def _fitted(signature: bytes) -> bytes:
    """Pad a signature to its length; one that is too long is cut and gets a checksum."""
    if len(signature) > SIGNATURE:
        return signature[: SIGNATURE - 12] + f" ..{zlib.crc32(signature):08x} ".encode()[:12]
    return signature.ljust(SIGNATURE, b"\0")
