"""Launchers on several hosts over ssh: start, forward their output, end all together. Also a process by itself.

`python -m phalanx.tools.submit.hosts FOLDER` runs the plan in a folder after the submitting command has ended;
`state.json` there says how far it is.
"""

from __future__ import annotations

import dataclasses
import json
import os
import queue
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED
from phalanx.host.files import replace_file

PLAN, STATE = "plan.json", "state.json"
_LINGER_SECONDS = 10.0
"""How long other launchers may take to end by themselves, and report why, after the first has failed."""
_SIGN_OF_LIFE_SECONDS = 20.0
_SSH_FAILED = 255
_CANCEL = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_RESTARTS = 10
"""How often a job whose ranks were ended after they had saved is started again."""


@dataclass(frozen=True)
class HostPlan:
    """What runs where."""

    hosts: list[str]
    ssh: list[str]
    """The command `ssh` with its options; a host and a command follow."""
    python: str
    """On the hosts, as their shells read it."""
    script: str
    endpoint: str
    environment: dict[str, str]
    """Variables that come over the connection, so that no list of processes shows them."""
    grace: float
    """Seconds between the order to end and the end."""
    output: str = ""
    """The file for the output of all."""
    work: str = ""
    """The folder of shipped code below the home folders of the hosts; empty where none was shipped."""

    def remote(self, host: str, *words: str) -> list[str]:
        """Return the command that runs `phalanx.tools.submit.node` on a host."""
        return [*self.ssh, host, f"{self.python} -P -m phalanx.tools.submit.node {shlex.join(words)}"]

    def on_all(self, command: str, content: bytes = b"") -> dict[str, str]:
        """Run a command on all hosts at once, with some input; return the error output of those where it failed."""

        def run(host: str) -> subprocess.CompletedProcess[bytes]:
            return subprocess.run([*self.ssh, host, command], input=content, capture_output=True)

        with ThreadPoolExecutor(len(self.hosts)) as pool:
            ran = dict(zip(self.hosts, pool.map(run, self.hosts), strict=True))
        return {host: process.stderr.decode(errors="replace") for host, process in ran.items() if process.returncode}

    def remove_code(self, show: Callable[[str], None]) -> None:
        """Remove shipped code, and the environment in it, from all hosts."""
        if self.work:
            for host in self.on_all(f'rm -rf "$HOME"/{shlex.quote(self.work)}'):
                show(f"[{host}] the copy of the code was not removed: ~/{self.work}")


class HostGroup:
    """One launcher per host, which end together."""

    def __init__(self, plan: HostPlan, show: Callable[[str], None]) -> None:
        self._plan, self._show = plan, show
        self._ended: queue.Queue[tuple[str, int]] = queue.Queue()
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self.codes: dict[str, int] = {}

    def run(self) -> int:
        """Run to the end; return the exit code of the first host that failed. An exception ends all hosts."""
        try:
            for number, host in enumerate(self._plan.hosts):
                self._start(number, host)
            return self._wait()
        except BaseException as error:
            self._end(b"I" if isinstance(error, KeyboardInterrupt) else b"T")
            raise

    def _start(self, number: int, host: str) -> None:
        process = subprocess.Popen(
            self._plan.remote(host, "run"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches this process alone, which passes it on
        )
        self._running[host] = process
        order = {
            "script": self._plan.script,
            "arguments": [str(number), self._plan.endpoint, self._plan.work],
            "environment": self._plan.environment,
            "grace": self._plan.grace,
        }
        self._write(process, json.dumps(order).encode() + b"\n")
        threading.Thread(target=self._forward, args=(host, process), daemon=True).start()

    def _forward(self, host: str, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._show(f"[{host}] {line.decode(errors='replace').rstrip()}")
        self._ended.put((host, process.wait()))

    def _wait(self) -> int:
        first, deadline = 0, None
        while self._running:
            seconds = _SIGN_OF_LIFE_SECONDS if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                host, code = self._ended.get(timeout=seconds)
            except queue.Empty:
                if deadline is not None:
                    self._end(b"T")
                    return first
                for process in self._running.values():
                    self._write(process, b"\n")
                continue
            self._handle_exit(host, code)
            if code and not first:
                first, deadline = code, time.monotonic() + _LINGER_SECONDS
        return first

    def _handle_exit(self, host: str, code: int) -> None:
        del self._running[host]
        self.codes[host] = code
        if code == _SSH_FAILED:
            self._show(f"[{host}] the connection was lost; what ran there ends with it")
        elif code:
            self._show(f"[{host}] ended with exit code {code}")

    def _end(self, order: bytes) -> None:
        """Order all hosts to end, and wait for it."""
        for process in self._running.values():
            self._write(process, order)
            assert process.stdin is not None
            with suppress(BrokenPipeError):
                process.stdin.close()
        deadline = time.monotonic() + self._plan.grace + _LINGER_SECONDS
        while self._running:
            try:
                self._handle_exit(*self._ended.get(timeout=max(0.0, deadline - time.monotonic())))
            except queue.Empty:
                for host, process in self._running.items():
                    self._show(f"[{host}] did not end in {self._plan.grace + _LINGER_SECONDS:.0f} s; connection closed")
                    process.kill()
                return

    @staticmethod
    def _write(process: subprocess.Popen[bytes], text: bytes) -> None:
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended; its exit code follows
            process.stdin.write(text)
            process.stdin.flush()


def supervise(folder: Path) -> int:
    """Run the plan in a folder; keep its state and its output in files."""
    plan = HostPlan(**json.loads((folder / PLAN).read_text(encoding="utf-8")))
    for number in _CANCEL:
        signal.signal(number, _cancelled)
    with Path(plan.output).open("a", encoding="utf-8", buffering=1) as output:

        def show(line: str) -> None:
            print(line, file=output)

        group = HostGroup(plan, show)
        state: dict[str, Any] = {"state": "running", "pid": os.getpid(), "hosts": plan.hosts}
        replace_file(folder / STATE, json.dumps(state))
        state |= {"state": "failed", "detail": "the process that held the connections failed; see supervisor.log"}
        try:
            code = group.run()
            for again in range(_RESTARTS):
                if code != EXIT_PREEMPTED:
                    break
                show(f"the ranks have saved and ended; they start again ({again + 1} of at most {_RESTARTS} times)")
                group = HostGroup(plan, show)
                code = group.run()
            ended = {0: "finished", EXIT_PREEMPTED: "preempted"}.get(code, "failed")
            state |= {"state": ended, "detail": _describe(group.codes)}
        except SystemExit as error:
            state |= {"state": "cancelled", "detail": _describe(group.codes)}
            code = int(str(error.code))
        finally:
            _ignore_signals()  # the order to end a job that ends by itself
            plan.remove_code(show)
            replace_file(folder / STATE, json.dumps(state))
    return code


def _describe(codes: dict[str, int]) -> str:
    return ", ".join(f"{host}: exit code {code}" for host, code in sorted(codes.items()))


def _ignore_signals() -> None:
    for number in _CANCEL:
        signal.signal(number, signal.SIG_IGN)


def _cancelled(number: int, frame: object) -> None:
    _ignore_signals()  # another one must not interrupt the end of the launchers
    raise SystemExit(EXIT_INTERRUPTED)


def write_plan(plan: HostPlan, folder: Path) -> None:
    """Write a plan that only this user can read: it holds the job's secret."""
    descriptor = os.open(folder / PLAN, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(dataclasses.asdict(plan), file, indent=1)


def main(arguments: Sequence[str]) -> int:
    """Run as a process by itself."""
    return supervise(Path(arguments[0]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
