"""What of a model divides over ranks: heads, layers, experts, sequences. Training and planning ask the same functions.

Each returns the error to raise, or None where the parts are equal. No torch here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

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
        f"a sequence of {time} tokens is longer than block_size={limit}.",
        hint=f"Shorten them, or build the model with block_size={time} (--set model.block_size={time}).",
    )
