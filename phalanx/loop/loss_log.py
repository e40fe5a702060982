"""The losses between two logging steps, read with one transfer, and the weights of the losses of a step."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from phalanx.errors import UsageError
from phalanx.torch_compat import base_of
from phalanx.world.abort import raise_if_aborted
from phalanx.world.world import World

if TYPE_CHECKING:
    from phalanx.comm.shm import SharedNumbers


class StepLoss(NamedTuple):
    """The mean loss of a step, and how many samples (or labels) it is the mean of."""

    loss: float
    weight: float


Losses = dict[int, StepLoss]
"""By step."""


@dataclass
class LossSum:
    """The losses of some steps, added up over all their samples (or labels)."""

    total: float = 0.0
    weight: float = 0.0
    """The samples (or labels)."""

    def add(self, losses: Losses) -> None:
        """Add the losses of more steps."""
        self.total += sum(loss.loss * loss.weight for loss in losses.values())
        self.weight += sum(loss.weight for loss in losses.values())

    @property
    def mean(self) -> float | None:
        """The mean over the samples (or labels); None without any."""
        return self.total / self.weight if self.weight else None


class LossLog:
    """Collects each micro-batch's loss and its weight; `read` gives the global-batch loss of every step since."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._losses: list[torch.Tensor] = []
        self._shares: list[float | torch.Tensor] = []
        self._step_of: list[int] = []
        self._summed: list[tuple[int, torch.Tensor]] = []
        self.sums_per_step = False
        """Whether each step's losses are added up over the ranks in that step: then no lost rank has a part of them."""

    def add(self, step: int, loss: torch.Tensor, share: float | torch.Tensor) -> None:
        """Add a micro-batch's mean loss and its samples, or labels."""
        self._losses.append(loss.detach() if loss.requires_grad else loss)
        self._shares.append(share)
        self._step_of.append(step)

    def copy(self) -> None:
        """Copy the losses that were not read yet: their memory is about to be written again."""
        if self._losses:
            self._losses = list(torch.stack(self._losses).unbind())
            self._shares = [share.clone() if isinstance(share, torch.Tensor) else share for share in self._shares]

    def sum_step(self) -> None:
        """Add up the losses of a step over the ranks, if a lost rank must not take its part with it.

        All ranks call this when the step's last loss is there, before the optimizer's step: then a step that is
        complete has the losses of all ranks. Nothing waits for the device.
        """
        if self.sums_per_step and self._losses:
            step, sums = self._step_of[-1], self._local_sums(set(self._step_of))
            dist.all_reduce(sums)
            self._clear()
            self._summed.append((step, sums))

    def unread(self, last_step: int) -> list[torch.Tensor]:
        """Return the weighted losses and the weights of steps that were not read, up to a step; without communication.

        Of steps that were not added up over the ranks it is the part of this rank.
        """
        steps = {step for step in self._step_of if step <= last_step}
        return [sums for step, sums in self._summed if step <= last_step] + ([self._local_sums(steps)] if steps else [])

    def _local_sums(self, steps: set[int]) -> torch.Tensor:
        """Return this rank's weighted losses of some steps and their weights, as one tensor on the device."""
        weighted = weights = torch.zeros((), dtype=torch.float64, device=self._losses[0].device)
        for step, loss, share in zip(self._step_of, self._losses, self._shares, strict=True):
            if step not in steps:
                continue
            if isinstance(share, torch.Tensor):  # an empty batch counts for nothing, also where its loss is NaN
                weighted = weighted + torch.where(share > 0, loss.double() * share, 0.0)
            elif share > 0:
                weighted = weighted + loss.double() * share
            weights = weights + share
        return torch.stack([weighted, weights])

    def _clear(self) -> None:
        self._losses.clear()
        self._shares.clear()
        self._step_of.clear()

    def read(self) -> Losses:
        """Return step -> loss of its global batch, and clear the log; all ranks must call this together."""
        if self._summed:
            steps, sums = zip(*self._summed, strict=True)
            rows = zip(steps, torch.stack(sums).tolist(), strict=True)
            raise_if_aborted()  # else a part of a sum
            self._summed.clear()
            losses = {step: StepLoss(total / weight, weight) for step, (total, weight) in rows if weight}
            return losses | self._read_local()
        return self._read_local()

    def _read_local(self) -> Losses:
        """Add up over the ranks what was not added up in its step, and return it."""
        if not self._losses:
            return {}
        first, single_rank = self._step_of[0], self._world.world_size == 1
        losses = _side_by_side(self._losses).double()
        if single_rank or losses.device.type == "cpu":
            # One transfer, or none: for a few numbers the host is faster than starting kernels.
            numbers = [share for share in self._shares if not isinstance(share, torch.Tensor)]
            on_host = len(numbers) == len(self._shares)
            sums = self._sums(losses.tolist(), numbers if on_host else _stack(self._shares, None).tolist())
        if not single_rank:
            on_cpu = losses.device.type == "cpu"
            table = torch.tensor(sums, dtype=torch.float64) if on_cpu else self._sums_on_device(losses)
            dist.all_reduce(table)
            sums = table.tolist()
        self._clear()
        raise_if_aborted()  # else a part of a sum
        rows_read = zip(itertools.count(first), *sums, strict=False)
        # A step in which no label counts has no loss to report.
        return {step: StepLoss(total / weight, weight) for step, total, weight in rows_read if weight}

    def _sums(self, losses: list[float], shares: list[float]) -> list[list[float]]:
        """Return two rows, by step: the weighted losses and the weights.

        An empty batch has share 0; a NaN in its loss must not spread to all ranks.
        """
        first = self._step_of[0]
        weighted, weights = ([0.0] * (self._step_of[-1] - first + 1) for _ in range(2))
        for step, loss, share in zip(self._step_of, losses, shares, strict=True):
            if share > 0:
                weighted[step - first] += loss * share
                weights[step - first] += share
        return [weighted, weights]

    def _sums_on_device(self, losses: torch.Tensor) -> torch.Tensor:
        device, first = losses.device, self._step_of[0]
        rows = torch.tensor([step - first for step in self._step_of], device=device)
        shares = _stack(self._shares, device)
        weighted = torch.where(shares > 0, losses * shares, torch.zeros_like(losses))
        table = torch.zeros(2, self._step_of[-1] - first + 1, dtype=torch.float64, device=device)
        table[0].index_add_(0, rows, weighted)
        table[1].index_add_(0, rows, shares)
        return table


def _side_by_side(losses: list[torch.Tensor]) -> torch.Tensor:
    """Return losses as one tensor; those that a replayed step has written one after the other are one already."""
    base, begin = base_of(losses[0]), losses[0].storage_offset()
    is_plain = base.ndim == 1 and base.is_contiguous() and base.storage_offset() == 0
    if is_plain and base_of(losses[-1]) is base and losses[-1].storage_offset() == begin + len(losses) - 1:
        return base[begin : begin + len(losses)]
    return torch.stack(losses)


def _stack(shares: list[float | torch.Tensor], device: torch.device | None) -> torch.Tensor:
    """Return the shares as one tensor; numbers alone move to the device in one transfer."""
    tensors = [share for share in shares if isinstance(share, torch.Tensor)]
    if not tensors:
        return torch.tensor(shares, dtype=torch.float64, device=device)
    if len(tensors) == len(shares):
        return _side_by_side(tensors).to(device=device, dtype=torch.float64)
    return torch.stack([torch.as_tensor(share, device=device).double() for share in shares])


class LossWeights:
    """The weights of a step's micro-batches on this rank, and their mean over the ranks that average gradients.

    A micro-batch may have several backward calls, one after the other, whose gradients add up: weights add up over the
    micro-batches and the ranks, for each call by itself. All calls share one divisor, so the sums must be equal.
    """

    def __init__(self, device: torch.device, ranks: int, timeout: float) -> None:
        self._device = device
        self._ranks = ranks
        self._timeout = timeout
        self._shared: SharedNumbers | None = None
        """Adds weights up in shared memory, where all ranks are on this machine."""
        self._has_looked = False
        self._sums: list[torch.Tensor] = []
        self._mean: torch.Tensor | None = None
        self._without = self._divided = False
        self._announced: Callable[[], float] | None = None
        """Waits for the sum over the ranks of the weight of a step's only micro-batch."""

    def none(self) -> None:
        """Note a backward call without a weight."""
        self._without = True
        if self._sums or self._divided:
            raise _mixed_weights()

    @property
    def is_empty(self) -> bool:
        """Whether no micro-batch of this step was counted yet."""
        return not self._sums

    def announce(self, weight: float | torch.Tensor) -> None:
        """Begin to add up the weight of a step's only micro-batch while its forward pass runs; all ranks call this.

        On a GPU no collective holds the host, so `whole` adds up there.
        """
        if self._ranks == 1 or self._device.type != "cpu":
            return
        if not self._has_looked:
            self._shared, self._has_looked = self._share(), True
        if self._shared is not None:
            self._shared.put(float(weight))
            self._announced = self._shared.total
            return
        total = torch.tensor([float(weight)], dtype=torch.float64)
        group: Any = dist.group.WORLD  # dist.all_reduce would take longer than the message
        work = group.allreduce([total])

        def finish() -> float:
            work.wait()
            return total.item()

        self._announced = finish

    def _share(self) -> SharedNumbers | None:
        from phalanx.comm.shm import share_numbers  # most processes have one rank, or a GPU
        from phalanx.comm.shm.pages import group_text_gatherer

        return share_numbers(group_text_gatherer(None), dist.get_rank(), self._ranks, timeout=self._timeout)

    def _sum_on_host(self, weight: float) -> float:
        """Return the sum over the ranks of the weight of a step's only micro-batch."""
        if self._ranks == 1:
            return weight
        if self._announced is None:
            self.announce(weight)
        assert self._announced is not None, "begun just now"
        total, self._announced = self._announced(), None
        return total

    def whole(self, weight: float | torch.Tensor, _: int) -> float | torch.Tensor:
        """Return the factor on the loss of a step's only micro-batch, after which its gradient needs no divisor.

        All ranks call this; one all-reduce for each backward call.
        """
        if self._without:
            raise _mixed_weights()
        self._divided = True
        # Without any weight there is no gradient either: zero, where a division would give NaN.
        if self._device.type == "cpu":
            weight = float(weight)
            total_here = self._sum_on_host(weight)
            return weight * self._ranks / total_here if total_here else 0.0
        total = torch.as_tensor(weight, dtype=torch.float64, device=self._device).clone()
        if self._ranks > 1:
            dist.all_reduce(total)
        return torch.where(total == 0, 0.0, weight * self._ranks / total)

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
        self._sums, self._mean, self._announced = [], None, None
        self._without = self._divided = False


def _mixed_weights() -> UsageError:
    return UsageError(
        "some backward calls of a step have a weight, and some have none",
        hint="Write f.backward(loss, weight=...) in each of them, or in none.",
    )
