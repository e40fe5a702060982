"""Evidence about a failed or silent rank: error file, exit code, heartbeat, stack, OOM-kill counter, log."""

from __future__ import annotations

import dataclasses
import math
import signal
import socket
import time
from collections.abc import Sequence
from typing import Any

from phalanx.diagnosis.blame import Blame
from phalanx.diagnosis.calls import RankCalls, read_calls
from phalanx.diagnosis.exits import RankExit, explain, find_first_cause
from phalanx.diagnosis.memory_breakdown import read_breakdown
from phalanx.diagnosis.stacks import describe_frames, is_waiting, main_stack, parse_frame, whereabouts
from phalanx.errors import EXIT_PREEMPTED, error_line, first_line
from phalanx.host.lost_peers import reports_lost_peer
from phalanx.host.processes import how_it_ended, is_stopped, oom_kills
from phalanx.launch.environment import NodeInfo
from phalanx.launch.error_file import read_record, record_path
from phalanx.launch.failure import FailureReport
from phalanx.launch.group import RankState
from phalanx.launch.launcher_loop import duration_text
from phalanx.launch.output import log_path, log_tail
from phalanx.launch.rank_files import calls_path, stack_path
from phalanx.launch.spec import LaunchSpec
from phalanx.launch.watches import Hang
from phalanx.observe.heartbeat import HeartbeatBoard, board_path

_USUAL_STEPS = 3
_SEE_STACK = "Its stack is in the .stack file next to its log."


class Evidence:
    """Reads what one attempt's ranks wrote into the log directory."""

    def __init__(self, spec: LaunchSpec, node: NodeInfo) -> None:
        self._spec = spec
        self._world_size = node.world_size
        slots = max(node.world_size, node.first_rank + spec.ranks_per_node)
        if spec.elastic is not None:  # besides the planned ranks: spare ones, and those that take over
            slots += spec.elastic.spares + spec.ranks_per_node
        self._board = HeartbeatBoard.create(board_path(spec.log_dir, node.node_rank), slots)
        self._oom_kills = oom_kills()
        self.late: dict[int, dict[str, Any]] = {}
        """By slot, what ranks that run have waited for too long, in the form of an error record."""

    def note_late(self, slot: int, text: str) -> None:
        """Note that a rank has waited too long for an operation that raises no error: as if it had raised one."""
        fixed = {"type": "CommunicationError", "hint": "", "exit_code": 1, "of_collectives": True, "traceback": []}
        self.late[slot] = {**fixed, "message": text, "time": time.time(), "step": self._step(slot)}

    def clear(self, ranks: Sequence[int], attempt: int) -> None:
        """Remove what earlier runs left under this node's ranks; the log continues across restarts."""
        for rank in ranks:
            record_path(self._spec.log_dir, rank).unlink(missing_ok=True)
            calls_path(self._spec.log_dir, rank).unlink(missing_ok=True)
            log = log_path(self._spec.log_dir, rank)
            if attempt == 0:
                log.unlink(missing_ok=True)
            else:
                with log.open("a") as file:
                    file.write(f"--- restart {attempt} ---\n")

    def of(self, state: RankState) -> RankExit:
        """Collect what is known of a rank's end (or, while it still runs, of its exception)."""
        return RankExit(
            rank=state.slot,
            code=state.code if state.code is not None else 1,
            time=state.ended or time.time(),
            record=read_record(self._spec.log_dir, state.slot) or (self.late.get(state.slot) if state.alive else None),
            log_tail=log_tail(self._spec.log_dir, state.slot),
            killed_for=state.killed_for,
        )

    def describe(self, state: RankState) -> str:
        """Return how a rank ended, as the end of a sentence that begins with its name."""
        end = self.of(state)
        if end.record:
            return f"raised {error_line(end.record['type'], end.record['message'])[:250]}"
        return end.killed_for or how_it_ended(end.code)

    def find_failure(self, states: Sequence[RankState]) -> FailureReport:
        """Explain the failure of the guilty rank among those that failed or are about to."""
        suspects = [self.of(state) for state in states if self._is_suspect(state)]
        guilty = find_first_cause(suspects)
        failure = explain(
            guilty,
            label=self._spec.label(guilty.rank),
            host=socket.gethostname(),
            step=self._step(guilty.rank),
            killed_for_memory=oom_kills() > self._oom_kills,
            log=log_path(self._spec.log_dir, guilty.rank),
            bill=read_breakdown(self._spec.log_dir, guilty.rank),
        )
        return dataclasses.replace(failure, others_stopped=self._others(states))

    def only_waited(self, states: Sequence[RankState]) -> bool:
        """Whether every rank that failed reports only that a collective failed: other ranks were lost or disagree."""
        suspects = [self.of(state) for state in states if self._is_suspect(state)]
        return bool(suspects) and all(suspect.is_about_collectives for suspect in suspects)

    def collect_calls(self, states: Sequence[RankState], since: float) -> list[RankCalls]:
        """Return the records of collectives that ranks have written since a time, or before an error ended them."""
        records = []
        for state in states:
            begin = 0.0 if self._is_suspect(state) else since
            calls = read_calls(self._spec.log_dir, state.slot, begin) or RankCalls(state.rank, answered=False)
            aborted = self._is_suspect(state) and self.of(state).has_mismatch and not calls.answered
            waits = not calls.answered and self._is_waiting(state)
            records.append(dataclasses.replace(calls, aborted=aborted, waits=waits, position=self._whereabouts(state)))
        return records

    def has_answered(self, state: RankState, since: float) -> bool:
        """Whether a rank has written its stack and then its record since a time, or cannot."""
        if not state.alive or (state.pid is not None and is_stopped(state.pid)):
            return True
        return read_calls(self._spec.log_dir, state.slot, since) is not None

    def _is_waiting(self, state: RankState) -> bool:
        runs = state.alive and not (state.pid is not None and is_stopped(state.pid))
        return runs and is_waiting(stack_path(self._spec.log_dir, state.slot))

    def _whereabouts(self, state: RankState) -> str:
        """Return where a rank is or how it ended, as the end of a sentence that begins with its name."""
        end = self.of(state)
        if end.record and state.slot not in self.late:
            frames = [frame for line in reversed(end.record["traceback"]) if (frame := parse_frame(line)) is not None]
            return self.describe(state) + (f" {describe_frames(frames)}" if frames else "")
        if state.alive:
            return f"is {self.position(state)}"
        stack = main_stack("\n".join(end.log_tail)) if state.code == -signal.SIGABRT else []
        return how_it_ended(state.code or 0) + (f" {describe_frames(stack)}" if stack else "")

    def explain_waiting(
        self, states: Sequence[RankState], blame: Blame | None, nodes: Sequence[str] | None
    ) -> FailureReport:
        """Report why ranks waited; `nodes`: other nodes without a heartbeat, None where there is one node."""
        silent = self.silent(states)
        if not self.only_waited(states):  # a rank has reported its cause meanwhile
            return self.find_failure(states)
        if nodes:
            return self.explain_lost_nodes(states, nodes, blame)
        if blame is not None:
            return self.explain_blame(states, blame)
        if silent:
            return self.explain_silence(states, silent)
        return self.find_failure(states) if nodes is None else self.explain_lost_nodes(states, ())

    def explain_blame(self, states: Sequence[RankState], blame: Blame) -> FailureReport:
        """Report the rank that a comparison of all ranks' collectives has found."""
        failure = self.find_failure(states)
        guilty = next((state for state in states if state.rank == blame.rank), None)
        verb = "gave up waiting" if reports_lost_peer(failure.cause) else "reported"
        error_text = f"rank {failure.rank} {verb}: {_raised(failure.cause)}"
        hint = "The records of all ranks are in the .collectives.json files next to their logs."
        facts = {"rank": blame.rank, "label": self._spec.label(blame.rank), "exit_code": failure.exit_code}
        return self._report(states, guilty, blame.cause, (*blame.details, error_text), hint, **facts)

    def _report(
        self,
        states: Sequence[RankState],
        guilty: RankState | None,
        cause: str,
        details: Sequence[str],
        hint: str,
        **more: Any,
    ) -> FailureReport:
        """Return the report about a rank of this node; `guilty`: None where it is not one of this node."""
        facts: dict[str, Any] = {"exit_code": 1, "logs": str(self._spec.log_dir)}
        if guilty is not None:
            facts |= {"rank": guilty.rank, "label": guilty.label, "host": socket.gethostname()}
            facts |= {"step": self._step(guilty.slot), "logs": str(log_path(self._spec.log_dir, guilty.slot))}
        facts |= {"others_stopped": self._others(states), **more}
        return FailureReport(cause=cause, details=tuple(details), hint=hint, **facts)

    def silent(self, states: Sequence[RankState]) -> list[RankState]:
        """Return the ranks that run and have reported no error."""
        return [state for state in states if state.alive and not self._is_suspect(state)]

    def explain_silence(self, states: Sequence[RankState], silent: Sequence[RankState]) -> FailureReport:
        """Name the rank that did not answer the others: one that is not waiting itself, and the furthest behind."""
        failure = self.find_failure(states)
        positions = {state.rank: self.position(state) for state in silent}
        guilty = [state for state in silent if not is_waiting(stack_path(self._spec.log_dir, state.slot))]
        if not guilty:  # they wait for each other: show where
            waits = (f"rank {rank} waits too: it is {where}" for rank, where in positions.items())
            return dataclasses.replace(failure, details=(*failure.details, *waits))
        first = min(guilty, key=lambda state: (self._step(state.slot) or 0, state.rank))
        silent_too = [rank for rank in positions if rank != first.rank]
        lines = [f"rank {failure.rank} gave up waiting: {_raised(failure.cause)}"]
        lines += [f"rank {rank} has not answered either: it is {positions[rank]}" for rank in silent_too]
        return self._report(states, first, f"has not answered: it is {positions[first.rank]}", lines, _SEE_STACK)

    def last_progress(self, states: Sequence[RankState]) -> float | None:
        """Return when one of these ranks last completed a step or a batch of an evaluation; None before the first."""
        beats = [beat.time for state in states if (beat := self._board.read(state.slot)) is not None]
        return max(beats, default=None)

    def is_stuck(self, state: RankState, seconds: float) -> bool:
        """Whether a rank has shown no progress for this many seconds, nor for the time of some of its steps.

        In code of the user's or a save it may take as long as others may wait for it without a loss.
        """
        limit = max(seconds, _USUAL_STEPS * self.usual_step([state]))
        if self.activity(state):
            elastic = self._spec.elastic
            longest = elastic.stall_seconds if elastic is not None else None
            limit = max(limit, longest or self._spec.join_timeout or math.inf)
        return time.time() - self._board.last_progress(state.slot) > limit

    def activity(self, state: RankState) -> str:
        """Return which callback of the user's a rank is in, or that it saves; empty if it is in a step."""
        return self._board.activity(state.slot)

    def usual_step(self, states: Sequence[RankState]) -> float:
        """Return the seconds of a step, as the slowest of these ranks has measured; 0 where none has."""
        beats = [beat for state in states if (beat := self._board.read(state.slot)) is not None]
        return max((beat.gauges.known().get("step_seconds", 0.0) for beat in beats), default=0.0)

    def find_stalled(self, states: Sequence[RankState]) -> list[tuple[RankState, str]]:
        """Return the ranks that do not wait, with where they are, where all others wait in a collective."""
        waiting = [state for state in states if is_waiting(stack_path(self._spec.log_dir, state.slot))]
        idle = [state for state in states if state not in waiting]
        return [(state, self.position(state)) for state in idle] if waiting else []

    def explain_lost_nodes(
        self, states: Sequence[RankState], nodes: Sequence[str], blame: Blame | None = None
    ) -> FailureReport:
        """Name the nodes without a heartbeat; where there are none, say that the cause is on another node."""
        failure = self.find_failure(states)
        lines = [f"rank {failure.rank} here gave up waiting: {_raised(failure.cause)}"]
        lines += [str(blame)] if blame is not None else []
        if nodes:
            lost_nodes = f"node{'s' * (len(nodes) > 1)} {', '.join(nodes)}"
            cause = f"{lost_nodes} sent no heartbeat: the node, its network or its launcher was lost"
        else:
            cause = "a rank of another node was lost or did not answer"
        hint = "Look at the output of the launcher there, and at the network between the nodes."
        return FailureReport(cause=cause, details=tuple(lines), exit_code=1, hint=hint, logs=failure.logs)

    def position(self, state: RankState) -> str:
        """Say where a rank is, from the stack that it wrote last."""
        if state.pid is not None and is_stopped(state.pid):
            return "stopped (SIGSTOP or a debugger)"
        return whereabouts(stack_path(self._spec.log_dir, state.slot))

    def explain_hang(self, hang: Hang, states: Sequence[RankState]) -> FailureReport:
        """Name the ranks that never joined, and where they are."""
        absent = [state for state in states if state.rank in hang.missing]
        lines = tuple(self._absence(state, hang) for state in absent)
        if not absent:
            cause = f"not all ranks joined: those of this node have waited {hang.waited:g} s for those of other nodes"
            return self._report(states, None, cause, (), "", others_stopped=0)
        first = absent[0]
        cause = lines[0].removeprefix(f"rank {first.rank} ")
        return self._report(states, first, cause, lines[1:], _SEE_STACK if first.alive else "", host="", step=None)

    def describe_slow_start(self, state: RankState, seconds: float) -> str:
        """Describe where a rank is while no rank has joined."""
        where = whereabouts(stack_path(self._spec.log_dir, state.slot))
        limit = "" if self._spec.start_timeout else "; --start-timeout SECONDS limits the wait"
        return f"no rank has joined the group after {duration_text(seconds)}: rank {state.rank} is {where}{limit}"

    def _absence(self, state: RankState, hang: Hang) -> str:
        if not state.alive:
            return f"rank {state.rank} never joined: it ended with code {state.code} while others waited for it"
        silence = "nothing happened for" if hang.none_came else "waited"
        where = whereabouts(stack_path(self._spec.log_dir, state.slot))
        return f"rank {state.rank} never joined: {silence} {hang.waited:g} s; it is {where}"

    def _is_suspect(self, state: RankState) -> bool:
        if state.alive:
            return state.slot in self.late or record_path(self._spec.log_dir, state.slot).exists()
        return state.code not in (0, EXIT_PREEMPTED)

    def _step(self, rank: int) -> int | None:
        beat = self._board.read(rank)
        return beat.step if beat else None

    def _others(self, states: Sequence[RankState]) -> int:
        ended_well = sum(state.code in (0, EXIT_PREEMPTED) for state in states)
        return self._world_size - 1 - ended_well

    def close(self) -> None:
        """Close the heartbeat board."""
        self._board.close()


def _raised(cause: str) -> str:
    return first_line(cause.removeprefix("raised ").removeprefix("stopped: "))
