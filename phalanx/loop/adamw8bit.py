"""AdamW with states of 8 bits: a quarter of the memory of the usual ones, in one pass over each parameter."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from phalanx.strategies.base import local
from phalanx.torch_compiler import has_triton

_EIGHT_BITS = torch.float8_e4m3fn
_LARGEST = torch.finfo(_EIGHT_BITS).max
_DROPPED_BITS = 20
"""Of the 23 bits of a float32's fraction, e4m3 keeps 3."""
_BLOCK = 256
"""Neighbouring values with one scale, the largest of them. Narrower rows have smaller blocks, down to 32."""
_SMALLEST = 4096
"""Parameters with fewer values (norms, biases) keep states in float32: they need little memory."""
_STATES = ("exp_avg", "exp_avg_root")
_SAVED = (*_STATES, *(f"{name}_scale" for name in _STATES))
_LEAST_ROOT = 2.0**-9
"""The smallest positive e4m3. A root is never rounded to zero: the next step would divide by almost nothing."""
_FIRST_CAPABILITY = (8, 9)
"""Compute capability of the first GPUs on which Triton has e4m3; others take the same steps by torch's operations."""


class AdamW8bit(torch.optim.Optimizer):
    """AdamW that keeps the average gradient m and the root of the average square v as 8-bit floats, scaled by block.

    The root, because its range is half as wide in powers of two as that of the square. It is never rounded to zero: m,
    which has a scale of its own, may be positive there, and the step would be m / eps.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        if lr < 0 or eps < 0 or weight_decay < 0 or not all(0 <= beta < 1 for beta in betas):
            numbers = f"the rate {lr}, betas {betas}, eps {eps} and the weight decay {weight_decay}"
            raise ValueError(f"AdamW8bit got {numbers}: none may be negative, and betas are below 1")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take a step; parameters without a gradient stay."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in trained:
                if not self.state[parameter]:
                    self.state[parameter] |= _new_state(parameter)
            _step_small([(p, self.state[p]) for p in trained if not _block(p)], group)
            for parameter in trained:
                if block := _block(parameter):
                    _step_blocks(parameter, self.state[parameter], block, group)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; a state of another optimizer is refused.

        torch makes states of the parameter's type: 8 bits survive that, and the scales are taken from what was given.
        """
        given = [
            state_dict["state"].get(number, {}) for group in state_dict["param_groups"] for number in group["params"]
        ]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        wanted = [(p, state) for p, state in zip(parameters, given, strict=False) if state and _block(p)]
        if missing := [name for _, state in wanted for name in _SAVED if name not in state]:
            raise ValueError(f"this is not a state of AdamW8bit: a parameter has no {missing[0]}")
        super().load_state_dict(state_dict)
        for parameter, state in wanted:
            own = self.state[parameter]
            own |= {name: own[name].to(_EIGHT_BITS) for name in _STATES}
            own |= {name: state[name].to(own[name].device, copy=True) for name in _SAVED if name not in _STATES}


def _block(parameter: Tensor) -> int:
    """Return the size of a parameter's blocks, which divides its rows; 0 for states in float32."""
    piece = local(parameter)
    if parameter.ndim < 2 or parameter.numel() < _SMALLEST or not piece.is_contiguous():
        return 0
    row, size = piece.shape[1:].numel(), _BLOCK
    while size >= 32 and row % size:
        size //= 2
    return size if size >= 32 else 0


def _new_state(parameter: Tensor) -> dict[str, Any]:
    block, piece = _block(parameter), local(parameter.detach())
    if not block:
        zeros = {name: torch.zeros_like(parameter.detach()) for name in ("exp_avg", "exp_avg_sq")}
        return {"step": torch.zeros((), device=piece.device), **zeros}
    state: dict[str, Any] = {"step": torch.zeros(())}
    for name in _STATES:
        eight = torch.zeros(piece.shape, dtype=_EIGHT_BITS, device=piece.device)
        scales = torch.zeros(piece.shape[0], piece.shape[1:].numel() // block, device=piece.device)
        state[name], state[f"{name}_scale"] = _like(parameter, eight, 1), _like(parameter, scales, block)
    return state


def _like(parameter: Tensor, piece: Tensor, block: int) -> Tensor:
    """Return a state with a value for each `block` values of a parameter, sharded as the parameter is."""
    if not isinstance(parameter, DTensor):
        return piece
    shape = parameter.shape if block == 1 else torch.Size([parameter.shape[0], parameter.shape[1:].numel() // block])
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        piece, parameter.device_mesh, parameter.placements, run_check=False, shape=shape, stride=stride
    )


def _step_small(trained: list[tuple[Tensor, dict[str, Any]]], group: dict[str, Any]) -> None:
    """Take the step of the parameters with states in float32, by torch's AdamW."""
    if not trained:
        return
    beta1, beta2 = group["betas"]
    adamw(
        [local(parameter) for parameter, _ in trained],
        [local(parameter.grad) for parameter, _ in trained if parameter.grad is not None],
        [local(state["exp_avg"]) for _, state in trained],
        [local(state["exp_avg_sq"]) for _, state in trained],
        [],
        [state["step"] for _, state in trained],
        fused=True,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=float(group["lr"]),
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


def _step_blocks(parameter: Tensor, state: dict[str, Any], block: int, group: dict[str, Any]) -> None:
    state["step"] += 1
    step, rate, (beta1, beta2) = int(state["step"]), float(group["lr"]), group["betas"]
    corrections = (1 - beta1**step, math.sqrt(1 - beta2**step))
    numbers = (rate, rate * group["weight_decay"], beta1, beta2, *corrections, group["eps"])
    assert parameter.grad is not None, "parameters without a gradient are not updated"
    weights, gradient = local(parameter.detach()), local(parameter.grad).contiguous()
    states = tuple(local(state[name]) for name in _SAVED)
    if _has_kernel(weights):
        from phalanx.models.kernels import adamw8bit_

        adamw8bit_(weights, gradient, states, block, step, numbers)
    else:
        _step_by_operations(weights, gradient, states, block, step, numbers)


def _has_kernel(weights: Tensor) -> bool:
    if not weights.is_cuda or not has_triton():
        return False
    return torch.cuda.get_device_capability(weights.device) >= _FIRST_CAPABILITY


def _step_by_operations(
    weights: Tensor, gradient: Tensor, states: tuple[Tensor, ...], block: int, step: int, numbers: tuple[float, ...]
) -> None:
    """Take the same step without Triton."""
    rate, decay, beta1, beta2, correction1, correction2_root, eps = numbers
    weights, gradient, average8, root8 = (each.view(-1, block) for each in (weights, gradient, *states[:2]))
    average_scale, root_scale = (scale.view(-1, 1) for scale in states[2:])
    gradient = gradient.float()
    average = beta1 * (average8.float() * average_scale) + (1 - beta1) * gradient
    root = (beta2 * (root8.float() * root_scale).square() + (1 - beta2) * gradient.square()).sqrt()
    moved = weights.float() * (1 - decay) - rate * (average / correction1) / (root / correction2_root + eps)
    weights.copy_(moved)
    average_scale.copy_(average.abs().amax(1, keepdim=True).clamp_min(1e-30) / _LARGEST)
    average8.copy_((average / average_scale).to(_EIGHT_BITS))
    root_scale.copy_(root.amax(1, keepdim=True).clamp_min(1e-30) / _LARGEST)
    root8.copy_(rounded_either_way(root / root_scale, step).clamp(_LEAST_ROOT, _LARGEST).to(_EIGHT_BITS))


def rounded_either_way(values: Tensor, step: int) -> Tensor:
    """Round to the 3 bits of e4m3's fraction, up or down by chance: the nearest would lose changes of 0.1% for ever.

    The chance is a function of the step and the place, so that replicas stay equal.
    """
    places = torch.arange(values.numel(), device=values.device, dtype=torch.int64).view_as(values)
    noise = (places + step * 0x9E3779B9) * 0x2545F491
    noise = ((noise ^ (noise >> 15)) * 0x45D9F3B) >> 11
    dropped = (1 << _DROPPED_BITS) - 1
    bits = values.view(torch.int32) + (noise & dropped).to(torch.int32)
    return (bits & ~dropped).view(torch.float32)
