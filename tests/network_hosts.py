"""Hosts as network namespaces on one bridge: separate machines as far as addresses, ports and cables go."""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@dataclass(frozen=True)
class Host:
    """One namespace, and its cable to the bridge."""

    namespace: str
    address: str
    cable: str

    def command(self, *words: str) -> list[str]:
        return ["ip", "netns", "exec", self.namespace, *words]

    def cut(self) -> None:
        """Pull the cable: packets vanish without an answer."""
        ip("link", "set", self.cable, "down")

    def slow(self, rate: str) -> None:
        """Limit what the host receives, such as to 20mbit."""
        words = ["qdisc", "replace", "dev", self.cable, "root", "tbf", "rate", rate, "burst", "32k", "latency", "400ms"]
        subprocess.run(["tc", *words], check=True, capture_output=True, text=True)


@contextmanager
def network(count: int) -> Iterator[list[Host]]:
    """Make some hosts on one bridge, and remove them afterwards; skip the test where that is not allowed."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("making network namespaces needs root and ip")
    mark = uuid.uuid4().hex[:5]
    third = int(mark[:2], 16)
    hosts = [Host(f"phx{mark}{n}", f"10.214.{third}.{n + 1}", f"c{mark}{n}") for n in range(count)]
    made: list[Host] = []
    try:
        try:
            ip("link", "add", f"b{mark}", "type", "bridge")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"bridges are not allowed here: {error.stderr.strip()}")
        ip("link", "set", f"b{mark}", "up")
        for host in hosts:
            ip("netns", "add", host.namespace)
            made.append(host)
            ip("link", "add", host.cable, "type", "veth", "peer", "eth0", "netns", host.namespace)
            ip("link", "set", host.cable, "master", f"b{mark}", "up")
            ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                ip("-n", host.namespace, "link", "set", device, "up")
        yield hosts
    finally:
        for host in made:
            ip("netns", "delete", host.namespace)
        subprocess.run(["ip", "link", "delete", f"b{mark}"], check=False, capture_output=True)
