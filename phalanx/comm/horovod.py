"""Gradients averaged by Horovod while backward goes on: its fusion and its threads, on hooks of ours.

Each gradient is handed over as soon as autograd has it; Horovod's own thread agrees with the other ranks on what is
ready everywhere, and averages that in pieces. At the end of the backward pass the rank waits for what is left, so the
loop finds averaged gradients where it clips, weighs and steps, as with every other strategy.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from phalanx.comm.backward import BackwardHooks

if TYPE_CHECKING:
    from collections.abc import Sequence

_PAUSE = 50e-6
"""Seconds between two looks at what is under way. Horovod's own wait looks all the time: it keeps a core busy, which
Horovod's threads, and other ranks of the machine, need to come to an end."""


class HorovodReducer(BackwardHooks):
    """Averages the gradients of some parameters over all ranks, at the end of each backward pass."""

    def __init__(
        self,
        hvd: Any,
        named_parameters: Sequence[tuple[str, torch.nn.Parameter]],
        *,
        compression: str = "none",
        adasum: bool = False,
        allow_unused: bool = False,
    ) -> None:
        super().__init__(named_parameters)
        self._hvd = hvd
        self._compression = getattr(hvd.Compression, compression)
        self._op = hvd.Adasum if adasum else hvd.Average
        self._allow_unused = allow_unused
        self._under_way: dict[int, tuple[Any, Any]] = {}

    def close(self) -> None:
        """Take the hooks off."""
        self._remove_hooks()
        self._under_way.clear()

    def _take(self, number: int) -> None:
        if number in self._under_way:
            raise self._second_gradient(number)
        self._send(number)

    def _forget_pass(self) -> bool:
        """What is under way stays so: Horovod does not take it back."""
        return bool(self._under_way)

    def _send(self, number: int) -> None:
        gradient = self._parameters[number].grad
        assert gradient is not None, "sent only where there is one"
        self._check_dense(number, gradient)
        sent, context = self._compression.compress(gradient)
        handle = self._hvd.allreduce_async_(sent, name=self._names[number], op=self._op)
        self._under_way[number] = (handle, context)

    def _finish(self) -> None:
        """At the end of a backward pass: send what only an earlier micro-batch touched, and wait for all."""
        try:
            self._send_the_rest()
            for number, (handle, context) in self._under_way.items():
                while not self._hvd.poll(handle):
                    time.sleep(_PAUSE)
                averaged = self._compression.decompress(self._hvd.synchronize(handle), context)
                gradient = self._parameters[number].grad
                if averaged is not gradient:
                    gradient.copy_(averaged)  # type: ignore[union-attr]
        finally:
            self._under_way.clear()
            self._pass = None

    def _send_the_rest(self) -> None:
        missing = [number for number, parameter in enumerate(self._parameters) if parameter.grad is None]
        if missing and not self._allow_unused:
            raise self._unused(missing, f"on rank {self._hvd.rank()}")
        if self._allow_unused:
            self._fill_where_others_have(missing)
        for number, parameter in enumerate(self._parameters):
            if number not in self._under_way and parameter.grad is not None:
                self._send(number)

    def _fill_where_others_have(self, missing: list[int]) -> None:
        """A parameter that some rank used gets the average; one that no rank used keeps no gradient."""
        used = torch.ones(len(self._parameters), dtype=torch.int32)
        used[missing] = 0
        anywhere = self._hvd.allreduce(used, name="phalanx.used", op=self._hvd.Max).tolist()
        for number in missing:
            if anywhere[number]:
                self._parameters[number].grad = torch.zeros_like(self._parameters[number])
