"""Memory that all ranks of one node map: an unnamed file in /dev/shm, and tensors in it.

Rank 0 creates the file without a name and the others open it through /proc, so nothing remains in /dev/shm after a
failure. All pages are allocated at once: a full /dev/shm is an error at the start instead of a SIGBUS later. Before
the memory exists, ranks send each other short texts by an all-gather of tensors (`AllGatherText`).
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import socket
import struct
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from phalanx.errors import CommunicationError, SharedMemoryUnavailable, first_line

SHM = "/dev/shm"
PAGE = mmap.PAGESIZE
_TOKEN_BYTES = 16
_FLOCK = struct.Struct("hhqqi4x")
"""C's `struct flock` where long and off_t have 64 bits: type, whence, start, length, pid."""

AllGatherText = Callable[[str], list[str]]
"""Sends a short text to all ranks and returns the texts of all of them, by rank."""

TEXT = 256
"""Bytes of such a text."""


def text_gatherer(all_gather: Callable[[list[torch.Tensor], torch.Tensor], object], size: int) -> AllGatherText:
    """Return an all-gather of texts, made of an all-gather of tensors into a list."""

    def gather_text(text: str) -> list[str]:
        encoded = torch.tensor(list(text.encode()[:TEXT].ljust(TEXT)), dtype=torch.uint8)
        gathered = [torch.empty_like(encoded) for _ in range(size)]
        try:
            all_gather(gathered, encoded)
        except RuntimeError as error:
            reason = first_line(error)
            raise CommunicationError(f"a rank was lost before the ranks could share memory: {reason}") from error
        return [bytes(row.tolist()).decode(errors="replace").rstrip() for row in gathered]

    return gather_text


def group_text_gatherer(group: dist.ProcessGroup | None) -> AllGatherText:
    """Return an all-gather of texts in a process group that supports CPU tensors."""
    return text_gatherer(
        lambda gathered, tensor: dist.all_gather(gathered, tensor, group=group), dist.get_world_size(group)
    )


def machine_id() -> str:
    """Return what is equal on ranks that may share memory: host name, boot id, and the pid and network namespaces.

    Ranks in different containers cannot open each other's memory. Tests use network namespaces as nodes.
    """
    boot = Path("/proc/sys/kernel/random/boot_id")
    parts = [socket.gethostname(), boot.read_text().strip() if boot.exists() else "?"]
    parts += [os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net") if Path(f"/proc/self/ns/{kind}").exists()]
    return "/".join(parts)


def round_up(nbytes: int, unit: int = PAGE) -> int:
    """Return the next multiple of `unit`."""
    return -(-nbytes // unit) * unit


class SharedPages:
    """`nbytes` of memory that all ranks of a group on one node share."""

    def __init__(self, gather_text: AllGatherText, rank: int, size: int, nbytes: int, *, later: int = 0) -> None:
        """Create or open the memory; all ranks call this, and all succeed or all raise.

        `later`: bytes that will be needed next, so that an error states the whole amount.
        """
        self.rank, self.size, self.nbytes = rank, size, nbytes
        self._fd = -1
        name = problem = ""
        try:
            name = self._create(later) if rank == 0 else ""
        except OSError as error:
            problem = error.strerror or str(error)
        name = gather_text(name)[0]
        if name and rank != 0:
            problem = self._open(name)
        problems = [text for text in gather_text(problem) if text]
        if problems:
            self.close()
            raise SharedMemoryUnavailable(problems[0], hint=f"Make it larger: remount {SHM}, docker --shm-size.")

    def _create(self, later: int) -> str:
        needed = self.nbytes + PAGE
        disk = os.statvfs(SHM)
        free, total = disk.f_bavail * disk.f_frsize, needed + (later + PAGE if later else 0)
        if free < total:
            raise OSError(0, f"{SHM} has {free / 2**20:.1f} MB free and {total / 2**20:.1f} MB are needed")
        self._fd = os.open(SHM, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        os.posix_fallocate(self._fd, 0, needed)
        token = secrets.token_bytes(_TOKEN_BYTES)
        self._attach()
        self.memory[self.nbytes : self.nbytes + _TOKEN_BYTES] = token
        return f"{os.getpid()} {self._fd} {token.hex()}"

    def _open(self, where: str) -> str:
        """Open the memory of rank 0; return what is wrong with it, or an empty string."""
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
        request = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, rank, 1, 0)
        answer = _FLOCK.unpack(fcntl.fcntl(self._fd, fcntl.F_GETLK, request))
        return rank == self.rank or answer[0] != fcntl.F_UNLCK

    def close(self) -> None:
        """Close the file; the memory remains as long as tensors use it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        self.close()


class SymmetricTensors:
    """Creates tensors in shared pages, and finds the other ranks' tensors by address."""

    def __init__(self, gather_text: AllGatherText, rank: int, size: int) -> None:
        self._gather_text, self._rank, self._size = gather_text, rank, size
        self._pages: list[tuple[SharedPages, list[torch.Tensor]]] = []
        self._views: dict[tuple[int, int, torch.dtype], list[torch.Tensor]] = {}

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return this rank's tensor; all ranks call this, with the same size."""
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        room = round_up(numel * dtype.itemsize)
        pages = SharedPages(self._gather_text, self._rank, self._size, self._size * room)
        by_rank = [
            torch.frombuffer(pages.memory, dtype=torch.uint8, offset=rank * room, count=numel * dtype.itemsize)
            for rank in range(self._size)
        ]
        self._pages.append((pages, by_rank))
        return by_rank[self._rank].view(dtype)

    def find(self, flat: torch.Tensor) -> list[torch.Tensor] | None:
        """Return the corresponding tensors of all ranks, if this flat, contiguous tensor is in shared pages."""
        key = (flat.data_ptr(), flat.numel(), flat.dtype)
        tensors = self._views.get(key)
        if tensors is None:
            for _, by_rank in self._pages:
                offset = flat.data_ptr() - by_rank[self._rank].data_ptr()
                if offset >= 0 and offset + flat.nbytes <= by_rank[self._rank].nbytes:
                    tensors = [one[offset : offset + flat.nbytes].view(flat.dtype) for one in by_rank]
                    self._views[key] = tensors
        return tensors

    def close(self) -> None:
        """Close the files; the memory remains as long as tensors use it."""
        for pages, _ in self._pages:
            pages.close()
        self._pages.clear()
        self._views.clear()
        del self._gather_text  # it refers to the group, which would keep the pages until a garbage collection
