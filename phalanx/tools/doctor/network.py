"""Checks of the network: cards, the ones that gloo and NCCL would choose, RDMA, ports, measured links."""

from __future__ import annotations

import ipaddress
import json
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from typing import NamedTuple

from phalanx.errors import UsageError
from phalanx.host.addresses import free_port
from phalanx.tools.doctor.reader import CheckResult, HostReader
from phalanx.world.env import RankEnv, torchrun_variables

_FAST = 25_000
"""Mb/s from which jumbo frames matter."""
_AMAZON = "0x1d0f"
_VIRTUAL = ("lo", "docker", "veth", "br-", "virbr", "ifb", "cni", "flannel", "cali", "dummy")
_PLUGINS = ("/opt/amazon/ofi-nccl", "/opt/aws-ofi-nccl", "/opt/amazon/aws-ofi-nccl")
_RENDEZVOUS_PORT = 29500


class Card(NamedTuple):
    """One network card."""

    name: str
    up: bool
    mtu: int
    speed: int | None
    """Mb/s, where the driver knows it."""

    def __str__(self) -> str:
        speed = f", {self.speed / 1000:g} Gb/s" if self.speed else ""
        return f"{self.name} (MTU {self.mtu}{speed})"


class RdmaDevice(NamedTuple):
    """One RDMA device: InfiniBand, RoCE or EFA."""

    name: str
    kind: str
    active: bool
    rate: str


def cards(machine: HostReader) -> list[Card]:
    """Return the cards that may lead to other machines."""
    listed = []
    for name in machine.names("/sys/class/net"):
        if name.startswith(_VIRTUAL):
            continue
        at = f"/sys/class/net/{name}"
        mtu, speed = machine.text(f"{at}/mtu") or "0", machine.text(f"{at}/speed") or ""
        up = machine.text(f"{at}/operstate") in ("up", "unknown")
        listed.append(Card(name, up, int(mtu), int(speed) if speed.isdecimal() else None))
    return listed


def rdma_devices(machine: HostReader) -> list[RdmaDevice]:
    """Return the RDMA devices, by their first port."""
    devices = []
    for name in machine.names("/sys/class/infiniband"):
        at = f"/sys/class/infiniband/{name}"
        vendor = machine.text(f"{at}/device/vendor")
        layer = machine.text(f"{at}/ports/1/link_layer") or ""
        kind = "EFA" if vendor == _AMAZON else "RoCE" if layer == "Ethernet" else "InfiniBand"
        state = machine.text(f"{at}/ports/1/state") or ""
        devices.append(RdmaDevice(name, kind, "ACTIVE" in state, machine.text(f"{at}/ports/1/rate") or "?"))
    return devices


def default_card(machine: HostReader) -> str | None:
    """Return the card of the default route."""
    for line in (machine.text("/proc/net/route") or "").splitlines()[1:]:
        parts = line.split()
        if len(parts) > 7 and parts[1] == parts[7] == "00000000":
            return parts[0]
    return None


def check_network(machine: HostReader) -> Iterator[CheckResult]:
    """Check how ranks of several machines would reach each other."""
    yield from _cards(machine)
    yield from _choices(machine)
    yield from _rdma(machine)
    yield from _cloud(machine)
    yield from _ports(machine)


def _cards(machine: HostReader) -> Iterator[CheckResult]:
    listed, route = cards(machine), default_card(machine)
    if route is None:
        yield CheckResult(
            "warning", "network", "there is no default route: other machines may not be reached", "ip route"
        )
    for card in listed:
        if card.up:
            yield CheckResult("ok", "network", f"{card}{', default route' if card.name == route else ''}")
        if card.up and card.speed and card.speed >= _FAST and card.mtu < 4000:
            text = f"{card.name} has {card.speed / 1000:g} Gb/s with MTU {card.mtu}: small packets cost the CPU"
            yield CheckResult(
                "note", "network", text, f"ip link set {card.name} mtu 9000 (root), if the switches allow it"
            )


def _choices(machine: HostReader) -> Iterator[CheckResult]:
    """Say which card gloo and NCCL would choose, and whether what is set exists."""
    environment, names = machine.fact("environment"), set(machine.names("/sys/class/net"))
    route, addresses = default_card(machine), machine.fact("addresses_of_own_name") or []
    for name, library in (("GLOO_SOCKET_IFNAME", "gloo"), ("NCCL_SOCKET_IFNAME", "NCCL")):
        value = environment.get(name, "")
        patterns = [part for part in value.lstrip("=").split(",") if part] if not value.startswith("^") else []
        missing = [part for part in patterns if not any(card_name.startswith(part) for card_name in names)]
        if missing:
            text = f"{name}={value}, and there is no card {missing[0]}: {library} fails at its start"
            yield CheckResult("error", "network", text, f"export {name}={route}" if route else f"unset {name}")
        elif value:
            yield CheckResult("ok", "network", f"{library} uses {value} ({name})")
    if "GLOO_SOCKET_IFNAME" not in environment:
        loopback = not addresses or all(ipaddress.ip_address(address).is_loopback for address in addresses)
        if loopback and route is not None:
            name = machine.fact("hostname")
            where = ", ".join(addresses) or "no address"
            text = f"the own name {name} leads to {where}: gloo of plain torchrun listens there"
            fix = f"export GLOO_SOCKET_IFNAME={route} (phalanx train does this by itself), or correct /etc/hosts"
            yield CheckResult("note", "network", text, fix)
        elif not loopback:
            yield CheckResult("ok", "network", f"gloo listens at {', '.join(addresses)}, the address of the own name")
    if "NCCL_SOCKET_IFNAME" not in environment and machine.names("/proc/driver/nvidia/gpus"):
        usable = [card.name for card in cards(machine) if card.up]
        rdma = [device.name for device in rdma_devices(machine) if device.active]
        chosen = f"RDMA ({', '.join(rdma)})" if rdma else ", ".join(usable) or "nothing"
        yield CheckResult("ok", "network", f"NCCL would choose {chosen}")


def _rdma(machine: HostReader) -> Iterator[CheckResult]:
    devices, environment = rdma_devices(machine), machine.fact("environment")
    for device in devices:
        if device.active:
            yield CheckResult("ok", device.kind, f"{device.name}: {device.rate}")
        else:
            fix = "ibstat shows its state; check the cable, the subnet manager (opensm), the switch port"
            yield CheckResult("error", device.kind, f"{device.name} is not active", fix)
    rates = {device.rate for device in devices if device.active and device.kind != "EFA"}
    if len(rates) > 1:
        text = f"devices run at different rates ({', '.join(sorted(rates))}): the slowest one sets the pace"
        yield CheckResult("warning", "InfiniBand", text, "ibstat; set the slow link's cable or port right")
    if any(device.active for device in devices) and environment.get("NCCL_IB_DISABLE") == "1":
        text = "NCCL_IB_DISABLE=1 while RDMA devices are active: NCCL uses TCP, many times slower"
        yield CheckResult("error", "InfiniBand", text, "unset NCCL_IB_DISABLE")
    if devices and machine.names("/proc/driver/nvidia/gpus"):
        yield from _gpudirect(machine, devices)


def _gpudirect(machine: HostReader, devices: list[RdmaDevice]) -> Iterator[CheckResult]:
    modules = machine.text("/proc/modules") or ""
    if re.search(r"^(nvidia_peermem|nv_peer_mem|efa_nv_peermem|gdrdrv) ", modules, re.MULTILINE):
        yield CheckResult("ok", "GPUDirect", "the kernel module for RDMA from GPU memory is loaded")
    elif all(device.kind == "EFA" for device in devices):
        yield CheckResult("note", "GPUDirect", "EFA's driver reads GPU memory by itself where it was built for it", "")
    elif "Open Kernel Module" in (machine.text("/proc/driver/nvidia/version") or ""):
        yield CheckResult("ok", "GPUDirect", "the open driver gives RDMA access by DMA-BUF")
    else:
        text = "no module for RDMA from GPU memory: data stop in host memory on their way"
        yield CheckResult("warning", "GPUDirect", text, "modprobe nvidia-peermem (root)")


def _cloud(machine: HostReader) -> Iterator[CheckResult]:
    vendor = machine.text("/sys/class/dmi/id/sys_vendor") or ""
    environment = machine.fact("environment")
    if any(device.kind == "EFA" for device in rdma_devices(machine)):
        plugin = any(machine.names(folder) for folder in _PLUGINS)
        if not plugin:
            text = "EFA cards without the aws-ofi-nccl plugin: NCCL uses TCP in silence"
            yield CheckResult("error", "AWS", text, "install aws-ofi-nccl (in AWS's Deep Learning AMI and containers)")
        elif environment.get("FI_PROVIDER") != "efa":
            yield CheckResult(
                "note",
                "AWS",
                "variables for EFA are not set",
                "phalanx train --nccl-env aws-efa, or: phalanx doctor --nccl-env aws-efa",
            )
    tuned = "NCCL_NSOCKS_PERTHREAD" in environment or "NCCL_NET" in environment
    if vendor == "Google" and machine.names("/proc/driver/nvidia/gpus") and not tuned:
        text = "gVNIC limits each TCP flow, and NCCL uses few of them"
        yield CheckResult("note", "Google Cloud", text, "phalanx doctor --nccl-env gcp; GPUDirect-TCPX on a3 machines")


def _ports(machine: HostReader) -> Iterator[CheckResult]:
    port = machine.fact("environment").get("MASTER_PORT", str(_RENDEZVOUS_PORT))
    tables = [machine.text(f"/proc/net/{name}") or "" for name in ("tcp", "tcp6")]  # torch listens on IPv6
    listening = [line.split() for table in tables for line in table.splitlines()[1:]]
    in_use = {int(parts[1].split(":")[1], 16) for parts in listening if len(parts) > 3 and parts[3] == "0A"}
    if port.isdecimal() and int(port) in in_use:
        text = f"port {port} has a listener: a rendezvous there fails, or meets another job"
        yield CheckResult(
            "warning", "ports", text, f"ss -ltnp 'sport = :{port}' shows it; use --rdzv-endpoint HOST:ANOTHER"
        )


MOST_HOSTS = 32
"""Pairs are measured one after the other, 0.1 s or more each."""
_SECONDS = 120
_BENCH = ("-P", "-m", "phalanx", "bench", "comm", "--p2p", "--json")
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
        failed = next((process for process in ran if process.returncode), ran[0])
        why = (failed.stderr.strip().splitlines() or [f"exit code {failed.returncode}"])[-1]
        fix = "a firewall between the hosts, or GLOO_SOCKET_IFNAME: see the lines about network"
        yield CheckResult("error", "bandwidth", f"the links were not measured: {why}", fix)
        return
    hosts = list(machines)
    rate_of = {(a, b): rates[hosts.index(a)][hosts.index(b)] for a, b in combinations(hosts, 2)}
    yield from _judge(rate_of, {host: _card_gbs(machine) for host, machine in machines.items()})


def _judge(rate_of: Mapping[tuple[str, str], float], promised: Mapping[str, float | None]) -> Iterator[CheckResult]:
    median = statistics.median(rate_of.values())
    for (first, second), rate in rate_of.items():
        speeds = [speed for host in (first, second) if (speed := promised[host]) is not None]
        expected = max(min(_ONE_STREAM, *speeds) if speeds else 0.0, median)
        if rate < _SLOW_SHARE * expected:
            text = f"{first} - {second}: {rate:.3g} GB/s by TCP; {expected:.3g} GB/s are expected"
            fix = (
                "ethtool on both shows speed and errors; the cable and the switch port; traffic of others: sar -n DEV 1"
            )
            yield CheckResult("warning", "bandwidth", text, fix)
    spread = f"{min(rate_of.values()):.3g} to {max(rate_of.values()):.3g}" if len(rate_of) > 1 else f"{median:.3g}"
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
