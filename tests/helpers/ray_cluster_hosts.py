"""A Ray cluster of two machines, as far as addresses and processes go: a head and a second node in two namespaces."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from dataclasses import dataclass, field
from pathlib import Path

from command import clean_environment

PORT, CLIENT_PORT = 32379, 32001


def ray_environment(**added: str) -> dict[str, str]:
    """The environment of everything that Ray starts: ours, quiet, without files at home."""
    folder = str(Path(sys.executable).parent)
    quiet = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "TMPDIR": "/tmp"}
    # A dead machine is noticed after five of these, and its ranks are not asked for again for as long as usual.
    soon = {"RAY_health_check_period_ms": "500", "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "5"}
    return clean_environment(PATH=f"{folder}:{os.environ['PATH']}", **quiet, **soon, **added)


_OWN_NETWORK = """
ip link set lo up
ip link add outer type veth peer name away
ip address add 198.51.100.1/24 dev outer
ip link set outer up
ip link set away up
ip route add default via 198.51.100.2
exec "$@"
"""


def in_a_namespace_of_its_own(*words: str) -> list[str]:
    """A command on a machine with an outer address and a route that lead nowhere: no other machine reaches its Ray."""
    return ["unshare", "-n", "sh", "-ec", _OWN_NETWORK, "sh", *words]


def why_no_namespaces() -> str | None:
    """Say why this machine cannot have the namespaces, or None."""
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("unshare") is None:
        return "making network namespaces needs root, ip and unshare"
    made = subprocess.run(["unshare", "-n", "true"], capture_output=True, text=True, check=False)
    return f"network namespaces are not allowed here: {made.stderr.strip()}" if made.returncode else None


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@dataclass
class TwoMachines:
    """Two namespaces joined by a cable; `up` starts Ray in both."""

    mark: str = field(default_factory=lambda: uuid.uuid4().hex[:6])
    folder: str = field(default_factory=lambda: tempfile.mkdtemp(prefix="ray-", dir="/tmp"))

    dashboard_port: int | None = None
    """With one, the head has a dashboard, and with it the job API."""

    @property
    def dashboard(self) -> str:
        return f"http://{self._host(0)}:{self.dashboard_port}"

    @property
    def address(self) -> str:
        return f"ray://{self._host(0)}:{CLIENT_PORT}"

    def command(self, *words: object) -> list[str]:
        """Return a command as run on the first machine."""
        return ["ip", "netns", "exec", self._name(0), *map(str, words)]

    def up(self) -> None:
        for number in range(2):
            _ip("netns", "add", self._name(number))
        ends = [f"v{self.mark}{number}" for number in range(2)]
        _ip("link", "add", ends[0], "netns", self._name(0), "type", "veth", "peer", ends[1], "netns", self._name(1))
        for number, end in enumerate(ends):
            _ip("-n", self._name(number), "addr", "add", f"{self._host(number)}/24", "dev", end)
            for device in (end, "lo"):
                _ip("-n", self._name(number), "link", "set", device, "up")
        head = ["--head", f"--port={PORT}", f"--ray-client-server-port={CLIENT_PORT}", f"--temp-dir={self.folder}"]
        if self.dashboard_port is None:
            head.append("--include-dashboard=false")
        else:
            head += [f"--dashboard-port={self.dashboard_port}", "--dashboard-host=0.0.0.0"]
        self._start(0, *head)
        self._start(1, f"--address={self._host(0)}:{PORT}")

    def kill_second_machine(self) -> None:
        """Pull the plug: every process of it dies at once."""
        self._kill(1)

    def down(self) -> None:
        for number in range(2):
            self._kill(number)
            subprocess.run(["ip", "netns", "delete", self._name(number)], check=False, capture_output=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self, number: int, *words: str) -> None:
        """Start a node; its processes are daemons, and what is left of them is found by their namespace."""
        ray = [sys.executable, "-m", "ray.scripts.scripts", "start", *words, "--num-cpus=1"]
        if number and self.dashboard_port:  # shipped code is unpacked into Ray's folder: each machine has its own
            ray = ["sh", "-c", f'mount -t tmpfs none {self.folder} && exec "$@"', "sh", *ray]
        command = ["ip", "netns", "exec", self._name(number), *ray, f"--node-ip-address={self._host(number)}"]
        with tempfile.TemporaryFile() as log:  # not a pipe, which the daemons would keep open
            quiet = {"stdout": log, "stderr": log, "stdin": subprocess.DEVNULL}
            code = subprocess.run(command, env=ray_environment(), check=False, **quiet).returncode
            log.seek(0)
            assert code == 0, log.read().decode()

    def _kill(self, number: int) -> None:
        listed = subprocess.run(
            ["ip", "netns", "pids", self._name(number)], capture_output=True, text=True, check=False
        )
        for pid in listed.stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def _name(self, number: int) -> str:
        return f"phxr{self.mark}{number}"

    def _host(self, number: int) -> str:
        return f"10.213.81.{number + 1}"


def silent_port() -> socket.socket:
    """Listen at a port and never answer."""
    return socket.create_server(("127.0.0.1", 0))
