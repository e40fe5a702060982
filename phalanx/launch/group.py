"""The ranks of one node in one attempt: start them, read their output and events, signal them, note their ends."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from phalanx.host import messages
from phalanx.host.processes import JOINS_LATE, kill_group
from phalanx.launch.environment import NodeInfo, rank_environment, threads_per_rank
from phalanx.launch.error_file import record_path
from phalanx.launch.forkserver.client import Session
from phalanx.launch.launcher_loop import ProcessExited, ProcessRefused, ProcessStarted
from phalanx.launch.output import OutputPump, RankConsole, RankLog, log_path
from phalanx.launch.rank_files import calls_path, open_stack, process_path, stack_path
from phalanx.launch.spec import CallTarget, LaunchSpec, target_to_message

_EVENT_BYTES = 1 << 18
_STOPPED_BEFORE_START = -9
_ADDED = itertools.count(1)


def remove_empty(log_dir: Path, ranks: Iterable[int], *, logs: bool) -> None:
    """Remove the empty stack files of ranks that have ended; with `logs` empty logs too, and what they answered."""
    for rank in ranks:
        process_path(log_dir, rank).unlink(missing_ok=True)
        if logs:
            calls_path(log_dir, rank).unlink(missing_ok=True)
            stack_path(log_dir, rank).unlink(missing_ok=True)
        for path in (stack_path(log_dir, rank), *([log_path(log_dir, rank)] if logs else [])):
            with contextlib.suppress(OSError):  # a full or lost disk is reported by those who write there
                if path.stat().st_size == 0:
                    path.unlink()


@dataclass
class RankState:
    """What the supervisor knows of one rank."""

    rank: int
    label: str
    key: str
    """The name of the process in messages to the fork server."""
    slot: int
    """The number in the names of its files; its rank may change while it runs."""
    node: str = ""
    """The node, where there are several."""
    local_rank: int = 0
    pid: int | None = None
    code: int | None = None
    """None while it runs; then as `subprocess` has it."""
    ended: float = 0.0
    stopped_since: float | None = None
    killed_for: str = ""
    """Why this launcher killed it, if so: the end of a sentence that begins with its name."""
    dismissed: bool = False
    """Whether it was asked to end, because the run goes on without it."""

    @property
    def alive(self) -> bool:
        """Whether it has not ended yet."""
        return self.code is None


class RankGroup:
    """This node's ranks. `start` puts their sockets and pipes on a selector, whose callbacks update `ranks`."""

    def __init__(self, spec: LaunchSpec, node: NodeInfo, session: Session, console: RankConsole) -> None:
        self._spec, self._node, self._session, self._console = spec, node, session, console
        self._pumps: dict[str, list[OutputPump]] = {}
        self._logs: dict[str, RankLog] = {}
        self._events, self._events_far = messages.socket_pair()
        self._events.setblocking(False)
        self.on_event: Callable[[dict[str, Any]], None] = console.handle
        self.ranks = {
            f"r{rank}": RankState(rank, spec.label(rank), f"r{rank}", rank, node.own, rank - node.first_rank)
            for rank in range(node.first_rank, node.first_rank + spec.ranks_per_node)
        }
        self.controls: dict[str, socket.socket] = {}
        """The control sockets of ranks that may get another position while they run, by key."""

    @property
    def states(self) -> list[RankState]:
        """All ranks that are not retired."""
        return list(self.ranks.values())

    @property
    def alive(self) -> list[RankState]:
        """The ranks that have not ended."""
        return [state for state in self.ranks.values() if state.alive]

    @property
    def has_started(self) -> bool:
        """Whether any rank has been forked or refused."""
        return any(state.pid is not None or state.code is not None for state in self.ranks.values())

    def start(self, attempt: int, shared_env: dict[str, str], selector: selectors.BaseSelector, scratch: Path) -> None:
        """Fork every rank and listen to them; each has a folder for its sockets in `scratch`."""
        selector.register(self._events, selectors.EVENT_READ, self._on_events)
        self._selector, self._attempt, self._shared_env, self._scratch = selector, attempt, shared_env, scratch
        for state in self.ranks.values():
            self._start_rank(state)
        if self._spec.elastic is None:
            self._events_far.close()

    def add(self, generation: int) -> RankState:
        """Fork one more rank, which waits until it gets a position; it takes the lowest free number for its files."""
        used = {state.slot for state in self.alive}
        first = self._node.first_rank
        slot = next(number for number in itertools.count(first) if number not in used)
        for ended in [member for member in self.ranks.values() if member.slot == slot]:
            self.retire(ended)
        key = f"r{slot}g{generation}-{next(_ADDED)}"
        state = RankState(slot, self._spec.label(slot), key, slot, self._node.own, slot - first)
        self.ranks[state.key] = state
        record_path(self._spec.log_dir, slot).unlink(missing_ok=True)
        self._start_rank(state, {JOINS_LATE: "1"})
        return state

    def retire(self, state: RankState) -> None:
        """Forget a rank that has ended and whose place another one takes, and close what it wrote to."""
        if self.ranks.pop(state.key, None) is not None:
            self._close_rank(state.key, self._selector)

    def _close_rank(self, key: str, selector: selectors.BaseSelector) -> None:
        """Pass on the last output of a rank, and close its log and its control socket."""
        listened: list[OutputPump | socket.socket] = [*self._pumps.pop(key, [])]
        if (control := self.controls.pop(key, None)) is not None:
            listened.append(control)
        for end in listened:
            if end in selector.get_map():
                selector.unregister(end)
            end.close()
        if (log := self._logs.pop(key, None)) is not None:
            log.close()

    def _start_rank(self, state: RankState, more: Mapping[str, str] = MappingProxyType({})) -> None:
        common = {
            "do": "rank",
            "target": target_to_message(self._spec.target),
            "prelude": self._spec.prelude,
            "cwd": os.getcwd(),
            "path": sys.path,
            "threads": threads_per_rank(self._spec, self._shared_env),
            "log_dir": str(self._spec.log_dir.absolute()),
        }
        local_rank = state.slot - self._node.first_rank
        env = rank_environment(self._spec, self._node, local_rank, self._attempt, self._shared_env)
        scratch = str(self._scratch / f"{self._attempt}-{state.key}")
        of_rank = {"key": state.key, "rank": state.slot, "env": {**env, **more}, "scratch": scratch}
        self._fork({**common, **of_rank}, state, self._selector)

    def _fork(self, request: messages.Message, state: RankState, selector: selectors.BaseSelector) -> None:
        log = RankLog(self._spec.log_dir, state.slot, self._console.notice)
        self._logs[state.key] = log
        stack = open_stack(self._spec.log_dir, state.slot)
        stdin = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        with contextlib.suppress(OSError):  # this process's stdin may be closed
            if not os.isatty(0):  # a terminal may be read by its own session only
                os.dup2(0, stdin, inheritable=False)
        pumps = self._pumps[state.key] = self._make_pumps(state, log, selector)
        out, err = (pumps[0].write_end, pumps[-1].write_end) if pumps else (log.descriptor, log.descriptor)
        request["writes_log"] = not pumps
        descriptors = [stdin, out, err, log.descriptor, stack, self._events_far.fileno()]
        far_end: socket.socket | None = None
        if self._spec.elastic is not None:
            self.controls[state.key], far_end = messages.socket_pair()
            descriptors.append(far_end.fileno())
        try:
            self._session.fork(request, descriptors)
        finally:
            if far_end is not None:
                far_end.close()
            os.close(stdin)
            os.close(stack)
            for pump in pumps:
                pump.close_write_end()

    def _make_pumps(self, state: RankState, log: RankLog, selector: selectors.BaseSelector) -> list[OutputPump]:
        """Make the pumps of a shown rank's standard output and error: one for both where they have one destination.

        Where one rank of a user's program is shown on a terminal, that rank writes to a terminal too.
        """
        alone = self._spec.console_ranks == "0"
        if alone and state.slot != 0:
            return []
        streams = self._console.streams
        terminals = [streams.out_terminal] if streams.same else [streams.out_terminal, streams.err_terminal]
        if not alone or isinstance(self._spec.target, CallTarget):
            terminals = [None] * len(terminals)
        return [
            self._listen(
                OutputPump(state.slot, state.label, log, self._console, err=number > 0, terminal=terminal), selector
            )
            for number, terminal in enumerate(terminals)
        ]

    def _listen(self, pump: OutputPump, selector: selectors.BaseSelector) -> OutputPump:
        def pass_on() -> None:
            if not pump.pump():
                selector.unregister(pump)

        selector.register(pump, selectors.EVENT_READ, pass_on)
        return pump

    def on_message(self, message: ProcessStarted | ProcessExited | ProcessRefused) -> RankState | None:
        """Note a message of the fork server; return the rank that it is about, if any."""
        state = self.ranks.get(message.key)
        if state is None:
            return None
        if isinstance(message, ProcessStarted):
            state.pid = message.pid
        elif isinstance(message, ProcessExited):
            state.code, state.ended = message.code, message.time
        else:
            state.code, state.ended = _STOPPED_BEFORE_START, time.time()
            self._console.notice(f"rank {state.rank} could not be started: {message.why}")
        return state

    def _on_events(self) -> None:
        for data in messages.read_available(lambda: self._events.recv(_EVENT_BYTES)):
            self.on_event(json.loads(data))

    def signal(self, number: int, states: list[RankState] | None = None) -> None:
        """Send a signal to the given ranks, or to all that are alive; SIGKILL also goes to what they started."""
        for state in self.alive if states is None else states:
            self._session.signal(state.key, number)

    def kill_directly(self) -> None:
        """Kill the ranks with what they started, without the fork server; it has not reaped them, so pids hold."""
        for state in self.alive:
            if state.pid is not None:
                kill_group(state.pid)

    def resize(self) -> None:
        """Pass on that the console's terminal has another size."""
        for pump in itertools.chain.from_iterable(self._pumps.values()):
            pump.resize()
        self.signal(signal.SIGWINCH)

    def close(self, selector: selectors.BaseSelector, *, failed: bool = False) -> None:
        """Pass on the last output and events, close everything and remove empty files; a report may name the logs."""
        self._on_events()
        selector.unregister(self._events)
        self._events.close()
        self._events_far.close()
        for key in list(self._logs):
            self._close_rank(key, selector)
        remove_empty(self._spec.log_dir, [state.slot for state in self.ranks.values()], logs=not failed)
