"""Lab 04: profile the slow trainer, mend it, and measure what that brought.

``torchrun --nproc-per-node 2 trainer.py`` prints a profile of both trainers; ``phalanx learn check lab-04`` grades.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from slow_trainer import Pictures, SlowTrainer
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function, schedule

Table = dict[str, tuple[float, float]]


def profile_steps(step: Callable[[int], object], warmup: int = 2, steps: int = 4) -> Table:
    """Run step(0), step(1), ... and return what torch.profiler saw in the last ``steps`` of them.

    The keys are the names of operations and of record_function ranges, each with calls per step and milliseconds per
    step (with what was called inside). The first ``warmup`` steps run, but are not recorded; step is called
    ``warmup + steps`` times in all. The profiler's own ranges (ProfilerStep...) are left out.
    """
    plan = schedule(wait=0, warmup=warmup, active=steps, repeat=1)
    with profile(activities=[ProfilerActivity.CPU], schedule=plan) as profiler:
        for number in range(warmup + steps):
            step(number)
            profiler.step()
    return {
        event.key: (event.count / steps, event.cpu_time_total / 1000 / steps)
        for event in profiler.key_averages()
        if not event.key.startswith("ProfilerStep")
    }


class FastTrainer(SlowTrainer):
    """The same training as SlowTrainer's, to rounding, without its bottlenecks, and with mixed precision.

    precision: "fp32", or "bf16": products of matrices in bfloat16, weights, gradients and loss in float32.
    """

    def __init__(self, data: Pictures, accumulate: int = 4, validate_every: int = 10, precision: str = "fp32") -> None:
        super().__init__(data, accumulate, validate_every)
        if precision not in ("fp32", "bf16"):
            raise ValueError(f"precision={precision!r}: write fp32 or bf16")
        self.precision = precision
        self.decoded: dict[int, Tensor] = {}
        sizes = [parameter.numel() for parameter in self.model.parameters()]
        self.flat = torch.zeros(sum(sizes) + 1)  # all gradients, and the loss
        for parameter, part in zip(self.model.parameters(), self.flat[:-1].split(sizes), strict=True):
            parameter.grad = part.view_as(parameter)  # backward adds into the flat buffer: no copy

    def batch(self, rows: list[int]) -> tuple[Tensor, Tensor]:
        """Return inputs and labels; a picture is decoded when it is used for the first time."""
        for row in rows:
            if row not in self.decoded:
                self.decoded[row] = self.data.decode(row)
        return torch.stack([self.decoded[row] for row in rows]), self.data.labels[rows]

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits in float32."""
        mixed: AbstractContextManager[object] = nullcontext()
        if self.precision == "bf16":
            mixed = torch.autocast("cpu", torch.bfloat16)
        with mixed:
            return self.model(inputs).float()

    def step(self, number: int) -> float:
        """Make one step with one exchange, and return the loss of its global batch."""
        self.flat.zero_()
        rows = self.rows(number)
        size = -(-len(rows) // self.accumulate)
        for first in range(0, len(rows), size):
            with record_function("phase: data"):
                inputs, labels = self.batch(rows[first : first + size])
            with record_function("phase: forward, backward"):
                logits = self.forward(inputs)
                loss = nn.functional.cross_entropy(logits, labels, reduction="sum") / self.batch_size
                loss.backward()
                self.flat[-1] += loss.detach()
        with record_function("phase: exchange"):
            dist.all_reduce(self.flat)
        with record_function("phase: optimizer"):
            self.optimizer.step()
        if (number + 1) % self.validate_every == 0:
            with record_function("phase: metrics"):
                self.history.accuracies[number + 1] = self.validate()
        return self.flat[-1].item()


def main() -> None:
    """Print where the time of a step goes, in both trainers."""
    dist.init_process_group("gloo")
    for trainer in (SlowTrainer(Pictures()), FastTrainer(Pictures())):
        table = profile_steps(trainer.step)
        if dist.get_rank() == 0:
            print(f"{type(trainer).__name__:<30} calls per step   ms per step")
            for name, (calls, milliseconds) in sorted(table.items(), key=lambda item: -item[1][1])[:12]:
                print(f"  {name:<28} {calls:>14.1f} {milliseconds:>13.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
