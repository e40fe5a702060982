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
    #   Hint 1: Which global batch, and which order of samples, would make both runs the same training?
    #   Hint 2: One rank with 32 samples, two ranks with 16 each; dropout off; the same seed; log each loss.
    #   Hint 3: With Phalanx: --num-workers 1 and 2, --log-every-n-steps 1, and the events "step" in events.jsonl.
    # TODO project-scaling: measure samples per second on one and on several ranks, three times or more.
    #   Hint 1: Is it strong scaling (the global batch stays) or weak scaling (the batch per rank stays)?
    #   Hint 2: Leave out the first steps, take the median of the others, and repeat the runs in turn.
    #   Hint 3: Efficiency is the rate of n ranks over n times the rate of one. Say what limits it.
    # TODO project-recovery: kill a rank in the middle, and compare the end with a run that was not disturbed.
    #   Hint 1: What would be different if one step was lost, or computed twice?
    #   Hint 2: The largest difference between two weights of the two runs says it; 0 is possible with a fixed order.
    #   Hint 3: phalanx verify --script train.py --num-workers 2 --fault kill:rank=1,step=8 --json
    # TODO project-bytes: count what a rank sends, and compute what it should send.
    #   Hint 1: What does data parallelism have to send in each step?
    #   Hint 2: A ring sends 2 (n - 1) / n times the bytes of the gradients per rank and step.
    #   Hint 3: sent_bytes in the summary of a run of Phalanx (--json); a wrapper round all_reduce in your own loop.
    raise NotImplementedError("build")
