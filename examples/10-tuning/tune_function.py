"""Tune a function: successive halving gives up bad points early.

    python tune_function.py [--samples 12]

`train` is called in separate processes, several at once. It trains with a trainer of ours, which reports every epoch
and stops where the search decides; a function with another loop calls `phalanx.tune.report(loss=...)` instead.
"""

import argparse

from phalanx import DistributedTuner, tune

SPACE = {
    "learning_rate": tune.loguniform(1e-4, 1e-1),
    "optimizer": tune.choice(["sgd", "adamw"]),
    "momentum": tune.uniform(0.5, 0.99, when={"optimizer": "sgd"}),
    "width": tune.qrandint(16, 64, 16),
}


def train(config):
    import torch

    from phalanx import Trainer
    from phalanx.zoo.data import load

    torch.manual_seed(0)
    width = config["width"]
    model = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, 10)
    )
    settings = {name: value for name, value in config.items() if name != "width"}
    trainer = Trainer(model, loss_fn=torch.nn.CrossEntropyLoss(), batch_size=32, epochs=9, **settings)
    trainer.fit(load("digits", split="train"), load("digits", split="val"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=12)
    tuner = DistributedTuner(train, SPACE, metric="val/accuracy", scheduler="asha", study_dir="asha")
    best = tuner.tune(num_samples=parser.parse_args().samples)
    full = 9 * len(tuner.results.trials)
    taken = sum(trial.iteration for trial in tuner.results.trials)
    print(f"best: {best}, accuracy {tuner.results.best_value:.3f}")
    print(f"{taken} epochs instead of {full}: {1 - taken / full:.0%} saved")
