"""One Python session that fits twice on N ranks; prints, for each fit, the seconds from the call to the first step."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import phalanx


def first_step_after_fit(ranks: int, folder: Path) -> float:
    """Fit for one step and return how long it took until that step was done in a rank."""
    mark = folder / "first-step"
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    dataset = TensorDataset(torch.randn(256, 64), torch.randint(10, (256,)))
    trainer = phalanx.PyTorchDDPTrainer(
        model, num_workers=ranks, device="cpu", batch_size=32, max_steps=1, progress=False, run_dir=str(folder / "run")
    )

    def note_time(info: object) -> None:
        mark.write_text(repr(time.time()))

    trainer.add_hook(note_time)
    called = time.time()
    trainer.fit(dataset)
    return float(mark.read_text()) - called


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="phalanx-bench-") as directory:
        print(json.dumps([first_step_after_fit(int(sys.argv[1]), Path(directory)) for _ in range(2)]))
