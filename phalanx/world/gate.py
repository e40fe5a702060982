"""Hold the optimizer's step back on the GPU until its gradients are known to be complete (`StepGate`).

With nccl the host runs ahead: when it learns that a rank is lost, the step that uses an interrupted sum is already queued,
and an abort lets the GPU go on to it. So each step of a run that replaces lost ranks waits, in the GPU's own queue, for a
word in host memory. The host writes it when the GPU has come there, if no abort has begun: an abort refuses all later
steps before it ends nccl's collectives. A step that is refused is undone: its tensors are copied, the GPU goes on, and
they get their values back.
"""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Callable
from typing import Any

import torch

from phalanx.errors import CommunicationError
from phalanx.torch_compat import foreach_copy_
from phalanx.world.abort import abortable

_REACHED, _ALLOWED = range(2)
_WORD = 4
_GREATER_OR_EQUAL = 0
"""CU_STREAM_WAIT_VALUE_GEQ, which compares cyclically."""
_POLLS = 100
"""So often without a pause: where the host is the slower one, the GPU comes within microseconds."""
_PAUSE_SECONDS = 2e-5


class StepGate:
    """A place in the GPU's queue that it passes only when the host allows it."""

    def __init__(self, device: torch.device) -> None:
        self._words = torch.zeros(2, dtype=torch.int32).pin_memory()
        self._host: Any = self._words.numpy()
        self._address = self._words.data_ptr()
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        """Made in advance: what is copied while the GPU waits must not wait for it."""
        self._count = 0
        self._why: str | None = None
        self._before: dict[int, HostState] = {}
        abortable(self)

    def abort(self, why: str) -> None:
        """Refuse the steps that the GPU has not come to; called before nccl's collectives are ended."""
        self._why = why

    def take(self, step: Callable[[], object], optimizer: torch.optim.Optimizer) -> None:
        """Queue a step, and return when the GPU has come to it; undo it, and raise, after an abort.

        The GPU waits some microseconds for the host, and has the step to compute while the host goes on.
        """
        self._count += 1
        before = self._before.setdefault(id(optimizer), HostState(optimizer))
        before.note()
        stream = torch.cuda.current_stream().cuda_stream
        _driver().write(stream, self._address + _WORD * _REACHED, self._count)
        _driver().wait(stream, self._address + _WORD * _ALLOWED, self._count)
        try:
            step()
        except BaseException:
            self._allow()  # what was queued of it has to end
            raise
        self._await_gpu()
        if self._why is None:
            self._allow()
        else:
            self._undo(before)
            raise CommunicationError(self._why)

    def complete(self) -> None:
        """Wait until the GPU has done what is queued, and raise after an abort: what it has computed may be partial."""
        torch.cuda.current_stream().synchronize()
        if self._why is not None:
            raise CommunicationError(self._why)

    def _allow(self) -> None:
        self._host[_ALLOWED] = self._count

    def _await_gpu(self) -> None:
        """Wait until all work before the step is done, also where an abort has ended it."""
        for _ in range(_POLLS):
            if self._host[_REACHED] == self._count:
                return
        while self._host[_REACHED] != self._count:
            time.sleep(_PAUSE_SECONDS)  # not in CUDA: signals are handled, and other threads run

    def _undo(self, before: HostState) -> None:
        """Let the GPU take the step, and put back what it changes; nothing here may free its memory, which waits."""
        changed = before.on_device()
        with torch.no_grad():
            with torch.cuda.stream(self._side):
                copies = _copied(changed)
            self._side.synchronize()
            self._allow()
            torch.cuda.synchronize()
            for tensor, value in zip(changed, copies, strict=True):
                tensor.copy_(value)
        before.put_back()


class HostState:
    """What an optimizer's step changes on the host at once: entries of its state, and counters in CPU tensors."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._entries: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._known = -1
        self._counters: list[torch.Tensor] = []
        self._copies: list[torch.Tensor] = []

    def note(self) -> None:
        """Note it before a step; cheap, because each step does it."""
        state = self._optimizer.state
        self._entries = [(entry, dict(entry)) for entry in (*self._optimizer.param_groups, *state.values())]
        if len(state) != self._known:
            self._known = len(state)
            self._counters = [value for value in self._tensors() if not value.is_cuda]
            self._copies = [value.clone() for value in self._counters]
        if self._counters:
            foreach_copy_(self._copies, self._counters)

    def on_device(self) -> list[torch.Tensor]:
        """Return what a step changes on the GPU: parameters, and state from before it."""
        parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        return [value for value in (*parameters, *self._tensors()) if value.is_cuda]

    def put_back(self) -> None:
        """Undo a step."""
        for parameter in list(self._optimizer.state)[self._known :]:  # the first step made it
            del self._optimizer.state[parameter]
        for entry, noted in self._entries:
            entry.clear()
            entry.update(noted)
        if self._counters:
            foreach_copy_(self._counters, self._copies)

    def _tensors(self) -> list[torch.Tensor]:
        return [value for _, noted in self._entries for value in noted.values() if isinstance(value, torch.Tensor)]


def _copied(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copy tensors on the GPU where it has room, else to the host."""
    needed = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
    free, total = torch.cuda.mem_get_info()
    allowed = total * torch.cuda.get_per_process_memory_fraction() - torch.cuda.memory_reserved()
    if needed < min(free, allowed) / 2:
        return [tensor.detach().clone() for tensor in tensors]
    return [tensor.detach().cpu() for tensor in tensors]


class _Driver:
    """The two calls of CUDA's driver that torch does not offer."""

    def __init__(self) -> None:
        self._cuda: Any = ctypes.CDLL("libcuda.so.1")

    def write(self, stream: int, address: int, value: int) -> None:
        """Let a stream write a word when it comes there."""
        self._check(self._cuda.cuStreamWriteValue32_v2(*_arguments(stream, address, value), 0))

    def wait(self, stream: int, address: int, value: int) -> None:
        """Let a stream wait there until a word has a value."""
        self._check(self._cuda.cuStreamWaitValue32_v2(*_arguments(stream, address, value), _GREATER_OR_EQUAL))

    def _check(self, code: int) -> None:
        if code:
            raise RuntimeError(f"CUDA's driver refused a stream memory operation (error {code})")


def _arguments(stream: int, address: int, value: int) -> tuple[Any, ...]:
    return ctypes.c_void_p(stream), ctypes.c_uint64(address), ctypes.c_uint32(value)


_driver = functools.cache(_Driver)
