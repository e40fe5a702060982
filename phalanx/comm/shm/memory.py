"""Memory that all ranks of one machine map: an unnamed file of /dev/shm, and tensors that live in it.

Rank 0 creates the file without a name and the others open it through /proc, so nothing is left in /dev/shm however a
rank ends. All pages are reserved at once: a full /dev/shm is an error at the start instead of a SIGBUS later.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import struct

import torch

from phalanx.comm.shm.bootstrap import AllGatherText
from phalanx.errors import SharedMemoryUnavailable

SHM = "/dev/shm"
PAGE = mmap.PAGESIZE
_TOKEN_BYTES = 16
_FLOCK = struct.Struct("hhqqi4x")
"""C's `struct flock` where long and off_t have 64 bits: type, whence, start, length, pid."""


def round_up(nbytes: int, unit: int = PAGE) -> int:
    """Return the next multiple of `unit`."""
    return -(-nbytes // unit) * unit


class SharedPages:
    """`nbytes` of memory, the same on every rank of a group that lives on one machine."""

    def __init__(self, tell: AllGatherText, rank: int, size: int, nbytes: int, *, later: int = 0) -> None:
        """Make or open the memory; all ranks call this, and all succeed or all raise.

        `later`: bytes that will be asked for next, so that what is missing is said once and whole.
        """
        self.rank, self.size, self.nbytes = rank, size, nbytes
        self._fd = -1
        made = problem = ""
        try:
            made = self._create(later) if rank == 0 else ""
        except OSError as error:
            problem = error.strerror or str(error)
        made = tell(made)[0]
        if made and rank != 0:
            problem = self._open(made)
        problems = [text for text in tell(problem) if text]
        if problems:
            self.close()
            raise SharedMemoryUnavailable(problems[0], hint=f"Make it larger: mount {SHM} anew, docker --shm-size.")

    def _create(self, later: int) -> str:
        needed = self.nbytes + PAGE
        disk = os.statvfs(SHM)
        free, all_of_it = disk.f_bavail * disk.f_frsize, needed + (later + PAGE if later else 0)
        if free < all_of_it:
            raise OSError(0, f"{SHM} has {free / 2**20:.1f} MB free and {all_of_it / 2**20:.1f} MB are needed")
        self._fd = os.open(SHM, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        os.posix_fallocate(self._fd, 0, needed)
        token = secrets.token_bytes(_TOKEN_BYTES)
        self._attach()
        self.memory[self.nbytes : self.nbytes + _TOKEN_BYTES] = token
        return f"{os.getpid()} {self._fd} {token.hex()}"

    def _open(self, where: str) -> str:
        """Open what rank 0 made; return what is wrong with it, or nothing."""
        pid, fd, token = where.split()
        try:
            self._fd = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
            if os.fstat(self._fd).st_size != self.nbytes + PAGE:
                return f"rank {self.rank} found another file than the memory of rank 0"
            self._attach()
        except OSError as error:
            return f"rank {self.rank} cannot open the memory of rank 0 (process {pid}): {error.strerror}"
        if self.memory[self.nbytes : self.nbytes + _TOKEN_BYTES] != bytes.fromhex(token):
            return f"rank {self.rank} found other memory than that of rank 0"
        return ""

    def _attach(self) -> None:
        self.memory = mmap.mmap(self._fd, self.nbytes + PAGE)
        fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, self.rank)

    def is_alive(self, rank: int) -> bool:
        """Whether the process of a rank still holds its lock."""
        question = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, rank, 1, 0)
        answer = _FLOCK.unpack(fcntl.fcntl(self._fd, fcntl.F_GETLK, question))
        return rank == self.rank or answer[0] != fcntl.F_UNLCK

    def close(self) -> None:
        """Let go of the file; the memory itself stays as long as tensors live in it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        self.close()


class SymmetricTensors:
    """Makes tensors in shared pages, and finds the peers of what lies in them by its address."""

    def __init__(self, tell: AllGatherText, rank: int, size: int) -> None:
        self._tell, self._rank, self._size = tell, rank, size
        self._made: list[tuple[SharedPages, list[torch.Tensor]]] = []
        self._found: dict[tuple[int, int, torch.dtype], list[torch.Tensor]] = {}

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return this rank's tensor; all ranks call this, with the same size."""
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        room = round_up(numel * dtype.itemsize)
        pages = SharedPages(self._tell, self._rank, self._size, self._size * room)
        everyones = [
            torch.frombuffer(pages.memory, dtype=torch.uint8, offset=rank * room, count=numel * dtype.itemsize)
            for rank in range(self._size)
        ]
        self._made.append((pages, everyones))
        return everyones[self._rank].view(dtype)

    def find(self, flat: torch.Tensor) -> list[torch.Tensor] | None:
        """Return what lies at the same place on each rank, if this flat, contiguous tensor lies in shared pages."""
        key = (flat.data_ptr(), flat.numel(), flat.dtype)
        found = self._found.get(key)
        if found is None:
            for _, everyones in self._made:
                offset = flat.data_ptr() - everyones[self._rank].data_ptr()
                if offset >= 0 and offset + flat.nbytes <= everyones[self._rank].nbytes:
                    found = [one[offset : offset + flat.nbytes].view(flat.dtype) for one in everyones]
                    self._found[key] = found
        return found

    def close(self) -> None:
        """Let go of the files; the memory stays as long as tensors live in it."""
        for pages, _ in self._made:
            pages.close()
        self._made.clear()
        self._found.clear()
        del self._tell  # it leads back to the group, which would keep the pages until a collection of garbage
