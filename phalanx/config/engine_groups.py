"""The fields of engines that are not torch's own: who starts the ranks, where, and what only they can be told."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.config.option import option


@dataclass(frozen=True, kw_only=True)
class Engines:
    """Settings of Horovod and Ray."""

    address: str | None = option(
        None, "ray: the cluster to run on: ray://head:10001, head:6379 or auto (default: a local one, for this run)"
    )
    min_workers: int | None = option(
        None, "ray, horovod: elastic: go on with as few ranks as this while others are gone", minimum=1
    )
    cpus_per_worker: float = option(1.0, "ray: CPU cores that each rank reserves", above=0)
    resources_per_worker: str | None = option(
        None, "ray: what else each rank reserves, such as 'GPU=0.5,big_memory=1' (default: a GPU where ranks use them)"
    )
    placement: str = option(
        "pack",
        "ray: ranks on as few machines as possible (pack) or as many (spread); strict: or the run does not start",
        choices=("pack", "spread", "strict-pack", "strict-spread"),
    )
    hosts: str | None = option(None, "horovod: machines and their slots, node1:8,node2:8 (default: this machine)")
    host_discovery_script: str | None = option(
        None, "horovod: elastic: an executable that prints the machines there are, a line of host:slots each"
    )
    adasum: bool = option(False, "horovod: combine gradients by Adasum instead of averaging them")
    horovod_timeline: str | None = option(
        None, "horovod: write what is sent when to this file, for chrome://tracing or Perfetto"
    )
