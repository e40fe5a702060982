"""Write phalanx/config/arguments.py, the settings as types of keyword arguments: `python tools/settings_arguments.py`.

A test compares the file with what this writes, so that it is run again whenever a setting is added or changed.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "phalanx" / "config" / "arguments.py"
sys.path.insert(0, str(ROOT))

from phalanx.config import FIELDS, GROUPS  # noqa: E402
from phalanx.config.aliases import ALIASES  # noqa: E402
from phalanx.config.option import kinds  # noqa: E402
from phalanx.config.rules import FOLDERS  # noqa: E402

HEAD = '''"""The settings as types of keyword arguments, for editors and type checkers; no program imports it.

Written by tools/settings_arguments.py from the fields: change those, and run it again.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal, TypedDict


class CommonSettings(TypedDict, total=False):
    """Every setting but `optimizer` and `compression`, which some trainers take as separate arguments."""

'''
TAIL = '''

class TrainerSettings(CommonSettings, total=False):
    """The settings of a trainer, which takes `optimizer` as a separate argument."""

    compression: {compression}


class AllSettings(TrainerSettings, total=False):
    """Every setting."""

    optimizer: {optimizer}


class TaskArguments(TypedDict, total=False):
    """What a trainer for torch models takes besides settings."""

    loss_fn: Any
    optimizer: Any
    scheduler: Any
    scheduler_interval: str
    metrics: Mapping[str, Any] | None
    callbacks: list[Any] | None
    augment: Any
    hooks: list[Any] | None


class TorchArguments(TrainerSettings, TaskArguments, total=False):
    """The keyword arguments of a trainer for torch models."""


class HorovodArguments(CommonSettings, TaskArguments, total=False):
    """The keyword arguments of HorovodTrainer, whose `compression` may be a class of Horovod."""
'''
WIDER = dict.fromkeys(("num_workers", "num_gpus"), "int | tuple[int, int] | None")
"""Settings whose Python argument may be more than the field: (least, most) workers."""


def annotation(field: dataclasses.Field[Any]) -> str:
    """Return the type of a setting as an argument."""
    if field.name in WIDER:
        return WIDER[field.name]
    choices = field.metadata["choices"]
    # Other packages bring names of their own, and torch's names of sharding are allowed too.
    if choices is not None and field.metadata["entry_points"] is None and field.name != "sharding":
        named = ", ".join(repr(choice).replace("'", '"') for choice in choices if choice is not None)
        return f"Literal[{named}]" + (" | None" if None in choices else "")
    if field.name in (*FOLDERS, "tensorboard_dir", "nvme_path"):
        return str(field.type).replace("str", "str | os.PathLike[str]")
    return " | ".join(kinds(field))


def written() -> str:
    """Return the text of the module."""
    lines = []
    for group in GROUPS:
        names = [name for name in group.__dataclass_fields__ if name not in ("optimizer", "compression")]
        lines += [f"    {name}: {annotation(FIELDS[name])}" for name in names]
    lines += ["    # Other spellings."]
    lines += [f"    {name}: {annotation(field)}" for name, field in ALIASES.items()]
    own = {name: annotation(FIELDS[name]) for name in ("optimizer", "compression")}
    return HEAD + "\n".join(lines) + "\n" + TAIL.format(**own)


if __name__ == "__main__":
    FILE.write_text(written(), encoding="utf-8")
