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
    #   Hint 1: The first steps are different: memory is allocated, code is loaded. Which argument of torch.profiler's
    #     profile() says from when on to record?
    #   Hint 2: schedule(wait=0, warmup=..., active=..., repeat=1); call profiler.step() after each step.
    #   Hint 3: profiler.key_averages() has key, count and cpu_time_total (microseconds, with what was called inside) of
    #     each name, over all recorded steps.
    raise NotImplementedError("profile_steps")


class FastTrainer(SlowTrainer):
    """The same training as SlowTrainer's, to rounding, without its bottlenecks, and with mixed precision.

    precision: "fp32", or "bf16": products of matrices in bfloat16, weights, gradients and loss in float32.
    """

    def __init__(self, data: Pictures, accumulate: int = 4, validate_every: int = 10, precision: str = "fp32") -> None:
        super().__init__(data, accumulate, validate_every)
        self.precision = precision
        # TODO lab-04-bottlenecks: find the three bottlenecks with the profile, and mend them here.
        #   Hint 1: Count before you look at the time: how often per step is each thing done, how often is it needed?
        #   Hint 2: 89 all_reduce per step; 160 decodes per step, of 640 pictures in all; one validation per step. Which
        #     methods of SlowTrainer do you have to replace?
        #   Hint 3: A dict of decoded pictures. One flat tensor with all gradients and the loss, and one all_reduce of
        #     it at the end of the step. validate() only where its result is kept.
        # TODO lab-04-accumulation: send once per step for any number of micro-batches, and add mixed precision.
        #   Hint 1: Where must the exchange be, so that the number of micro-batches does not matter?
        #   Hint 2: loss.backward() adds to the gradients that are there. torch.autocast("cpu", torch.bfloat16) round
        #     the forward pass lets products run in bf16; the weights stay as they are.
        #   Hint 3: The loss is computed from logits.float(), outside of autocast. Validation may use the same forward.
        # TODO lab-04-report: measure with measure.py, and fill in report.md.
        #   Hint 1: Which numbers would convince you, if another one had written the report?
        #   Hint 2: runs.json has the numbers before and after; each row of the table quotes two of them.
        #   Hint 3: `where` is slow_trainer.py:LINE; the sections below the table say what happens too often, and which
        #     line of the profile shows it.
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
