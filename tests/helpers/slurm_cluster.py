"""A real Slurm of two nodes on this machine: munged, slurmctld and two slurmd, on free ports, in one folder."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from waiting import LIMIT_SECONDS

_CONF = """ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdTimeout=10
KillWait=3
MinJobAge=300
SchedulerParameters=sched_interval=1
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


class SlurmCluster:
    """Two nodes, n1 and n2."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf")}

    def start(self) -> None:
        for name in ("state", "spool-n1", "spool-n2"):
            (self.folder / name).mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        host = socket.gethostname().partition(".")[0]
        text = _CONF.format(host=host, folder=self.folder, ports=_free_ports(3))
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        files = {part: self.folder / f"munge.{part}" for part in ("sock", "pid", "log", "seed")}
        flags = [f"--{flag}={files[part]}" for flag, part in zip(_MUNGE_FLAGS, files, strict=True)]
        self._run("munged", "--force", f"--key-file={key}", *flags)
        self._run("slurmctld", "-i")
        for node in ("n1", "n2"):
            self.start_node(node)
        self._wait_for("idle")

    def start_node(self, node: str) -> None:
        self._run("slurmd", "-N", node)

    def stop_node(self, node: str) -> None:
        """Kill a node's daemon and what it has started, as when the machine is lost."""
        daemon = psutil.Process(int((self.folder / f"slurmd-{node}.pid").read_text()))
        log = str(self.folder / f"slurmd-{node}.log")
        steps = [each for each in psutil.process_iter() if _writes(each, log)]
        for each in (daemon, *(child for step in steps for child in (step, *step.children(recursive=True)))):
            with suppress(psutil.NoSuchProcess):
                each.kill()

    def _run(self, program: str, *arguments: str) -> None:
        subprocess.run(
            [shutil.which(program) or f"/usr/sbin/{program}", *arguments],
            env={**os.environ, **self.environment},
            check=True,
            timeout=LIMIT_SECONDS,
            capture_output=True,
        )

    def _wait_for(self, state: str, seconds: float = LIMIT_SECONDS) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            found = self.ask("sinfo", "--noheader", "--Node", "--format", "%T").split()
            if len(found) == 2 and set(found) == {state}:
                return
            time.sleep(0.2)
        raise TimeoutError((self.folder / "slurmctld.log").read_text()[-2000:])

    def ask(self, *command: str) -> str:
        """Return what a command of Slurm prints."""
        environment = {**os.environ, **self.environment}
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS).stdout

    def stop(self) -> None:
        """End all daemons, and what they have started."""
        self.ask("scancel", "--user=root")
        while found := [process for process in psutil.process_iter() if self._owns(process)]:
            for process in found:  # the daemons first to be seen may have started others
                with suppress(psutil.Error):
                    process.kill()
            time.sleep(0.2)
        with suppress(OSError, ValueError):
            os.kill(int((self.folder / "munge.pid").read_text()), signal.SIGKILL)

    def _owns(self, process: psutil.Process) -> bool:
        try:
            own = process.environ().get("SLURM_CONF") == self.environment["SLURM_CONF"]
            # The daemon of a step writes its title over its environment.
            own = own or any(_writes(process, str(self.folder / f"slurmd-{node}.log")) for node in ("n1", "n2"))
            return own and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False


_MUNGE_FLAGS = ("socket", "pid-file", "log-file", "seed-file")


def _writes(process: psutil.Process, log: str) -> bool:
    """Whether a process is the daemon of a step, which writes to the log of its node."""
    try:
        return process.name() == "slurmstepd" and any(file.path == log for file in process.open_files())
    except psutil.Error:
        return False


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[SlurmCluster]:
    """Start Slurm, and end it; skip where it is not installed."""
    missing = [name for name in ("sbatch", "srun") if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        pytest.skip("needs slurm-wlm and munge, as root")
    folder.chmod(0o755)
    cluster = SlurmCluster(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
