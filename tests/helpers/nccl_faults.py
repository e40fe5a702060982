"""A run that loses ranks at given points, started as a process of its own: what it leaves is written as JSON.

python nccl_faults.py '{"faults": [["kill", 12, 1, "backward"]], "settings": {"num_workers": 3}}' FOLDER

With NCCL_FAULTS_DUMP=3 each rank prints its stacks every 3 s after an abort or its start, until a step is complete.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import phalanx
from phalanx.recovery.ranks import member as membership
from phalanx.zoo.models.gpt import gpt

WIDTH, CLASSES = 64, 4


class Faults(phalanx.Callback):
    """Injects each fault once: (kind, step, rank, where). Where "forming": as `step` the generation of the group."""

    def __init__(self, folder: str, faults: list[list[Any]]) -> None:
        self.folder = Path(folder)
        self.faults = faults

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Called in each rank before it joins a group."""
        self.__dict__.update(state)
        join = dist.init_process_group

        def join_or_fail(*args: Any, **options: Any) -> None:
            self.maybe("forming", int(os.environ.get("PHALANX_GENERATION", "0")), int(os.environ["RANK"]))
            join(*args, **options)

        dist.init_process_group = join_or_fail
        if seconds := os.environ.get("NCCL_FAULTS_DUMP"):
            dump_after_aborts(float(seconds))
            if any(self.folder.glob("fault-*")):  # a rank that replaces a lost one
                faulthandler.dump_traceback_later(float(seconds), repeat=True)

    def on_fit_start(self, trainer: Any) -> None:
        torch.backends.cuda.matmul.allow_tf32 = False
        self.trainer = trainer
        for number, parameter in enumerate(trainer.model.parameters()):
            parameter.register_hook(lambda gradient, number=number: self.maybe(f"backward {number}"))
        for module in trainer.formation.unwrap(trainer.model).modules():
            if isinstance(module, nn.Dropout):
                module.register_forward_hook(lambda module, *_: None if module.training else self.maybe("evaluate"))
        if (gate := getattr(trainer.formation.gradients, "gate", None)) is not None:
            self.note_undone(gate)

    def note_undone(self, gate: Any) -> None:
        """Write a file for each step that the gate undoes."""
        undo = gate._undo

        def undo_and_note(before: Any) -> None:
            undo(before)
            name = f"undone-{self.trainer.step + 1}-{self.trainer.formation.rank}-{os.getpid()}"
            (self.folder / name).write_text(str(gate.has_lost_state))

        gate._undo = undo_and_note

    def on_step_end(self, trainer: Any, info: Any) -> None:
        faulthandler.cancel_dump_traceback_later()
        self.maybe("boundary", info.step)

    def maybe(self, where: str, step: int | None = None, own: int | None = None) -> None:
        """Inject the fault of this step, rank and place."""
        step = self.trainer.step + 1 if step is None else step
        own = self.trainer.formation.rank if own is None else own
        for number, (kind, at, rank, place) in enumerate(self.faults):
            mark = self.folder / f"fault-{number}"
            if (at, rank, place) == (step, own, where) and not mark.exists():
                mark.write_text(str(os.getpid()))
                self.inject(kind)

    def inject(self, kind: str) -> None:
        """Fail in one of the ways that ranks fail."""
        if kind in ("kill", "stop"):
            os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        if kind == "raise":
            raise RuntimeError("an error of this rank")
        if kind == "oom":
            torch.empty(2**45, dtype=torch.uint8, device=self.trainer.formation.device)


def dump_after_aborts(seconds: float) -> None:
    """Print the stacks of all threads this long after an abort."""
    abort = membership.abort_collectives

    def abort_and_watch(why: str) -> None:
        faulthandler.dump_traceback_later(seconds, repeat=True)
        abort(why)

    membership.abort_collectives = abort_and_watch


def build(name: str) -> tuple[nn.Module, TensorDataset]:
    """Return a model and data, equal in each run."""
    torch.manual_seed(1)
    if name == "gpt":
        tokens = torch.randint(61, (256, 17), generator=torch.Generator().manual_seed(1))
        return gpt(layers=2, vocab_size=61, seq_len=16), TensorDataset(tokens[:, :-1], tokens[:, 1:])
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(6)]
    model = nn.Sequential(*blocks, nn.Dropout(0.1), nn.Linear(WIDTH, CLASSES))
    inputs = torch.randn(512, WIDTH, generator=torch.Generator().manual_seed(2))
    return model, TensorDataset(inputs, inputs[:, :CLASSES].argmax(1))


def main(plan: dict[str, Any], folder: str) -> None:
    """Train, and write the weights and the result."""
    model, data = build(plan.get("model", "mlp"))
    settings = {
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "share_gpus": torch.cuda.is_available(),
        "batch_size": 8,
        "strategy": "ddp",
        "optimizer": "sgd",
        "learning_rate": 0.05,
        "max_steps": 30,
        "max_restarts": 2 * len(plan["faults"]) + 1,
        "progress": False,
        "run_dir": f"{folder}/run",
        **({"check_replicas_every": 5} if "memory_frequency" not in plan.get("settings", {}) else {}),
        **plan.get("settings", {}),
    }
    trainer = phalanx.PyTorchDDPTrainer(model=model, callbacks=[Faults(folder, plan["faults"])], **settings)
    trainer.fit(data, data if plan.get("evaluates") else None)
    torch.save({name: value.cpu() for name, value in model.state_dict().items()}, f"{folder}/weights.pt")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), sys.argv[2])
