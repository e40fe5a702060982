"""The links between hosts, measured pair by pair by `phalanx bench comm`, compared with the speed of their cards."""

from __future__ import annotations

import json
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations

from phalanx.errors import UsageError
from phalanx.host.addresses import free_port
from phalanx.tools.doctor.network import cards, default_card
from phalanx.tools.doctor.reader import HostReader
from phalanx.tools.doctor.result import CheckResult
from phalanx.world.env import RankEnv, torchrun_variables

MOST_HOSTS = 32
"""Pairs are measured one after the other, 0.1 s or more each."""
_SECONDS = 120
_BENCH = ("-P", "-m", "phalanx", "bench", "comm", "--p2p", "--json", "-")
_ONE_STREAM = 1.25
"""GB/s that one TCP stream reaches on any machine with a faster card."""
_SLOW_SHARE = 0.5

Run = Callable[[], list["subprocess.CompletedProcess[str]"]]


def over_ssh(machines: Mapping[str, HostReader], ssh: Sequence[str], python: str) -> Run:
    """Return the measurement with one rank per host, each started by ssh; the first host has the store."""

    def command(rank: int, host: str, address: str, port: int) -> list[str]:
        variables = torchrun_variables(RankEnv(rank, 0, len(machines), 1, rank, address, port, started_by="ssh"))
        # `timeout` ends the rank where this side ends early: ssh without a terminal does not.
        words = ["timeout", str(_SECONDS), "env", *(f"{name}={value}" for name, value in variables.items()), python]
        return [*ssh, host, shlex.join([*words, *_BENCH])]

    def run() -> list[subprocess.CompletedProcess[str]]:
        store = next(iter(machines.values())).fact("address"), free_port()
        with ThreadPoolExecutor(len(machines)) as pool:
            return list(pool.map(_finish, (command(rank, host, *store) for rank, host in enumerate(machines))))

    return run


def by_srun(hosts: Sequence[str]) -> Run:
    """Return the measurement with one rank on each of these nodes of this Slurm job, in their order."""
    words = ["srun", f"--nodes={len(hosts)}", f"--nodelist={','.join(hosts)}", "--ntasks-per-node=1", "--overlap"]
    words += [sys.executable, *_BENCH]
    return lambda: [_finish(words)]


def check_links(machines: Mapping[str, HostReader], run: Run) -> Iterator[CheckResult]:
    """Measure every pair of hosts, and name those that are slow for their cards or against the others."""
    if len(machines) > MOST_HOSTS:
        hint = "Give fewer with --hosts; in a job: phalanx bench comm --algo gloo,nccl, started by srun or torchrun"
        raise UsageError(f"--measure measures every pair of hosts; {len(machines)} hosts are too many", hint=hint)
    if len(machines) < 2:
        yield CheckResult("note", "bandwidth", "no link was measured: that needs two hosts that answer")
        return
    ran = run()
    try:
        rates = json.loads(ran[0].stdout)["bandwidth_gbs"]
    except (ValueError, LookupError, TypeError):
        failed = next((each for each in ran if each.returncode), ran[0])
        why = (failed.stderr.strip().splitlines() or [f"exit code {failed.returncode}"])[-1]
        fix = "a firewall between the hosts, or GLOO_SOCKET_IFNAME: see the lines about network"
        yield CheckResult("error", "bandwidth", f"the links were not measured: {why}", fix)
        return
    hosts = list(machines)
    found = {(a, b): rates[hosts.index(a)][hosts.index(b)] for a, b in combinations(hosts, 2)}
    yield from _judge(found, {host: _card_gbs(machine) for host, machine in machines.items()})


def _judge(found: Mapping[tuple[str, str], float], promised: Mapping[str, float | None]) -> Iterator[CheckResult]:
    median = statistics.median(found.values())
    for (first, second), rate in found.items():
        known = [speed for host in (first, second) if (speed := promised[host]) is not None]
        expected = max(min(_ONE_STREAM, *known) if known else 0.0, median)
        if rate < _SLOW_SHARE * expected:
            text = f"{first} - {second}: {rate:.3g} GB/s by TCP; {expected:.3g} GB/s are expected"
            fix = (
                "ethtool on both shows speed and errors; the cable and the switch port; traffic of others: sar -n DEV 1"
            )
            yield CheckResult("warning", "bandwidth", text, fix)
    spread = f"{min(found.values()):.3g} to {max(found.values()):.3g}" if len(found) > 1 else f"{median:.3g}"
    yield CheckResult("ok", "bandwidth", f"{spread} GB/s by TCP between {len(promised)} hosts, one stream per pair")


def _card_gbs(machine: HostReader) -> float | None:
    """Return what the card of the default route promises; None where its driver does not say."""
    route = default_card(machine)
    speeds = [card.speed for card in cards(machine) if card.speed and (card.name == route or route is None) and card.up]
    return max(speeds) / 8e3 if speeds else None


def _finish(words: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(words, 1, "", str(error))
