"""The contestants of the step benchmark, one file each: `run(task)` trains `task.steps` optimizer steps."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec


@dataclass(frozen=True)
class Contestant:
    """A way to train, and the package it needs."""

    title: str
    module: str
    packages: tuple[str, ...]
    """Any one of them will do: Lightning is published under two names."""
    function: str = "run"

    @property
    def is_installed(self) -> bool:
        return any(find_spec(package) for package in self.packages)


CONTESTANTS = {
    "raw": Contestant("raw PyTorch loop", "contestants.raw", ("torch",)),
    "raw-tensors": Contestant("raw loop, TensorDataset", "contestants.raw", ("torch",), "run_on_tensors"),
    "raw-ddp": Contestant("raw loop, DDP of one rank", "contestants.raw", ("torch",), "run_in_ddp"),
    "raw-fsdp": Contestant("raw loop, fully_shard of one rank", "contestants.raw", ("torch",), "run_in_fsdp"),
    "phalanx": Contestant("Phalanx", "contestants.phalanx_trainer", ("phalanx",)),
    "phalanx-tensors": Contestant(
        "Phalanx, TensorDataset", "contestants.phalanx_trainer", ("phalanx",), "run_on_tensors"
    ),
    "raw-on-phalanx": Contestant("raw loop, DDP on our backend", "contestants.raw", ("torch",), "run_on_our_backend"),
    "phalanx-ddp": Contestant("Phalanx, ddp", "contestants.phalanx_trainer", ("phalanx",), "run_ddp"),
    "phalanx-ring": Contestant("Phalanx, ring", "contestants.phalanx_trainer", ("phalanx",), "run_ring"),
    "phalanx-fsdp": Contestant("Phalanx, fsdp", "contestants.phalanx_trainer", ("phalanx",), "run_fsdp"),
    "accelerate": Contestant("Accelerate", "contestants.accelerate_loop", ("accelerate",)),
    "fabric": Contestant("Lightning Fabric", "contestants.fabric_loop", ("lightning", "lightning_fabric")),
    "lightning": Contestant("Lightning Trainer", "contestants.lightning_trainer", ("lightning", "pytorch_lightning")),
    "hf": Contestant("Hugging Face Trainer", "contestants.hf_trainer", ("transformers",)),
}
