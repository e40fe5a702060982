"""Gradients averaged by Horovod while backward goes on: its fusion and its threads, on hooks of ours.

Each gradient is handed over as soon as autograd has it; Horovod's own thread agrees with the other ranks on what is
ready everywhere, and averages that in pieces. At the end of the backward pass the rank waits for what is left, so the
loop finds averaged gradients where it clips, weighs and steps, as with every other strategy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from phalanx.errors import CommunicationError, ModelError, unused_parameters

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class HorovodReducer:
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
        self.sync = True
        """Whether a backward pass ends with averaged gradients; between the micro-batches of a step it does not."""
        self._hvd = hvd
        self._names = [name for name, _ in named_parameters]
        self._parameters = [parameter for _, parameter in named_parameters]
        self._compression = getattr(hvd.Compression, compression)
        self._op = hvd.Adasum if adasum else hvd.Average
        self._allow_unused = allow_unused
        self._pass: int | None = None
        self._under_way: dict[int, tuple[Any, Any]] = {}
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._hook(number))  # type: ignore[no-untyped-call]
            for number, parameter in enumerate(self._parameters)
        ]

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._under_way.clear()

    def _hook(self, number: int) -> Callable[[torch.nn.Parameter], None]:
        def gradient_is_there(parameter: torch.nn.Parameter) -> None:
            if self.sync:
                self._take(number)

        return gradient_is_there

    def _take(self, number: int) -> None:
        if torch._C._current_graph_task_id() != self._pass:
            self._begin()
        if number in self._under_way:
            raise ModelError(
                f"{self._names[number]} got a second gradient in one backward pass, after the first was sent",
                hint="Checkpoint activations without reentrant autograd (use_reentrant=False).",
            )
        self._send(number)

    def _begin(self) -> None:
        """At the first gradient of a backward pass: have its end told to us."""
        if self._pass is not None and self._under_way:
            raise CommunicationError(
                "the backward pass before this one broke off after some of its gradients were sent",
                hint="Ranks are out of step. Let the error end the run, and go on from a checkpoint.",
            )
        self._pass = torch._C._current_graph_task_id()
        torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def _send(self, number: int) -> None:
        gradient = self._parameters[number].grad
        assert gradient is not None, "sent only where there is one"
        if gradient.requires_grad:
            raise ModelError(
                "backward(create_graph=True) keeps the graph of gradients, which averaging would cut",
                hint="Take such gradients with torch.autograd.grad, and backward without create_graph.",
            )
        if gradient.layout is not torch.strided:
            raise ModelError(
                f"{self._names[number]} has a sparse gradient, which is not averaged here",
                hint="Build the embedding with sparse=False, or use strategy='parameter-server'.",
            )
        sent, context = self._compression.compress(gradient)
        handle = self._hvd.allreduce_async_(sent, name=self._names[number], op=self._op)
        self._under_way[number] = (handle, context)

    def _finish(self) -> None:
        """At the end of a backward pass: send what only an earlier micro-batch touched, and wait for all."""
        try:
            self._send_the_rest()
            for number, (handle, context) in self._under_way.items():
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
            raise unused_parameters([self._names[number] for number in missing], f"on rank {self._hvd.rank()}")
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
