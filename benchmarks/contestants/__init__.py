"""The contestants of the step benchmark, one file each: `run(task)` trains `task.steps` optimizer steps."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec


@dataclass(frozen=True)
class Contestant:
    """A way to train, and the package it needs."""

    title: str
    module: str
    package: str
    function: str = "run"

    @property
    def is_installed(self) -> bool:
        return find_spec(self.package) is not None


CONTESTANTS = {
    "raw": Contestant("raw PyTorch loop", "contestants.raw", "torch"),
    "raw-ddp": Contestant("raw loop, DDP of one rank", "contestants.raw", "torch", "run_in_ddp"),
    "phalanx": Contestant("Phalanx", "contestants.phalanx_trainer", "phalanx"),
    "accelerate": Contestant("Accelerate", "contestants.accelerate_loop", "accelerate"),
    "fabric": Contestant("Lightning Fabric", "contestants.lightning_fabric", "lightning"),
    "lightning": Contestant("Lightning Trainer", "contestants.lightning_trainer", "lightning"),
    "hf": Contestant("Hugging Face Trainer", "contestants.hf_trainer", "transformers"),
}
