"""The body of a forked rank: set its environment, run the target, exit as Python itself would."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import fcntl
import functools
import importlib
import importlib.machinery
import multiprocessing.process
import os
import runpy
import sys
import tempfile
import threading
import time
import traceback
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from phalanx.features import feature
from phalanx.host import messages
from phalanx.host.processes import PACKAGE
from phalanx.launch.error_file import exit_code_of, name_loader, note_loaders, record_exception
from phalanx.launch.forkserver.preload import set_compute_threads
from phalanx.launch.spec import CallTarget, ModuleTarget, ScriptTarget, Target, target_from_message
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
        target = target_from_message(request["target"])
        if not isinstance(target, CallTarget):
            feature("count-steps")()
        run_target(target, request["path"])

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
        feature("diagnosis").write_calls(Path(request["log_dir"]), request["rank"], failed=True)
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
    feature("diagnosis").answer_launcher(Path(request["log_dir"]), request["rank"], stack)
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
    feature("diagnosis").record_messages()
    feature("register-backend")()


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
        feature("diagnosis").CallHistory.begin()
        original(*args, **kwargs)
        announce("joined", rank)

    # device_mesh took its own reference when it was imported.
    for module in (torch.distributed, distributed_c10d, device_mesh):
        setattr(module, original.__name__, init_process_group)


def run_target(target: Target, caller_path: list[str]) -> None:
    """Run the target in this process, as its main program."""
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    # The fork server was started elsewhere; spawned children resolve a relative main path against this.
    multiprocessing.process.ORIGINAL_DIR = os.getcwd()  # type: ignore[attr-defined]
    if isinstance(target, ScriptTarget):
        _run_script(target, main)
    elif isinstance(target, ModuleTarget):
        sys.argv = ["-m", *target.args]
        sys.orig_argv = [sys.executable, "-m", target.name, *target.args]
        sys.path[:] = [os.getcwd(), *_interpreter_path()]
        # What the interpreter itself calls for -m: packages, __main__ modules and its messages behave the same.
        runpy._run_module_as_main(target.name)  # type: ignore[attr-defined]
    else:
        sys.path[:] = [entry or os.getcwd() for entry in caller_path]
        call(target.function, target.payload)


def _run_script(target: ScriptTarget, main: types.ModuleType) -> None:
    path = os.path.abspath(target.path)
    sys.argv = [str(target.path), *target.args]
    sys.orig_argv = [sys.executable, *sys.argv]
    sys.path[:] = [str(Path(path).resolve().parent), *_interpreter_path()]
    main.__file__ = path
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    main.__dict__["__cached__"] = None
    code = compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
    exec(code, main.__dict__)


def call(function: str, *arguments: Any) -> None:
    """Import `package.module:name` and call it."""
    module, _, name = function.partition(":")
    getattr(importlib.import_module(module), name)(*arguments)


def _interpreter_path() -> list[str]:
    """Return the interpreter's own import path; a folder that `python -m phalanx...` put first goes last."""
    package_root = os.path.dirname(os.path.realpath(PACKAGE))
    if sys.path[0] != package_root or package_root in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        return list(sys.path)
    others = sys.path[1:]
    return others if package_root in others else [*others, package_root]


def leave(code: int) -> NoReturn:
    """Do what the interpreter does at exit, in its order, but stop before modules are torn down.

    Tearing torch down can deadlock: a process group freed with the interpreter lock held waits for its own thread.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    _leave_operators_registered()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        # As in the interpreter: a closed pipe at the very end is ignored.
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _leave_operators_registered() -> None:
    """Keep torch from taking back 177 registrations of operators one by one: 45 ms in a process that ends anyway."""
    for finalizer in list(getattr(weakref.finalize, "_registry", ())):  # a detail of Python
        if (alive := finalizer.peek()) and getattr(alive[1], "__module__", "") == "torch.library":
            finalizer.atexit = False
