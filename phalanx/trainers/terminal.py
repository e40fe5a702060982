"""The terminal of the process that launches: a progress console, or plain output when no progress is wanted."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from phalanx.launch.console import PlainConsole

if TYPE_CHECKING:
    from collections.abc import Iterator

    from phalanx.config import DistributedConfig
    from phalanx.launch.console import Console


@contextmanager
def open_console(config: DistributedConfig) -> Iterator[Console]:
    """Open the console for one launch and leave the terminal tidy afterwards."""
    labelled = config.console_ranks == "all"
    if not config.progress:
        yield PlainConsole(labelled=labelled)
        return
    from phalanx.observe.console import Console as LiveConsole

    console = LiveConsole(show_labels=labelled)
    try:
        yield console
    finally:
        console.close()
