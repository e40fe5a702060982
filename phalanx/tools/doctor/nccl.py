"""What nccl has chosen for the ranks of a real communicator: version, transport, and why, from its own log."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from phalanx.host.gpus import HOST_ID
from phalanx.tools.doctor.result import CheckResult, Level

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
    found = {(int(first), int(second)): way for first, second, way in _CHANNEL.findall(text)}
    if not found:
        fix = "NCCL_DEBUG=INFO phalanx bench comm --device cuda shows all that nccl says"
        yield CheckResult("error", "NCCL", "no communicator was made", fix)
        return
    version = _VERSION.search(text)
    kinds = Counter(way.split("/")[0] for way in found.values())
    shown = ", ".join(sorted(set(found.values())))
    for kind in kinds:
        level, why, fix = _reason(kind, text, shared=shared)
        yield CheckResult(level, "NCCL", f"{version[1] if version else 'version unknown'}, {shown}: {why}", fix)


def _reason(kind: str, text: str, *, shared: bool) -> tuple[Level, str, str]:
    """Return the level, why nccl has chosen a kind of transport, and what changes it."""
    given = dict(_SET.findall(text))
    if kind == "P2P":
        return "ok", "GPUs read and write each other's memory", ""
    if kind in ("SHM", "DIRECT"):
        if given.get("NCCL_P2P_DISABLE", "0") != "0":
            return "warning", "through host memory, as NCCL_P2P_DISABLE is set", "unset NCCL_P2P_DISABLE"
        fix = "nvidia-smi topo -p2p r shows it; in virtual machines: ACS and IOMMU settings of the host"
        return "warning", "through host memory: the GPUs have no peer access to each other", fix
    if kind == "NET" and shared:
        return "ok", f"each rank has its own host id, as with --share-gpus, so that they talk by {_card(text)}", ""
    if kind == "NET" and "NET/IB" in text and "via NET/IB" in text:
        direct = "GDRDMA" in text
        return "ok", f"RDMA {'from GPU memory' if direct else 'through host memory'}", ""
    if given.get("NCCL_IB_DISABLE", "0") != "0":
        return "note", f"{_card(text)}, as NCCL_IB_DISABLE is set", "unset NCCL_IB_DISABLE"
    return "note", f"{_card(text)}: nccl takes the ranks for those of different hosts", f"unset {HOST_ID}"


def _card(text: str) -> str:
    found = _SOCKETS.search(text)
    return f"TCP over {found[1].removeprefix('[0]').partition(':')[0]}" if found else "TCP"
