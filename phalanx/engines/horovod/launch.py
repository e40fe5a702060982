"""Launch ranks with horovodrun: its command line, its environment, and restarts."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx.config import DistributedConfig
from phalanx.config.option import options_of
from phalanx.config.settings import Host, parse_hosts
from phalanx.engines.horovod.attempt import HorovodAttempt
from phalanx.engines.horovod.declaration import HorovodSettings
from phalanx.engines.horovod.entry_point import network
from phalanx.errors import UsageError
from phalanx.host.processes import SignalInbox, own_python
from phalanx.launch.environment import shared_environment, threads_per_rank
from phalanx.launch.launcher_loop import Outcome, run_attempts
from phalanx.launch.output import RankConsole
from phalanx.launch.spec import LaunchResult, LaunchSpec, PlannedRanks, target_to_message

_SCRIPT_SECONDS = 30.0


@dataclass(frozen=True)
class HorovodRun:
    """The settings of horovodrun."""

    ranks: int
    hosts: str | None = None
    least: int | None = None
    discovery: str | None = None
    timeline: str | None = None
    mpi: bool = False
    """Whether mpirun starts the ranks, which then use MPI; else horovodrun does, and they use gloo."""

    @property
    def elastic(self) -> bool:
        """Whether the run continues while nodes are lost and added."""
        return self.least is not None or self.discovery is not None

    def launch(self, spec: LaunchSpec, console: RankConsole) -> LaunchResult:
        """Run the target on the ranks and return when all of them have ended."""
        if self.discovery is not None:  # refused here if it names no nodes: horovodrun would wait
            hosts = _discover(self.discovery)
        else:
            hosts = parse_hosts(self.hosts) if self.hosts is not None else (Host("localhost", self.ranks),)
        with SignalInbox() as inbox:

            def run_once(number: int, failures: int) -> Outcome:
                attempt = HorovodAttempt(spec, console, inbox, number, ranks=self.ranks, elastic=self.elastic)
                return attempt.run(self.command(spec, hosts, attempt.name), self._environment(spec, hosts, number))

            return run_attempts(spec, console, run_once)[1]

    def command(self, spec: LaunchSpec, hosts: Sequence[Host], events: str) -> list[str]:
        """Return horovodrun's whole command line."""
        words = ["--mpi" if self.mpi else "--gloo", "--disable-cache", "-np", str(self.least or self.ranks)]
        if self.elastic:
            words += ["--min-np", str(self.least or self.ranks), "--max-np", str(self.ranks)]
        loopback = _all_here(hosts) and not self.mpi
        if loopback:
            words += ["--network-interfaces", "lo"]
        if self.discovery is not None:
            words += ["--host-discovery-script", str(Path(self.discovery).absolute())]
        else:
            words += ["-H", ",".join(f"{host.name}:{host.slots}" for host in hosts)]
        if self.timeline is not None:
            words += ["--timeline-filename", str(Path(self.timeline).absolute())]
        request = {
            "target": target_to_message(spec.target),
            "path": [entry or os.getcwd() for entry in sys.path],
            "log_dir": str(spec.log_dir.absolute()),
            "events": events,
            "network": network(),
            "loopback": loopback and self.elastic,  # ranks open servers of Horovod only in elastic runs
        }
        driver = own_python(f"from phalanx.engines.horovod.driver import main; main({os.getpid()}, {loopback})", *words)
        rank = own_python("from phalanx.engines.horovod.entry_point import main; main()", json.dumps(request))
        return [*driver, *rank]

    def _environment(self, spec: LaunchSpec, hosts: Sequence[Host], attempt: int) -> dict[str, str]:
        shared = shared_environment(spec)
        densest = max((host.slots for host in hosts), default=self.ranks)
        here = sum(host.slots for host in hosts) if _all_here(hosts) else densest
        threads = threads_per_rank(dataclasses.replace(spec, ranks_per_node=max(1, min(here, self.ranks))), shared)
        first = {"MASTER_ADDR": hosts[0].name} if self.mpi and not _all_here(hosts) else {}  # MPI does not set it
        return {
            **shared,
            **first,
            "OMP_NUM_THREADS": str(threads),
            "PHALANX_LOG_DIR": str(spec.log_dir.absolute()),
            "PHALANX_RUN_ID": spec.run_id,
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
            "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
        }


def starter(config: DistributedConfig, layout: PlannedRanks) -> HorovodRun:
    """Return the starter for a config."""
    options = options_of(HorovodSettings, config)
    return HorovodRun(
        ranks=layout.world_size,
        hosts=config.hosts,
        least=config.min_workers,
        discovery=options.host_discovery_script,
        timeline=options.horovod_timeline,
        mpi=options.adasum,
    )


def _discover(script: str) -> tuple[Host, ...]:
    path = Path(script)
    if not path.is_file() or not os.access(path, os.X_OK):
        problem = "is not executable" if path.is_file() else "does not exist"
        raise UsageError(
            f"host_discovery_script = {script!r} {problem}",
            hint="Write a script that prints the nodes, a line of host:slots each, and make it executable: chmod +x",
        )
    try:
        done = subprocess.run(
            [str(path.absolute())], capture_output=True, text=True, check=True, timeout=_SCRIPT_SECONDS
        )
        return parse_hosts(",".join(done.stdout.split()))
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise UsageError(
            f"host_discovery_script = {script!r} names no nodes: {error}",
            hint="It must print a line of host:slots for each node, such as node1:8.",
        ) from error


def _all_here(hosts: Sequence[Host]) -> bool:
    """Whether all names are this machine: then ranks use loopback."""
    try:
        return all(socket.gethostbyname(host.name).startswith("127.") for host in hosts)
    except OSError:
        return False
