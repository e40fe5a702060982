"""`Popen` and `run` for Python programs that use Phalanx: forked from a process that has imported torch.

They take what `subprocess.Popen` and `subprocess.run` take. The program is a real child of the caller, with its own
descriptors, environment, folder, session and exit code. It gets a fresh interpreter instead if the command is not
plain Python (`python x.py`, `-m x` or `-c x`, alone or after `ip netns exec HOST`), or if its environment or a file
beside it would change what the warm process has imported. A test of what a fresh interpreter does (imports, time to
start, the end of a stream) calls `subprocess` itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import DEVNULL, PIPE, CompletedProcess, TimeoutExpired
from typing import Any

import psutil

from phalanx.host import messages
from phalanx.launch.forkserver import client
from phalanx.launch.forkserver.preload import PRELOAD, SINGLE_THREADED

__all__ = ["DEVNULL", "Popen", "TimeoutExpired", "run"]  # what the client of the fork server takes from `subprocess`

SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""A program ignores those of them that its parent ignores; nohup ignores the first."""
WARM = "tests-warm"
"""The name of the warm process of a program, which `ps` shows."""
IMPORTED = (
    *("phalanx.cli.train", "phalanx.worker", "phalanx.run.trainer", "phalanx.strategies.compose"),
    *("phalanx.checkpoint.read", "phalanx.checkpoint.write", "phalanx.comm.backend", "phalanx.loop.checks"),
    *("phalanx.diagnosis.blame", "phalanx.diagnosis.nonfinite", "phalanx.diagnosis.out_of_memory"),
    *("phalanx.recovery.ranks.neighbours", "phalanx.zoo.models.loss", "phalanx.zoo.models.registry"),
    *("phalanx.launch.supervisor", "psutil", "pytest"),
)
"""What the command and the ranks of most tests import beside torch, which takes as long as a small training."""
ROOT = str(Path(__file__).resolve().parents[2])
_PYTHON = sys.executable
_SET_IN_PROGRAMS = ("PYTHONPATH", "PYTHONUNBUFFERED")
_READ_LATER = ("PYTHONBREAKPOINT", "TORCHINDUCTOR_CACHE_DIR", "PYTORCH_NVML_BASED_CUDA_CHECK", "KMP_")
_LOCALE = ("LANG", "LC_")

_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


class _Unavailable(Exception):
    """The program needs a fresh interpreter."""


class Popen(subprocess.Popen):  # type: ignore[type-arg]
    """A program, forked where it can be."""

    def _execute_child(  # type: ignore[no-untyped-def]
        self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, restore_signals, *process,
    ) -> None:  # fmt: skip
        pipes = (p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)
        *user, start_new_session, group = process
        is_plain = not (executable or preexec_fn or shell) and close_fds and restore_signals
        is_plain = is_plain and (*user, group) == (None, None, None, -1, -1)
        if is_plain and (program := _parse(args)) and (warm := _of_this_process()):
            given = [end if end >= 0 else number for number, end in enumerate((p2cread, c2pwrite, errwrite))]
            request = {
                "program": program,
                "env": dict(os.environ if env is None else env),
                "cwd": os.path.abspath(cwd or os.curdir),
                "session": bool(start_new_session),
                "passed": list(pass_fds),
                "ignored": [int(number) for number in SIGNALS if signal.getsignal(number) == signal.SIG_IGN],
            }
            with contextlib.suppress(_Unavailable):
                self.pid = warm.fork(request, [*given, *pass_fds])
                self._child_created = True
                self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]
                return
        super()._execute_child(  # type: ignore[misc]
            args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell, *pipes,
            restore_signals, *process,
        )  # fmt: skip


def run(
    args: Sequence[object], *, input: Any = None, capture_output: bool = False, timeout: float | None = None,
    check: bool = False, **options: Any,
) -> CompletedProcess[Any]:  # fmt: skip
    """`subprocess.run`, by `Popen` of this module."""
    if input is not None:
        options["stdin"] = PIPE
    if capture_output:
        options.update(stdout=PIPE, stderr=PIPE)
    with Popen(args, **options) as process:
        try:
            out, err = process.communicate(input, timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = CompletedProcess(process.args, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


def started_by(process: subprocess.Popen[Any]) -> list[psutil.Process]:
    """Return all processes that a program has started, and not its warm process."""
    found = psutil.Process(process.pid).children(recursive=True)
    return [each for each in found if each.name() != WARM]


def _parse(args: Any) -> dict[str, Any] | None:
    """Return what a command runs, or None if it is not plain Python with this interpreter."""
    words = [args] if isinstance(args, str | bytes | os.PathLike) else [os.fspath(word) for word in args]
    host = ""
    if words[:3] == ["ip", "netns", "exec"]:
        host, *words = words[3:]
    if len(words) < 2 or words[0] != _PYTHON or not all(isinstance(word, str) for word in words):
        return None
    first, *rest = words[1:]
    if first in ("-m", "-c") and rest:
        return {"kind": first, "what": rest[0], "arguments": rest[1:], "host": host}
    return None if first.startswith("-") else {"kind": "script", "what": first, "arguments": rest, "host": host}


def settings_of(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that matter while a program begins and imports."""
    read = client.import_settings({name: value for name, value in environ.items() if name != PRELOAD})
    read.update({name: value for name, value in environ.items() if name.startswith(_LOCALE)})
    return {name: read[name] for name in read if not name.startswith((*_SET_IN_PROGRAMS, *_READ_LATER))}


class WarmProcess:
    """The near end of a process that forks programs for this one; `warm_process` is the far end."""

    def __init__(self, control: socket.socket, settings: Mapping[str, str]) -> None:
        self._control = control
        self._settings = dict(settings)
        self._lock = threading.Lock()

    def fork(self, request: dict[str, Any], descriptors: Sequence[int]) -> int:
        """Start a program as a child of this process, and return its id."""
        if settings_of(request["env"]) != self._settings:
            raise _Unavailable
        near, far = messages.socket_pair()
        with near, self._lock:
            with far:
                try:
                    messages.send(self._control, {**request, "parent": os.getpid()}, [far.fileno(), *descriptors])
                except OSError as error:
                    raise _Unavailable from error
            pid = int(near.recv(32) or b"0")
            if not pid:
                raise _Unavailable
            # The process between the warm one and the program ends now. Its child goes to the nearest ancestor that
            # takes such children: for this moment that is this process.
            _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                near.send(b"go")
                near.recv(1)
            finally:
                _libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        return pid

    def close(self) -> None:
        """Let the warm process end."""
        self._control.close()


_warm: WarmProcess | None = None
_process: subprocess.Popen[bytes] | None = None
"""In a process of pytest: the warm process itself, which has imported everything in a fresh interpreter."""
_environ: dict[str, str] | None = None
"""What that one begins with, whatever variables the first test that needs it has set."""


def prepare() -> None:
    """Let this process's programs be forked: the first of them starts the warm process."""
    global _environ
    _environ = dict(os.environ)


def end() -> None:
    """End the warm process, if there is one."""
    global _environ, _process
    _environ = None
    if _warm is not None and _process is not None:
        take(None)
        _process.wait()
    _process = None


def pid() -> int | None:
    """Return the id of the warm process, or None if there is none."""
    return None if _process is None else _process.pid


def take(warm: WarmProcess | None) -> None:
    """Have the programs of this process forked by that one."""
    global _warm
    if _warm is not None:
        _warm.close()
    _warm = warm


def _of_this_process() -> WarmProcess | None:
    if _process is not None and _process.poll() is not None:
        raise RuntimeError(f"the process that forks the programs of the tests has ended with {_process.returncode}")
    if _warm is None and _environ is not None:
        _begin(_environ)
    return _warm


def _begin(environ: Mapping[str, str]) -> None:
    global _process
    near, far = messages.socket_pair()
    helpers = str(Path(__file__).parent)
    code = f"import sys; sys.path[0] = {helpers!r}; from warm_process import main; del sys.path[0]; main()"
    with far:
        _process = subprocess.Popen(
            [sys.executable, "-c", code, str(far.fileno())],
            env={**environ, **SINGLE_THREADED, "PYTHONPATH": ROOT},
            stdin=DEVNULL,
            pass_fds=[far.fileno()],
        )
    take(WarmProcess(near, settings_of(environ)))


def _forget_in_fork() -> None:
    """Keep a fork from its parent's warm process: its programs would become children of the parent."""
    global _environ, _process
    take(None)
    _environ = _process = None


os.register_at_fork(after_in_child=_forget_in_fork)
