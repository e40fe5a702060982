"""Processes of this machine: start one with this package, end it with its parent, signal it, check its user, take its
signals one after the other, and the memory that its control groups allow.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Handler = Callable[[int, FrameType | None], object] | int | signal.Handlers | None


_PR_SET_PDEATHSIG = 1
_PF_EXITING = 4
"""The flag of a process that is being taken down, in the ninth field of its stat file."""
_PR_SET_NAME = 15
_CREDENTIALS = struct.Struct("3i")  # process, user, group
_libc = ctypes.CDLL(None, use_errno=True)

PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
"""The folder of this package."""
_ROOT = os.path.dirname(PACKAGE)
# One line: it may pass through a shell on another machine.
_START = "; ".join(
    (
        "import sys",
        "sys.flags.safe_path or sys.path.pop(0)",
        "from importlib.util import module_from_spec, spec_from_file_location",
        f"spec = spec_from_file_location('phalanx', {os.path.join(PACKAGE, '__init__.py')!r})",
        "sys.modules['phalanx'] = module_from_spec(spec)",
        "spec.loader.exec_module(sys.modules['phalanx'])",
        f"{_ROOT!r} in sys.path or sys.path.append({_ROOT!r})",
    )
)


def own_python(code: str, *arguments: object) -> list[str]:
    """Return a command that runs a line of code in a fresh Python with this package, installed or not.

    The folder that holds the package is not put before the standard library: it may be site-packages, which may hold
    old copies of standard modules.
    """
    return [sys.executable, "-c", f"{_START}; {code}", *map(str, arguments)]


def stat_fields(pid: int) -> list[str]:
    """Return what Linux says of a process, from its state on (`man 5 proc`); empty where it has ended, or elsewhere."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode().split()
    except OSError:
        return []


def began_at(pid: int) -> int | None:
    """Return when a process was started or forked, in ticks since boot: a later process may get the same number."""
    fields = stat_fields(pid)
    return int(fields[19]) if fields else None


def process_began() -> float:
    """Return when this process was started or forked, in seconds since the epoch; now where the system does not say."""
    ticks = began_at(os.getpid())
    if ticks is None:
        return time.time()
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")


def die_with(parent: int) -> None:
    """Let the kernel kill this process as soon as `parent`, which forked it, has ended for any reason."""
    _libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # it ended before the call above
        os._exit(128 + signal.SIGKILL)


def outlive_parent() -> None:
    """Undo `die_with`."""
    _libc.prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0)


def set_name(name: str) -> None:
    """Set what `ps` and `top` show for this process (15 bytes of it)."""
    _libc.prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()), 0, 0, 0)


def is_same_user(connection: socket.socket) -> bool:
    """Whether the process at the other end of a Unix socket belongs to this process's user."""
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(peer)[1] == os.geteuid())


def is_stopped(pid: int) -> bool:
    """Whether a process does not run because of SIGSTOP, a terminal or a debugger."""
    return stat_fields(pid)[:1] in (["T"], ["t"])


def is_ending(pid: int) -> bool:
    """Whether the kernel is taking a process down: its connections are closed, and its end is not reported yet."""
    state, *fields = stat_fields(pid) or [""]
    return state not in ("", "Z", "X") and bool(int(fields[5]) & _PF_EXITING)


def cpu_seconds() -> float:
    """Return the CPU time that this process, and what it has started, have used; that of ended ones is not counted."""
    used: dict[int, int] = {}
    started: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*"):
        pid = int(path.name)
        if fields := stat_fields(pid):
            used[pid] = int(fields[11]) + int(fields[12])
            started.setdefault(int(fields[1]), []).append(pid)
    pids = [os.getpid()]
    for pid in pids:
        pids += started.get(pid, [])
    return sum(used.get(pid, 0) for pid in pids) / os.sysconf("SC_CLK_TCK") or time.process_time()


def kill_group(leader: int) -> None:
    """Kill a process that leads its own group, with everything it started in that group."""
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:  # between fork and setpgid there is no group yet
        send_signal(leader, signal.SIGKILL)
    except PermissionError:  # only zombies are left in the group
        return


def how_it_ended(code: int) -> str:
    """Describe an exit code of `subprocess`, as the end of a sentence that begins with "the process"."""
    if code >= 0:
        return f"ended with exit code {code}"
    signals = {number.value: f"{number.name} (signal {number.value})" for number in signal.Signals}
    return f"was killed by {signals.get(-code, f'signal {-code}')}"


def send_signal(pid: int, number: int) -> None:
    """Send a signal to a child that has not been reaped; it may have ended already."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")


def memory_groups(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> Iterator[Path]:
    """Yield the folders of this process's memory groups, inner ones first: version 2 (`0::/path`) and version 1."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        root = cgroups if controllers == "" else cgroups / "memory" if "memory" in controllers.split(",") else None
        if root is not None:
            inner = Path(path.lstrip("/"))
            yield from (root / part for part in (inner, *inner.parents) if str(part) != ".")
    yield cgroups  # in a container this is the own group


def host_memory(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int:
    """Return the bytes of memory that processes of this machine, or of this container, may use together."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for group in memory_groups(proc, cgroups):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with contextlib.suppress(OSError):
                text = (group / name).read_text().strip()
                limits += [int(text)] if text.isdecimal() else []
    return min(limits)


def oom_kills(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int:
    """Return how often the kernel has killed for memory, on this machine or in this process's control groups."""
    names = ("memory.events", "memory.oom_control")
    counters = [proc / "vmstat", *(group / name for group in memory_groups(proc, cgroups) for name in names)]
    count = 0
    for path in counters:
        with contextlib.suppress(OSError):  # not every kernel and container shows every counter
            count += sum(int(line.split()[1]) for line in path.read_text().splitlines() if line.startswith("oom_kill "))
    return count


STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals at which a run ends or saves."""
JOINS_LATE = "PHALANX_JOINS_LATE"
"""Set for a rank that takes a place in a group that trains; it begins with `STOPS` blocked, until it handles them."""
_RESIZED = signal.SIGWINCH


class SignalInbox:
    """Collects SIGINT, SIGTERM, SIGHUP and SIGUSR1 between enter and exit; in other threads only what is posted."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._before: dict[signal.Signals, Handler] = {}
        self._wakeup_before: int | None = None
        self._lock = threading.Lock()
        self._was_resized = False

    def __enter__(self) -> SignalInbox:
        if threading.current_thread() is threading.main_thread():
            self._wakeup_before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
            for number in (*STOPS, _RESIZED):
                # Signals that the parent process ignores (nohup) stay ignored.
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, lambda number, frame: None)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        if self._wakeup_before is not None:
            signal.set_wakeup_fd(self._wakeup_before)
        self.close()

    def close(self) -> None:
        """Close the pipe; safe to call twice."""
        with self._lock:  # a later `post` must not write into a reused descriptor
            if self._write >= 0:
                os.close(self._read)
                os.close(self._write)
                self._read = self._write = -1

    def fileno(self) -> int:
        """Let selectors wait for a signal."""
        return self._read

    def take(self) -> list[signal.Signals]:
        """Return the watched signals that came since the last call, in order."""
        received = b""
        with contextlib.suppress(BlockingIOError):
            received = os.read(self._read, 4096)
        self._was_resized = self._was_resized or _RESIZED in received
        return [signal.Signals(number) for number in received if number in STOPS]

    def take_resize(self) -> bool:
        """Return whether the terminal has got another size since the last call."""
        was_resized, self._was_resized = self._was_resized, False
        return was_resized

    def post(self, number: signal.Signals) -> None:
        """Add a signal as if it had been received: a launch in another thread gets no real ones."""
        with self._lock:
            if self._write >= 0:
                os.write(self._write, bytes([number]))


_reason: str | None = None


def request_stop(reason: str) -> None:
    """Ask this process's rank to stop; `reason` is what it reports, such as SIGTERM."""
    global _reason
    _reason = reason


def stop_reason() -> str | None:
    """Return why this rank has to stop, or None."""
    return _reason
