"""The backends in one table: each is a name for a launcher and a strategy, with what an engine brings. No torch."""

from __future__ import annotations

from typing import NamedTuple

DEFAULT_STRATEGY = "ddp"


class Package(NamedTuple):
    """What an engine imports, and how to install it."""

    module: str
    title: str
    install: str


class Backend(NamedTuple):
    """A launcher and a strategy."""

    launcher: str
    strategy: str
    strategy_of_many: str = ""
    """The default for several ranks, where it is another one."""
    strategies: tuple[str, ...] = ()
    """The only strategies that it has; empty: all of torch."""
    engine: str = ""
    """A package with the engine (`engine.py`) and its rules (`rules.py`); empty for torch alone."""
    package: Package | None = None
    replaces_ranks: bool = False
    """Phalanx's launcher replaces ranks in place."""
    resizes: bool = False
    """The engine itself goes on with fewer ranks, whatever the strategy."""
    framework: str = "torch"
    variable: str = ""
    """An environment variable that its launcher sets in ranks."""
    script_imports: str = ""
    """A module that a user's script imports to use it."""


BACKENDS = {
    "pytorch-ddp": Backend("local", DEFAULT_STRATEGY, replaces_ranks=True),
    "pytorch-fsdp": Backend("local", "fsdp", replaces_ranks=True),
    "deepspeed": Backend("local", "deepspeed", engine="phalanx.engines.deepspeed"),
    "horovod": Backend(
        "horovodrun",
        "horovod",
        strategies=("horovod",),
        engine="phalanx.engines.horovod",
        package=Package(
            "horovod",
            "Horovod",
            "Build it: make horovod, or python tools/build_horovod.py. (The extra phalanx[horovod] alone "
            "does not compile: docs/horovod.md)",
        ),
        resizes=True,
        variable="HOROVOD_RANK",
        script_imports="horovod.torch",
    ),
    "ray": Backend(
        "ray",
        DEFAULT_STRATEGY,
        engine="phalanx.engines.ray",
        package=Package("ray", "Ray", "Run: pip install 'phalanx[ray]'"),
        resizes=True,
        variable="PHALANX_UNDER_RAY",
    ),
    "tensorflow": Backend(
        "local",
        "mirrored",
        "multiworker",
        strategies=("mirrored", "multiworker", "parameter-server"),
        engine="phalanx.engines.tensorflow",
        package=Package("tensorflow", "TensorFlow", "Run: pip install 'phalanx[tensorflow]'"),
        framework="keras",
    ),
}
