"""A real slow link: two network namespaces, a pair of interfaces between them, and the kernel's token bucket.

Needs root, `ip` and `tc`, and a kernel that has both. Latency cannot be shaped everywhere (netem is often missing), so
only the rate is. The machine's network is not changed.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from phalanx.errors import ShapingError

_ADDRESSES = ("10.213.77.1", "10.213.77.2")
_BURST_SECONDS = 0.002
_SMALLEST_BURST = 64 * 1024
_QUEUE = "50ms"


class Nodes:
    """Two namespaces joined by a shaped link."""

    def __init__(self, names: tuple[str, str], interfaces: tuple[str, str]) -> None:
        self.names = names
        self._interfaces = interfaces
        self.address = _ADDRESSES[0]

    def command(self, node: int, words: list[str]) -> list[str]:
        """Return the command that runs `words` on one of the two."""
        return ["ip", "netns", "exec", self.names[node], *words]

    def shape(self, bytes_per_second: float) -> None:
        """Set the link's rate, both ways."""
        burst = max(_SMALLEST_BURST, int(bytes_per_second * _BURST_SECONDS))
        rate = f"{int(bytes_per_second * 8)}bit"
        for name, interface in zip(self.names, self._interfaces, strict=True):
            bucket = ("tbf", "rate", rate, "burst", str(burst), "latency", _QUEUE)
            _run("tc", "-n", name, "qdisc", "replace", "dev", interface, "root", *bucket)


def why_not() -> str | None:
    """Return why namespaces cannot be used here, or None."""
    if os.geteuid() != 0:
        return "not root"
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            return f"no {program}"
    try:
        with two_nodes() as nodes:
            nodes.shape(1e9)
    except ShapingError as error:
        return error.message
    return None


@contextmanager
def two_nodes() -> Iterator[Nodes]:
    """Make two joined namespaces, and remove them afterwards."""
    token = secrets.token_hex(3)
    names = (f"phalanx-{token}-a", f"phalanx-{token}-b")
    interfaces = (f"phx{token}a", f"phx{token}b")
    with ExitStack() as stack:
        for name in names:
            _run("ip", "netns", "add", name)
            stack.callback(_run, "ip", "netns", "delete", name)
        _run("ip", "link", "add", interfaces[0], "netns", names[0], "type", "veth", "peer", "name", interfaces[1],
             "netns", names[1])  # fmt: skip
        for name, interface, address in zip(names, interfaces, _ADDRESSES, strict=True):
            _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", interface)
            _run("ip", "-n", name, "link", "set", interface, "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
        yield Nodes(names, interfaces)


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        output = (done.stderr or done.stdout).strip().splitlines()
        raise ShapingError(f"`{' '.join(words[:4])} ...` failed: {output[0] if output else done.returncode}")
