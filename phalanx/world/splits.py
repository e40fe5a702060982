"""What of a model divides over ranks: heads, layers, experts, sequences. Training and planning ask the same functions.

The first functions return the error to raise, or None where the parts are equal. `PipelineSchedule` is arithmetic: p
ranks in a row, m microbatches, v stages per rank; a forward pass of a rank's share takes one unit of time, its backward
pass two: one for the gradient of its input, one for that of its weights. No torch here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from phalanx.errors import ModelError, UsageError


def _divisors(number: int) -> str:
    return ", ".join(str(one) for one in range(1, number + 1) if number % one == 0)


def uneven_tensors(model: str, sizes: Mapping[str, int], ranks: int) -> UsageError | None:
    """Check that the number of tensor-parallel ranks divides these sizes, such as the number of heads."""
    wrong = [f"{name} = {size}" for name, size in sizes.items() if size % ranks]
    if not wrong:
        return None
    more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
    return UsageError(
        f"tensor_parallel = {ranks} cannot split {model}: it does not divide {', '.join(wrong[:3])}{more}",
        hint=f"For this model tensor_parallel can be: {_divisors(math.gcd(*sizes.values()))}.",
    )


def too_many_stages(model: str, layers: int, stages: int) -> UsageError | None:
    """Check that every pipeline stage gets a layer."""
    if stages <= layers:
        return None
    return UsageError(
        f"{stages} pipeline stages need as many layers, and {model} has {layers}",
        hint=f"Use at most {layers} stages (interleaved and zero-bubble put two on each rank), or a deeper model.",
    )


def uneven_experts(module: str, experts: int, ranks: int) -> UsageError | None:
    """Check that every rank gets as many experts."""
    if experts % ranks == 0:
        return None
    return UsageError(
        f"expert_parallel = {ranks} cannot spread the {experts} experts of {module} evenly",
        hint=f"With {experts} experts it can be: {_divisors(experts)}.",
    )


def uneven_context(time: int, ranks: int) -> ModelError | None:
    """Check that a sequence can be cut into two chunks for each context-parallel rank."""
    chunks = 2 * ranks
    rest = time % chunks
    if time >= chunks and not rest:
        return None
    below, above = time - rest, time - rest + chunks
    return ModelError(
        f"a sequence of {time} tokens cannot be cut into 2 x context_parallel = {chunks} equal chunks",
        hint=(f"Use sequences of {below} tokens, or pad" if below else "Pad")
        + f" them to {above} (label -100 does not count).",
    )


def uneven_slices(time: int, ranks: int) -> ModelError | None:
    """Check that a sequence can be cut into a slice for each tensor-parallel rank."""
    rest = time % ranks
    if not rest:
        return None
    return ModelError(
        f"a sequence of {time} tokens cannot be cut into tensor_parallel = {ranks} equal slices",
        hint=f"Use sequences of {time - rest or ranks} tokens, or pad them to {time + ranks - rest} (label -100 does "
        "not count).",
    )


def too_long(time: int, limit: int) -> ModelError | None:
    """Check a sequence against the positions that a model knows."""
    if time <= limit:
        return None
    return ModelError(
        f"a sequence of {time} tokens is longer than seq_len={limit}.",
        hint=f"Shorten them, or build the model with seq_len={time} (--set model.seq_len={time}).",
    )


@dataclass(frozen=True)
class PipelineSchedule:
    """One way to order the passes."""

    name: str
    torch_name: str
    stages_per_rank: int = 1
    folded: bool = False
    """Whether the stages go down the ranks and back up again, so that the first rank holds the last stage too."""
    splits_backward: bool = False
    """Whether gradients of weights are computed apart from those of inputs: `fully_shard` does not support that."""

    def num_stages(self, ranks: int) -> int:
        """Return into how many stages the model is cut."""
        return ranks * self.stages_per_rank

    def owner(self, stage: int, ranks: int) -> int:
        """Return which of the ranks in a row holds a stage."""
        turn, index = divmod(stage, ranks)
        return ranks - 1 - index if self.folded and turn % 2 else index

    def stages_of(self, index: int, ranks: int) -> list[int]:
        """Return the stages of a rank, in their order."""
        return [stage for stage in range(self.num_stages(ranks)) if self.owner(stage, ranks) == index]

    def bubble(self, ranks: int, microbatches: int) -> float:
        """Return the share of a step in which a rank waits for others, when all stages take equally long.

        gpipe and 1f1b wait (p-1) times for a forward and a backward pass: (p-1)/(m+p-1). With v stages per rank these
        are v times shorter: (p-1)/(v m+p-1). The zero-bubble schedule fills the wait with gradients of weights: with
        enough microbatches, p-1 waits remain for 6m passes of one stage.
        """
        if self.splits_backward:
            waits = max(ranks - 1, 4 * (ranks - 1) - 2 * (microbatches - 1))
            return waits / (6 * microbatches + waits)
        return (ranks - 1) / (self.stages_per_rank * microbatches + ranks - 1)


SCHEDULES = {
    schedule.name: schedule
    for schedule in (
        PipelineSchedule("gpipe", "GPipe"),
        PipelineSchedule("1f1b", "1F1B"),
        PipelineSchedule("interleaved", "Interleaved1F1B", stages_per_rank=2),
        PipelineSchedule("zero-bubble", "ZBVZeroBubble", stages_per_rank=2, folded=True, splits_backward=True),
    )
}
"""The schedules by the name that the config gives them."""


def choose_microbatches(
    requested: int | None, batch_size: int, ranks: int, schedule: PipelineSchedule, *, smallest: int = 1
) -> int:
    """Return into how many microbatches a rank's batch is cut; an impossible number is refused with the possible ones.

    By default up to four for each rank of the row, as far as the batch divides: that keeps the bubble small.
    `smallest`: the least samples that a microbatch may have.
    """
    most = batch_size // smallest

    def fits(count: int) -> bool:
        """1f1b fills the row before its first backward pass; interleaved goes in rounds of equal length."""
        if schedule.name == "1f1b":
            return count >= ranks
        return schedule.name != "interleaved" or count % max(1, count // ranks) == 0

    if requested is not None and requested <= most and batch_size % requested == 0 and fits(requested):
        return requested
    small = [count for count in range(1, math.isqrt(batch_size) + 1) if batch_size % count == 0]
    divisors = sorted({*small, *(batch_size // count for count in small)})
    possible = [count for count in divisors if count <= most and fits(count)]
    if not possible:
        raise UsageError(
            f"a batch of {batch_size} samples is too small for pipeline_schedule = {schedule.name!r} on {ranks} ranks",
            hint=f"Raise batch_size to a multiple of {ranks * smallest}, or write pipeline_schedule = 'gpipe'.",
        )
    if requested is None:
        return max((count for count in possible if count <= 4 * ranks), default=possible[0])
    cause = f"pipeline_schedule = {schedule.name!r} on {ranks} ranks cannot run microbatches = {requested}"
    if batch_size % requested:
        cause = f"a batch of {batch_size} samples cannot be cut into microbatches = {requested}"
    elif requested > most:
        cause = f"microbatches = {requested} leave less than {smallest} samples for each, and batch norms need them"
    raise UsageError(
        cause, hint=f"With batch_size = {batch_size} microbatches can be: {', '.join(map(str, possible))}."
    )
