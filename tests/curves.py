"""What TensorBoard reads from a folder of its files."""

from __future__ import annotations

import sys
import types
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def scalars(directory: str | Path) -> dict[str, list[tuple[int, float]]]:
    """Every curve by its name, as (step, value), read by TensorBoard itself."""
    # Where this module exists, TensorBoard reads without TensorFlow, which takes long to import and sets variables.
    sys.modules.setdefault("tensorboard.compat.notf", types.ModuleType("notf"))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(directory))
    reader.Reload()
    return {tag: [(item.step, item.value) for item in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}
