"""An answer to lab 01: a node that joins, a job on Kubernetes, a training loop, metrics, a run on two nodes."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from ray import train
from ray.train import Checkpoint, CheckpointConfig, FailureConfig, RunConfig, ScalingConfig, UserCallback
from ray.train.torch import TorchTrainer, prepare_model
from torch import Tensor, nn


def make_model(seed: int) -> nn.Module:
    """Return the network; given, do not change it."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double()


def make_data(seed: int, rows: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets; given, do not change it."""
    draw = torch.Generator().manual_seed(seed)
    inputs = torch.randn(rows, 8, generator=draw).double()
    return inputs, inputs.square().sum(dim=1, keepdim=True) + 0.1 * torch.randn(rows, 1, generator=draw).double()


def join_command(head: str, cpus: int) -> list[str]:
    """Return the words by which a machine joins the cluster."""
    return ["ray", "start", f"--address={head}", f"--num-cpus={cpus}"]


def submit_command(nodes: int, gpus_per_node: int, image: str, claim: str) -> list[str]:
    """Return the words that make a RayJob."""
    return [
        *("phalanx", "submit", "ray", "text", "--kind", "rayjob", "--job-name", "lab-01"),
        *("--num-nodes", str(nodes), "--gpus-per-node", str(gpus_per_node), "--device", "cuda"),
        *("--max-restarts", "3", "--image", image, "--pvc", f"{claim}:/workspace"),
    ]


def train_loop(config: dict[str, Any]) -> None:
    """Train on this worker's rows; report, with a checkpoint, after each epoch."""
    context = train.get_context()
    rank, workers = context.get_world_rank(), context.get_world_size()
    model = make_model(config["seed"])
    inputs, targets = make_data(config["seed"], config["rows"])
    optimizer = torch.optim.SGD(model.parameters(), lr=config["learning_rate"], momentum=0.9)
    begin = restore(model, optimizer)
    prepared = prepare_model(model)
    for epoch in range(begin, config["epochs"]):
        began, total, seen = time.monotonic(), 0.0, 0
        order = torch.randperm(config["rows"], generator=torch.Generator().manual_seed(config["seed"] + epoch))
        for batch in order.split(config["batch"]):
            mine = batch[rank::workers]
            loss = nn.functional.mse_loss(prepared(inputs[mine]), targets[mine])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(mine)
            seen += len(mine)
        metrics = {"epoch": epoch, "loss": total / seen, "rows": seen, "seconds": time.monotonic() - began}
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if rank == 0:  # all ranks have the same state, so one file is enough
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
                torch.save(state, Path(folder) / "state.pt")
                checkpoint = Checkpoint.from_directory(folder)
            train.report(metrics, checkpoint=checkpoint)


def restore(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the last reported checkpoint, if there is one; return the epoch to begin with."""
    checkpoint = train.get_checkpoint()
    if checkpoint is None:
        return 0
    with checkpoint.as_directory() as folder:
        state = torch.load(Path(folder) / "state.pt")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["epoch"]) + 1


class MetricsLog(UserCallback):
    """Writes one line per report, over all workers."""

    def __init__(self, path: str) -> None:
        """Keep the path of the file."""
        self._path = path

    def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Checkpoint | None) -> None:
        """Append a line."""
        rows = sum(each["rows"] for each in metrics)
        seconds = [each["seconds"] for each in metrics]
        line = {
            "epoch": metrics[0]["epoch"],
            "workers": len(metrics),
            "loss": sum(each["loss"] * each["rows"] for each in metrics) / rows,
            "rows_per_second": rows / max(seconds),
            "slowest": seconds.index(max(seconds)),
        }
        with open(self._path, "a") as file:
            file.write(json.dumps(line) + "\n")


def make_trainer(config: dict[str, Any], workers: int, folder: str) -> TorchTrainer:
    """Return a trainer whose workers are spread over the nodes, and that survives lost workers."""
    return TorchTrainer(
        train_loop,
        train_loop_config=config,
        scaling_config=ScalingConfig(
            num_workers=workers, resources_per_worker={"CPU": 1}, placement_strategy="STRICT_SPREAD"
        ),
        run_config=RunConfig(
            name="lab-01",
            storage_path=folder,
            failure_config=FailureConfig(max_failures=3),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
            callbacks=[MetricsLog(f"{folder}/metrics.jsonl")],
        ),
    )
