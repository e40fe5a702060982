"""What a process that horovodrun started for us does: tell the launcher who it is, run the target, leave in words.

The launcher's socket is there only on its own machine. Elsewhere the rank's output, which horovodrun carries, is all
that the launcher hears. The socket's end is the launcher's: mpirun would let the ranks go on without it, so those that
have a line to it end themselves, and mpirun then ends those of other machines.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from phalanx.errors import EXIT_PREEMPTED
from phalanx.launch.group import stack_path
from phalanx.launch.horovod_driver import bind_to_loopback
from phalanx.launch.output import open_log
from phalanx.launch.rank import leave, lift, record_to_log, run_to_end
from phalanx.launch.target import from_message, run_target
from phalanx.observe.folders import make_private

if TYPE_CHECKING:
    from phalanx.launch.wire import Message

STARTED = "horovod_rank_started"
ENDED = "horovod_rank_ended"
_NUMBERS = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
"""Where horovodrun says who this is: itself, or by Open MPI or MPICH, which it lets start the ranks."""


def main() -> NoReturn:
    """Be the rank that the environment names."""
    request: Message = json.loads(sys.argv[1])
    rank = request["rank"] = int(next(os.environ[name] for name in _NUMBERS if name in os.environ))
    make_private(Path(request["log_dir"]))
    launcher = _connect(request["events"], request["network"])
    log = None if launcher is None else open_log(Path(request["log_dir"]), rank)
    _tell(launcher, {"event": STARTED, "rank": rank, "pid": os.getpid()})
    if request["loopback"]:
        bind_to_loopback()
    _prepare(request, launcher, log)
    code = run_to_end(
        lambda: run_target(from_message(request["target"]), request["path"]),
        lambda error: record_to_log(error, request, log),
    )
    _tell(launcher, {"event": ENDED, "rank": rank, "code": code})
    # To horovodrun a rank that left with a checkpoint, as it was told to, has done well.
    leave(0 if code == EXIT_PREEMPTED else code)


def network() -> str:
    """Return what is equal where the launcher's socket can be reached: the machine since it booted, and its network."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot} {os.readlink('/proc/self/ns/net')}"


def _connect(name: str, launchers: str) -> socket.socket | None:
    """Return a line to the launcher, or None on another machine than its own."""
    if network() != launchers:
        return None
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        line.connect("\0" + name)
    except ConnectionRefusedError:
        sys.exit("phalanx: the launcher was gone before this rank began")
    threading.Thread(target=_end_with, args=(line,), name="phalanx-launcher", daemon=True).start()
    return line


def _end_with(launcher: socket.socket) -> None:
    """Kill this process when the launcher is gone, however it went. It never says anything: only its end is heard."""
    with suppress(ConnectionResetError):
        launcher.recv(1)
    os.kill(os.getpid(), signal.SIGKILL)


def _prepare(request: Message, launcher: socket.socket | None, log: int | None) -> None:
    if launcher is not None:
        os.environ["PHALANX_EVENTS_FD"] = str(lift(os.dup(launcher.fileno())))
    if log is not None:
        faulthandler.enable(log)
        stack = os.open(
            stack_path(Path(request["log_dir"]), request["rank"]), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644
        )
        faulthandler.register(signal.SIGQUIT, stack, all_threads=True)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _tell(launcher: socket.socket | None, message: dict[str, Any]) -> None:
    if launcher is None:
        return
    try:
        launcher.send(json.dumps(message).encode())
    except (BrokenPipeError, ConnectionResetError):
        # The launcher is gone, and this rank is about to be.
        return
