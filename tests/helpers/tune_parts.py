"""Functions that tests search over, in a module that a trial imports at once: no pytest, no Optuna."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from phalanx.tools.tune.trial import checkpoint_dir, report


def train_line(config: dict[str, Any]) -> None:
    """Fit a line with our trainer; how well it goes depends on the rate alone."""
    import torch

    from phalanx import PyTorchDDPTrainer

    torch.manual_seed(0)
    inputs = torch.randn(16, 4)
    data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
    trainer = PyTorchDDPTrainer(torch.nn.Linear(4, 1), loss_fn=torch.nn.MSELoss(), optimizer="sgd", momentum=0.0,
                                learning_rate=config["rate"], batch_size=8, epochs=9)  # fmt: skip
    trainer.fit(data, data)


def curve(config: dict[str, Any]) -> None:
    """A trial without any training: a curve, at a pace that the test sets."""
    for step in range(1, 10):
        if os.environ.get("SLOW") == str(config["x"] > 0):
            time.sleep(0.02)
        report(loss=(config["x"] - 1) ** 2 + 1 / step)


def ends_badly(config: dict[str, Any]) -> dict[str, float]:
    """End in the way that the point asks for."""
    if config["how"] == "crash":
        raise RuntimeError("the disk is on fire")
    if config["how"] == "memory":
        raise MemoryError("1 TB asked for")
    if config["how"] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if config["how"] == "other":
        return {"accuracy": 0.5}
    return {"loss": float("nan") if config["how"] == "nan" else 1.0, "accuracy": 0.5}


def returns_accuracy(config: dict[str, Any]) -> dict[str, float]:
    """Report a loss on the way, and return the accuracy alone."""
    report({"train/loss": 1.0})
    return {"accuracy": config["x"]}


def train(config: dict[str, Any]) -> None:
    """Fit a line, and leave the weights of each generation's first and last moment in the trial's folder."""
    import torch

    from phalanx import Callback, PyTorchDDPTrainer

    folder = Path(os.environ["PHALANX_RUN_DIR"])

    class KeepWeights(Callback):
        def on_fit_start(self, trainer: Any) -> None:
            torch.save(trainer.task.model.state_dict(), folder / f"first-{trainer.epoch}.pt")

        def on_fit_end(self, trainer: Any) -> None:
            torch.save(trainer.task.model.state_dict(), folder / f"last-{trainer.epoch}.pt")
            group = trainer.optimizer.param_groups[0]
            (folder / f"used-{trainer.epoch}").write_text(f"{group['lr']!r} {group['weight_decay']!r}")

    inputs = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
    torch.manual_seed(int(os.environ["PHALANX_TRIAL"]))
    PyTorchDDPTrainer(
        torch.nn.Linear(4, 1), loss_fn=torch.nn.MSELoss(), batch_size=8, epochs=3, callbacks=[KeepWeights()],
        learning_rate=config["rate"], weight_decay=config["decay"], optimizer="sgd", momentum=0.0,
    ).fit(data, data)  # fmt: skip


def count_on(config: dict[str, Any]) -> None:
    """A loop of the user's own, which says nothing of steps."""
    file = checkpoint_dir() / "epochs"
    done = int(file.read_text()) if file.exists() else 0
    for epoch in range(done + 1, 5):
        file.write_text(str(epoch))
        report(loss=config["rate"], epoch=epoch)
