"""AdamW with states of 8 bits: a quarter of the memory of the usual ones, in one pass over each parameter."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from phalanx.loop.group_optimizer import GroupOptimizer
from phalanx.strategies.base import local
from phalanx.torch_compat import has_triton

_TYPES = {"exp_avg_level": torch.int8, "exp_avg_root": torch.float8_e4m3fn}
_LEVELS = 127
_LARGEST = torch.finfo(torch.float8_e4m3fn).max
_BLOCK = 32
"""Neighbouring values with one scale, the largest of them; so few, that a row which ranks share is still cut alike."""
_SMALLEST = 4096
"""Parameters with fewer values (norms, biases) keep states in float32: they need little memory."""
_SAVED = (*_TYPES, *(f"{name}_scale" for name in _TYPES))
_AT_ONCE = 1 << 22
_LEAST_ROOT = 2.0**-9
"""The smallest positive e4m3. A root is never rounded to zero: the next step would divide by almost nothing."""
_FIRST_CAPABILITY = (8, 9)
"""Compute capability of the first GPUs on which Triton has e4m3; others take the same steps by torch's operations."""


class AdamW8bit(GroupOptimizer):
    """AdamW that keeps the average gradient m and the root of the average square v in 8 bits, scaled by block.

    Of m a byte holds the sign and the fourth root of its share of the block's largest value, in 127 levels, which are
    3% apart near that value and 10% at a hundredth of it. v is a float of 8 bits, and the root of v, because that has
    half as wide a range in powers of two. It is never rounded to zero: m, which has its own scale, may be positive
    there, and the step would be m / eps. States are contiguous, whatever the layout of their weight.
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

    def _new_state(self, parameter: Tensor) -> dict[str, Any]:
        return _new_state(parameter)

    def _step_group(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        _step_small([(p, self.state[p]) for p in parameters if not _block(p)], group)
        for parameter in parameters:
            if block := _block(parameter):
                _step_blocks(parameter, self.state[parameter], block, group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; a state of another optimizer is refused.

        States of 8 bits are put in apart: torch would make them of the parameter's type first, four times as large.
        """
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        saved = {number: dict(state_dict["state"].get(number, {})) for number in numbers}
        apart: list[tuple[Tensor, dict[str, Any]]] = []
        for number, parameter in zip(numbers, parameters, strict=False):
            state = saved[number]
            if not state or not _block(parameter):
                continue
            if missing := [name for name in _SAVED if name not in state]:
                raise ValueError(f"this is not a state of AdamW8bit: a parameter has no {missing[0]}")
            apart.append((parameter, {name: state.pop(name) for name in _SAVED}))
        filled = {number: state for number, state in saved.items() if state}
        super().load_state_dict({**state_dict, "state": filled})
        for parameter, states in apart:
            self.state[parameter] |= {name: _loaded(state, parameter, name) for name, state in states.items()}


def _loaded(state: Tensor, parameter: Tensor, name: str) -> Tensor:
    return state.to(parameter.device, dtype=_TYPES.get(name, torch.float32), copy=True)


def _block(parameter: Tensor) -> int:
    """Return the size of a parameter's blocks, which divides its rows; 0 for states in float32."""
    if parameter.ndim < 2 or parameter.numel() < _SMALLEST:
        return 0
    rows = parameter.shape[1:].numel(), local(parameter).shape[1:].numel()
    return 0 if any(row % _BLOCK for row in rows) else _BLOCK


def _new_state(parameter: Tensor) -> dict[str, Any]:
    block, piece = _block(parameter), local(parameter.detach())
    if not block:
        zeros = {name: torch.zeros_like(parameter.detach()) for name in ("exp_avg", "exp_avg_sq")}
        return {"step": torch.zeros((), device=piece.device), **zeros}
    state: dict[str, Any] = {"step": torch.zeros(())}
    for name, dtype in _TYPES.items():
        eight = torch.zeros(piece.shape, dtype=dtype, device=piece.device)
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
    whole = weights.contiguous()  # a copy of channels-last weights
    if _has_kernel(weights):
        from phalanx.speed.kernels import adamw8bit_

        adamw8bit_(whole, gradient, states, block, step, numbers)
    else:
        _step_by_operations(whole, gradient, states, block, step, numbers)
    if whole is not weights:
        weights.copy_(whole)


def _has_kernel(weights: Tensor) -> bool:
    if not weights.is_cuda or not has_triton():
        return False
    return torch.cuda.get_device_capability(weights.device) >= _FIRST_CAPABILITY


def _step_by_operations(
    weights: Tensor, gradient: Tensor, states: tuple[Tensor, ...], block: int, step: int, numbers: tuple[float, ...]
) -> None:
    """Take the same step without Triton, for some values at a time: its operations need many times their memory."""
    blocks = [tensor.view(-1, block) for tensor in (weights, gradient, *states[:2])]
    scales = [tensor.view(-1, 1) for tensor in states[2:]]
    many = max(1, _AT_ONCE // block)
    for number, parts in enumerate(zip(*(torch.split(tensor, many) for tensor in (*blocks, *scales)), strict=True)):
        _step_values(parts, number * many * block, step, numbers)


def _step_values(parts: tuple[Tensor, ...], first: int, step: int, numbers: tuple[float, ...]) -> None:
    """Take the step of some blocks of a parameter; `first`: the place of their first value in it."""
    weights, gradient, average8, root8, average_scale, root_scale = parts
    rate, decay, beta1, beta2, correction1, correction2_root, eps = numbers
    gradient = gradient.float()
    average = beta1 * (_fourth_power(average8.float() / _LEVELS) * average8.sign() * average_scale)
    average += (1 - beta1) * gradient
    root = (beta2 * (root8.float() * root_scale).square() + (1 - beta2) * gradient.square()).sqrt()
    moved = weights.float() * (1 - decay) - rate * (average / correction1) / (root / correction2_root + eps)
    weights.copy_(moved)
    average_scale.copy_(average.abs().amax(1, keepdim=True).clamp_min(1e-30))
    chances = _chances(average, first, step)
    average8.copy_((_level(average.abs() / average_scale, chances[0]) * average.sign()).to(torch.int8))
    root_scale.copy_(root.amax(1, keepdim=True).clamp_min(1e-30) / _LARGEST)
    root8.copy_(_rounded(root / root_scale, chances[1]).to(torch.float8_e4m3fn))


# Both are rounded up or down by chance: the nearest value would lose changes of 0.1% (of m: of some percent) for ever.


def _chances(values: Tensor, first: int, step: int) -> tuple[Tensor, Tensor]:
    """Return two numbers from 0 to 1 for each value: a function of step and place, so that replicas stay equal."""
    places = torch.arange(first, first + values.numel(), device=values.device, dtype=torch.int64).view_as(values)
    noise = (places + step * 0x9E3779B9) * 0x2545F491
    noise = (noise ^ (noise >> 15)) * 0x45D9F3B
    return ((noise >> 31) & 0xFFFFF).float() / 2**20, ((noise >> 11) & 0xFFFFF).float() / 2**20


def _fourth_power(values: Tensor) -> Tensor:
    return values.square().square()


def _level(shares: Tensor, chance: Tensor) -> Tensor:
    """Round the fourth roots of shares of the largest value to levels; the mean of the shares stays."""
    below = (shares.sqrt().sqrt() * _LEVELS).floor()
    low, high = _fourth_power(below / _LEVELS), _fourth_power((below + 1) / _LEVELS)
    return torch.where(chance < (shares - low) / (high - low), below + 1, below).clamp_max(_LEVELS)


def _rounded(values: Tensor, chance: Tensor) -> Tensor:
    """Round positive values to e4m3; the mean of the squares stays."""
    power = values.view(torch.int32) & 0x7F800000  # the largest power of two that is not above
    spacing = (power - (3 << 23)).view(torch.float32).clamp_min(_LEAST_ROOT)  # e4m3 has 3 bits after it
    below = (values / spacing).floor() * spacing
    above = below + spacing
    share = (values.square() - below.square()) / (above.square() - below.square())
    return torch.where(chance < share, above, below).clamp(_LEAST_ROOT, _LARGEST)
