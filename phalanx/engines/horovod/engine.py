"""The engine `horovod`: what horovodrun changes about a run."""

from __future__ import annotations

import ast
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from phalanx.config import DistributedConfig
from phalanx.engine import Engine
from phalanx.engines.horovod.rules import STARTED_BY, names_hosts
from phalanx.errors import UsageError
from phalanx.launch.spec import PlannedRanks, Starter


class Horovod(Engine):
    """Ranks that horovodrun starts, with a rendezvous by Horovod's broadcast."""

    strategy = "horovod"

    def check_script(self, script: Path, started_by: str) -> None:
        """Refuse a script that imports Horovod where another launcher starts its ranks: each would train alone."""
        if started_by == STARTED_BY or not _imports_horovod(script):
            return
        if started_by != "mpirun":
            why = "hvd.init() finds other ranks only where horovodrun started them"
        elif (library := installed_library()) is not None and not speaks_mpi(library):
            why = "this Horovod was built without MPI, which it would need to find them"
        else:
            return
        raise UsageError(
            f"{script} imports horovod, but {started_by} would start its ranks, and {why}: each rank would train alone",
            hint=f"Write: phalanx train --script {script} --backend horovod, or horovodrun -np N python {script}",
        )

    def num_nodes(self, config: DistributedConfig) -> int:
        """Return 1: horovodrun starts the ranks of all nodes from one."""
        if config.num_nodes > 1 and not names_hosts(config):
            ranks = config.total_ranks or "<ranks>"
            raise UsageError(
                f"num_nodes = {config.num_nodes} with backend = 'horovod': horovodrun must know the nodes",
                hint=f"Write hosts = 'node1:4,node2:4', their slots, or start it by: horovodrun -np {ranks} -H ...",
            )
        return 1

    def counts_gpus_here(self, config: DistributedConfig) -> bool:
        """Whether all ranks run on this machine."""
        return not names_hosts(config)

    def starter(self, config: DistributedConfig, ranks: PlannedRanks) -> Starter:
        """Return horovodrun with the config's settings."""
        from phalanx.engines.horovod.launch import starter

        return starter(config, ranks)

    def check_rank(self, env: Any) -> None:
        """Refuse ranks of another launcher in a script that called hvd.init(): each of them is alone for Horovod."""
        from phalanx.engines.horovod.rendezvous import check_not_alone

        check_not_alone(env)

    def rendezvous(self, env: Any, seconds: float) -> Any:
        """Return the store of the ranks of horovodrun."""
        if env.started_by != STARTED_BY:
            return None
        from phalanx.engines.horovod.rendezvous import connect_ranks

        return connect_ranks(env, seconds)

    def wrap_run(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Run again after ranks were lost or added, where horovodrun is elastic."""
        if "HOROVOD_RANK" not in os.environ or os.environ.get("HOROVOD_ELASTIC") != "1":
            return run
        from phalanx.engines.horovod.elastic import run_elastic

        return lambda: run_elastic(run)


def _imports_horovod(script: Path) -> bool:
    """Whether the script imports Horovod at its top level; where it is optional, a branch imports it."""
    try:
        body = ast.parse(script.read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return False  # the rank that runs it reports it better
    names = [alias.name for node in body if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in body if isinstance(node, ast.ImportFrom) and not node.level]
    return any(name.split(".")[0] == "horovod" for name in names)


ENGINE = Horovod()


def installed_library() -> Path | None:
    """Return the shared library of the installed Horovod, if any, without importing it."""
    spec = importlib.util.find_spec("horovod")
    folders = [] if spec is None else spec.submodule_search_locations or []
    return next((library for folder in folders for library in sorted(Path(folder).glob("*/mpi_lib*.so"))), None)


def speaks_mpi(library: Path) -> bool:
    """Whether a Horovod was built with MPI: read from its symbols, because loading it would load torch."""
    return b"MPI_Init_thread" in library.read_bytes()
