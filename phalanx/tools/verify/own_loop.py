"""Loops as users write them, for `verify --own-loop`: the same code on a layout and in one process.

`passes`: two forward passes, then their two backward passes with a weight, and half of the parameters join half-way.
`optimizers`: two optimizers that step one after the other, and a loss after the first step whose gradients the one that
has stepped drops, as adversarial training does.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from phalanx.config import DistributedConfig
from phalanx.errors import UsageError
from phalanx.loop.formation import Formation
from phalanx.loop.forward import Forward, decide_forward
from phalanx.loop.metrics import LossFn
from phalanx.loop.prepare import PreparedLoader
from phalanx.tools.verify.probe import Recording, Tensors
from phalanx.trainers.weights import whole_tensors

LOOPS = {
    "passes": "two forward and two backward passes, half of the model unfrozen half-way",
    "optimizers": "two optimizers, and a loss between their steps",
}


def loops_for(config: DistributedConfig) -> list[str]:
    """Return the loops that a layout can run: parameter servers take one optimizer."""
    if config.pipeline_parallel > 1:
        raise UsageError(
            "--own-loop calls the model, and a pipeline cannot be called in training",
            hint="Verify the other axes, or the pipeline without --own-loop.",
        )
    return ["passes"] if config.facts.has_servers else list(LOOPS)


def run_own_loop(
    which: str, config: DistributedConfig, model: nn.Module, data: Any, loss_fn: LossFn | None
) -> Recording:
    """Train the config's steps in a loop and return what is compared."""
    loop = _Loop(which, config, model, loss_fn)
    try:
        return loop.run(data)
    finally:
        loop.formation.close()


class _Loop:
    def __init__(self, which: str, config: DistributedConfig, model: nn.Module, loss_fn: LossFn | None) -> None:
        self.formation = Formation(config)
        self._model, self._loss_fn = model, loss_fn
        self._passes = which == "passes"
        names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        self._late = set(names[: len(names) // 2]) if self._passes and not self.formation.strategy.owns_step else set()
        self._steps = config.max_steps or 1

    def run(self, data: Any) -> Recording:
        """Take the steps, over as many epochs as they need."""
        f, model = self.formation, self._model
        before = {name: module.__class__.__name__ for name, module in model.named_modules()}
        recording = Recording(modules=before, parameters=sum(p.numel() for p in model.parameters()))
        self._want_gradients(False)
        parameters = list(model.parameters())
        cut = len(parameters) if self._passes else len(parameters) // 2
        rate = f.config.learning_rate
        # The second one's step leaves its weights: the loss after it is the same in every micro-batch of a step.
        made = [
            torch.optim.SGD(part, lr=lr) for part, lr in ((parameters[:cut], rate), (parameters[cut:], 0.0)) if part
        ]
        wrapped, *made = f.prepare(model, *made)
        loader = f.prepare_loader(data)
        recording.global_batch = loader.sharded.layout.global_batch
        while f.step < self._steps:
            self._epoch(wrapped, made, loader, recording)
        f.strategy.consolidate(wrapped)
        recording.after = self._whole()
        return recording

    def _epoch(self, wrapped: nn.Module, made: list[Any], loader: PreparedLoader, recording: Recording) -> None:
        f, sums, forward = self.formation, torch.zeros(2, dtype=torch.float64), None
        for batch in loader:
            if f.step == self._steps // 2:
                self._want_gradients(True)
            forward = forward or decide_forward(f.unwrap(wrapped), self._loss_fn, batch)
            weight = self._weight(forward, wrapped, batch, loader)
            loss = self._backward(forward, wrapped, batch, weight)
            sums += torch.tensor([float(loss) * weight, weight], dtype=torch.float64)
            norm = f.clip_grad_norm(math.inf, None if len(made) == 1 else made[1])
            for optimizer in reversed(made):
                optimizer.step()
                optimizer.zero_grad()
                if optimizer is not made[0]:
                    f.backward(0.5 * forward.loss(wrapped, batch))
            for optimizer in made:
                optimizer.zero_grad()
            if norm is not None:
                total, count = f.reduce(sums.to(f.device), "sum").tolist()
                recording.steps.append({"step": f.step, "loss": total / count, "grad_norm": float(norm)})
                sums = torch.zeros(2, dtype=torch.float64)
            if f.step == self._steps:
                return

    def _backward(self, forward: Forward, wrapped: nn.Module, batch: Any, weight: float) -> torch.Tensor:
        f = self.formation
        first = forward.loss(wrapped, batch)
        if not self._passes:
            f.backward(first)
            return first.detach()
        second = 0.5 * forward.loss(wrapped, batch)
        f.backward(first, weight)
        f.backward(second, weight)
        return first.detach()

    def _weight(self, forward: Forward, wrapped: nn.Module, batch: Any, loader: PreparedLoader) -> float:
        """Return what the loss is the mean of: the labels of this rank's batch, or its samples."""
        samples = loader.current.samples
        if not samples or not self.formation.weighs_labels(forward, wrapped, batch, loader):
            return float(samples)
        return float(forward.count_labels(batch))

    def _want_gradients(self, wanted: bool) -> None:
        for name, parameter in self._model.named_parameters():
            if name in self._late:
                parameter.requires_grad_(wanted)

    def _whole(self) -> Tensors:
        found = {name: t for name, t in self._model.state_dict().items() if t.is_floating_point() or t.is_complex()}
        return {k: v.clone() for k, v in (whole_tensors(self._model, found, keep=self.formation.is_main) or {}).items()}
