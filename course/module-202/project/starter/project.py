"""Final project: your model, and the measurements of its distributed training. README.md has the requirements.

The grader calls build() and reads measurements.json and report.md from the folder of this file. It does not train: how
you train, and with which framework, is yours to choose. This file may not import phalanx, but it may start its
commands.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


def build() -> tuple[nn.Module, Tensor, Tensor, Any]:
    """Return the model as training begins, inputs and targets of some samples, and the loss function.

    loss_function(model(inputs), targets) is the mean loss of these samples. It is near the loss of the first step in
    measurements.json, as both are of a model that has learned nothing. The number of parameters is that which you
    trained.
    """
    # TODO project-equality: choose model and data, and show that several ranks compute what one process computes.
    #   Hints, one at a time: phalanx learn hint project-equality
    # TODO project-scaling: measure samples per second on one and on several ranks, three times or more.
    #   Hints, one at a time: phalanx learn hint project-scaling
    # TODO project-recovery: kill a rank in the middle, and compare the end with a run that was not disturbed.
    #   Hints, one at a time: phalanx learn hint project-recovery
    # TODO project-bytes: count what a rank sends, and compute what it should send.
    #   Hints, one at a time: phalanx learn hint project-bytes
    raise NotImplementedError("build")
