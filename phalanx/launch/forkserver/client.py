"""Client of the fork server: started once, used by every launch of this Python process, ended with it."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence

from phalanx.errors import ForkServerDiedError
from phalanx.host import messages
from phalanx.host.processes import how_it_ended, own_python
from phalanx.launch.forkserver.preload import PRELOAD, SINGLE_THREADED

# Read by the interpreter, by torch or by its libraries at import: ranks forked from a process that imported under other
# values would ignore them.
_READ_AT_IMPORT = ("PYTHON", "TORCH", "PYTORCH", "OMP_", "KMP_", "MKL_", "GOMP_", "LD_", "MALLOC_")
_SET_IN_EVERY_RANK = ("OMP_NUM_THREADS", "TORCHELASTIC_")
_READ_BY_TENSORFLOW = (PRELOAD, "TF_", "KERAS_", "XLA_")


def import_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that take effect only while torch and further modules are imported."""
    read = (*_READ_AT_IMPORT, *_READ_BY_TENSORFLOW) if environ.get(PRELOAD) else _READ_AT_IMPORT
    return {
        name: value
        for name, value in environ.items()
        if name.startswith(read) and not name.startswith(_SET_IN_EVERY_RANK)
    }


_ANSWER_SECONDS = 0.5
_END_SECONDS = 1.0


class ForkServerProcess:
    """A running `phalanx.launch.forkserver.server`. Once retired, it is closed after its last session."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.settings = import_settings(environ)
        self.is_serving = False
        """Whether it has answered: before that it imports torch and serves no request."""
        self._sessions = 0
        self._retired = False
        self._lock = threading.Lock()
        # Its output explains why it failed to start.
        self._output = os.memfd_create("fork-server-output", os.MFD_CLOEXEC)
        self._control, far_end = messages.socket_pair()
        # While it imports it ends with this process. The kernel ties it to the thread that starts it, and only the main
        # thread is sure to exist until then.
        parent = os.getpid() if threading.current_thread() is threading.main_thread() else 0
        with far_end:
            self._process = subprocess.Popen(
                own_python("from phalanx.launch.forkserver.server import main; main()", far_end.fileno(), parent),
                env={**environ, **SINGLE_THREADED},
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                pass_fds=[far_end.fileno()],
                # Ctrl-C at the terminal must reach the supervisor alone.
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """The fork server's id."""
        return self._process.pid

    def is_usable(self, environ: Mapping[str, str]) -> bool:
        """Whether it still runs and imported torch under the same settings."""
        return self._process.poll() is None and self.settings == import_settings(environ)

    def open_session(self) -> Session:
        """Open a connection for one launch."""
        near_end, far_end = messages.socket_pair()
        with far_end:
            try:
                messages.send(self._control, {"do": "session"}, [far_end.fileno()])
            except OSError as error:
                near_end.close()
                raise self.death() from error
        with self._lock:
            self._sessions += 1
        return Session(self, near_end)

    def end_session(self) -> None:
        """Note that a launch has ended."""
        with self._lock:
            self._sessions -= 1
            last = self._retired and self._sessions == 0
        if last:
            self.close()

    def retire(self) -> None:
        """Accept no more launches; close after those that run."""
        with self._lock:
            self._retired = True
            idle = self._sessions == 0
        if idle:
            self.close()

    def kill_if_idle(self) -> None:
        """Kill it at once, unless another launch uses it too."""
        with self._lock:
            is_shared = self._sessions > 1
        if not is_shared:
            self.kill()

    def close(self) -> None:
        """End the process and everything it forked, and wait for its end."""
        self._control.close()
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self.abandon()

    def abandon(self) -> None:
        """Close the descriptors without ending the process: in a fork it belongs to the parent."""
        self._control.close()
        if self._output >= 0:
            os.close(self._output)
            self._output = -1
        self._process.returncode = self._process.returncode or 0

    def death(self) -> ForkServerDiedError:
        """Return an error that explains, by its exit code and output, why the fork server has ended."""
        code = None
        with contextlib.suppress(subprocess.TimeoutExpired):  # its socket closes a moment before its end
            code = self._process.wait(_END_SECONDS)
        if code is not None and code < 0:
            return ForkServerDiedError(f"the fork server that starts the ranks {how_it_ended(code)}.")
        text = os.pread(self._output, 1 << 20, 0).decode(errors="replace").strip() if self._output >= 0 else ""
        tail = "\n  ".join(text.splitlines()[-12:])
        return ForkServerDiedError(
            f"the fork server that starts the ranks has died{':' if tail else '.'}\n  {tail}".rstrip(),
            hint="Check that `python -c 'import torch'` works with this interpreter.",
        )

    def wake(self) -> None:
        """Continue it if it was stopped (SIGSTOP): it could not forward signals."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill it together with everything it has forked."""
        self._process.kill()
        self._process.wait()


class Session:
    """One launch's connection to the fork server. Closing it kills every process of the launch."""

    def __init__(self, process: ForkServerProcess, end: socket.socket) -> None:
        self.server = process
        self._end = end

    def fileno(self) -> int:
        """Let selectors wait for messages."""
        return self._end.fileno()

    def fork(self, request: messages.Message, descriptors: Sequence[int]) -> None:
        """Request a process. `request["key"]` identifies it in replies."""
        try:
            messages.send(self._end, request, descriptors)
        except OSError as error:
            raise self.server.death() from error

    def signal(self, key: str, number: int) -> None:
        """Send a signal to a process of this session; SIGKILL goes to its whole group."""
        try:
            messages.send(self._end, {"do": "signal", "key": key, "signal": int(number)})
        except OSError:
            # The fork server and its ranks have ended; `receive` reports it.
            return

    def receive(self) -> messages.Message:
        """Return the next "started", "exited" or "refused" message."""
        received = messages.receive(self._end)
        if received is None:
            raise self.server.death()
        self.server.is_serving = True
        return received[0]

    def abort(self) -> None:
        """Close the connection at once; a fork server that does not react, and serves no other launch, is killed."""
        if self._end.fileno() < 0:
            return
        has_answered = False
        if self.server.is_serving:
            self._end.shutdown(socket.SHUT_WR)
            self._end.settimeout(_ANSWER_SECONDS)
            with contextlib.suppress(TimeoutError):
                while messages.receive(self._end) is not None:
                    continue
                has_answered = True  # it has killed all ranks, and closed the connection in turn
        if not has_answered:
            self.server.kill_if_idle()
        self.close()

    def close(self) -> None:
        """Close the connection; safe to call twice."""
        if self._end.fileno() >= 0:
            self._end.close()
            self.server.end_session()


_lock = threading.Lock()
_current: ForkServerProcess | None = None


def fork_server(environ: Mapping[str, str] | None = None) -> ForkServerProcess:
    """Return this process's fork server; start one where none was imported under the settings of `environ`."""
    global _current
    environ = os.environ if environ is None else environ
    with _lock:
        if _current is not None and not _current.is_usable(environ):
            _current.retire()
            _current = None
        if _current is None:
            _current = ForkServerProcess(environ)
        return _current


def prestart(env: Mapping[str, str] | None = None) -> None:
    """Start importing torch in the background for a launch that follows.

    `env`: what the launch will add to this process's environment.
    """
    fork_server({**os.environ, **(env or {})})


def shutdown() -> None:
    """End the fork server, if there is one."""
    global _current
    with _lock:
        if _current is not None:
            _current.close()
            _current = None


def _forget_in_fork() -> None:
    """Keep a fork from using or ending its parent's fork server, and from holding its connection open."""
    global _current, _lock
    _lock = threading.Lock()
    if _current is not None:
        _current.abandon()
        _current = None


atexit.register(shutdown)
os.register_at_fork(after_in_child=_forget_in_fork)
