"""Plain ssh: one launcher per host, without a scheduler; a process on this machine holds the connections."""

from __future__ import annotations

import json
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from phalanx.config.option import option
from phalanx.config.settings import ENV_PREFIX
from phalanx.config.sources import NOT_SETTINGS
from phalanx.errors import UsageError
from phalanx.host.job_secret import VARIABLE
from phalanx.observe.guard import say_to_user
from phalanx.tools.submit.hosts import STATE, HostGroup, HostPlan, write_plan
from phalanx.tools.submit.job import ENDED, ClusterJob, JobRecord
from phalanx.tools.submit.job_files import (
    FIND_UV,
    archive,
    follow_files,
    own_limit,
    program_of,
    rank_log,
    shell_join,
    split_words,
    uv_lines,
    uv_place,
)
from phalanx.tools.submit.target import CommonOptions, Status, Target

_ANSWER_SECONDS = 60.0
"""How long a host that was reached may take to say what is installed."""
_NUMBER, _MEETING, _HOME = "\0number", "\0meeting", "\0home"
"""Marks of what a host gets as arguments of its script, and of its home folder."""
_UNPACK = "mkdir -p {folder} && tar -xzf - -C {folder}"
_HINTS = {
    "host key": "Compare its fingerprint, then add it: ssh-keyscan HOST >> ~/.ssh/known_hosts",
    "Permission denied": "Passwords are not asked for: give a key with --identity FILE, or ssh-copy-id HOST once.",
    "No module named phalanx": "Install phalanx there at the same path, or give its environment: --venv FOLDER",
    "No such file": "Install phalanx there at the same path, or give its environment: --venv FOLDER",
}


@dataclass(frozen=True, kw_only=True)
class SshOptions(CommonOptions):
    """Options of ssh. What ~/.ssh/config says of a host holds, too."""

    user: str | None = option(None, "ssh: log in as this user")
    port: int | None = option(None, "ssh: port of sshd on the hosts", minimum=1)
    identity: str | None = option(None, "ssh: file of the private key")
    ssh: str | None = option(None, "more options for ssh, as they are: '-J gateway -o Compression=yes'")
    connect_timeout: int = option(10, "seconds until a host that does not answer is given up", minimum=1)
    grace: float = option(60.0, "seconds that a launcher has to save and end before it is killed", above=0)


class Ssh(Target[SshOptions]):
    """Starts launchers over ssh."""

    name = "ssh"
    options_class = SshOptions

    def __init__(self, options: SshOptions) -> None:
        super().__init__(options)
        self._facts: dict[str, dict[str, Any]] = {}

    def render(self, job: ClusterJob) -> dict[str, str]:
        """Return the script that every host runs, the list of hosts, and the commands that reach them."""
        if self.options.image:
            raise UsageError(f"--image {self.options.image}: ssh uses an environment of the hosts; give --venv")
        listed = "".join(f"{name} slots={ranks}\n" for name, ranks in _hosts(job).items())
        return {
            "node.sh": "\n".join(self._script(job)) + "\n",
            "hosts": f"# the first one hosts the rendezvous\n{listed}",
            "commands": "\n".join(self._commands(job)) + "\n",
        }

    def _commands(self, job: ClusterJob) -> Iterator[str]:
        """Return what this machine runs, for a reader; `submit` runs the same with its own number for a copy."""
        work = f"{_work(job)}ID" if self.options.ship == "archive" else ""
        plan, folder = self._plan(job, "", work), self._folder(job, work)
        for host in plan.hosts:
            if work:
                yield f"{shlex.join([*plan.ssh, host, _UNPACK.format(folder=folder)])} < code.tar.gz"
            if self.options.uv:
                yield f"{shlex.join([*plan.ssh, host, 'bash -s'])} < the lines of node.sh that make the environment"
        meeting = plan.endpoint or f"a free port of {plan.hosts[0]}"
        yield f"# all at once; node.sh, the host's number and the rendezvous ({meeting}) go over the connection"
        yield from (shlex.join(plan.remote(host, "run")) for host in plan.hosts)

    def _script(self, job: ClusterJob) -> Iterator[str]:
        yield "#!/bin/bash"
        ships = self.options.ship == "archive"
        copy = "; $3: the copy of the code, below the home folder" if ships else ""
        yield f"# {job.name}: runs on each of {job.nodes} hosts. $1: its number; $2: HOST:PORT of the rendezvous{copy}"
        folder = '"$HOME/$3"' if ships else shlex.quote(job.directory)
        yield f"cd {folder} || exit 1"
        yield from (f"export {name}={shlex.quote(value)}" for name, value in job.environment.items())
        if self.options.uv:
            yield from uv_lines(self.options, folder)
        listed = ",".join(f"{name}:{ranks}" for name, ranks in _hosts(job).items())
        extra = ["--hosts", listed, "--num-nodes", str(job.nodes), "--node-rank", _NUMBER, "--rdzv-endpoint", _MEETING]
        if ships:  # the copy is removed at the end of the job, and the run stays
            extra += job.kept_flags(_HOME)
        if not any(word.startswith("--console-ranks") for word in job.arguments):
            extra += ["--console-ranks", "all"]  # lines say their rank
        words = job.train_command(program_of(self.options), *extra, *own_limit(job, self.options))
        yield "# the launcher of this host; it starts, watches and restarts the host's ranks"
        yield "exec " + shell_join(words, {_NUMBER: '"$1"', _MEETING: '"$2"', _HOME: '"$HOME"'})

    def check(self, job: ClusterJob, files: Mapping[str, str]) -> list[str]:
        """Ask every host, all at once, for its versions (or for uv); refuse hosts that do not answer or differ."""
        if shutil.which("ssh") is None:
            raise UsageError("ssh is not on this machine's PATH", hint="Install it: apt install openssh-client")
        folder = "~" if self.options.ship == "archive" else job.directory
        plan = self._plan(job, "", "")
        if self.options.uv:  # the versions are those of uv.lock
            is_there = f"test -d {folder if folder == '~' else shlex.quote(folder)}"
            question = f"""{is_there} && echo '{{"has_folder": true}}' || echo '{{"has_folder": false}}'"""
            script = shlex.quote(f"{FIND_UV}\n{question}")
            facts = _ask_all(plan, lambda host: [*plan.ssh, host, f"sh -c {script}"])
        else:
            facts = self._facts = _ask_all(plan, lambda host: plan.remote(host, "facts", folder))
            _check_same(facts)
        if lacking := [host for host, answer in facts.items() if not answer["has_folder"]]:
            raise UsageError(
                f"{', '.join(lacking)}: the folder {job.directory} is not there",
                hint="Share it between the hosts, or copy the code: --ship archive",
            )
        first = next(iter(facts.values()))
        have = "uv" if self.options.uv else f"phalanx {first['phalanx']} and torch {first['torch']}"
        return [f"{len(facts)} hosts answer, all with {have}"]

    def _plan(self, job: ClusterJob, script: str, work: str) -> HostPlan:
        options = self.options
        words = ["ssh", "-T", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=yes"]
        words += ["-o", f"ConnectTimeout={options.connect_timeout}", "-o", "ServerAliveInterval=15"]
        words += ["-l", options.user] if options.user else []
        words += ["-p", str(options.port)] if options.port else []
        words += ["-i", options.identity, "-o", "IdentitiesOnly=yes"] if options.identity else []
        facts = next(iter(self._facts.values()), None)
        meeting = job.config.rdzv_endpoint or (f"{facts['address']}:{facts['port']}" if facts else "")
        python = shlex.quote(str(Path(program_of(options)).parent / "python"))
        if options.uv:
            python = f"{uv_place(options, self._folder(job, work))}/bin/python"
        return HostPlan(
            hosts=list(_hosts(job)),
            ssh=[*words, *split_words("--ssh", options.ssh), "--"],
            python=python,
            script=script,
            endpoint=meeting,
            environment=_forwarded(),
            grace=options.grace,
            work=work,
        )

    def _folder(self, job: ClusterJob, work: str) -> str:
        return f'"$HOME"/{work}' if work else shlex.quote(job.directory)

    def _prepare(self, job: ClusterJob, script: str, packed: bytes | None) -> HostPlan:
        """Unpack shipped code on every host and make its environment; return the plan to start the launchers."""
        # Of one submission, so that no other job with this name runs in the folder when it is removed.
        work = "" if packed is None else f"{_work(job)}{secrets.token_hex(4)}"
        plan, folder = self._plan(job, script, work), self._folder(job, work)
        try:
            if packed is not None:
                _refuse_failed("the code was not copied", plan.on_all(_UNPACK.format(folder=folder), packed))
            if self.options.uv:
                make = "\n".join([f"cd {folder} || exit 1", *uv_lines(self.options, folder)])
                _refuse_failed("uv did not make the environment", plan.on_all("bash -s", make.encode()))
                self._facts = _ask_all(plan, lambda host: plan.remote(host, "facts", "~"))
        except BaseException:
            plan.remove_code(say_to_user)
            raise
        return self._plan(job, script, work)  # with the address and the port of the first host

    def run(self, job: ClusterJob, show: Callable[[str], None]) -> int:
        """Run in the foreground: forward the output; end every host where one fails, or at an exception."""
        files = self.render(job)
        self.check(job, files)
        packed = archive(Path(job.directory), job.files)[1] if self.options.ship == "archive" else None
        plan = self._prepare(job, files["node.sh"], packed)
        try:
            return HostGroup(plan, show).run()
        finally:
            plan.remove_code(show)

    def submit(self, job: ClusterJob, folder: Path) -> str:
        """Start the process that holds the connections; its number is the job's id."""
        output = Path(job.directory, job.run_dir, "ssh.out")
        output.parent.mkdir(parents=True, exist_ok=True)
        output.unlink(missing_ok=True)
        packed = next((path.read_bytes() for path in folder.glob("code-*.tar.gz")), None)
        plan = replace(self._prepare(job, (folder / "node.sh").read_text(), packed), output=str(output))
        try:
            return self._detach(plan, folder)
        except BaseException:
            plan.remove_code(say_to_user)
            raise

    def _detach(self, plan: HostPlan, folder: Path) -> str:
        """Start the process that runs a plan, and return its number."""
        write_plan(plan, folder)
        with (folder / "supervisor.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "phalanx.tools.submit.hosts", str(folder)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            while not (folder / STATE).exists():
                if process.poll() is not None:
                    raise UsageError(_first_line((folder / "supervisor.log").read_text()))
                time.sleep(0.05)
        except BaseException:
            process.terminate()  # the job is not recorded, so no later command could end it
            process.wait()
            raise
        return str(process.pid)

    def status(self, record: JobRecord) -> Status:
        """Read the state that the supervising process keeps."""
        path = Path(record.folder) / STATE
        if not path.exists():
            return Status("lost", f"{path} is missing")
        state = json.loads(path.read_text(encoding="utf-8"))
        if state["state"] == "running" and not _is_alive(record):
            return Status("lost", "the process that held the connections was killed, and the launchers with it")
        return Status(state["state"], state.get("detail", ""), tuple(state["hosts"]))

    def logs(self, record: JobRecord, *, follow: bool, rank: int | None) -> Iterator[str]:
        """Read the output of all hosts, or the log of one rank."""
        folder = Path(record.directory) / record.run_dir
        path = folder / "ssh.out" if rank is None else rank_log(folder, rank)
        return follow_files(
            lambda: [path], (lambda: self.status(record).state in (*ENDED, "preempted")) if follow else None
        )

    def cancel(self, record: JobRecord) -> None:
        """End the launchers on all hosts, and wait for it."""
        if _is_alive(record):
            with suppress(ProcessLookupError):
                os.kill(int(record.id), signal.SIGTERM)
        while _is_alive(record):
            time.sleep(0.1)


def _hosts(job: ClusterJob) -> dict[str, int]:
    """Return the hosts and the ranks of each."""
    if job.config.hosts is None:
        raise UsageError("ssh needs the hosts", hint="Write: --hosts node1:8,node2:8, or a file: --hosts ./hosts")
    return job.config.host_ranks


def _work(job: ClusterJob) -> str:
    """Return the beginning of the folder of shipped code, below the home folder of a host."""
    return f".cache/phalanx/jobs/{job.name}-"


def _forwarded() -> dict[str, str]:
    """Return the variables that hosts get over the connection: settings, and the secret that launchers share."""
    skipped = {ENV_PREFIX + name for name in NOT_SETTINGS}
    settings = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(ENV_PREFIX) and name not in skipped and not name.startswith(f"{ENV_PREFIX}SUBMIT_")
    }
    return {**settings, VARIABLE: os.environ.get(VARIABLE) or secrets.token_hex(32)}


def _ask_all(plan: HostPlan, command: Callable[[str], list[str]]) -> dict[str, dict[str, Any]]:
    """Return the facts of every host, asked all at once; refuse hosts that do not answer."""
    with ThreadPoolExecutor(len(plan.hosts)) as pool:
        answers = dict(zip(plan.hosts, pool.map(lambda host: _ask(command(host)), plan.hosts), strict=True))
    facts = {host: answer for host, answer in answers.items() if isinstance(answer, dict)}
    if silent := {host: answer for host, answer in answers.items() if isinstance(answer, str)}:
        raise _unreachable(silent, list(facts))
    return facts


def _refuse_failed(action: str, failed: dict[str, str]) -> None:
    for host, text in failed.items():
        output = text[max(0, text.find("error: ")) :]  # uv reports its steps before it
        raise UsageError(f"{host}: {action}: {_first_line(output)}", hint="\n  ".join(output.strip().splitlines()[1:6]))


def _ask(command: list[str]) -> dict[str, Any] | str:
    """Return the facts of a host, or why there are none."""
    began = time.monotonic()
    try:
        ran = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_ANSWER_SECONDS)
    except subprocess.TimeoutExpired:
        return f"no answer in {_ANSWER_SECONDS:.0f} s"
    if ran.returncode:
        return f"{_first_line(ran.stderr or ran.stdout)} (after {time.monotonic() - began:.1f} s)"
    try:
        facts: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        return f"expected its versions, and it wrote: {_first_line(ran.stdout)}"
    return facts


def _first_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("Warning:")]
    return lines[0] if lines else "it ended without a word"


def _unreachable(silent: dict[str, str], answered: list[str]) -> UsageError:
    lines = [f"{host}: {why}" for host, why in silent.items()]
    others = f"answered: {', '.join(answered)}" if answered else "no host answered"
    hints = [text.replace("HOST", host) for host, why in silent.items() for key, text in _HINTS.items() if key in why]
    return UsageError("\n  ".join([*lines, f"{others}; nothing was started"]), hint=hints[0] if hints else "")


def _check_same(facts: dict[str, dict[str, Any]]) -> None:
    """Refuse hosts with different versions; the ranks of one run exchange data by them."""
    first = next(iter(facts))
    for package in ("phalanx", "torch"):
        version = facts[first][package]
        if other := {host: answer[package] for host, answer in facts.items() if answer[package] != version}:
            differ = ", ".join(f"{had} on {host}" for host, had in other.items())
            raise UsageError(
                f"the hosts have different versions of {package}: {version} on {first}, {differ}",
                hint=f"Install {package}=={version} on all of them; nothing was started.",
            )


def _is_alive(record: JobRecord) -> bool:
    """Whether the process of this job runs; another process may have its number later."""
    try:
        return record.folder.encode() in Path(f"/proc/{record.id}/cmdline").read_bytes()
    except OSError:
        return False
