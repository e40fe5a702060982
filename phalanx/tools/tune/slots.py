"""How many trials run at once, and where: on fixed groups of GPUs, or on the CPU's cores."""

from __future__ import annotations

import os
from dataclasses import dataclass

from phalanx.config import DistributedConfig
from phalanx.errors import UsageError
from phalanx.host.gpus import count_gpus


@dataclass(frozen=True)
class Slot:
    """Room for one trial."""

    number: int
    gpus: tuple[int, ...] = ()

    def environment(self) -> dict[str, str]:
        """Return the variable that lets the trial see only its GPUs."""
        if not self.gpus:
            return {}
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",") if visible else None
        return {"CUDA_VISIBLE_DEVICES": ",".join(names[gpu] if names else str(gpu) for gpu in self.gpus)}


@dataclass(frozen=True)
class Slots:
    """All slots, and the compute threads per rank."""

    slots: tuple[Slot, ...]
    threads_per_rank: int | None
    summary: str


def plan_slots(
    config: DistributedConfig,
    *,
    num_gpus: int | None = None,
    trials_per_gpu: int = 1,
    trials: int | None = None,
    gpus_here: int | None = None,
) -> Slots:
    """Divide this machine into slots; `trials` sets how many run at once."""
    here = count_gpus() if gpus_here is None else gpus_here
    ranks = config.total_ranks or 1
    for name, value in (("trials_per_gpu", trials_per_gpu), ("trials", trials), ("num_gpus", num_gpus)):
        if value is not None and value < 1:
            raise UsageError(f"{name} = {value}: must be 1 or more")
    if config.device == "cpu" or here == 0:
        return _on_cpu(config, ranks, trials, asked_gpus=num_gpus)
    if num_gpus is not None and num_gpus > here:
        raise UsageError(
            f"num_gpus = {num_gpus}, but this machine has {here} GPU{'s' * (here > 1)}",
            hint=f"Write num_gpus={here}, or search on a Ray cluster that has them: engine='ray', address='ray://...'.",
        )
    usable = num_gpus or here
    if ranks > usable:
        raise UsageError(f"a trial of {ranks} ranks needs {ranks} GPUs, but {usable} are there")
    most = usable // ranks * trials_per_gpu
    count = trials or most
    if count > most:
        raise UsageError(
            f"trials = {count} at once need {count * ranks} GPUs, but {usable} are there",
            hint=f"Write trials={most}, or let trials share GPUs: trials_per_gpu={-(-count * ranks // usable)}.",
        )
    groups = usable // ranks  # consecutive slots have different GPUs: the first trials spread over all of them
    slots = tuple(Slot(n, tuple(range(n % groups * ranks, (n % groups + 1) * ranks))) for n in range(count))
    return Slots(slots, config.threads_per_rank, _summary(count, f"on {usable} GPU{'s' * (usable > 1)}", ranks))


def _on_cpu(config: DistributedConfig, ranks: int, trials: int | None, asked_gpus: int | None) -> Slots:
    cores = len(os.sched_getaffinity(0))
    count = trials or max(1, cores // ranks)
    threads = config.threads_per_rank
    if threads is None and "OMP_NUM_THREADS" not in os.environ:
        threads = max(1, cores // (count * ranks))
    missing = " (no GPU was found)" if asked_gpus else ""
    return Slots(
        tuple(Slot(number) for number in range(count)),
        threads,
        _summary(count, f"on {cores} CPU core{'s' * (cores > 1)}{missing}", ranks),
    )


def _summary(count: int, where: str, ranks: int) -> str:
    each = f", {ranks} ranks each" if ranks > 1 else ""
    return f"{count} trial{'s' * (count > 1)} at once {where}{each}"
