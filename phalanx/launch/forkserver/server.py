"""The fork server: imports torch once, then forks ranks on request in milliseconds.

It runs in its own session; its arguments are a descriptor and a process id. One thread polls the control socket, one
socket per launch, and a pipe for SIGCHLD. When the socket of a launch closes, its ranks are killed; when the supervisor
has ended for any reason, everything is killed and the fork server ends.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from phalanx.host import messages
from phalanx.host.processes import JOINS_LATE, STOPS, die_with, kill_group, outlive_parent, send_signal, set_name
from phalanx.launch.forkserver.preload import preload, preload_for
from phalanx.launch.rank_files import ASK

Job = Callable[[], NoReturn]

# Some schedulers signal every process of a job: the ranks and the supervisor handle it, and need this process.
# SIGQUIT and ASK stay ignored in a fresh rank until it can answer with a stack and a record.
_LEFT_TO_THE_SUPERVISOR = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, ASK)


@dataclass(frozen=True)
class _Child:
    session: socket.socket
    key: str


class ForkServer:
    """Forks on request, reaps, reports, and kills what an ended supervisor has left running."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._poll = selectors.PollSelector()
        self._children: dict[int, _Child] = {}
        self._open: set[socket.socket] = {control}
        self._wakeup_read, self._wakeup_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._pidfd = -1

    def serve(self) -> Job:
        """Loop for ever in the parent; return in a forked child, with what it has to run."""
        # A handler must exist for the wakeup descriptor to be written.
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        for number in _LEFT_TO_THE_SUPERVISOR:
            signal.signal(number, signal.SIG_IGN)
        signal.set_wakeup_fd(self._wakeup_write, warn_on_full_buffer=False)
        self._poll.register(self._wakeup_read, selectors.EVENT_READ, self._reap)
        # The supervisor's process itself is watched: a forked child of it may hold a copy of the socket open.
        with contextlib.suppress(OSError):  # a kernel without pidfd: the end of the control socket is enough
            self._pidfd = os.pidfd_open(os.getppid())
            self._poll.register(self._pidfd, selectors.EVENT_READ, lambda _: self._end())
        self._poll.register(self._control, selectors.EVENT_READ, self._on_session)
        while True:
            for key, _ in self._poll.select():
                job = key.data(key.fileobj)
                if job is not None:
                    return job  # type: ignore[no-any-return]

    def _on_session(self, _: socket.socket) -> None:
        received = messages.receive(self._control)
        if received is None:
            self._end()
        session = socket.socket(fileno=received[1][0])
        self._open.add(session)
        self._poll.register(session, selectors.EVENT_READ, self._on_request)

    def _on_request(self, session: socket.socket) -> Job | None:
        received = messages.receive(session)
        if received is None:
            self._drop(session)
            return None
        request, descriptors = received
        if request["do"] == "signal":  # to a child that has not been reaped: only here is its pid known to be valid
            for pid, child in self._children.items():
                if child == _Child(session, request["key"]):
                    if request["signal"] == signal.SIGKILL:
                        kill_group(pid)
                    else:
                        send_signal(pid, request["signal"])
            return None
        preload_for(request.get("target", {}))
        return self._fork(session, request, descriptors)

    def _fork(self, session: socket.socket, request: messages.Message, descriptors: list[int]) -> Job | None:
        parent = os.getpid()
        # A signal for the child waits until it has reset the handlers: before, it would be lost, or go to this
        # process's pipe.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, *_LEFT_TO_THE_SUPERVISOR, *STOPS})
        try:
            pid = os.fork()
            if pid == 0:
                self._reset_handlers()
                if JOINS_LATE in request.get("env", {}):  # others wait for it: it stops with them, not before
                    mask |= set(STOPS)
        except OSError as error:
            self._send(session, {"refused": request["key"], "why": str(error)})
            pid = -1
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if pid == 0:
            return self._become(parent, request, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        if pid > 0:
            self._children[pid] = _Child(session, request["key"])
            self._send(session, {"started": request["key"], "pid": pid})
        return None

    def _reset_handlers(self) -> None:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def _become(self, parent: int, request: messages.Message, descriptors: list[int]) -> Job:
        """Turn this fork into a rank or a store agent, which keeps nothing of the fork server but ends with it."""
        os.setpgid(0, 0)
        die_with(parent)
        set_name(f"phalanx-{request['key']}")
        self._poll.close()
        for end in self._open:
            end.close()
        for descriptor in (self._wakeup_read, self._wakeup_write, self._pidfd):
            if descriptor >= 0:
                os.close(descriptor)
        if request["do"] == "agent":
            from phalanx.launch.store_agent import serve

            return lambda: serve(request, descriptors)
        from phalanx.launch.rank import run

        return lambda: run(request, descriptors)

    def _reap(self, _: int) -> None:
        os.read(self._wakeup_read, 4096)
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            pid = ended.si_pid
            # Kill its group before the pid is released, so that no other process can have it.
            kill_group(pid)
            _, status = os.waitpid(pid, 0)
            child = self._children.pop(pid, None)
            if child is not None:
                code = os.waitstatus_to_exitcode(status)
                self._send(child.session, {"exited": child.key, "code": code, "time": time.time()})

    def _send(self, session: socket.socket, message: messages.Message) -> None:
        try:
            messages.send(session, message)
        except OSError:
            # The launch has ended; the end of its socket leads to _drop.
            return

    def _drop(self, session: socket.socket) -> None:
        for pid, child in self._children.items():
            if child.session is session:
                kill_group(pid)
        self._poll.unregister(session)
        self._open.discard(session)
        session.close()

    def _end(self) -> NoReturn:
        for pid in self._children:
            kill_group(pid)
        os._exit(0)


def main() -> NoReturn:
    """Preload, then serve the supervisor; arguments: the descriptor of its socket, and its process id."""
    descriptor, supervisor = (int(word) for word in sys.argv[1:])
    control = socket.socket(fileno=descriptor)
    control.set_inheritable(False)
    set_name("phalanx-fork")
    if supervisor:
        # While torch is imported nothing is polled. Later the ranks' own children have to be killed first.
        die_with(supervisor)
    preload()
    outlive_parent()
    ForkServer(control).serve()()


if __name__ == "__main__":
    main()
