"""What a recorded training step reads and writes, and its calls: batches at a fixed place, losses in a ring."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from phalanx.data.device import to_device
from phalanx.data.order import MicroInfo
from phalanx.loop.formation import Formation
from phalanx.loop.forward import Forward
from phalanx.loop.loss_log import LossLog
from phalanx.loop.step import StepOutcome, Weighting, add_micro_batch, finish_step
from phalanx.torch_compat import pytree

_LOSSES = 4096
"""Losses on the device that are not read yet."""


class StepBatches(NamedTuple):
    """The micro-batches of one step, on the device."""

    infos: list[MicroInfo]
    batches: list[Any]

    def form(self) -> tuple[Any, ...]:
        """Return all that must be equal for two steps to be one recording: structure, shapes, shares."""
        return tuple((info.scale, info.samples, *batch_form(batch)) for info, batch in zip(*self, strict=True))


def batch_form(batch: Any) -> tuple[Any, ...]:
    """Return the structure of a batch, the shapes and dtypes of its tensors, and its other values."""
    leaves, structure = pytree.tree_flatten(batch)
    return (structure, *((leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves))


_ALIGNED = 256
_STAGED_BYTES = 128 << 10
_ROWS = 64


class StaticBatch:
    """A micro-batch at a fixed place on the device; a small one of the host gets there by one copy of all its tensors.

    The copy is from page-locked rows, which are used in turns: before a half of them is used again, the device must
    have read it.
    """

    def __init__(self, batch: Any, device: torch.device) -> None:
        leaves: list[torch.Tensor] = pytree.tree_leaves(batch)
        places = list(itertools.accumulate((-(-leaf.nbytes // _ALIGNED) * _ALIGNED for leaf in leaves), initial=0))
        self._memory = torch.empty(places[-1], dtype=torch.uint8, device=device)
        self.tensors = [_placed(self._memory, offset, leaf) for offset, leaf in zip(places, leaves, strict=False)]
        is_plain = all(leaf.is_contiguous() for leaf in leaves)
        if not is_plain:  # such as channels_last, for which kernels add up in another order
            self.tensors = [torch.empty_like(leaf, device=device) for leaf in leaves]
        self.batch = pytree.tree_unflatten(self.tensors, pytree.tree_structure(batch))
        self.forms = [(leaf.shape, leaf.dtype) for leaf in leaves]
        self._rows: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
        if device.type == "cuda" and is_plain and places[-1] <= _STAGED_BYTES:
            for row in torch.empty((_ROWS, places[-1]), dtype=torch.uint8, pin_memory=True).unbind():
                parts = [_placed(row, offset, leaf) for offset, leaf in zip(places, leaves, strict=False)]
                self._rows.append((row, parts))
        self._used = 0
        self._read: list[torch.cuda.Event | None] = [None, None]
        """When the device has read each half of the rows."""

    def put(self, leaves: Iterable[torch.Tensor]) -> None:
        """Copy a batch to its place."""
        tensors = list(leaves)
        if not self._rows or tensors[0].is_cuda:
            for leaf, static in zip(tensors, self.tensors, strict=True):
                static.copy_(leaf, non_blocking=True)
            return
        half, within = divmod(self._used, _ROWS // 2)
        if within == 0 and (event := self._read[half]) is not None:
            event.synchronize()
        row, parts = self._rows[self._used]
        for leaf, part in zip(tensors, parts, strict=True):
            part.copy_(leaf)
        self._memory.copy_(row, non_blocking=True)
        self._used = (self._used + 1) % _ROWS
        if within == _ROWS // 2 - 1:
            self._read[half] = torch.cuda.current_stream(self._memory.device).record_event()


def _placed(memory: torch.Tensor, offset: int, like: torch.Tensor) -> torch.Tensor:
    """Return a part of some bytes as a tensor of the same shape and dtype as another."""
    return memory[offset : offset + like.nbytes].view(like.dtype).view(like.shape)


class RecordedStep:
    """A recorded step: its graphs, the memory that they read and write, and what on the host they depend on."""

    def __init__(self, pulled: StepBatches, loss: torch.Tensor, optimizer: torch.optim.Optimizer, log: LossLog) -> None:
        """`loss`: of an earlier step, for its dtype."""
        self.form = pulled.form()
        self.graphs: dict[bool, torch.cuda.CUDAGraph] = {}
        """By whether the norm of the gradients is measured."""
        self.pool = torch.cuda.graph_pool_handle() if loss.is_cuda else None
        self.norm = torch.zeros((), dtype=torch.float64, device=loss.device)
        self.infos = pulled.infos
        self._static = [StaticBatch(batch, loss.device) for batch in pulled.batches]
        self.batches: list[Any] = [static.batch for static in self._static]
        self._ring = torch.zeros(_LOSSES, dtype=loss.dtype, device=loss.device)
        self._next = torch.zeros(1, dtype=torch.int64, device=loss.device)
        self._losses = list(self._ring.unbind())
        self._share_ring = torch.zeros(_LOSSES, dtype=torch.float64, device=loss.device)
        self._shares = list(self._share_ring.unbind())
        self._counts_labels = False
        self._count = 0
        self._log, self._optimizer = log, optimizer
        self._rates = rates_of(optimizer)
        self._on_device: list[torch.Tensor] | None = None

    def fits(self, pulled: StepBatches) -> bool:
        """Whether a step is a replay of this one, with other values."""
        infos, batches = pulled
        if len(infos) != len(self.infos):
            return False
        for info, recorded, batch, static in zip(infos, self.infos, batches, self._static, strict=True):
            if (
                info.samples != recorded.samples
                or info.scale != recorded.scale
                or type(batch) is not type(static.batch)
            ):
                return False
            if type(batch) not in (list, tuple):
                return pulled.form() == self.form
            if len(batch) != len(static.forms):
                return False
            for leaf, (shape, dtype) in zip(batch, static.forms, strict=True):
                if leaf.shape != shape or leaf.dtype is not dtype:
                    return False
        return True

    def put(self, pulled: StepBatches) -> None:
        """Copy the batches of a step to where the graph reads them; make room for its losses."""
        if self._count + len(pulled.infos) > len(self._losses):  # begin again at the first place
            self._log.copy()
            self._next.zero_()
            self._count = 0
        for batch, static in zip(pulled.batches, self._static, strict=True):
            static.put(batch if type(batch) in (list, tuple) else pytree.tree_leaves(batch))

    def write_loss(self, loss: torch.Tensor, share: float | torch.Tensor) -> None:
        """Write a micro-batch's loss and share at the next place; recorded, so that the device counts the places.

        A share that is a number is that of every replay: all have the same samples.
        """
        self._ring.index_copy_(0, self._next, loss.detach().reshape(1))
        self._counts_labels = isinstance(share, torch.Tensor)
        if isinstance(share, torch.Tensor):
            self._share_ring.index_copy_(0, self._next, share.double().reshape(1))
        self._next.add_(1)

    def log_losses(self, step: int, infos: list[MicroInfo]) -> torch.Tensor:
        """Give the losses of a replayed step to the log; return the last one."""
        for info in infos:
            loss = self._losses[self._count]
            self._log.add(step, loss, self._shares[self._count] if self._counts_labels else float(info.samples))
            self._count += 1
        return loss

    def read_rates_on_device(self) -> None:
        """Let the graphs read the rates from the device's memory."""
        self._on_device = [torch.full((), rate, device=self._ring.device) for rate in self._rates]

    def follow_rates(self) -> bool:
        """Write learning rates that have changed to the device; return whether the graphs can use them."""
        rates = rates_of(self._optimizer)
        if rates == self._rates:
            return True
        if self._on_device is None or len(rates) != len(self._rates):
            return False
        for tensor, rate, before in zip(self._on_device, rates, self._rates, strict=True):
            if rate != before:
                tensor.fill_(rate)
        self._rates = rates
        return True

    @contextmanager
    def settings(self) -> Iterator[None]:
        """Give the optimizer the settings for a capture: rates on the device, and torch's flag `capturable`."""
        groups = self._optimizer.param_groups
        before: list[dict[str, Any]] = [
            {name: group[name] for name in ("lr", "capturable") if name in group} for group in groups
        ]
        for number, group in enumerate(groups):
            if "capturable" in group:  # a fused optimizer is: torch asks for the flag
                group["capturable"] = True
            if self._on_device is not None:
                group["lr"] = self._on_device[number]
        try:
            yield
        finally:
            for group, settings in zip(groups, before, strict=True):
                group.update(settings)


class StepParts(NamedTuple):
    """What a step works on."""

    formation: Formation
    model: nn.Module
    optimizer: torch.optim.Optimizer
    log: LossLog


class StepCalls:
    """The calls of one step: run them, or record them."""

    def __init__(
        self,
        parts: StepParts,
        forward: Forward,
        pulled: StepBatches,
        step: int,
        weighting: Weighting,
        *,
        reseed: Callable[[int, int], None] | None,
    ) -> None:
        self._formation, self._model, self._optimizer, self._log = parts
        self._forward, self._step, self._weighting, self._reseed = forward, step, weighting, reseed
        self.pulled = pulled
        self.loss_fn = forward.run if forward.loss_fn is None else forward.loss_fn

    def run_passes(self) -> torch.Tensor | None:
        """Run forward and backward of all micro-batches; return the last loss."""
        loss = None
        for info, batch in zip(*self.pulled, strict=True):
            self._formation.gradients.begin(info)
            if self._reseed is not None:
                self._reseed(self._step, info.offset)
            loss, share = self._add(to_device(batch, self._formation.device, non_blocking=True))
            self._log.add(self._step, loss, share)
        return loss

    def _add(self, batch: Any) -> tuple[torch.Tensor, float | torch.Tensor]:
        return add_micro_batch(self._formation, self._model, self._forward, batch, self._weighting)

    def _finish(self, measure_norm: bool) -> torch.Tensor | None:
        return finish_step(
            self._formation, self._optimizer, clip=self._formation.config.gradient_clipping, measure_norm=measure_norm
        )

    def run(self, measure_norm: bool) -> StepOutcome:
        """Take the step."""
        loss = self.run_passes()
        assert loss is not None, "a step has micro-batches"
        self._log.sum_step()
        return StepOutcome(loss.detach(), self._finish(measure_norm))

    def record(self, recording: RecordedStep, measure_norm: bool) -> None:
        """Do on the recording's memory what the step does on its batches."""
        for info, batch in zip(self.pulled.infos, recording.batches, strict=True):
            self._formation.gradients.begin(info)
            recording.write_loss(*self._add(batch))
        norm = self._finish(measure_norm)
        if norm is not None:
            recording.norm.copy_(norm)
        if (scale := self._formation.gradients.scale) is not None:
            scale.update()


def rates_of(optimizer: torch.optim.Optimizer) -> list[float]:
    """Return the learning rates of an optimizer's groups."""
    return [group["lr"] for group in optimizer.param_groups]


def takes_rate_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer can read its learning rate from the device's memory: torch's fused ones."""
    is_of_torch = type(optimizer) in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
    return is_of_torch and all(group.get("fused") for group in optimizer.param_groups)
