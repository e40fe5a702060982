"""What the losses of a step are the means of: the weights that `backward` is given, and their divisor."""

from __future__ import annotations

import torch
import torch.distributed as dist

from phalanx.errors import UsageError


class LossWeights:
    """The weights of a step's micro-batches on this rank, and their mean over the ranks that average gradients.

    A micro-batch may have several backward calls, one after the other, whose gradients add up: weights add up over the
    micro-batches and the ranks, for each call by itself. All calls share one divisor, so the sums must be equal.
    """

    def __init__(self, device: torch.device, ranks: int) -> None:
        self._device = device
        self._ranks = ranks
        self._sums: list[torch.Tensor] = []
        self._mean: torch.Tensor | None = None
        self._without = False

    def none(self) -> None:
        """Note a backward call without a weight."""
        self._without = True
        if self._sums:
            raise _mixed_weights()

    def add(self, weight: float | torch.Tensor, call: int) -> torch.Tensor:
        """Count a micro-batch's backward call; return its weight as a tensor, the factor on its loss."""
        if self._without:
            raise _mixed_weights()
        weight = torch.as_tensor(weight, dtype=torch.float64, device=self._device)
        if call < len(self._sums):
            self._sums[call] = self._sums[call] + weight
        else:
            self._sums.append(weight.clone())
        self._mean = None
        return weight

    def mean(self) -> torch.Tensor | None:
        """Return the divisor of the averaged gradient, or None without weights; all ranks call this.

        One all-reduce, at the first call. Each sample counts once for every rank that saw it, so the sum is divided by
        the world's size, not by dp_size.
        """
        if not self._sums or self._mean is not None:
            return self._mean
        total = torch.stack(self._sums)
        if self._ranks > 1:
            dist.all_reduce(total)
        if len(self._sums) > 1:
            self._check_equal(total.tolist())
        total = total[0]
        # A step without any weight has no gradient either: divided by one it stays zero, by zero it would be NaN.
        self._mean = torch.where(total == 0, 1.0, total / self._ranks)
        return self._mean

    def _check_equal(self, totals: list[float]) -> None:
        if max(totals) - min(totals) > 1e-9 * max(totals):
            raise UsageError(
                f"the backward calls of a step have the weights {', '.join(f'{total:g}' for total in totals)} in all: "
                "their gradients add up, and are divided by one number",
                hint="Add the losses up and call backward once: f.backward(first + second, weight=n).",
            )

    def clear(self) -> None:
        """Begin the next step."""
        self._sums, self._mean, self._without = [], None, False


def _mixed_weights() -> UsageError:
    return UsageError(
        "some backward calls of a step have a weight, and some have none",
        hint="Write f.backward(loss, weight=...) in each of them, or in none.",
    )
