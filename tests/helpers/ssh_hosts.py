"""Hosts with a real sshd, each a network namespace; keys, known hosts and configuration in one folder."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from network_hosts import HostNamespace, network
from waiting import LIMIT_SECONDS

PORT = 2222


class SshHosts:
    """Some hosts, reached from the first one, as from a login node."""

    def __init__(self, folder: Path, hosts: list[HostNamespace]) -> None:
        self.folder, self.hosts = folder, hosts
        self.daemons: dict[int, subprocess.Popen[bytes]] = {}
        self.names = [host.address for host in hosts]
        self.options = [
            *("--port", str(PORT), "--identity", str(folder / "key")),
            *("--ssh", f"-o UserKnownHostsFile={folder / 'known_hosts'}"),
        ]
        self.variables = {
            f"PHALANX_SUBMIT_SSH_{name[2:].upper()}": value
            for name, value in zip(self.options[::2], self.options[1::2], strict=True)
        }

    def configure(self, number: int, *more: str) -> Path:
        """Write the configuration of a host's sshd; `more`: lines of it. A daemon that runs reads it anew."""
        conf = self.folder / f"sshd-{number}.conf"
        lines = [
            f"HostKey {self.folder / 'host'}",
            f"AuthorizedKeysFile {self.folder / 'key.pub'}",
            f"PidFile {self.folder / f'sshd-{number}.pid'}",
            "PasswordAuthentication no",
            "KbdInteractiveAuthentication no",
            "PermitRootLogin prohibit-password",
            "StrictModes no",
            "UsePAM no",
            *more,
        ]
        conf.write_text("\n".join(lines) + "\n")
        if number in self.daemons:
            self.daemons[number].send_signal(signal.SIGHUP)
            time.sleep(0.2)
            self._await(number)
        return conf

    def start(self, number: int) -> None:
        conf = self.configure(number)
        command = self.hosts[number].command("/usr/sbin/sshd", "-D", "-e", "-p", str(PORT), "-f", str(conf))
        with (self.folder / f"sshd-{number}.log").open("ab") as log:
            self.daemons[number] = subprocess.Popen(command, stderr=log)
        self._await(number)

    def _await(self, number: int) -> None:
        probe = self.hosts[0].command("bash", "-c", f"exec 3<>/dev/tcp/{self.names[number]}/{PORT}")
        for _ in range(1000):
            if subprocess.run(probe, capture_output=True).returncode == 0:
                return
            time.sleep(0.05)
        raise TimeoutError((self.folder / f"sshd-{number}.log").read_text())

    def stop(self, number: int) -> None:
        daemon = self.daemons.pop(number)
        daemon.terminate()
        daemon.wait(LIMIT_SECONDS)

    def processes(self) -> list[str]:
        """Return the command lines of all processes on the hosts, other than sshd itself."""
        return list(self._lines().values())

    def end_processes(self) -> None:
        """Kill what is left on the hosts, other than sshd itself."""
        for pid in self._lines():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _lines(self) -> dict[int, str]:
        found = {}
        for host in self.hosts:
            listed = subprocess.run(["ip", "netns", "pids", host.namespace], capture_output=True, text=True).stdout
            for pid in map(int, listed.split()):
                with suppress(OSError):
                    found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        return {pid: line for pid, line in found.items() if line and "sshd" not in line}


@contextmanager
def ssh_hosts(folder: Path, count: int) -> Iterator[SshHosts]:
    """Start the hosts, and end them; skip where that is not possible."""
    if not Path("/usr/sbin/sshd").exists() or shutil.which("ssh-keygen") is None:
        pytest.skip("needs openssh-server and openssh-client")
    Path("/run/sshd").mkdir(exist_ok=True)
    with network(count) as hosts:
        for name in ("key", "host"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
        found = SshHosts(folder, hosts)
        kind, key, *_ = (folder / "host.pub").read_text().split()
        known = [f"[{name}]:{PORT} {kind} {key}" for name in found.names]
        (folder / "known_hosts").write_text("\n".join(known) + "\n")
        try:
            for number in range(count):
                found.start(number)
            yield found
        finally:
            for number in list(found.daemons):
                found.stop(number)
