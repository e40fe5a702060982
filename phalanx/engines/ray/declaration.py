"""What every config knows of Ray; loaded with it, so without a heavy import."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from phalanx.config.option import option
from phalanx.config.rows import Backend, Package


@dataclass(frozen=True, kw_only=True)
class RaySettings:
    """The cluster, what it reserves for each rank, and where."""

    address: str | None = option(
        None,
        "ray: the cluster to run on: ray://head:10001, head:6379 or auto (default: a local one, for this run)",
        backends=("ray",),
        scope="machine",
        used_by="command",
    )
    cpus_per_worker: float = option(
        1.0, "CPU cores that each rank reserves", above=0, backends=("ray",), scope="machine", used_by="command"
    )
    resources_per_worker: Mapping[str, float] | str | None = option(
        None,
        "other resources that each rank reserves, 'GPU=0.5,big_memory=1' (in Python and files also a table; default: "
        "a GPU if ranks use them)",
        backends=("ray",),
        scope="machine",
        used_by="command",
    )
    placement: str = option(
        "pack",
        "place ranks on as few nodes as possible (pack) or on as many (spread); strict: else do not start",
        choices=("pack", "spread", "strict-pack", "strict-spread"),
        backends=("ray",),
        scope="machine",
        used_by="command",
    )


BACKEND = Backend(
    "ray",
    "ddp",
    engine="phalanx.engines.ray",
    package=Package("ray", "Ray", "Run: pip install 'phalanx[ray]'"),
    options=RaySettings,
    resizes=True,
    variable="PHALANX_UNDER_RAY",
)
STRATEGIES = ()
