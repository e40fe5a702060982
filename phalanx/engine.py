"""Engine interface: the hooks by which an engine of this or of another package changes a run.

The core calls an engine only through `Engine`, whose methods change nothing by default. An engine is a folder in
`phalanx/engines/` that is named in `config/backends.py`, or an entry point of another package:

    [project.entry-points."phalanx.engines"]
    my-engine = "my_package:ENGINE"

`backend="my-engine"` then selects it, and the fields of its class `options` are settings. No torch here, nor in the
module that defines an engine.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from phalanx.config import BACKENDS, DistributedConfig
from phalanx.config.option import load_entry_point
from phalanx.config.settings import Settings
from phalanx.errors import UsageError

if TYPE_CHECKING:  # the layers above
    from phalanx.launch.spec import PlannedRanks, Starter

ENTRY_POINTS = "phalanx.engines"
VARIABLE = "PHALANX_ENGINE"
"""In the ranks of an engine: its name."""


class Engine:
    """What a foreign engine may change about a run. Subclasses override only what they change."""

    strategy: ClassVar[str] = "ddp"
    """The strategy that `backend=<this engine>` means where none is given."""
    options: ClassVar[type[Any] | None] = None
    """The settings of an engine of another package: a dataclass of fields, each a `phalanx.config.option.option`."""
    prelude: ClassVar[str] = ""
    """A function, `package.module:name`, that each rank calls before its target."""

    # In the parent, before ranks start.

    def check(self, config: DistributedConfig) -> None:
        """Raise where the node lacks something that the engine needs."""

    def check_script(self, script: Path, started_by: str) -> None:
        """Raise where a script cannot run on the ranks of another launcher; called for every engine."""

    def check_recipe(self, name: str) -> None:
        """Raise where the engine cannot train a recipe."""

    def notice(self, config: DistributedConfig) -> str | None:
        """Return a message for the user before the ranks start, such as of a long compilation."""
        return None

    def num_nodes(self, config: DistributedConfig) -> int:
        """Return on how many nodes the user gives the command; 1 where the engine starts ranks elsewhere itself."""
        return config.num_nodes

    def check_batch(self, config: Settings, data_ranks: int) -> None:
        """Raise where the batch cannot be divided over the ranks that see different samples."""

    def uses_gpus_here(self, config: DistributedConfig) -> bool:
        """Whether the GPUs of this machine decide the device."""
        return True

    def counts_gpus_here(self, config: DistributedConfig) -> bool:
        """Whether the ranks of this machine need GPUs of this machine."""
        return config.hosts is None

    def run_as_task(self, config: DistributedConfig, settings: Collection[str]) -> Callable[[], None] | None:
        """Return what makes this process a part of the engine's own cluster, where its scheduler started it as one."""
        return None

    def layout(self, config: DistributedConfig, device: str) -> Any:
        """Return the `JobLayout` of an engine that does not place its ranks on the mesh; None: the usual one."""
        return None

    def environment(self, config: DistributedConfig, device: str) -> tuple[dict[str, str], list[str]]:
        """Return variables of the ranks, and modules that the fork server imports for them."""
        return {}, []

    def starter(self, config: DistributedConfig, ranks: PlannedRanks) -> Starter | None:
        """Return the system that starts the ranks; None: Phalanx's launcher."""
        return None

    def datasets(self, *sources: Any) -> Mapping[str, Any]:
        """Return the data sets, by name, that the starter itself distributes to the ranks."""
        return {}

    # In a rank.

    def check_rank(self, env: Any) -> None:
        """Raise where the ranks of `env` (`RankEnv`) cannot work with what the script imported."""

    def rendezvous(self, env: Any, seconds: float) -> Any:
        """Return (`RankEnv` with the store's address, store) where the engine connects the ranks; None: torch does."""
        return None

    def wrap_run(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return what runs a training, given the function that runs it once; an elastic engine calls it again."""
        return run

    def callbacks(self) -> list[Any]:
        """Return callbacks of the training loop."""
        return []

    # Searches.

    def executor(self, trainable: Any, request: Any, notice: Callable[[str], None]) -> Any:
        """Return a context manager with the `Executor` of a search's trials (`phalanx tune --engine <this engine>`)."""
        raise UsageError(f"the engine {type(self).__name__} runs no searches", hint="Write: --engine local or ray.")


ENGINES = {name: backend for name, backend in BACKENDS.items() if backend.engine}
"""The engines of this package: each folder has an `ENGINE` in `engine.py`."""

_TORCH = Engine()


@functools.cache
def find_engine(name: str) -> Engine:
    """Return an engine by name; torch's own backends are the default `Engine`."""
    if name in ENGINES:
        engine: Engine = import_module(f"{ENGINES[name].engine}.engine").ENGINE
        return engine
    loaded = load_entry_point(ENTRY_POINTS, name) if name and name not in BACKENDS else None
    if loaded is not None and not isinstance(loaded, Engine):
        raise UsageError(f"the entry point {name} in the group {ENTRY_POINTS} is not a phalanx.engine.Engine")
    return _TORCH if loaded is None else loaded


def engine_name(config: Settings) -> str:
    """Return the name of the engine that a config selects, by its backend or its strategy; "" for torch's own."""
    if config.backend in ENGINES or config.backend not in BACKENDS:
        return config.backend
    return config.resolved_strategy if config.resolved_strategy in ENGINES else ""


def engine_of(config: Settings) -> Engine:
    """Return the engine that a config selects."""
    return find_engine(engine_name(config))


def engines_here() -> list[Engine]:
    """Return the engines that this rank runs under, or whose package the script imported."""
    names = [
        name
        for name, row in ENGINES.items()
        if (row.variable and os.environ.get(row.variable)) or (row.script_imports and row.script_imports in sys.modules)
    ]
    chosen = os.environ.get(VARIABLE)
    return [find_engine(name) for name in dict.fromkeys([*names, *filter(None, [chosen])])]
