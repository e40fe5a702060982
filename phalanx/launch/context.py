"""What the parts of a launcher share while its ranks run."""

from __future__ import annotations

import selectors
from collections.abc import Callable
from dataclasses import dataclass

from phalanx.launch.diagnosis import Evidence
from phalanx.launch.environment import NodeInfo
from phalanx.launch.group import RankGroup
from phalanx.launch.output import RankConsole
from phalanx.launch.rendezvous import Rendezvous
from phalanx.launch.spec import LaunchSpec


@dataclass
class LauncherContext:
    """Services that the parts of a launcher need from it."""

    spec: LaunchSpec
    node: NodeInfo
    group: RankGroup
    evidence: Evidence
    console: RankConsole
    rendezvous: Rendezvous
    selector: selectors.BaseSelector
    later: Callable[[float, Callable[[], None]], None]
    fail: Callable[..., None]
    """Gets a `FailureReport`; with `final=True` this machine alone ends, and does not start again."""
    is_stopping: Callable[[], bool]
