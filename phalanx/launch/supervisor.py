"""`launch`: start the ranks of this node, follow them to their end, restart them where that was asked for."""

from __future__ import annotations

import secrets
from pathlib import Path

from phalanx.errors import ForkServerDiedError, UsageError
from phalanx.host.files import make_private, scratch_folder
from phalanx.host.job_secret import VARIABLE
from phalanx.host.processes import SignalInbox
from phalanx.launch.attempt import Attempt
from phalanx.launch.environment import shared_environment
from phalanx.launch.failure import FailureReport
from phalanx.launch.forkserver.client import fork_server
from phalanx.launch.launcher_loop import Outcome, run_attempts
from phalanx.launch.nccl import sharing_gpus
from phalanx.launch.output import PlainConsole, RankConsole
from phalanx.launch.rendezvous import Rendezvous
from phalanx.launch.spec import LaunchResult, LaunchSpec, check_endpoint


def launch(spec: LaunchSpec, console: RankConsole | None = None, signals: SignalInbox | None = None) -> LaunchResult:
    """Run the target on this node's ranks and return when all of them have ended.

    Runs in the caller's thread; in the main thread it handles signals, and another thread can post some through
    `signals`. The report of a failure is not printed: it is `str(result.failure)`, for the caller to show or to raise.
    """
    spec.target.check()
    if spec.num_nodes > 1 and spec.starter is None:
        check_endpoint(spec.rdzv_endpoint)
    try:
        make_private(spec.log_dir)
    except OSError as error:
        raise UsageError(f"log directory '{spec.log_dir}' cannot be made: {error.strerror}.") from error
    console = console or PlainConsole(labelled=spec.console_ranks == "all")
    if spec.starter is not None:
        return spec.starter.launch(spec, console)
    shared_env = shared_environment(spec)
    with sharing_gpus(spec, shared_env, console.notice) as sharing, scratch_folder("ranks") as scratch:
        launching = _Launching(spec, console, shared_env, sharing, scratch)
        try:
            return launching.run(signals or SignalInbox())
        finally:
            launching.close()


class _Launching:
    """Runs attempts. A fork server that dies ends the ranks and the store too; the next attempt gets a new one."""

    def __init__(
        self, spec: LaunchSpec, console: RankConsole, shared_env: dict[str, str], sharing: dict[str, str], scratch: Path
    ) -> None:
        self._spec = spec
        self._console = console
        self._shared_env = shared_env
        self._rank_env = shared_env | sharing  # what the fork server has is compared with the environment before it
        if spec.num_nodes == 1:
            self._rank_env.setdefault(VARIABLE, secrets.token_hex(32))
        self._scratch = scratch
        self._open()

    def _open(self) -> None:
        try:
            self._session = fork_server(self._shared_env).open_session()
        except ForkServerDiedError:  # since it was last used
            self._session = fork_server(self._shared_env).open_session()
        self._rendezvous = Rendezvous(self._spec, self._session)

    def close(self) -> None:
        """Close the connections to the agent and the fork server."""
        self._rendezvous.close()
        self._session.close()

    def run(self, signals: SignalInbox) -> LaunchResult:
        with signals as inbox:
            outcome, result = run_attempts(self._spec, self._console, lambda *which: self._attempt(inbox, *which))
            if self._rendezvous.is_complete or not outcome.before_start:
                self._rendezvous.leave()
            if outcome.before_start:
                self._session.abort()
            return result

    def _attempt(self, inbox: SignalInbox, number: int, failures: int) -> Outcome:
        def new_attempt() -> Attempt:
            parts = (self._session, self._rendezvous, inbox)
            return Attempt(self._spec, self._console, *parts, number, self._scratch, failures)

        attempt = new_attempt()
        try:
            return attempt.run(self._rank_env)
        except ForkServerDiedError as death:
            if not self._session.server.is_serving:  # it cannot import torch, nor could the next
                raise
            self.close()
            self._open()
            if not attempt.has_started:  # it was dying already
                return new_attempt().run(self._rank_env)
            failure = FailureReport(cause=death.message, hint=death.hint, exit_code=death.exit_code)
            # Of several nodes whose number may change the others go on without this one, and would not meet it.
            final = self._spec.num_nodes > 1 and self._spec.elastic is not None
            return Outcome(failure.exit_code, failure, failures=failures, final=final)
