"""`launch`: start the ranks of this node, follow them to their end, restart them where that was asked for."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from phalanx.errors import UsageError
from phalanx.launch.attempt import Attempt
from phalanx.launch.console import Console, PlainConsole
from phalanx.launch.environment import shared_environment
from phalanx.launch.meeting import Meeting
from phalanx.launch.policy import Outcome, Restart, decide
from phalanx.launch.signals import SignalInbox
from phalanx.launch.signed_store import VARIABLE
from phalanx.launch.spec import LaunchResult, LaunchSpec, check_endpoint
from phalanx.launch.warm import warm_process

if TYPE_CHECKING:
    from pathlib import Path

    from phalanx.launch.warm import Session


def launch(spec: LaunchSpec, console: Console | None = None, signals: SignalInbox | None = None) -> LaunchResult:
    """Run the target on this node's ranks and return when every one of them is gone.

    Runs in the caller's thread. Signals are taken over meanwhile when that is the main thread; `signals` lets another
    thread post some. The report of a failure is not printed: it is `str(result.failure)`, for the caller to show or to
    raise.
    """
    spec.target.check()
    if spec.num_nodes > 1 and spec.starter is None:
        check_endpoint(spec.rdzv_endpoint)
    _make_directory(spec.log_dir)
    console = console or PlainConsole(labelled=spec.console_ranks == "all")
    if spec.starter is not None:
        return spec.starter.launch(spec, console)
    shared_env = shared_environment(spec)
    session = warm_process(shared_env).open_session()
    if spec.num_nodes == 1:
        shared_env.setdefault(VARIABLE, secrets.token_hex(32))
    try:
        return _run_attempts(spec, console, session, shared_env, signals or SignalInbox())
    finally:
        session.close()


def _run_attempts(
    spec: LaunchSpec, console: Console, session: Session, shared_env: dict[str, str], signals: SignalInbox
) -> LaunchResult:
    meeting = Meeting(spec, session)
    number = 0
    with signals as inbox:
        try:
            while True:
                outcome = Attempt(spec, console, session, meeting, inbox, number).run(shared_env)
                decision = decide(outcome, attempt=number, max_restarts=spec.max_restarts)
                if not isinstance(decision, Restart):
                    _leave(meeting, session, outcome)
                    return LaunchResult(outcome.exit_code, number + 1, outcome.failure)
                console.notice(f"{outcome.failure}\n{decision.why}")
                number += 1
        finally:
            meeting.close()


def _leave(meeting: Meeting, session: Session, outcome: Outcome) -> None:
    """Take leave of the agent and the other nodes; where nothing ran yet nobody is owed a goodbye."""
    if meeting.has_met or not outcome.before_start:
        meeting.leave()
    if outcome.before_start:
        session.abort()


def _make_directory(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"log directory '{path}' cannot be made: {error.strerror}.") from error
