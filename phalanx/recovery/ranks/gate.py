"""Hold the optimizer's step back on the GPU where its gradients may be incomplete (`StepGate`).

With nccl the host runs ahead: when it learns that a rank is lost, the step that uses an interrupted sum is already
queued, and an abort lets the GPU go on to it. So the GPU's queue has a gate before each step of a run that replaces
lost ranks: a word in host memory. It is open, and costs microseconds; an abort closes it before it ends collectives.
A step counts when the GPU has passed the gate. One that is held back is undone: its tensors are copied, the gate is
opened, and they get their values back. The copies come before nccl's collectives are ended (`before_end`): nccl then
frees memory, which waits for the GPU with a lock of the driver that a copy needs, while the GPU waits at the gate.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from phalanx.errors import CommunicationError
from phalanx.torch_compat import foreach_copy_
from phalanx.world.abort import abortable, complete

_OPEN, _REACHED, _PASSED = range(3)
_WORD = 4
_WAIT_EQUAL = 1
"""CU_STREAM_WAIT_VALUE_EQ."""
_POLLS = 100
"""So often without a pause: where the host is the slower one, the GPU comes within microseconds."""
_PAUSE_SECONDS = 2e-5
_SETTLE_SECONDS = 0.1
"""A GPU that has passed shows it long before, also where processes take turns on it."""
_BLOCKED_SECONDS = 1.0
"""So long may a step wait for a GPU that is held back: one that reads a value of the GPU, or loads a kernel, does."""


class StepGate:
    """A place in the GPU's queue that it passes only while the gate is open."""

    def __init__(self, device: torch.device) -> None:
        self._words = torch.tensor([1, 0, 0], dtype=torch.int32).pin_memory()
        self._host: Any = self._words.numpy()
        self._address = self._words.data_ptr()
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        """Made in advance: what is copied while the GPU waits must not wait for it."""
        self._count = 0
        self._stepped = [torch.cuda.Event(), torch.cuda.Event()]  # type: ignore[no-untyped-call]
        """When the GPU has taken the last step, and the one before: by turns."""
        self._running = self._queueing = False
        self._why: str | None = None
        self._before: dict[int, HostState] = {}
        self._deciding = threading.Lock()
        self.has_lost_state = False
        """Whether a step that may be wrong could not be undone."""
        abortable(self)

    def abort(self, why: str) -> None:
        """Close the gate; called before nccl's collectives are ended."""
        with self._deciding:
            if self._why is not None:
                return
            self._why = why
            if self.has_lost_state:  # a step that failed may be queued behind the gate: it must not wait for ever
                return
            self._host[_OPEN] = 0
        threading.Thread(target=_open_for_blocked, args=(weakref.ref(self),), daemon=True).start()

    def before_end(self) -> None:
        """Wait until a step that is held back has been copied; called before nccl's collectives are ended."""
        limit = time.monotonic() + _BLOCKED_SECONDS
        while self._running and not self._host[_OPEN] and (not self._queueing or time.monotonic() < limit):
            time.sleep(_PAUSE_SECONDS)

    def run(self, step: Callable[[], object], optimizer: torch.optim.Optimizer) -> None:
        """Queue a step, and return when the GPU has passed the gate before it; undo it, and raise, where it does not.

        The GPU does not wait: it has the step to compute while the host goes on.
        """
        self._running = True  # before the gate is looked at: an abort closes it before it asks for this
        try:
            self._raise_if_closed()
            self._run_gated(step, optimizer)
        finally:
            self._running = False

    def _run_gated(self, step: Callable[[], object], optimizer: torch.optim.Optimizer) -> None:
        before = self._before.get(id(optimizer)) or self._before.setdefault(id(optimizer), HostState(optimizer))
        if not before.is_on_gpu:  # offloaded: the host has the gradients, and takes the step itself
            complete()
            step()
            return
        before.note()
        self._queue()
        self._queueing = True
        try:
            step()
            self._queueing = False
            self._stepped[self._count % 2].record()
            if self._passes():
                return
            self._undo(before)
        except BaseException:
            self._give_up()
            raise
        finally:
            self._queueing = False
        self._raise_if_closed()

    def _queue(self) -> None:
        self._count += 1
        stream = torch.cuda.current_stream().cuda_stream
        _driver().write(stream, self._address + _WORD * _REACHED, self._count)
        _driver().wait(stream, self._address + _WORD * _OPEN, 1)
        _driver().write(stream, self._address + _WORD * _PASSED, self._count)

    def _raise_if_closed(self) -> None:
        if self._why is not None:
            raise CommunicationError(self._why)

    def _passes(self) -> bool:
        """Wait until the GPU has passed the gate, or cannot any more."""
        for _ in range(_POLLS):
            if self._has_passed():
                return not self.has_lost_state
        while self._host[_OPEN]:
            if self._has_passed():
                return not self.has_lost_state
            time.sleep(_PAUSE_SECONDS)  # not in CUDA: signals are handled, and other threads run
        time.sleep(_SETTLE_SECONDS)  # it may have passed just before the gate was closed
        return self._has_passed() and not self.has_lost_state

    def _has_passed(self) -> bool:
        return bool(self._host[_PASSED] == self._count)

    def _holds(self) -> bool:
        """Whether the GPU has come to the closed gate, and has not passed it."""
        _, reached, passed = self._host.tolist()
        return not self._host[_OPEN] and bool(reached == self._count != passed)

    def _undo(self, before: HostState) -> None:
        """Let the GPU take the step, and put back what it changes; nothing here may free its memory, which waits."""
        if self.has_lost_state:
            return
        with torch.no_grad():
            tensors = before.on_device()
            self._side.wait_event(self._stepped[(self._count - 1) % 2])  # what the last step wrote is complete
            with torch.cuda.stream(self._side):
                values_before = _copied(tensors)
            self._side.synchronize()
            self._open(loses_state=False)
            self._await_passing()
            torch.cuda.synchronize()
            for tensor, value in zip(tensors, values_before, strict=True):
                tensor.copy_(value)
        before.put_back()

    def _await_passing(self) -> None:
        """Wait for the GPU without a lock of the driver; raise where it does not work any more."""
        stream, queried_at = torch.cuda.current_stream(), time.monotonic()
        while not self._has_passed():
            time.sleep(_PAUSE_SECONDS)
            if time.monotonic() - queried_at < _SETTLE_SECONDS:
                continue
            queried_at = time.monotonic()
            stream.query()  # raises where another process of the GPU's server failed, and this one with it

    def _open(self, *, loses_state: bool) -> None:
        with self._deciding:
            if not self._host[_OPEN]:
                self.has_lost_state = loses_state
                self._host[_OPEN] = 1

    def _give_up(self) -> None:
        """Open the gate for good: a step failed while it was queued or undone."""
        with self._deciding:
            self.has_lost_state = True
            self._host[_OPEN] = 1

    def open_if_blocked(self) -> bool:
        """Open the gate where a step waits for the GPU that waits there; return whether it is open."""
        if self._queueing and self._holds():
            time.sleep(_BLOCKED_SECONDS)
            if self._queueing and self._holds():
                self._open(loses_state=True)
        return bool(self._host[_OPEN])


def _open_for_blocked(gate: weakref.ref[StepGate]) -> None:
    while (open_gate := gate()) is not None and not open_gate.open_if_blocked():
        del open_gate
        time.sleep(_SETTLE_SECONDS)


class HostState:
    """What an optimizer's step changes on the host at once: entries of its state, and counters in CPU tensors."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.is_on_gpu = any(parameter.is_cuda for parameter in self._parameters())
        self._state: Any = None
        self._entries: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._state_size = -1
        self._counters: list[torch.Tensor] = []
        self._copies: list[torch.Tensor] = []

    def note(self) -> None:
        """Note it before a step; cheap, because each step does it."""
        state = self._optimizer.state
        self._entries = [(entry, dict(entry)) for entry in (*self._optimizer.param_groups, *state.values())]
        if state is not self._state or len(state) != self._state_size:  # another one after load_state_dict
            self._state, self._state_size = state, len(state)
            self._counters = [value for value in self._tensors() if not value.is_cuda]
            self._copies = [value.clone() for value in self._counters]
        if self._counters:
            foreach_copy_(self._copies, self._counters)

    def on_device(self) -> list[torch.Tensor]:
        """Return what a step changes on the GPU: parameters, and state from before it; of sharded ones the shards."""
        values = [value for value in (*self._parameters(), *self._tensors()) if value.is_cuda]
        return [value.to_local() if isinstance(value, DTensor) else value for value in values]

    def put_back(self) -> None:
        """Undo a step."""
        for parameter in list(self._optimizer.state)[self._state_size :]:  # the first step made it
            del self._optimizer.state[parameter]
        for entry, values in self._entries:
            entry.clear()
            entry.update(values)
        if self._counters:
            foreach_copy_(self._counters, self._copies)

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    def _tensors(self) -> list[torch.Tensor]:
        return [value for _, values in self._entries for value in values.values() if isinstance(value, torch.Tensor)]


def _copied(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copy tensors on the GPU where it has room, else to the host."""
    wanted_bytes = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
    free, total = torch.cuda.mem_get_info()
    limit_bytes = total * torch.cuda.get_per_process_memory_fraction() - torch.cuda.memory_reserved()
    if wanted_bytes < min(free, limit_bytes) / 2:
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
        self._check(self._cuda.cuStreamWaitValue32_v2(*_arguments(stream, address, value), _WAIT_EQUAL))

    def _check(self, code: int) -> None:
        if code:
            raise RuntimeError(f"CUDA's driver refused a stream memory operation (error {code})")


def _arguments(stream: int, address: int, value: int) -> tuple[Any, ...]:
    return ctypes.c_void_p(stream), ctypes.c_uint64(address), ctypes.c_uint32(value)


_driver = functools.cache(_Driver)
