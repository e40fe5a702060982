"""Lab 04: profile the slow trainer, mend it, and measure what that brought.

``torchrun --nproc-per-node 2 trainer.py`` prints a profile of both trainers; ``phalanx learn check lab-04`` grades.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from slow_trainer import Pictures, SlowTrainer

Table = dict[str, tuple[float, float]]


def profile_steps(step: Callable[[int], object], warmup: int = 2, steps: int = 4) -> Table:
    """Run step(0), step(1), ... and return what torch.profiler saw in the last ``steps`` of them.

    The keys are the names of operations and of record_function ranges, each with calls per step and milliseconds per
    step (with what was called inside). The first ``warmup`` steps run, but are not recorded; step is called
    ``warmup + steps`` times in all. The profiler's own ranges (ProfilerStep...) are left out.
    """
    # TODO lab-04-profile: let torch.profiler record some steps, and sum up per step.
    #   Hints, one at a time: phalanx learn hint lab-04-profile
    raise NotImplementedError("profile_steps")


class FastTrainer(SlowTrainer):
    """The same training as SlowTrainer's, to rounding, without its bottlenecks, and with mixed precision.

    precision: "fp32", or "bf16": products of matrices in bfloat16, weights, gradients and loss in float32.
    """

    def __init__(self, data: Pictures, accumulate: int = 4, validate_every: int = 10, precision: str = "fp32") -> None:
        super().__init__(data, accumulate, validate_every)
        self.precision = precision
        # TODO lab-04-bottlenecks: find the three bottlenecks with the profile, and mend them here.
        #   Hints, one at a time: phalanx learn hint lab-04-bottlenecks
        # TODO lab-04-accumulation: send once per step for any number of micro-batches, and add mixed precision.
        #   Hints, one at a time: phalanx learn hint lab-04-accumulation
        # TODO lab-04-report: measure with measure.py, and fill in report.md.
        #   Hints, one at a time: phalanx learn hint lab-04-report
        raise NotImplementedError("FastTrainer")


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
