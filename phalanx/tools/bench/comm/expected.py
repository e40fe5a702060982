"""The expected speed of links as the machine reports it: network cards, GPU links, memory. No torch here."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

_INTERFACES = Path("/sys/class/net")
_LANE_GBS = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
"""PCIe, GB/s per lane by generation."""


@dataclass(frozen=True)
class ExpectedLink:
    """One link and its expected bandwidth in GB/s; None where it is not known."""

    name: str
    expected_gbs: float | None
    source: str


def network_links(interfaces: Path = _INTERFACES) -> list[ExpectedLink]:
    """Return the network cards that are up, with the speed their driver reports."""
    found = []
    for path in sorted(interfaces.glob("*")):
        if path.name == "lo" or _read(path / "operstate") not in ("up", "unknown"):
            continue
        megabits = _read(path / "speed")
        known = bool(re.fullmatch(r"[1-9]\d*", megabits))
        rate = int(megabits) / 8e3 if known else None
        found.append(ExpectedLink(path.name, rate, f"{path / 'speed'}" if known else "its driver does not say"))
    return found


def gpu_links() -> list[ExpectedLink]:
    """Return how GPUs are connected, by nvidia-smi; nothing without it."""
    if shutil.which("nvidia-smi") is None:
        return []
    nvlink = _ask("nvidia-smi", "nvlink", "--status")
    pcie = _ask("nvidia-smi", "--query-gpu=pcie.link.gen.max,pcie.link.width.max", "--format=csv,noheader")
    return [*parse_nvlink(nvlink), *parse_pcie(pcie)]


def parse_nvlink(text: str) -> list[ExpectedLink]:
    """Add up the links of each GPU (`Link 0: 26.562 GB/s`)."""
    found = []
    for block in re.split(r"^(?=GPU \d+)", text, flags=re.MULTILINE):
        number = re.match(r"GPU (\d+)", block)
        rates = [float(rate) for rate in re.findall(r"Link \d+: ([\d.]+) GB/s", block)]
        if number and rates:
            found.append(ExpectedLink(f"GPU {number[1]} NVLink", sum(rates), f"nvidia-smi: {len(rates)} links"))
    return found


def parse_pcie(text: str) -> list[ExpectedLink]:
    """Read generation and width of each GPU's PCIe link (`5, 16`)."""
    found = []
    for number, line in enumerate(filter(None, map(str.strip, text.splitlines()))):
        match = re.fullmatch(r"(\d+), (\d+)", line)
        if match:
            rate = _LANE_GBS.get(int(match[1]), 0.0) * int(match[2])
            found.append(ExpectedLink(f"GPU {number} PCIe", rate or None, f"nvidia-smi: gen {match[1]} x{match[2]}"))
    return found


def link_report(measured_gbs: float, copy_gbs: float, *, one_host: bool, links: list[ExpectedLink]) -> str:
    """Return expected and measured bandwidth. Ranks of one host communicate through memory, not its cards."""
    memory = ExpectedLink("memory (loopback)", copy_gbs, "one core copies, measured here")
    lines = [
        f"{'link':<22}{'expected':>10}{'measured':>10}{'share':>8}   expected by",
        " " * 22 + "    (GB/s)    (GB/s)",
    ]
    for link in [memory, *links] if one_host else links:
        used = one_host == (link is memory)
        expected = f"{link.expected_gbs:.2f}" if link.expected_gbs is not None else "?"
        shown = f"{measured_gbs:.2f}" if used else "-"
        share = f"{measured_gbs / link.expected_gbs:.0%}" if used and link.expected_gbs else "-"
        lines.append(f"{link.name:<22}{expected:>10}{shown:>10}{share:>8}   {link.source}")
    return "\n".join(lines)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # the kernel gives no speed for some links
        return ""


def _ask(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
