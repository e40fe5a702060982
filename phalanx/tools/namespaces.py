"""Hosts as network namespaces on one bridge: separate machines as far as addresses, ports and links go. Needs root."""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from phalanx.errors import UsageError

_INSIDE = "eth0"


def ip(*words: str) -> None:
    """Run the command `ip`."""
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@dataclass(frozen=True)
class HostNamespace:
    """One namespace, and its cable to the bridge."""

    namespace: str
    address: str
    cable: str
    """The name of the link outside the namespace."""
    link: str = _INSIDE
    """The name of the link inside it."""

    def command(self, *words: str) -> list[str]:
        """Return a command that runs on the host."""
        return ["ip", "netns", "exec", self.namespace, *words]

    def cut(self) -> None:
        """Cut the link: packets vanish without an answer."""
        ip("link", "set", self.cable, "down")

    def slow(self, rate: str, burst: str = "32k", queue: str = "400ms") -> None:
        """Limit what the host receives, such as to 20mbit; `burst`: bytes at once, `queue`: how long packets wait."""
        words = ["qdisc", "replace", "dev", self.cable, "root", "tbf", "rate", rate, "burst", burst, "latency", queue]
        subprocess.run(["tc", *words], check=True, capture_output=True, text=True)


@contextmanager
def network(count: int) -> Iterator[list[HostNamespace]]:
    """Make hosts on one bridge, and remove them afterwards; UsageError with the reason where that is not allowed."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        raise UsageError("hosts as network namespaces need root and the command ip")
    mark = uuid.uuid4().hex[:5]
    third = int(mark[:2], 16)
    hosts = [HostNamespace(f"phx{mark}{n}", f"10.214.{third}.{n + 1}", f"c{mark}{n}") for n in range(count)]
    created: list[HostNamespace] = []
    try:
        try:
            ip("link", "add", f"b{mark}", "type", "bridge")
        except subprocess.CalledProcessError as error:
            raise UsageError(f"network bridges are not allowed here: {error.stderr.strip()}") from None
        ip("link", "set", f"b{mark}", "up")
        for host in hosts:
            ip("netns", "add", host.namespace)
            created.append(host)
            ip("link", "add", host.cable, "type", "veth", "peer", host.link, "netns", host.namespace)
            ip("link", "set", host.cable, "master", f"b{mark}", "up")
            ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", host.link)
            for device in (host.link, "lo"):
                ip("-n", host.namespace, "link", "set", device, "up")
        yield hosts
    finally:
        for host in created:
            ip("netns", "delete", host.namespace)
        subprocess.run(["ip", "link", "delete", f"b{mark}"], check=False, capture_output=True)
