"""The process that forks the programs of `programs`: it imports torch and Phalanx once.

It forks twice for each program: the process between ends at once, and the program becomes a child of the process that
asked for it. A program has a warm process of its own, a child that it forks before it does anything else: its fork
server is forked from that one, and imports nothing again.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import importlib
import multiprocessing.process
import os
import signal
import socket
import sys
import tempfile
import time
import types
from pathlib import Path
from typing import Any, NoReturn

import programs

from phalanx.host import messages
from phalanx.host.processes import _START, die_with, set_name
from phalanx.launch import ModuleTarget, ScriptTarget, rank
from phalanx.launch.forkserver import client
from phalanx.launch.forkserver.preload import preload, set_compute_threads
from phalanx.launch.rank import leave, run_target

_CLONE_NEWNS, _CLONE_NEWNET = 0x00020000, 0x40000000
_MS_BIND, _MS_REC, _MS_SLAVE, _MNT_DETACH = 0x1000, 0x4000, 0x80000, 2
_libc = ctypes.CDLL(None, use_errno=True)
_HIGH = 200
"""Above the numbers that the descriptors of a program get."""


def main() -> NoReturn:
    """Import, then fork programs until the process that started this one ends; argument: a socket."""
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    preload()
    for name in programs.IMPORTED:
        importlib.import_module(name)
    gc.freeze()
    sys.path.remove(programs.ROOT)
    client.subprocess = programs  # type: ignore[attr-defined]
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"imports have started {len(threads) - 1} threads, which a fork would not have"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests
    serve(control, programs.settings_of(os.environ))


def serve(control: socket.socket, settings: dict[str, str]) -> NoReturn:
    """Fork programs until the other end closes."""
    imported = {name for name in sys.modules if "." not in name} - {"__main__"}
    while (received := messages.receive(control)) is not None:
        request, (link, *given) = received
        if not _hides_module(request, imported):
            between = os.fork()
            if between == 0:
                control.close()
                _fork_program(socket.socket(fileno=link), settings, request, given)
            os.waitpid(between, 0)
        for descriptor in (link, *given):
            os.close(descriptor)
    os._exit(0)


def _hides_module(request: messages.Message, imported: set[str]) -> bool:
    """Whether the import path of a program has another module of the name of one that is imported already."""
    program, folder = request["program"], Path(request["cwd"])
    folders = [Path(entry) for entry in request["env"].get("PYTHONPATH", "").split(os.pathsep) if entry]
    if program["kind"] == "script":
        script = folder / program["what"]
        if not script.is_file():
            return True  # the interpreter itself says that
        folders.append(script.resolve().parent)
    elif not program["what"].startswith(_START):
        folders.append(folder)
    entries = [entry for each in folders if str(each) != programs.ROOT and each.is_dir() for entry in each.iterdir()]
    return any(_is_module(entry, imported | {"sitecustomize", "usercustomize"}) for entry in entries)


def _is_module(entry: Path, names: set[str]) -> bool:
    is_module = entry.suffix in (".py", ".so", ".pyc", ".zip") or (entry / "__init__.py").exists()
    return is_module and entry.name.partition(".")[0] in names


def _fork_program(
    link: socket.socket, settings: dict[str, str], request: messages.Message, given: list[int]
) -> NoReturn:
    """In the process between: fork the program, and end when the parent takes it."""
    between = os.getpid()
    pid = os.fork()
    if pid > 0:
        link.send(str(pid).encode())
        link.recv(2)
        os._exit(0)
    while os.getppid() == between:
        time.sleep(0.0002)
    if os.getppid() != request["parent"]:  # it has ended meanwhile
        os._exit(1)
    if request["program"]["host"]:
        _enter(request["program"]["host"])
    if not request["program"]["what"].startswith(_START):  # a fork server has ranks alone
        _fork_warm_process(settings, [link.fileno(), *given])
    _set_up(request, given)
    link.send(b"!")
    link.close()
    _run(request["program"])


def _enter(namespace: str) -> None:
    """Do what `ip netns exec` does: take the links of a namespace, and see these in /sys and its own files in /etc."""
    own = Path("/etc/netns") / namespace
    with open(f"/run/netns/{namespace}") as links:
        _check(_libc.setns(links.fileno(), _CLONE_NEWNET))
    _check(_libc.unshare(_CLONE_NEWNS))
    _check(_libc.mount(b"", b"/", b"none", _MS_SLAVE | _MS_REC, None))
    _check(_libc.umount2(b"/sys", _MNT_DETACH))
    _check(_libc.mount(namespace.encode(), b"/sys", b"sysfs", 0, None))
    for file in own.iterdir() if own.is_dir() else ():
        _check(_libc.mount(os.fsencode(file), os.fsencode(Path("/etc") / file.name), b"none", _MS_BIND, None))


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _fork_warm_process(settings: dict[str, str], held: list[int]) -> None:
    """Fork a warm process for this program. It keeps nothing of the program open, and ends with it."""
    near, far = messages.socket_pair()
    parent = os.getpid()
    if os.fork() == 0:
        near.close()
        os.setsid()
        set_name(programs.WARM)
        die_with(parent)
        for descriptor in held:
            os.close(descriptor)
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in range(3):
            os.dup2(nothing, number)
        serve(far, settings)
    far.close()
    programs.take(programs.WarmProcess(near, settings))


def _set_up(request: messages.Message, given: list[int]) -> None:
    """Give this process what the program begins with: session, descriptors, folder, environment, import path."""
    if request["session"]:
        os.setsid()
    for number in programs.SIGNALS:
        begin = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in request["ignored"] else begin)
    high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _HIGH) for descriptor in given]
    for descriptor in given:
        os.close(descriptor)
    for descriptor, number in zip(high, [0, 1, 2, *request["passed"]], strict=True):
        os.dup2(descriptor, number, inheritable=True)
        os.close(descriptor)
    threads = os.environ.get("OMP_NUM_THREADS")
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    _open_streams(bool(os.environ.get("PYTHONUNBUFFERED")))
    sys.path[:0] = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    importlib.invalidate_caches()
    # The rest was fixed by imports.
    tempfile.tempdir = None
    time.tzset()
    sys.modules["numpy"].random.seed()
    multiprocessing.process.ORIGINAL_DIR = os.getcwd()  # type: ignore[attr-defined]
    if (own := os.environ.get("OMP_NUM_THREADS")) != threads:
        set_compute_threads(int(own) if own else len(os.sched_getaffinity(0)))


def _open_streams(unbuffered: bool) -> None:
    """Open the standard streams as the interpreter does."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        before = getattr(sys, name)
        stream = open(  # noqa: SIM115 - for as long as the program runs
            number,
            "w" if number else "r",
            buffering=1 if number == 2 or os.isatty(number) else -1,
            encoding=before.encoding,
            errors=before.errors,
            closefd=False,
        )
        stream.buffer.raw.name = f"<{name}>"  # type: ignore[attr-defined]
        if unbuffered and number:
            stream.reconfigure(line_buffering=False, write_through=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _run(program: dict[str, Any]) -> NoReturn:
    """Run the program as `__main__`, and leave as the interpreter does."""
    code = 0
    try:
        _execute(program["kind"], program["what"], tuple(program["arguments"]))
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        if not isinstance(leaving.code, int | None):
            print(leaving.code, file=sys.stderr)
    except BaseException as error:  # noqa: BLE001 - the program ends here, whatever ended it
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename in (__file__, rank.__file__):
            frames = frames.tb_next
        sys.excepthook(type(error), error.with_traceback(frames), frames)
    if code < 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    leave(code & 0xFF)


def _execute(kind: str, what: str, arguments: tuple[str, ...]) -> None:
    if kind == "script":
        run_target(ScriptTarget(what, arguments), [])
    elif kind == "-m":
        run_target(ModuleTarget(what, arguments), [])
    else:
        main = types.ModuleType("__main__")
        main.__dict__["__builtins__"] = __builtins__
        sys.modules["__main__"] = main
        sys.argv = ["-c", *arguments]
        sys.orig_argv = [sys.executable, "-c", what, *arguments]
        if what.startswith(_START):  # which loads this package; it is loaded
            what = what.removeprefix(_START)[1:].lstrip()
        else:
            sys.path.insert(0, "")
        exec(compile(what, "<string>", "exec", dont_inherit=True), main.__dict__)
