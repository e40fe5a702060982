"""Hold the optimizer's step back on the GPU until its gradients are known to be complete (`StepGate`).

With nccl the host runs ahead: when it learns that a rank is lost, the step that uses an interrupted sum is already queued,
and an abort lets the GPU go on to it. So each step of a run that replaces lost ranks waits, in the GPU's own queue, for a
word in host memory. It is "open" all the time and costs microseconds; an abort closes it first. A step that is held back
is undone: its tensors are copied, the gate is opened, and they get their values back.
"""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Callable
from typing import Any

import torch

from phalanx.errors import CommunicationError
from phalanx.world.abort import abortable

_WAIT_EQUAL = 1
"""CU_STREAM_WAIT_VALUE_EQ."""
_OPEN, _REACHED, _PASSED = range(3)
_WORD = 4
_POLLS = 200
"""So often without a pause: most steps are reached by the GPU within microseconds of each other."""
_PAUSE_SECONDS = 2e-5
_SETTLE_SECONDS = 0.005
_HELD_SECONDS = 60.0
"""A GPU that does not reach the gate in this time after an abort hangs."""


class StepGate:
    """A place in the GPU's queue that it passes only while the gate is open."""

    def __init__(self, device: torch.device) -> None:
        self._words = torch.tensor([1, 0, 0], dtype=torch.int32).pin_memory()
        self._host = self._words.numpy()
        self._address = self._words.data_ptr()
        self._side = torch.cuda.Stream(device)
        """Made in advance: what is copied while the gate holds the GPU back must not wait for it."""
        self._count = 0
        self._why = ""
        abortable(self)

    def abort(self, why: str) -> None:
        """Close the gate; called before nccl's collectives are aborted."""
        self._why = why
        self._host[_OPEN] = 0

    def take(self, step: Callable[[], object], optimizer: torch.optim.Optimizer) -> None:
        """Queue a step behind the gate, and return when the GPU has passed it; else undo the step, and raise.

        The wait costs the GPU nothing: it has the step
        itself to compute meanwhile.
        """
        self._count += 1
        number, before = self._count, HostState(optimizer)
        stream = torch.cuda.current_stream().cuda_stream
        _driver().write(stream, self._address + _WORD * _REACHED, number)
        _driver().wait(stream, self._address + _WORD * _OPEN, 1)
        _driver().write(stream, self._address + _WORD * _PASSED, number)
        step()
        if not self._passes(number):
            self._undo(before, optimizer)
            raise CommunicationError(self._why)

    def _passes(self, number: int) -> bool:
        """Wait until the GPU has passed the gate, or is held back there."""
        polls, closed_at = 0, None
        while self._host[_PASSED] != number:
            polls += 1
            if polls > _POLLS:
                time.sleep(_PAUSE_SECONDS)
            if self._host[_OPEN]:
                continue
            if self._host[_REACHED] == number and self._host[_PASSED] != number:
                time.sleep(_SETTLE_SECONDS)  # it may have passed just before the gate was closed
                return bool(self._host[_PASSED] == number)
            closed_at = closed_at or time.monotonic()
            if time.monotonic() - closed_at > _HELD_SECONDS:
                raise CommunicationError(f"the GPU has not ended its work {_HELD_SECONDS:g} s after: {self._why}")
        return True

    def _undo(self, before: HostState, optimizer: torch.optim.Optimizer) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        changed = [value for value in (*parameters, *_values(optimizer)) if value.is_cuda]
        with torch.no_grad():
            with torch.cuda.stream(self._side):
                copies = _copied(changed)
            self._side.synchronize()
            self._host[_OPEN] = 1
            torch.cuda.synchronize()
            for tensor, value in zip(changed, copies, strict=True):
                tensor.copy_(value)
        before.put_back()


class HostState:
    """What an optimizer's step changes on the host at once: counters in CPU tensors, and plain values."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._tensors = [(value, value.clone()) for value in _values(optimizer) if not value.is_cuda]
        self._plain = [
            (entry, {name: value for name, value in entry.items() if not isinstance(value, (torch.Tensor, list))})
            for entry in (*optimizer.param_groups, *optimizer.state.values())
        ]
        self._known = set(optimizer.state)
        self._optimizer = optimizer

    def put_back(self) -> None:
        """Undo a step."""
        for tensor, value in self._tensors:
            tensor.copy_(value)
        for entry, values in self._plain:
            entry.update(values)
        for parameter in set(self._optimizer.state) - self._known:  # the first step made it
            del self._optimizer.state[parameter]


def _values(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [
        value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, torch.Tensor)
    ]


def _copied(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copy tensors on the GPU where it has room, else to the host; freeing its memory would wait for the gate."""
    needed = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
    free, _ = torch.cuda.mem_get_info()
    if needed < free // 2:
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
