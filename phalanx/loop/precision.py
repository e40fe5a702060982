"""Mixed precision: which dtype the forward pass uses, and the loss scale that fp16 needs."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from phalanx import torch_compat
from phalanx.config import DistributedConfig
from phalanx.config.settings import cpu_has_bf16, precision_name
from phalanx.features import feature

_COMPUTES_IN_FP32 = "mixed_precision = true: this CPU has no bf16 arithmetic, so it computes in fp32, which is faster"
_EMULATED = (
    "mixed_precision = 'bf16': this CPU emulates bf16, at least 60 times slower than fp32 (as measured on an ARM "
    "Neoverse-N1). Write mixed_precision=True for the fast precision of this machine, or leave it out."
)
_NO_FP8 = "mixed_precision = 'fp8': {why}, so it computes in {instead}"
_NO_AUTOCAST: AbstractContextManager[None] = nullcontext()


class Precision:
    """The forward pass's dtype, its autocast context and, for fp16, its gradient scaler."""

    def __init__(self, config: DistributedConfig, device: torch.device, *, by_engine: bool = False) -> None:
        precision = config.mixed_precision
        emulated = device.type == "cpu" and not cpu_has_bf16()
        self.fp8 = precision == "fp8"
        """Whether linear layers multiply in 8 bits."""
        self.note = _COMPUTES_IN_FP32 if precision is True and emulated else None
        if self.fp8 and (why := _why_no_fp8(config, device, by_engine=by_engine)):
            self.fp8 = False
            self.note = _NO_FP8.format(why=why, instead="fp32" if emulated else "bf16")
        self.name = precision_name(precision, device.type)
        self.device_type = device.type
        self.warning = _EMULATED if self.name == "bf16" and emulated else None
        if self.warning is not None:  # torch prints fifty lines of C++ frames
            warnings.filterwarnings("ignore", message="mkldnn_matmul failed, switching to BLAS gemm")
        self.dtype = None if by_engine else {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.name)
        self.scaler: torch.amp.GradScaler | None = None
        if self.dtype is torch.float16:
            self.scaler = torch.amp.GradScaler(
                device.type, init_scale=config.scaler_init_scale, growth_interval=config.scaler_growth_interval
            )

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context for a forward pass."""
        if self.dtype is None:
            return _NO_AUTOCAST
        return torch.autocast(self.device_type, dtype=self.dtype)


def _why_no_fp8(config: DistributedConfig, device: torch.device, *, by_engine: bool) -> str:
    if by_engine:
        return f"{config.resolved_strategy} has its own precision"
    if config.tensor_parallel > 1:
        return "layers that tensor_parallel splits have no products in 8 bits"
    why: str = feature("why-no-fp8")(device)
    return why


class LossScale:
    """fp16's loss scale over the optimizers of one step: removed once from each, then grown or shrunk once for all."""

    def __init__(self, scaler: torch.amp.GradScaler, device: torch.device, *, agree: bool) -> None:
        """`agree`: ranks hold parts of the model, and see an overflow in their own parts only."""
        self._scaler = scaler
        self._device = device
        self._agree = agree
        self._unscaled: set[int] = set()
        self._unscaled_at = 0
        self._stepped: set[int] = set()
        self._overflows: dict[int, torch.Tensor] = {}

    def current(self) -> torch.Tensor:
        """Return the factor on the loss."""
        return self._scaler.scale(torch.ones((), device=self._device))

    def is_removed_from(self, optimizers: Iterable[int]) -> bool:
        """Return whether the gradients of all these optimizers were unscaled."""
        return self._unscaled.issuperset(optimizers)

    def has_stepped(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether an optimizer has stepped since the scale was updated."""
        return id(optimizer) in self._stepped

    def unscale(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Remove the scale from an optimizer's gradients, once per step."""
        if id(optimizer) in self._unscaled:
            return
        if not self._unscaled:
            self._unscaled_at = step
        self._unscaled.add(id(optimizer))
        self._scaler.unscale_(optimizer)
        overflows = torch_compat.found_inf(self._scaler, id(optimizer))
        if not overflows:  # no gradient here: nothing overflowed, but torch raises without an entry
            overflows[self._device] = torch.zeros((), device=self._device)
        if self._agree:
            # All ranks must skip the step. One reduction on every rank: a pipeline stage may hold none of an
            # optimizer's parameters.
            anywhere = self._any_overflow(optimizer)
            dist.all_reduce(anywhere, op=dist.ReduceOp.MAX)
            for flag in overflows.values():
                flag.copy_(anywhere)

    def _any_overflow(self, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        flags = torch_compat.found_inf(self._scaler, id(optimizer)).values()
        return torch.stack([flag.to(self._device) for flag in flags]).amax()

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Take an optimizer's step, unless its gradients overflowed."""
        # On the device: reading here whether the scaler skips this step would wait for it.
        skips = self._any_overflow(optimizer).sign()
        if id(optimizer) not in self._overflows:
            self._overflows[id(optimizer)] = torch.zeros_like(skips)
        self._overflows[id(optimizer)] += skips  # in place: a captured step adds to the same memory
        self._scaler.step(optimizer)
        self._stepped.add(id(optimizer))

    def update(self) -> None:
        """Let the scale grow or shrink after a step: once all optimizers have stepped, before the next backward."""
        if self._unscaled:
            self._unscaled.clear()
            self._stepped.clear()
            self._scaler.update()

    def forget(self) -> None:
        """Forget a step that was prepared and not executed."""
        self._unscaled.clear()
        self._stepped.clear()
        torch_compat.forget_found_inf(self._scaler)

    def settle(self, steps: int) -> None:
        """Update the scale for the last complete step, before its state is saved; not for an interrupted one."""
        if self._unscaled_at < steps:
            self.update()

    def skipped(self, optimizer: int | None = None) -> int:
        """Return how many steps of one optimizer, or of all, overflowed; waits for the device."""
        counts = self._overflows.values() if optimizer is None else [self._overflows.get(optimizer, 0)]
        return sum(int(count) for count in counts)
