"""AdamW with states of 8 bits: a quarter of the memory of the usual ones, in one pass over each parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from phalanx.strategies.base import local

_EIGHT_BITS = torch.float8_e4m3fn
_LARGEST = torch.finfo(_EIGHT_BITS).max
_DROPPED_BITS = 20
"""Of the 23 bits of a float32's fraction, e4m3 keeps 3."""
_BLOCK = 256
"""Neighbouring values with one scale, the largest of them. Narrower rows have smaller blocks, down to 32."""
_SMALLEST = 4096
"""Parameters with fewer values (norms, biases) keep states in float32: they need little memory."""
_STATES = ("exp_avg", "exp_avg_root")


class AdamW8bit(torch.optim.Optimizer):
    """AdamW that keeps the average gradient m and the root of the average square v as 8-bit floats, scaled by block.

    The root, because sqrt(v) and m have the same range: where one is rounded to zero, so is the other. A zero v under
    an m that is not zero would be a step of m / eps.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._compiled: Callable[..., None] | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take a step; parameters without a gradient stay."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            numbers: dict[int, Tensor] = {}
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state |= _new_state(parameter)
                state["step"] += 1
                step = int(state["step"])
                if step not in numbers:  # for most groups one for all its parameters
                    numbers[step] = _numbers(group, step).to(parameter.device, non_blocking=True)
                self._update(parameter, state, group, numbers[step])
        return loss

    def _update(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any], numbers: Tensor) -> None:
        weights, gradient, block = local(parameter.detach()), local(parameter.grad), _block(parameter)
        values = [local(state[name]) for name in _STATES]
        constants = (numbers, *group["betas"], group["eps"])
        if not block:
            _adamw(weights, gradient, *values, *constants)
            return
        blocks = [each.reshape(-1, block) for each in (weights, gradient, *values)]
        scales = [local(state[f"{name}_scale"]).view(-1, 1) for name in _STATES]
        self._function(weights)(*blocks, *scales, *constants)

    def _function(self, weights: Tensor) -> Callable[..., None]:
        """Return the update of a matrix of blocks: on a GPU one kernel for parameters of any size."""
        if not weights.is_cuda:
            return _adamw_by_blocks
        if self._compiled is None:
            self._compiled = torch.compile(_adamw_by_blocks, dynamic=True)
        return self._compiled

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; torch makes states of the parameter's type, which for 8 bits loses nothing but memory."""
        super().load_state_dict(state_dict)
        for parameter, state in self.state.items():
            for name in _STATES if _block(parameter) else ():
                state[name] = state[name].to(_EIGHT_BITS)
            for name in (f"{each}_scale" for each in _STATES if _block(parameter)):
                state[name] = state[name].float()


def _block(parameter: Tensor) -> int:
    """Return the size of a parameter's blocks, which divides its rows; 0 for states in float32."""
    if parameter.ndim < 2 or parameter.numel() < _SMALLEST:
        return 0
    row = parameter.shape[1:].numel()
    size = _BLOCK
    while size >= 32 and (row % size or local(parameter).numel() % size):
        size //= 2
    return size if size >= 32 else 0


def _numbers(group: dict[str, Any], step: int) -> Tensor:
    """Return what changes from step to step as a tensor: with numbers, code would be compiled again in each step."""
    rate, (beta1, beta2) = float(group["lr"]), group["betas"]
    return torch.tensor(
        [rate, 1 - beta1**step, 1 - beta2**step, rate * group["weight_decay"], step], dtype=torch.float64
    )


def _new_state(parameter: Tensor) -> dict[str, Any]:
    block, piece = _block(parameter), local(parameter.detach())
    state: dict[str, Any] = {"step": torch.tensor(0.0)}
    for name in _STATES:
        dtype = _EIGHT_BITS if block else torch.float32
        state[name] = _like(parameter, torch.zeros(piece.shape, dtype=dtype, device=piece.device))
        if block:
            rows = (piece.shape[0], piece.shape[1:].numel() // block)
            state[f"{name}_scale"] = _like(parameter, torch.zeros(rows, device=piece.device))
    return state


def _like(parameter: Tensor, piece: Tensor) -> Tensor:
    """Return a state of this rank's piece of a parameter, sharded as the parameter is."""
    if not isinstance(parameter, DTensor):
        return piece
    return DTensor.from_local(piece, parameter.device_mesh, parameter.placements, run_check=False)


def _adamw(
    weights: Tensor, gradient: Tensor, m: Tensor, root: Tensor, numbers: Tensor, beta1: float, beta2: float, eps: float
) -> None:
    rate, correction1, correction2, decay = numbers[:4].float().unbind()
    gradient = gradient.float()
    m.lerp_(gradient, 1 - beta1)
    root.square_().mul_(beta2).add_(gradient.square(), alpha=1 - beta2).sqrt_()
    moved = weights.float() * (1 - decay) - rate * (m / correction1) / (root / correction2.sqrt() + eps)
    weights.copy_(moved)


def _adamw_by_blocks(
    weights: Tensor,
    gradient: Tensor,
    m8: Tensor,
    root8: Tensor,
    m_scale: Tensor,
    root_scale: Tensor,
    numbers: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    """Take the step of a matrix of blocks [blocks, block]; the scales are [blocks, 1]."""
    rate, correction1, correction2, decay = numbers[:4].float().unbind()
    gradient = gradient.float()
    m = torch.lerp(gradient, m8.float() * m_scale, beta1)
    root = ((root8.float() * root_scale).square() * beta2 + gradient.square() * (1 - beta2)).sqrt()
    moved = weights.float() * (1 - decay) - rate * (m / correction1) / (root / correction2.sqrt() + eps)
    weights.copy_(moved)
    m_scale.copy_(m.abs().amax(1, keepdim=True).clamp_min(1e-30) / _LARGEST)
    m8.copy_((m / m_scale).to(_EIGHT_BITS))
    root_scale.copy_(root.amax(1, keepdim=True).clamp_min(1e-30) / _LARGEST)
    root8.copy_(_rounded_either_way(root / root_scale, numbers[4]).clamp_max(_LARGEST).to(_EIGHT_BITS))


def _rounded_either_way(values: Tensor, step: Tensor) -> Tensor:
    """Round to the 3 bits of e4m3's fraction, up or down by chance: the nearest would lose changes of 0.1% for ever.

    The chance is a function of the step and the place, so that replicas stay equal.
    """
    places = torch.arange(values.numel(), device=values.device, dtype=torch.int64).view_as(values)
    noise = (places + step.long() * 0x9E3779B9) * 0x2545F491
    noise = ((noise ^ (noise >> 15)) * 0x45D9F3B) >> 11
    dropped = (1 << _DROPPED_BITS) - 1
    bits = values.view(torch.int32) + (noise & dropped).to(torch.int32)
    return (bits & ~dropped).view(torch.float32)
