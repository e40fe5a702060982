"""The body of a forked rank: set its environment, run the target, exit as Python itself would."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import fcntl
import functools
import multiprocessing.process
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from phalanx.host import messages
from phalanx.launch.collectives import answer_launcher, write_calls
from phalanx.launch.error_file import exit_code_of, record_exception
from phalanx.launch.forkserver.preload import set_compute_threads
from phalanx.launch.loader_workers import name_loader, note_loaders
from phalanx.launch.point_to_point import record_messages
from phalanx.launch.records import Joined
from phalanx.launch.target import call, from_message, run_target
from phalanx.observe.events import Message
from phalanx.observe.guard import guard_own_output
from phalanx.observe.sinks import FdSink, announce

# A process started by the rank inherits the variable but not the descriptor: a high number makes it unlikely that the
# same number is something else there.
_EVENTS_DESCRIPTOR_FLOOR = 200


def run(request: messages.Message, descriptors: list[int]) -> NoReturn:
    """Run as rank `request["rank"]` until the target ends, then exit without tearing torch down."""
    *stdio, log, stack, events = descriptors[:6]
    control = descriptors[6] if len(descriptors) > 6 else None
    for number, descriptor in enumerate(stdio):
        os.dup2(descriptor, number)
        os.close(descriptor)

    def program() -> None:
        _set_up(request, log, stack, events, control)
        if request["prelude"]:
            call(request["prelude"])
        run_target(from_message(request["target"]), request["path"])

    leave(run_to_end(program, lambda error: record_to_log(error, request, log)))


def run_to_end(program: Callable[[], None], record: Callable[[BaseException], None]) -> int:
    """Run the rank's program and return its exit code; `record` gets the exception that ended it."""
    try:
        program()
    except BaseException as error:  # noqa: BLE001 - the program ends here, whatever ended it
        if not isinstance(error, SystemExit):
            try:
                record(error)
            except RuntimeError as late:  # torch reports a killed DataLoader worker at any moment, also here
                record(late)
        elif error.code is not None and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
        return exit_code_of(error)
    return 0


def record_to_log(error: BaseException, request: messages.Message, log: int | None) -> None:
    """Record what ended the rank, with the traceback in the log instead of on stderr, which the launcher shows."""
    error = name_loader(error)
    if log is not None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.flush()
        os.dup2(log, 2)
    try:
        write_calls(Path(request["log_dir"]), request["rank"], failed=True)
    except Exception:  # noqa: BLE001 - it must not hide the exception that is being recorded
        traceback.print_exc()
    record_exception(error, request)


def _set_up(request: messages.Message, log: int, stack: int, events: int, control: int | None) -> None:
    os.environ.clear()
    os.environ.update(request["env"])
    os.environ["PHALANX_EVENTS_FD"] = str(lift(events))
    if control is not None:
        os.environ["PHALANX_CONTROL_FD"] = str(lift(control))
    os.chdir(request["cwd"])
    buffer_lines()
    faulthandler.enable(log)  # not to stderr: the launcher reports a crash once, not amid another rank's output
    answer_launcher(Path(request["log_dir"]), request["rank"], stack)
    if request["writes_log"]:
        guard_own_output(lambda text: _warn_launcher(request["rank"], text))
    # The fork server fixed these while it imported.
    tempfile.tempdir = None
    time.tzset()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    # Sockets of multiprocessing go where the launcher removes them even if this rank is killed.
    os.makedirs(request["scratch"], 0o700, exist_ok=True)
    multiprocessing.process.current_process()._config["tempdir"] = request["scratch"]  # type: ignore[attr-defined]
    set_compute_threads(request["threads"])
    announce_joining(request["rank"])
    note_loaders()
    record_messages()
    call("phalanx.comm.register:register")  # by its name: of what is above the launcher, nothing is imported here


def buffer_lines() -> None:
    """Let stdout and stderr pass on each line at once."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _warn_launcher(rank: int, text: str) -> None:
    sink = FdSink.from_environment()
    if sink is not None:
        sink.handle(Message("warning", f"rank {rank}: {text}", rank=rank))
        sink.close()


def lift(descriptor: int) -> int:
    """Move a descriptor to a high number."""
    lifted = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _EVENTS_DESCRIPTOR_FLOOR)
    os.close(descriptor)
    return lifted


def announce_joining(rank: int) -> None:
    """Wrap torch.distributed.init_process_group to report its begin and end: a rank that never joins can be named."""
    import torch.distributed
    from torch.distributed import device_mesh, distributed_c10d

    original = distributed_c10d.init_process_group

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        announce("joining", rank)
        Joined.begin()
        original(*args, **kwargs)
        announce("joined", rank)

    # device_mesh took its own reference when it was imported.
    for module in (torch.distributed, distributed_c10d, device_mesh):
        setattr(module, original.__name__, init_process_group)


def leave(code: int) -> NoReturn:
    """Do what the interpreter does at exit, in its order, but stop before modules are torn down.

    Tearing torch down can deadlock: a process group freed with the interpreter lock held waits for its own thread.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        # As in the interpreter: a closed pipe at the very end is ignored.
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
