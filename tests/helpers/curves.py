"""What TensorBoard reads from a folder of its files."""

from __future__ import annotations

import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path


def accumulator(directory: str | Path) -> Any:
    """TensorBoard's own reader of a folder."""
    # Where this module exists, TensorBoard reads without TensorFlow, which takes long to import and sets variables.
    sys.modules.setdefault("tensorboard.compat.notf", types.ModuleType("notf"))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(directory), size_guidance={"scalars": 0, "histograms": 0, "tensors": 0})
    reader.Reload()
    return reader


def scalars(directory: str | Path) -> dict[str, list[tuple[int, float]]]:
    """Every curve by its name, as (step, value), read by TensorBoard itself."""
    reader = accumulator(directory)
    return {tag: [(item.step, item.value) for item in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}
