"""From the config to what the launcher is told. No torch here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.launch import CallTarget, LaunchSpec

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from phalanx.config import DistributedConfig
    from phalanx.launch.spec import Target
    from phalanx.world.layout import Layout


def launch_spec(
    config: DistributedConfig, layout: Layout, target: Target, log_dir: Path, *, env: Mapping[str, str]
) -> LaunchSpec:
    """Return the launch that the config asks for.

    Our own targets meet within `timeout` of their start; a user's script may prepare for hours before it does.
    """
    start_timeout = config.start_timeout
    if start_timeout is None and isinstance(target, CallTarget):
        start_timeout = config.timeout
    return LaunchSpec(
        target=target,
        ranks_per_node=layout.ranks_per_node,
        num_nodes=layout.num_nodes,
        node_rank=config.node_rank,
        rdzv_endpoint=config.rdzv_endpoint or "",
        env=env,
        log_dir=log_dir,
        labels=layout.labels,
        console_ranks="all" if config.console_ranks == "all" else "0",
        max_restarts=config.max_restarts,
        grace_seconds=config.stop_grace,
        join_timeout=config.timeout,
        start_timeout=start_timeout,
        threads_per_rank=config.threads_per_rank,
    )
