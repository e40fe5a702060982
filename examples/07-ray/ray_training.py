"""One local Ray for everything: a Ray data set on two workers, then a search whose trials train alone and on two.

    python ray_training.py
    python ray_training.py --address auto        # on a machine of a cluster: ray start --head

Ray is started for this script (no dashboard, loopback only) and stopped at its end. In a cluster, leave `open_cluster`
out: RayTrainer joins the Ray that is there.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import ray
import torch
from ray import tune
from torch import nn
from torch.utils.data import TensorDataset

from phalanx import RayTrainer
from phalanx.engines.ray.cluster import open_cluster

INPUTS = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
LABELS = (INPUTS.sum(1) > 0).long()


def train_fn(config: dict[str, Any]) -> dict[str, float | None]:
    """A trial as Ray Tune calls it. `lr` and `batch_size` are settings of the trainer; `hidden_size` is ours."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, config["hidden_size"]), nn.Linear(config["hidden_size"], 2))
    trainer = RayTrainer(model, config, epochs=2, log_every_n_steps=1, progress=False, device="cpu")
    history = trainer.fit(TensorDataset(INPUTS, LABELS), TensorDataset(INPUTS, LABELS))
    return {"accuracy": trainer.best_accuracy, "loss": history.steps[-1]["loss"]}


def train_on_ray_data() -> None:
    rows = [{"x": inputs.numpy(), "y": int(label)} for inputs, label in zip(INPUTS, LABELS, strict=True)]
    data = ray.data.from_items(rows)
    trainer = RayTrainer(
        nn.Linear(4, 2), num_workers=2, batch_size=4, epochs=2, log_every_n_steps=1, progress=False, device="cpu"
    )
    history = trainer.fit(data, data)
    print(f"ray data: {history.steps[-1]['step']} steps, accuracy {trainer.best_accuracy:.2f}")


def search(batch_sizes: list[int]) -> None:
    """Batches of 8 on one rank (in the trial itself) and of 4 on each of two (a Ray Train run inside the trial)."""
    workers = tune.sample_from(lambda spec: 1 if spec.config.batch_size == 8 else 2)
    space = {"hidden_size": 8, "lr": 0.1, "batch_size": tune.grid_search(batch_sizes), "num_workers": workers}
    analysis = tune.run(
        train_fn,
        config=space,
        resources_per_trial={"cpu": 1},
        max_concurrent_trials=1,
        verbose=0,
        storage_path=os.path.abspath("tune"),
    )
    for trial in analysis.trials:
        result = trial.last_result
        print(f"trial on {trial.config['num_workers']}: loss {result['loss']:.6f}, accuracy {result['accuracy']:.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", help="a cluster to use; none: a Ray of this script's own")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[8, 4])
    options = parser.parse_args()
    with open_cluster(options.address, num_cpus=3):
        train_on_ray_data()
        search(options.batch_sizes)
    print(f"Ray is {'still there' if ray.is_initialized() else 'stopped'}")
