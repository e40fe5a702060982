"""Checks of NVIDIA GPUs: driver against torch, health, links between them; the variables of NCCL for a cloud."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from phalanx.host.gpus import HOST_ID, count_visible
from phalanx.tools.doctor.reader import CheckResult, HostReader, Level

_FIELDS = (
    "index",
    "name",
    "memory.total",
    "driver_version",
    "persistence_mode",
    "ecc.errors.uncorrected.volatile.total",
    "pcie.link.width.current",
    "pcie.link.width.max",
    "mig.mode.current",
    "temperature.gpu",
)
_QUERY = ("nvidia-smi", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits")
_DRIVERS = {11: 450, 12: 525, 13: 580}
"""The lowest driver for torch's builds, by the major version of CUDA (minor version compatibility)."""
_HOT = 85
_FAR = ("SYS", "NODE")
_LINKS = {
    "PIX": "one PCIe switch",
    "PXB": "several PCIe switches",
    "PHB": "the CPU's PCIe bridge",
    "NODE": "bridges of one NUMA node",
    "SYS": "the link between CPUs",
}


def read_gpus(machine: HostReader) -> list[dict[str, str]]:
    """Return the GPUs that nvidia-smi lists."""
    rows = (machine.command(*_QUERY) or "").splitlines()
    return [dict(zip(_FIELDS, (part.strip() for part in row.split(",")), strict=False)) for row in rows if "," in row]


def check_gpus(machine: HostReader) -> Iterator[CheckResult]:
    """Check the GPUs; a machine without any has one line."""
    gpus = read_gpus(machine)
    if not gpus:
        yield from _without(machine)
        return
    kinds = Counter(gpu["name"] for gpu in gpus)
    models = ", ".join(f"{count} x {name}" for name, count in kinds.items())
    yield CheckResult("ok", "GPUs", f"{models}, driver {gpus[0]['driver_version']}")
    if len(kinds) > 1:
        text = f"GPUs of {len(kinds)} kinds: ranks wait for the slowest one"
        yield CheckResult("warning", "GPUs", text, "CUDA_VISIBLE_DEVICES with GPUs of one kind")
    visible = machine.fact("environment").get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        count = count_visible(visible, len(gpus))
        level: Level = "error" if not count else "note" if count < len(gpus) else "ok"
        yield CheckResult(
            level, "GPUs", f"CUDA_VISIBLE_DEVICES={visible!r}: {count} of {len(gpus)}", "unset CUDA_VISIBLE_DEVICES"
        )
    yield from _software(machine, gpus[0]["driver_version"])
    for gpu in gpus:
        yield from _health(gpu)
    if any(gpu.get("persistence_mode") == "Disabled" for gpu in gpus):
        text = "persistence mode is off, so the first use of a GPU takes seconds"
        yield CheckResult("note", "GPUs", text, "nvidia-smi -pm 1 (root)")
    if len(gpus) > 1:
        yield from _fabric(machine)
        yield from _links(machine, len(gpus))


def _without(machine: HostReader) -> Iterator[CheckResult]:
    devices = machine.names("/proc/driver/nvidia/gpus")
    if devices:
        text = f"the driver has {len(devices)} GPUs, and nvidia-smi does not answer"
        yield CheckResult(
            "error", "GPUs", text, "nvidia-smi; dmesg | grep -i nvrm; reboot, or restart the container with --gpus all"
        )
        return
    yield CheckResult("ok", "GPUs", "none by NVIDIA: ranks run on the CPU")


def _software(machine: HostReader, driver: str) -> Iterator[CheckResult]:
    versions = machine.fact("versions")
    cuda = versions.get("cuda of torch")
    torch = f"torch {versions.get('torch', '')} ({'CPU only' if cuda == 'none' else f'CUDA {cuda}'})"
    if cuda is None:
        yield CheckResult("warning", "torch", "torch is not installed", "pip install torch")
    elif cuda == "none":
        fix = "pip install torch --index-url https://download.pytorch.org/whl/cu128"
        yield CheckResult("error", "torch", f"{torch}: the GPUs are not used", fix)
    else:
        cuda_major, major = int(cuda.split(".")[0]), driver.split(".")[0]
        least = _DRIVERS.get(cuda_major, 0)
        if major.isdecimal() and int(major) < least:
            text = f"{torch} needs driver {least} or later, there is {driver}"
            yield CheckResult(
                "error", "torch", text, f"upgrade the driver, or install a torch for CUDA {cuda_major - 1}"
            )
        else:
            yield CheckResult("ok", "torch", f"{torch} fits driver {driver}")
    if "nccl" in versions:
        yield CheckResult("ok", "NCCL", versions["nccl"])


def _health(gpu: dict[str, str]) -> Iterator[CheckResult]:
    name = f"GPU {gpu['index']}"
    errors = gpu.get("ecc.errors.uncorrected.volatile.total", "")
    if errors.isdecimal() and int(errors):
        text = f"{name} has {errors} uncorrected memory errors: results may be wrong, and jobs crash"
        yield CheckResult("error", "GPUs", text, f"nvidia-smi -q -d ECC -i {gpu['index']}; reset or replace it")
    now, most = gpu.get("pcie.link.width.current", ""), gpu.get("pcie.link.width.max", "")
    if now.isdecimal() and most.isdecimal() and int(now) < int(most):
        text = f"{name} uses {now} of {most} PCIe lanes: copies from the host are slower"
        yield CheckResult("warning", "GPUs", text, "reseat the card, or look at the slot and its riser")
    if gpu.get("mig.mode.current") == "Enabled":
        text = f"{name} is divided (MIG): a slice has no links to other GPUs"
        yield CheckResult("note", "GPUs", text, f"nvidia-smi -i {gpu['index']} -mig 0 (root)")
    heat = gpu.get("temperature.gpu", "")
    if heat.isdecimal() and int(heat) >= _HOT:
        yield CheckResult(
            "warning", "GPUs", f"{name} is at {heat} C and will lower its clock", "look at fans and airflow"
        )


def _fabric(machine: HostReader) -> Iterator[CheckResult]:
    switches = machine.names("/proc/driver/nvidia-nvswitch/devices")
    if switches and machine.text("/run/nvidia-fabricmanager/nv-fabricmanager.pid") is None:
        text = f"{len(switches)} NVSwitches, and the fabric manager does not run: CUDA fails with error 802"
        yield CheckResult(
            "error", "NVLink", text, "systemctl enable --now nvidia-fabricmanager (of the driver's version)"
        )


def _links(machine: HostReader, count: int) -> Iterator[CheckResult]:
    pairs = topology(machine.command("nvidia-smi", "topo", "-m") or "")
    if not pairs:
        return
    kinds = Counter(pairs.values())
    if all(kind.startswith("NV") for kind in kinds):
        names = ", ".join(sorted(kinds))
        yield CheckResult("ok", "NVLink", f"all {count} GPUs are linked ({names}: the number of links of a pair)")
        return
    far = [pair for pair, kind in pairs.items() if kind in _FAR]
    counts = ", ".join(f"{number} by {_LINKS.get(kind, kind)} ({kind})" for kind, number in kinds.items())
    level: Level = "warning" if any(kind.startswith("NV") for kind in kinds) and far else "note"
    text = f"pairs of GPUs are linked in different ways: {counts}"
    yield CheckResult(
        level, "NVLink", text, "tensor_parallel no larger than a group with NVLink; phalanx plan --gpus N"
    )
    refused = re.findall(
        r"\b(CNS|GNS|TNS|NS)\b", (machine.command("nvidia-smi", "topo", "-p2p", "r") or "").partition("Legend")[0]
    )
    if refused:
        number = len(refused) // 2
        text = f"{number} pair{'s' * (number != 1)} of GPUs without peer access: copies between them pass the host"
        yield CheckResult(
            "warning",
            "NVLink",
            text,
            "in virtual machines: ACS and IOMMU settings of the host; else NCCL_P2P_DISABLE=1 if it hangs",
        )


def topology(text: str) -> dict[tuple[int, int], str]:
    """Return how each pair of GPUs is linked, from `nvidia-smi topo -m`."""
    rows = [line.split() for line in text.replace("\x1b[4m", "").replace("\x1b[0m", "").splitlines()]
    gpus = [row for row in rows if row and re.fullmatch(r"GPU\d+", row[0])]
    body = [row for row in gpus if "X" in row[1 : len(gpus) + 2]]
    links = {}
    for first, row in enumerate(body):
        for second, kind in enumerate(row[1 : len(body) + 1]):
            if second > first:
                links[first, second] = kind
    return links


_FILE = "nccl.%p.log"
_VERSION = re.compile(r"NCCL version (\d+\.\d+(?:\.\d+)?)")
_CHANNEL = re.compile(r"Channel \d+(?:/\d+)? : (\d+)\[\w+\] -> (\d+)\[\w+\] (?:\[\w+\] )?via (\S+)")
_SET = re.compile(r"(NCCL_\w+) set by environment to (\S+?)\.?$", re.MULTILINE)
_SOCKETS = re.compile(r"NET/Socket : Using (\[0\]\S+?)<\d+>")


def log_environment(folder: Path) -> dict[str, str]:
    """Return the variables by which the ranks' nccl writes what it chooses into files of a folder."""
    return {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,ENV,NET,P2P,SHM", "NCCL_DEBUG_FILE": str(folder / _FILE)}


def read_log(folder: Path) -> str:
    """Return what the ranks' nccl has written."""
    return "\n".join(path.read_text(errors="replace") for path in sorted(folder.glob("nccl.*.log")))


def check_log(text: str, *, shared: bool) -> Iterator[CheckResult]:
    """Say which transport nccl uses between the ranks of this machine, and why; `shared`: ranks shared one GPU."""
    transports = {(int(first), int(second)): way for first, second, way in _CHANNEL.findall(text)}
    if not transports:
        fix = "NCCL_DEBUG=INFO phalanx bench comm --device cuda shows all that nccl says"
        yield CheckResult("error", "NCCL", "no communicator was made", fix)
        return
    version = _VERSION.search(text)
    kinds = Counter(way.split("/")[0] for way in transports.values())
    ways = ", ".join(sorted(set(transports.values())))
    for kind in kinds:
        level, why, fix = _reason(kind, text, shared=shared)
        yield CheckResult(level, "NCCL", f"{version[1] if version else 'version unknown'}, {ways}: {why}", fix)


def _reason(kind: str, text: str, *, shared: bool) -> tuple[Level, str, str]:
    """Return the level, why nccl has chosen a kind of transport, and what changes it."""
    variables = dict(_SET.findall(text))
    if kind == "P2P":
        return "ok", "GPUs read and write each other's memory", ""
    if kind in ("SHM", "DIRECT"):
        if variables.get("NCCL_P2P_DISABLE", "0") != "0":
            return "warning", "through host memory, as NCCL_P2P_DISABLE is set", "unset NCCL_P2P_DISABLE"
        fix = "nvidia-smi topo -p2p r shows it; in virtual machines: ACS and IOMMU settings of the host"
        return "warning", "through host memory: the GPUs have no peer access to each other", fix
    if kind == "NET" and shared:
        return "ok", f"each rank has its own host id, as with --share-gpus, so that they talk by {_card(text)}", ""
    if kind == "NET" and "NET/IB" in text and "via NET/IB" in text:
        direct = "GDRDMA" in text
        return "ok", f"RDMA {'from GPU memory' if direct else 'through host memory'}", ""
    if variables.get("NCCL_IB_DISABLE", "0") != "0":
        return "note", f"{_card(text)}, as NCCL_IB_DISABLE is set", "unset NCCL_IB_DISABLE"
    return "note", f"{_card(text)}: nccl takes the ranks for those of different hosts", f"unset {HOST_ID}"


def _card(text: str) -> str:
    match = _SOCKETS.search(text)
    return f"TCP over {match[1].removeprefix('[0]').partition(':')[0]}" if match else "TCP"
