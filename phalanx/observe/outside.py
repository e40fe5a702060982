"""Sinks of other packages: entry points of the group `phalanx.sinks`, named by the setting `sinks`."""

from __future__ import annotations

from pathlib import Path

from phalanx.config import DistributedConfig
from phalanx.config.option import load_entry_point
from phalanx.errors import UsageError, nearest
from phalanx.observe.sinks import Sink

SINKS_GROUP = "phalanx.sinks"


def check_sinks(config: DistributedConfig) -> None:
    """Refuse a name that no installed package has."""
    names = _names(config)
    if not names:
        return
    from importlib.metadata import entry_points  # 30 ms to import

    known = sorted(entry_points(group=SINKS_GROUP).names)
    for name in names:
        if name not in known:
            close = nearest(name, known)
            guess = f" Did you mean {close!r}?" if close else ""
            raise UsageError(
                f"sinks = {config.sinks!r}: no installed package has a sink {name!r}.{guess}",
                hint=f"Installed: {', '.join(known) or 'none'}. A package adds one by an entry point in {SINKS_GROUP}.",
            )


def outside_sinks(config: DistributedConfig, run_dir: Path) -> list[Sink]:
    """Make the sinks that the setting names."""
    made: list[Sink] = []
    for name in _names(config):
        factory = load_entry_point(SINKS_GROUP, name)
        sink = factory(config, run_dir) if callable(factory) else factory
        if not isinstance(sink, Sink):
            raise UsageError(
                f"the entry point {name} in the group {SINKS_GROUP} gave {sink!r}, which is not a sink",
                hint="Let it name a function of (config, run_dir) that returns an object with the methods "
                "handle(event) and close().",
            )
        made.append(sink)
    return made


def _names(config: DistributedConfig) -> list[str]:
    return [name for part in (config.sinks or "").split(",") if (name := part.strip())]
