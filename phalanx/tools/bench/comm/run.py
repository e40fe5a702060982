"""Start the ranks of a benchmark, or measure on those that another launcher started."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from phalanx.errors import UsageError
from phalanx.host.files import scratch_folder
from phalanx.launch import CallTarget, LaunchSpec, RankConsole
from phalanx.run.start import run_on_ranks
from phalanx.tools.bench.comm.plan import PLAN_FILE, RESULT_FILE, BenchPlan
from phalanx.world.env import card_environment, export_rank_env, read_rank_env


def run_bench(
    plan: BenchPlan,
    ranks: int,
    console: RankConsole,
    *,
    threads: int | None = None,
    env: Mapping[str, str] | None = None,
) -> dict[str, Any] | None:
    """Measure on ranks of this machine, or on those that torchrun, srun or mpirun started.

    Return the result of the first rank; None on the other started ranks. `env`: added to the ranks' environment.
    """
    started = read_rank_env()
    if started is not None:
        from phalanx.tools.bench.comm.measure import leave_group, measure  # with torch

        export_rank_env(started)
        os.environ.update(card_environment(started))
        measured = measure(plan, lambda text: console.rank_output(0, "r0", f"{text}\n"))
        leave_group()
        return measured if started.rank == 0 else None
    if ranks < 1:
        raise UsageError(f"--num-workers is {ranks}", hint="It must be 1 or more.")
    with scratch_folder("bench") as folder:
        (folder / PLAN_FILE).write_text(plan.to_json())
        target = CallTarget("phalanx.tools.bench.comm.measure:run_plan", str(folder))
        spec = LaunchSpec(
            target=target,
            ranks_per_node=ranks,
            log_dir=folder / "logs",
            threads_per_rank=threads,
            ranks_per_gpu=plan.ranks_per_gpu,
            env=env or {},
        )
        run_on_ranks(spec, console=console)
        result: dict[str, Any] = json.loads((folder / RESULT_FILE).read_text())
        return result
