"""The same checks on several hosts, by ssh or inside a Slurm job, and what differs between them."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from phalanx.errors import UsageError
from phalanx.tools.doctor.gpus import read_gpus
from phalanx.tools.doctor.network import cards, default_card, rdma_devices
from phalanx.tools.doctor.reader import CheckResult, HostReader

_SECONDS = 60
_MANY = 16
_SKEW = 1.0
"""Seconds between clocks that are worth a warning; NTP keeps them within milliseconds."""


def ssh_words(ssh: str) -> list[str]:
    """Return the ssh command of --ssh, which never asks for a password."""
    try:
        command = shlex.split(ssh)
    except ValueError as error:
        raise UsageError(f"--ssh {ssh!r} is not a command: {error}") from error
    if not command:
        raise UsageError("--ssh is empty", hint='Write: --ssh "ssh -p 2222"')
    return [*command, "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"]


def ask_hosts(hosts: Sequence[str], command: Sequence[str], python: str) -> dict[str, HostReader | str]:
    """Return each host as a recorded machine, or why it could not be asked."""
    with ThreadPoolExecutor(_MANY) as pool:
        return dict(zip(hosts, pool.map(lambda host: _ask(host, command, python), hosts), strict=True))


def _ask(host: str, ssh: Sequence[str], python: str) -> HostReader | str:
    remote = shlex.join([python, "-P", "-m", "phalanx", "doctor", "--record", "-"])
    words = [*ssh, host, remote]
    began = time.time()
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"no answer within {_SECONDS} s"
    except OSError as error:
        return f"{words[0]} cannot be run: {error.strerror}"
    return _recorded(done, began, time.time())


def _recorded(done: subprocess.CompletedProcess[str], began: float, ended: float) -> HostReader | str:
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        return last[0]
    try:
        answers = json.loads(done.stdout.strip().splitlines()[-1])  # a shell's start file may print lines before it
        there = float(answers["fact time"])
    except (ValueError, LookupError, TypeError):
        return "its answer is not a recording: another version of phalanx?"
    # The host read its clock between these two moments, so its offset is outside of that interval or not known.
    answers["clock offset"] = there - began if there < began else there - ended if there > ended else 0.0
    return HostReader(answers)


def job_hosts(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the hosts of the Slurm job that this process is in; empty outside of one, and inside of a step."""
    nodes = environ.get("SLURM_JOB_NODELIST", "")
    if not nodes or int(environ.get("SLURM_JOB_NUM_NODES", "1")) < 2 or environ.get("SLURM_STEP_NODELIST"):
        return []
    try:
        done = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=False)
    except OSError:  # a container without Slurm's commands
        return []
    return done.stdout.split()


def ask_job(hosts: Sequence[str]) -> dict[str, HostReader | str]:
    """Return the hosts of this Slurm job as recorded machines, by one step."""
    words = ["srun", f"--nodes={len(hosts)}", "--ntasks-per-node=1", "--overlap", "--label", sys.executable]
    words += ["-P", "-m", "phalanx", "doctor", "--record", "-"]
    began = time.time()
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return dict.fromkeys(hosts, f"srun: {error}")
    readers: dict[str, HostReader | str] = dict.fromkeys(hosts, (done.stderr.strip().splitlines() or ["no answer"])[-1])
    for line in done.stdout.splitlines():
        number, _, text = line.partition(": ")
        if number.strip().isdecimal() and text.startswith("{"):
            answer = _recorded(subprocess.CompletedProcess([], 0, text, ""), began, time.time())
            name = answer.fact("hostname") if isinstance(answer, HostReader) else ""
            readers[next((host for host in hosts if host.split(".")[0] == name.split(".")[0]), hosts[int(number)])] = (
                answer
            )
    return readers


def compare_hosts(machines: Mapping[str, HostReader]) -> Iterator[CheckResult]:
    """Say what differs between hosts that train together."""
    if len(machines) < 2:
        return
    for topic, values in _compared(machines).items():
        counts = Counter(values.values())
        if len(counts) > 1:
            usual, _ = counts.most_common(1)[0]
            odd = [f"{host} has {value or 'none'}" for host, value in values.items() if value != usual]
            differences = "; ".join(odd[:8]) + (f" and {len(odd) - 8} more" if len(odd) > 8 else "")
            level, fix = _DIFFERENCES.get(topic, ("warning", f"install the same {topic} everywhere"))
            yield CheckResult(level, "hosts", f"{topic} differs: {differences}; the others {usual or 'none'}", fix)
    yield from _clocks(machines)


_DIFFERENCES: dict[str, tuple[Any, str]] = {
    "phalanx": ("error", "install the same phalanx everywhere; phalanx submit --ship sends this one"),
    "torch": ("error", "install the same torch everywhere: ranks of different versions may hang or disagree"),
    "nccl": ("error", "install the same NCCL everywhere: it refuses to connect across versions"),
    "GPUs": ("error", "use hosts with the same GPUs, or fewer of them: --gpus-per-node"),
    "MTU": ("warning", "set the same MTU everywhere: larger packets are lost in silence"),
    "kernel": ("note", "no change is needed"),
    "default card": ("note", "set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME on each host to its own card"),
    "architecture": ("error", "hosts of one job need the same kind of processor"),
    "InfiniBand": ("warning", "ibstat on the hosts that have fewer"),
}


def _compared(machines: Mapping[str, HostReader]) -> dict[str, dict[str, str]]:
    by_topic: dict[str, dict[str, str]] = {}
    for host, machine in machines.items():
        facts = dict(machine.fact("versions") or {})
        gpus = Counter(gpu["name"] for gpu in read_gpus(machine))
        facts["GPUs"] = ", ".join(f"{count} x {name}" for name, count in gpus.items())
        facts["driver"] = next((gpu["driver_version"] for gpu in read_gpus(machine)), "")
        facts["default card"] = default_card(machine) or ""
        facts["MTU"] = next((str(card.mtu) for card in cards(machine) if card.name == facts["default card"]), "")
        facts["InfiniBand"] = str(sum(device.active for device in rdma_devices(machine)))
        facts["architecture"] = machine.fact("architecture")
        for topic, value in facts.items():
            by_topic.setdefault(topic, dict.fromkeys(machines, ""))[host] = value
    return by_topic


def _clocks(machines: Mapping[str, HostReader]) -> Iterator[CheckResult]:
    offsets = {host: float(machine.answer("clock offset") or 0.0) for host, machine in machines.items()}
    off = [f"{host} by {offset:+.1f} s" for host, offset in offsets.items() if abs(offset) > _SKEW]
    if off:
        text = f"clocks differ from this machine's: {', '.join(off)}"
        yield CheckResult("warning", "hosts", text, "chronyc makestep, or systemctl restart systemd-timesyncd (root)")
    else:
        yield CheckResult("ok", "hosts", f"{len(machines)} hosts, clocks within {_SKEW:g} s")
