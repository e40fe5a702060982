"""Lab 01: Ray Train. The contract is in the docstrings; README.md leads through the four tasks.

Write with ray, torch and the standard library. `phalanx learn check lab-01` grades it on two real nodes of Ray.
"""

from __future__ import annotations

from typing import Any

import torch
from ray.train import Checkpoint, UserCallback
from ray.train.torch import TorchTrainer
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
    """Return the words of the command by which a machine joins the Ray cluster at `head` (host:port) with some CPUs.

    ["ray", "start", ...]; the grader runs it, and looks for the new node.
    """
    raise NotImplementedError("join_command")


def submit_command(nodes: int, gpus_per_node: int, image: str, claim: str) -> list[str]:
    """Return the words of a `phalanx submit ray text ...` that runs the recipe `text` on Kubernetes.

    It becomes an object of KubeRay that starts a cluster, runs this one job on it and removes the cluster: with `nodes`
    worker pods of `image`, `gpus_per_node` GPUs in each, the volume claim `claim` mounted at /workspace, and a job that
    survives lost workers. The grader adds --render, and reads the YAML.
    """
    # TODO lab-01-cluster: both commands, join_command and submit_command.
    #   Hints, one at a time: phalanx learn hint lab-01-cluster
    raise NotImplementedError("submit_command")


def train_loop(config: dict[str, Any]) -> None:
    """Train make_model(seed) on make_data(seed, rows); every worker runs this function.

    config: seed, rows, batch (of all workers together; it divides rows), epochs, learning_rate. The order of epoch e
    is torch.randperm of the rows with a torch.Generator of seed + e; each `batch` of it is one step, of which worker r
    of n takes batch[r::n]. The loss is the mean squared error, the optimizer torch.optim.SGD with momentum 0.9; the
    weights after each step are those of one process on the whole batch.

    After each epoch every worker reports {"epoch", "loss", "rows", "seconds"}: the mean loss over its own rows, their
    number, and how long the epoch took. Rank 0 adds a checkpoint with the file state.pt, a torch.save of {"model": the
    state_dict of the network itself, "optimizer": that of the optimizer, "epoch"}. Where Ray has a checkpoint when the
    function begins, it goes on after that epoch.
    """
    # TODO lab-01-train: the loop, the report, the checkpoint. (Going on from one is a part of lab-01-scale.)
    #   Hints, one at a time: phalanx learn hint lab-01-train
    raise NotImplementedError("train_loop")


class MetricsLog(UserCallback):
    """Writes one line of JSON per report, over all workers. Ray Train's controller calls it."""

    def __init__(self, path: str) -> None:
        """Keep the path of the file; the object travels to the controller."""
        raise NotImplementedError("MetricsLog")

    def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Checkpoint | None) -> None:
        """Append {"epoch", "workers", "loss", "rows_per_second", "slowest"}; metrics[r] is what worker r reported.

        loss: over all rows. rows_per_second: of all workers, with the time of the slowest. slowest: its rank.
        """
        # TODO lab-01-metrics: one line for the whole group of workers.
        #   Hints, one at a time: phalanx learn hint lab-01-metrics
        raise NotImplementedError("MetricsLog")


def make_trainer(config: dict[str, Any], workers: int, folder: str) -> TorchTrainer:
    """Return a trainer of train_loop with these workers, one CPU each, no two of them on the same node.

    It keeps its files below `folder`, the last two checkpoints among them, survives three lost workers, and has a
    MetricsLog that writes to FOLDER/metrics.jsonl.
    """
    # TODO lab-01-scale: the settings of the trainer; and train_loop goes on from ray.train.get_checkpoint().
    #   Hints, one at a time: phalanx learn hint lab-01-scale
    raise NotImplementedError("make_trainer")
