"""Histograms of weights, gradients, gradient norms and update ratios for TensorBoard: `tensorboard_histograms`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from phalanx.loop.hooks import Callback
from phalanx.strategies.base import local
from phalanx.trackers.tensorboard import Histogram, TensorBoardSink

if TYPE_CHECKING:
    from phalanx.loop.running_trainer import RunningTrainer
    from phalanx.loop.train_loop import TrainLoop

_BINS = 64


class HistogramCallback(Callback):
    """Writes the weights at the end of every n-th epoch, and the gradients of the step that follows.

    Only the main rank has one. Of a sharded tensor it sees that rank's own part, so that no rank waits for another.
    """

    def __init__(self, sink: TensorBoardSink, every: int) -> None:
        self._sink = sink
        self._every = every
        self._wants_gradients = True
        self._hooks: list[RemovableHandle] = []
        self._before: dict[str, torch.Tensor] = {}

    def on_fit_start(self, trainer: RunningTrainer) -> None:
        """Look at gradients before the optimizer uses and clears them; an engine that owns the step has none here."""
        loop = cast("TrainLoop", trainer)
        if isinstance(loop.optimizer, torch.optim.Optimizer):
            self._hooks = [
                loop.optimizer.register_step_pre_hook(lambda *_: self._before_step(loop)),
                loop.optimizer.register_step_post_hook(lambda *_: self._after_step(loop)),
            ]

    def on_epoch_end(self, trainer: RunningTrainer, epoch: int, metrics: dict[str, float]) -> None:
        """Write the weights where it is due."""
        if (epoch + 1) % self._every == 0:
            named = cast("TrainLoop", trainer).task.model.named_parameters()
            self._write("weights", trainer.step, named)
            self._wants_gradients = True

    def on_fit_end(self, trainer: RunningTrainer) -> None:
        """Leave the optimizer, which may be the user's, as it was."""
        for hook in self._hooks:
            hook.remove()

    def _before_step(self, loop: TrainLoop) -> None:
        if self._wants_gradients:
            self._wants_gradients = False
            weights = dict(loop.task.model.named_parameters())
            gradients = {name: weight.grad for name, weight in weights.items() if weight.grad is not None}
            step = loop.step + 1  # a step counts when it is complete
            self._write("gradients", step, gradients.items())
            norms = [local(grad).norm() for grad in gradients.values()]
            self._write("gradients", step, [("norm_of_each", torch.stack(norms))] if norms else [])
            # In the host's memory: a copy beside the weights may be more than the device has.
            self._before = {name: local(weights[name]).detach().cpu().clone() for name in gradients}

    def _after_step(self, loop: TrainLoop) -> None:
        """Write by which share of its norm the step has changed each parameter; about 1e-3 is usual."""
        if not self._before:
            return
        now = {name: local(weight).detach().cpu() for name, weight in loop.task.model.named_parameters()}
        ratios = [(now[name] - old).norm() / old.norm().clamp(min=1e-12) for name, old in self._before.items()]
        self._write("updates", loop.step + 1, [("ratio_of_each", torch.stack(ratios).float())])
        self._before = {}

    def _write(self, group: str, step: int, tensors: Iterable[tuple[str, torch.Tensor | nn.Parameter]]) -> None:
        histograms = ((name, histogram_of(tensor)) for name, tensor in tensors)
        self._sink.histograms(step, {f"{group}/{name}": one for name, one in histograms if one is not None})


@torch.no_grad()
def histogram_of(tensor: torch.Tensor) -> Histogram | None:
    """Return the distribution of a tensor's finite values, computed on its device; None where there are none."""
    values = local(tensor).detach().flatten().float()
    values = values[values.isfinite()]
    if values.numel() == 0:
        return None
    lowest, highest = (float(end) for end in values.aminmax())
    counts = torch.histc(values, _BINS, lowest, highest)  # for equal ends torch widens the range by one on both sides
    low, high = (lowest, highest) if highest > lowest else (lowest - 1, highest + 1)
    limits = torch.linspace(low, high, _BINS + 1, dtype=torch.float64)[1:]
    total, squares = float(values.double().sum()), float(values.double().square().sum())
    return Histogram(lowest, highest, values.numel(), total, squares, limits.tolist(), counts.tolist())
