"""The entry point of a rank that horovodrun started: report to the launcher, run the target, report the end.

The launcher's socket exists only on its own node; on others the launcher gets only the rank's output, through
horovodrun. mpirun would let the ranks continue after the launcher's end, so ranks with a connection to it end
themselves when it closes, and mpirun then ends those of other nodes.
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
from typing import Any, NoReturn

from phalanx.diagnosis import answer_launcher
from phalanx.engines.horovod.driver import bind_to_loopback
from phalanx.errors import EXIT_PREEMPTED
from phalanx.host.files import make_private
from phalanx.host.messages import Message
from phalanx.launch.output import open_log
from phalanx.launch.rank import buffer_lines, leave, lift, record_to_log, run_target, run_to_end
from phalanx.launch.rank_files import open_stack
from phalanx.launch.spec import target_from_message

STARTED = "horovod_rank_started"
ENDED = "horovod_rank_ended"
_NUMBERS = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
"""Where the rank's number is: set by horovodrun, or by Open MPI or MPICH, which it may use."""


def main() -> NoReturn:
    """Run as the rank that the environment names."""
    request: Message = json.loads(sys.argv[1])
    rank = request["rank"] = int(next(os.environ[name] for name in _NUMBERS if name in os.environ))
    log_dir, log = Path(request["log_dir"]), None
    make_private(log_dir)
    launcher = _connect(request["events"], request["network"])
    if launcher is not None:
        log = open_log(log_dir, rank)
        faulthandler.enable(log)
        answer_launcher(log_dir, rank, open_stack(log_dir, rank))
        threading.Thread(target=_end_with, args=(launcher,), name="phalanx-launcher", daemon=True).start()
        os.environ["PHALANX_EVENTS_FD"] = str(lift(os.dup(launcher.fileno())))
    buffer_lines()
    _report(launcher, {"event": STARTED, "rank": rank, "pid": os.getpid()})
    if request["loopback"]:
        bind_to_loopback()
    code = run_to_end(
        lambda: run_target(target_from_message(request["target"]), request["path"]),
        lambda error: record_to_log(error, request, log),
    )
    _report(launcher, {"event": ENDED, "rank": rank, "code": code})
    # For horovodrun a rank that was preempted after a checkpoint has succeeded.
    leave(0 if code == EXIT_PREEMPTED else code)


def network() -> str:
    """Return an id of this machine's boot and network namespace: equal where the launcher's socket can be reached."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot} {os.readlink('/proc/self/ns/net')}"


def _connect(name: str, launchers_network: str) -> socket.socket | None:
    """Return a connection to the launcher, or None on another node than its own."""
    if network() != launchers_network:
        return None
    launcher = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        launcher.connect("\0" + name)
    except ConnectionRefusedError:
        sys.exit("phalanx: the launcher had ended before this rank began")
    return launcher


def _end_with(launcher: socket.socket) -> None:
    with suppress(ConnectionResetError):
        launcher.recv(1)  # returns only when the launcher has ended: it never sends anything
    os.kill(os.getpid(), signal.SIGKILL)


def _report(launcher: socket.socket | None, message: dict[str, Any]) -> None:
    if launcher is None:
        return
    try:
        launcher.send(json.dumps(message).encode())
    except (BrokenPipeError, ConnectionResetError):
        # The launcher has ended, and this rank will be killed.
        return
