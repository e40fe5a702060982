"""The same idea with Ray Train: elastic workers, a checkpoint by rank 0, a worker that is killed once.

``python ray_elastic.py FOLDER`` needs Ray (pip install "phalanx[ray]"). Compare it with your supervisor: Ray starts the
workers, notices the lost one, and starts all anew with as many as it can place, from the checkpoint reported last.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from pathlib import Path

import ray
import torch
import torch.distributed as dist
from ray import train
from ray.train.torch import TorchTrainer
from torch import nn

STEPS = 12
KILLED_AT = 6


def work(settings: dict[str, str]) -> None:
    """Train on one worker; rank 1 is killed once, before step KILLED_AT."""
    rank, world = train.get_context().get_world_rank(), train.get_context().get_world_size()
    torch.manual_seed(7)
    model = nn.Linear(8, 1)
    first = 0
    if (checkpoint := train.get_checkpoint()) is not None:
        with checkpoint.as_directory() as folder:
            state = torch.load(Path(folder) / "state.pt")
        model.load_state_dict(state["model"])
        first = state["step"]
    print(f"worker {rank} of {world} begins with step {first}", flush=True)
    mark = Path(settings["folder"]) / "killed"
    for step in range(first, STEPS):
        if rank == 1 and step == KILLED_AT and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        inputs = torch.randn(32, 8, generator=torch.Generator().manual_seed(step))
        share = inputs[rank::world]
        model.zero_grad()
        (model(share) - share.sum(1, keepdim=True)).square().sum().div(32).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)  # a sum of sums over 32 rows: right for any number of workers
            parameter.data -= 0.05 * parameter.grad
        with tempfile.TemporaryDirectory() as folder:
            torch.save({"model": model.state_dict(), "step": step + 1}, Path(folder) / "state.pt")
            kept = train.Checkpoint.from_directory(folder) if rank == 0 else None
            train.report({"step": step + 1, "world": world, "weight": model.weight.sum().item()}, checkpoint=kept)


def main() -> None:
    """Run on one to two workers of this machine."""
    folder = Path(sys.argv[1]).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    ray.init(address="local", num_cpus=2, include_dashboard=False)
    trainer = TorchTrainer(
        work,
        train_loop_config={"folder": str(folder)},
        scaling_config=train.ScalingConfig(num_workers=(1, 2)),
        run_config=train.RunConfig(
            name="elastic", storage_path=str(folder), failure_config=train.FailureConfig(max_failures=3)
        ),
    )
    result = trainer.fit()
    print(f"ended with {result.metrics}")


if __name__ == "__main__":
    main()
