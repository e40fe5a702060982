"""Kill a process with SIGKILL before its k-th system call that changes files, for every k.

The calls are seen by ptrace, in all threads of the process. Where ptrace is not permitted, Python's audit events and
`os.fsync` take their place: fewer points, and the same checks. Run as a script it needs nothing of pytest:

    python tests/helpers/kill_points.py DIRECTORY KIND|copy
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import signal
import struct
import sys
from collections.abc import Callable
from pathlib import Path

_CALLS = {
    "x86_64": {1, 18, 20, 74, 75, 76, 77, 82, 83, 84, 87, 257, 258, 263, 264, 316, 221},
    "aarch64": {64, 68, 66, 82, 83, 45, 46, 276, 34, 35, 56, 38, 223},
}
"""write, pwrite64, writev, fsync, fdatasync, (f)truncate, rename*, mkdir*, unlink*, rmdir, openat, fadvise64."""
_OPENAT = {"x86_64": 257, "aarch64": 56}
_TRACEME, _CONT_SYSCALL, _SETOPTIONS, _SYSCALL_INFO = 0, 24, 0x4200, 0x420E
_OPTIONS = 0x1 | 0x8 | 0x2 | 0x4 | 0x00100000  # good syscall stops, clone, fork, vfork, kill the tracee at our end
_WALL = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long


def killed_at(point: int, action: Callable[[], None]) -> bool:
    """Run `action` in a forked process that is killed at a point; return False where it ended before."""
    return (_traced if _can_trace() else _audited)(point, action)


def _can_trace() -> bool:
    if platform.machine() not in _CALLS:
        return False
    child = os.fork()
    if child == 0:
        os._exit(0 if _libc.ptrace(_TRACEME, 0, None, None) == 0 else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _traced(point: int, action: Callable[[], None]) -> bool:
    child = os.fork()
    if child == 0:
        _libc.ptrace(_TRACEME, 0, None, None)
        os.kill(os.getpid(), signal.SIGSTOP)
        action()
        os._exit(0)
    os.waitpid(child, _WALL)
    _libc.ptrace(_SETOPTIONS, child, None, _OPTIONS)
    _libc.ptrace(_CONT_SYSCALL, child, None, None)
    seen = 0
    while True:
        pid, status = os.waitpid(-1, _WALL)
        if os.WIFEXITED(status) or os.WIFSIGNALED(status):
            if pid == child:
                return os.WIFSIGNALED(status)
            continue
        number = os.WSTOPSIG(status)
        if number == signal.SIGTRAP | 0x80:
            seen += _changes_files(pid)
            if seen == point:
                os.kill(child, signal.SIGKILL)
                seen += 1
                continue
            number = 0
        elif number in (signal.SIGTRAP, signal.SIGSTOP):  # a new thread, or the event that announces it
            number = 0
        _libc.ptrace(_CONT_SYSCALL, pid, None, number or None)


def _changes_files(pid: int) -> bool:
    info = ctypes.create_string_buffer(88)
    _libc.ptrace(_SYSCALL_INFO, pid, ctypes.c_void_p(len(info)), ctypes.addressof(info))
    if info.raw[0] != 1:  # not the entry of a call
        return False
    number, *arguments = struct.unpack_from("<7Q", info.raw, 24)
    machine = platform.machine()
    if number == _OPENAT[machine]:
        return bool(arguments[2] & os.O_CREAT)
    return number in _CALLS[machine]


def _audited(point: int, action: Callable[[], None]) -> bool:
    child = os.fork()
    if child == 0:
        seen = 0
        flush = os.fsync

        def count(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal seen
            if event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "test.fsync") or (
                event == "open" and isinstance(arguments[2], int) and arguments[2] & os.O_CREAT
            ):
                seen += 1
                if seen == point:
                    os.kill(os.getpid(), signal.SIGKILL)

        def fsync(descriptor: int) -> None:
            sys.audit("test.fsync", descriptor)
            flush(descriptor)

        os.fsync = fsync
        sys.addaudithook(count)
        action()
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def main(directory: Path, kind: str) -> None:
    """Kill a save at every point; after each the directory has a loadable checkpoint, and the next save is clean."""
    import torch

    from phalanx.checkpoint import Snapshot, choose, load, save

    torch.set_num_threads(1)

    def saved(folder: Path, step: int) -> None:
        tensors = {"model": {"w": torch.full((5000,), float(step)), "frozen": torch.ones(5000)}}
        save(folder, Snapshot(step, 0, tensors, {"step": step}), run_id="run", kind=kind, keep_last=1)

    saved(directory / "base", 1)
    point, steps = 0, []
    while True:
        point += 1
        folder = directory / f"at-{point}"
        shutil.copytree(directory / "base", folder)
        killed = killed_at(point, lambda folder=folder: (saved(folder, 2), saved(folder, 2)))
        chosen = choose(folder, required=True)
        template = {"model": {"w": torch.zeros(5000), "frozen": torch.zeros(5000)}}
        loaded = load(chosen.checkpoint, template)
        assert template["model"]["w"].eq(loaded.step).all(), f"point {point}: not the weights of step {loaded.step}"
        assert template["model"]["frozen"].eq(1).all()
        assert loaded.rank_state == {"step": loaded.step}
        assert not chosen.notes, f"point {point}: {chosen.notes}"
        steps.append(loaded.step)
        saved(folder, 3)
        left = [path.name for path in folder.iterdir() if not path.name.startswith(".chunks-")]
        assert left == ["step-00000003"], f"point {point} left {left}"
        if kind == "incremental":
            _check_chunks(folder)
        shutil.rmtree(folder)
        if not killed:
            break
    assert steps == sorted(steps), f"a later kill left an older checkpoint: {steps}"
    assert {1, 2} <= set(steps)
    print(f"{point - 1} points, {'ptrace' if _can_trace() else 'audit events'}")


def copies(directory: Path) -> None:
    """Kill a copy at every point; after each it is not there or whole, and repeated it is the only thing there."""
    import torch

    from phalanx.checkpoint import Snapshot, list_checkpoints, save, verify
    from phalanx.checkpoint.copy import copy_checkpoint

    torch.set_num_threads(1)
    save(directory / "base", Snapshot(1, 0, {"model": {"w": torch.ones(9)}}), run_id="run", kind="incremental")
    (source,) = list_checkpoints(directory / "base")
    point, killed = 0, True
    while killed:
        point += 1
        target = directory / f"at-{point}"
        killed = killed_at(point, lambda target=target: copy_checkpoint(source, target))
        assert all(not verify(one.path) for one in list_checkpoints(target)), f"point {point}: damaged"
        copy_checkpoint(source, target)
        assert sorted(path.name for path in target.iterdir()) == [".chunks-run", "step-00000001"], f"point {point}"
        assert not verify(target / "step-00000001"), f"point {point}: damaged after it was repeated"
        shutil.rmtree(target)
    print(f"{point - 1} points, {'ptrace' if _can_trace() else 'audit events'}")


def _check_chunks(folder: Path) -> None:
    """All chunks that are left are used by the one checkpoint that is left."""
    from phalanx.checkpoint import choose, read_index

    index = read_index(choose(folder, required=True).checkpoint)
    used = {leaf.hash for leaves in index.leaves.values() for leaf in leaves}
    assert {path.name for path in folder.glob(".chunks-*/*/*")} == used


if __name__ == "__main__":
    copies(Path(sys.argv[1])) if sys.argv[2] == "copy" else main(Path(sys.argv[1]), sys.argv[2])
