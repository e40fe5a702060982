"""One run of horovodrun: start it, follow its output and its ranks, and find the cause of a failure."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import selectors
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.diagnosis import Evidence
from phalanx.engines.horovod.entry_point import ENDED, STARTED
from phalanx.errors import EXIT_PREEMPTED
from phalanx.host.processes import SignalInbox, is_same_user, send_signal
from phalanx.launch.environment import NodeInfo
from phalanx.launch.error_file import read_record
from phalanx.launch.failure import FailureReport
from phalanx.launch.group import RankState, remove_empty
from phalanx.launch.launcher_loop import SUCCESS_CODES, LauncherLoop, Outcome, ended_well, stopped
from phalanx.launch.output import RankConsole, RankLog
from phalanx.launch.spec import LaunchSpec

_END = re.compile(rb"\r\n|\n|\r")
_LONGEST = 1 << 20
_OF_RANK = re.compile(rb"\[(?:\d+,)?(\d+)\]<(?:stdout|stderr)>:(.*)", re.DOTALL)
"""horovodrun writes [rank], Open MPI [job,rank]."""
_ENDED = re.compile(r"Process (\d+) exit with status code (\d+)")
_OWN_LINES = 60
_SHELL_MESSAGES = ("Terminated", "Killed")
"""What the shell around a rank prints when the rank was killed: the report says more."""


@dataclass
class HorovodOutput:
    """Every rank's lines go to its log and to `show`; horovodrun's own last lines are kept."""

    log_dir: Path
    show: Callable[[int, str], None]
    on_exit: Callable[[int, int], None]
    notice: Callable[[str], None]
    launcher_lines: list[str] = field(default_factory=list)
    """The last lines of horovodrun itself."""
    _logs: dict[int, RankLog] = field(default_factory=dict)
    _partial: bytes = b""

    def feed(self, data: bytes) -> None:
        """Process output; lines that are complete are passed on."""
        begun, start = self._partial, 0
        for end in _END.finditer(data):
            self._handle_line(begun + data[start : end.end()])
            begun, start = b"", end.end()
        self._partial = begun + data[start:]
        if len(self._partial) > _LONGEST:
            self._handle_line(self._partial)
            of_rank = _OF_RANK.match(self._partial)
            self._partial = self._partial[: of_rank.start(2)] if of_rank else b""

    def close(self) -> None:
        """Pass on the rest, and close the logs."""
        if self._partial:
            self._handle_line(self._partial + b"\n")
        self._partial = b""
        for log in self._logs.values():
            log.close()
        self._logs.clear()

    def _handle_line(self, line: bytes) -> None:
        of_rank = _OF_RANK.match(line)
        if of_rank is None:
            output = line.decode(errors="replace").rstrip()
            self.launcher_lines = [*self.launcher_lines, output][-_OWN_LINES:] if output else self.launcher_lines
            if (ended := _ENDED.match(output)) is not None:
                self.on_exit(int(ended[1]), int(ended[2]))
            return
        rank, data = int(of_rank[1]), of_rank[2]
        if rank not in self._logs:
            self._logs[rank] = RankLog(self.log_dir, rank, self.notice)
        self._logs[rank].write(data)
        text = data.decode(errors="replace")
        if text.rstrip() not in _SHELL_MESSAGES:
            self.show(rank, text)


_EVENT_BYTES = 1 << 18
_CHUNK = 1 << 16
_KILL_SECONDS = 2.0
_LAST_LINES = 8


class HorovodAttempt(LauncherLoop):
    """Runs once."""

    def __init__(
        self, spec: LaunchSpec, console: RankConsole, inbox: SignalInbox, number: int, *, ranks: int, elastic: bool
    ) -> None:
        super().__init__(spec, console, inbox)
        self._number = number
        self._elastic = elastic
        self._evidence = Evidence(spec, NodeInfo(0, 1, 0, ranks, "", 0))
        self._states = {rank: RankState(rank, spec.label(rank), f"r{rank}", rank) for rank in range(ranks)}
        self._lost: set[int] = set()
        """Ranks without which an elastic run continues."""
        self._pidfds: dict[int, int] = {}
        self._over = False
        self._connections: list[socket.socket] = []
        self.name = f"phalanx-{uuid.uuid4().hex}"
        """The name (in Linux' abstract namespace) of the socket at which ranks of this machine reach the launcher."""
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind("\0" + self.name)
        self._listener.listen(ranks)
        self._output = HorovodOutput(spec.log_dir, self._show, self._handle_exit, console.notice)

    def run(self, command: list[str], environment: dict[str, str]) -> Outcome:
        """Start horovodrun and follow it to its end."""
        self._evidence.clear(list(self._states), self._number)
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches the launcher alone, which passes it on
        )
        assert self._process.stdout is not None
        self._selector.register(self._process.stdout, selectors.EVENT_READ, self._handle_output)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        try:
            self._follow()
            return self._outcome(self._process.wait())
        finally:
            self._close()

    # --- what arrives -------------------------------------------------------------------------------------------

    def _handle_output(self) -> None:
        assert self._process.stdout is not None
        data = os.read(self._process.stdout.fileno(), _CHUNK)
        if data:
            self._output.feed(data)
        else:  # horovodrun and its helper processes have ended
            self._over = True

    def _show(self, rank: int, line: str) -> None:
        lowest = next((rank for rank in sorted(self._states) if rank not in self._lost), 0)
        if self._spec.console_ranks == "all" or rank == lowest:
            self._console.rank_output(rank, self._spec.label(rank), line)

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        if not is_same_user(connection):
            connection.close()
            return
        connection.setblocking(False)
        self._connections.append(connection)
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._handle_events(connection))

    def _handle_events(self, connection: socket.socket) -> None:
        try:
            while data := connection.recv(_EVENT_BYTES):
                self._handle_event(json.loads(data))
        except BlockingIOError:
            return
        except ConnectionResetError:
            pass  # the same as its end
        self._selector.unregister(connection)
        self._connections.remove(connection)
        connection.close()

    def _handle_event(self, event: dict[str, Any]) -> None:
        state = self._states.get(event.get("rank", -1))
        if event["event"] == STARTED and state is not None:
            state.pid, state.code = event["pid"], None
            if (old := self._pidfds.pop(state.rank, None)) is not None:
                os.close(old)
            # A pidfd: after an end that is not reported here, the pid may belong to another process.
            with contextlib.suppress(ProcessLookupError):  # it has ended already
                self._pidfds[state.rank] = os.pidfd_open(event["pid"])
            self._lost.discard(state.rank)
            if self._requested is not None:
                self._signal(state.rank, self._requested)
        elif event["event"] == ENDED and state is not None:
            self._end(state, event["code"])
        else:
            self._console.handle(event)

    def _handle_exit(self, rank: int, code: int) -> None:
        """Note how a rank ended as horovodrun reports it, where the rank itself did not."""
        state = self._states.get(rank)
        if state is None:
            return
        if state.alive:
            self._end(state, -(code - 128) if code > 128 else code)
        if self._elastic and self._requested is None and state.code not in SUCCESS_CODES:
            self._lost.add(rank)
            self._console.notice(f"rank {rank} was lost (exit code {code}): Horovod continues with the others")

    def _end(self, state: RankState, code: int) -> None:
        state.code, state.ended = code, time.time()

    # --- the end ------------------------------------------------------------------------------------------------

    def _is_over(self) -> bool:
        return self._over

    def _stop_ranks(self, number: signal.Signals, grace: float) -> None:
        """Let the ranks stop at a step boundary: a rank that gets the signal passes it on to other nodes."""
        super()._stop_ranks(number, grace)
        if not self._living():
            send_signal(self._process.pid, signal.SIGTERM)

    def _living(self) -> list[int]:
        return [state.rank for state in self._states.values() if state.alive and state.pid is not None]

    def _signal_ranks(self, number: int) -> None:
        for rank in self._living():
            self._signal(rank, number)

    def _signal(self, rank: int, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, KeyError):
            signal.pidfd_send_signal(self._pidfds[rank], number)

    def _kill_ranks(self) -> None:
        self._signal_ranks(signal.SIGKILL)
        send_signal(self._process.pid, signal.SIGTERM)
        self._later(_KILL_SECONDS, self._kill_driver)

    def _kill_driver(self) -> None:
        """Kill horovodrun; its helper processes, which have their own sessions, then end the remaining ranks."""
        if self._process.poll() is None:
            self._process.kill()

    def _close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        for connection in (*self._connections, self._listener):
            connection.close()
        for descriptor in self._pidfds.values():
            os.close(descriptor)
        self._output.close()
        self._evidence.close()
        self._selector.close()
        codes = [state.code for state in self._states.values()]
        remove_empty(self._spec.log_dir, self._states, logs=ended_well(codes))

    def _outcome(self, code: int) -> Outcome:
        for connection in list(self._connections):
            self._handle_events(connection)
        self._output.close()
        states = list(self._states.values())
        for state in states:
            if state.alive and code == 0:
                self._end(state, 0)
        codes = [state.code for state in states if state.rank not in self._lost]
        if self._requested is not None:
            has_started = any(state.pid is not None for state in states)
            return stopped(self._requested, codes, "" if has_started else "horovodrun was starting the ranks")
        if code == 0:
            return Outcome(EXIT_PREEMPTED if EXIT_PREEMPTED in codes else 0)
        failure = self._find_failure(states)
        return Outcome(failure.exit_code, failure)

    def _find_failure(self, states: list[RankState]) -> FailureReport:
        failed = [state for state in states if state.code not in (None, *SUCCESS_CODES)]
        # After a failure horovodrun sends SIGTERM to the others: those count only where no other rank failed.
        of_themselves = [state for state in failed if state.code != -signal.SIGTERM] or failed
        if failed:
            victims = [state for state in failed if state not in of_themselves]
            failure = self._evidence.find_failure([state for state in states if state not in victims])
            record = None if failure.rank is None else read_record(self._spec.log_dir, failure.rank)
            # The node on which the rank ran is not always this one.
            return failure if record is None else dataclasses.replace(failure, host=record["host"])
        lines = [line for line in self._output.launcher_lines if not line.startswith((" ", "Traceback"))][-_LAST_LINES:]
        has_started = any(state.pid is not None for state in states)
        hint = "Every node must let this user in by ssh without a password, and have this Python at the same path."
        return FailureReport(
            cause="horovodrun gave up before a rank had failed" if has_started else "horovodrun started no rank",
            exit_code=1,
            details=tuple(lines),
            hint=hint if any("ssh" in line for line in lines) else "",
            logs=str(self._spec.log_dir),
        )
