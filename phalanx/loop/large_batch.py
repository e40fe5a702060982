"""LARS and LAMB: each weight's step has a length in proportion to the weight, for batches of thousands of samples.

Biases and the weights of norms (parameters of one dimension) get plain steps without decay. Norms are those of whole
parameters: shards add their squares up over the ranks, with one exchange for all parameters of a layout.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from phalanx.loop.group_optimizer import GroupOptimizer
from phalanx.strategies.base import local
from phalanx.torch_compat import (
    foreach_add_,
    foreach_addcmul_,
    foreach_div,
    foreach_lerp_,
    foreach_mul_,
    foreach_norm,
    foreach_sqrt,
)


class ParameterShards(NamedTuple):
    """The parameters of a group that have a gradient, as this rank's shards."""

    parameters: list[Tensor]
    weights: list[Tensor]
    gradients: list[Tensor]

    def adapt(self, steps: list[Tensor], decay: float, trust: float = 1.0) -> None:
        """Add decay x w to the step u of each weight w, and scale it by trust x |w| / |u|, all in place.

        A weight or a step of zeros keeps its step.
        """
        chosen = [number for number, parameter in enumerate(self.parameters) if parameter.ndim > 1]
        if not chosen:
            return
        parameters, weights, steps = ([values[n] for n in chosen] for values in (self.parameters, self.weights, steps))
        if decay:
            foreach_add_(steps, weights, alpha=decay)
        lengths, step_norms = (_norms(parameters, parts) for parts in (weights, steps))
        ratios = torch.where((lengths > 0) & (step_norms > 0), trust * lengths / step_norms, 1.0)
        foreach_mul_(steps, list(ratios.unbind()))


def _norms(parameters: list[Tensor], parts: list[Tensor]) -> Tensor:
    """Return the norm of each whole tensor, of which `parts` are the shards, laid out as the parameters are."""
    norms = list(foreach_norm(parts))
    layouts: dict[Any, list[int]] = {}
    for number, parameter in enumerate(parameters):
        if isinstance(parameter, DTensor):
            # Not is_shard: torch does not count the strided shards of two axes as such.
            axes = tuple(axis for axis, placement in enumerate(parameter.placements) if not placement.is_replicate())
            layouts.setdefault((parameter.device_mesh, axes), []).append(number)
    for (mesh, axes), numbers in layouts.items():
        squares = torch.stack([norms[number] for number in numbers]).square()
        for axis in axes:
            dist.all_reduce(squares, group=mesh.get_group(axis))
        for number, norm in zip(numbers, squares.sqrt().unbind(), strict=True):
            norms[number] = norm
    return torch.stack(norms)


def _as_shards(parameters: list[Tensor]) -> ParameterShards:
    gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    return ParameterShards(parameters, [local(parameter) for parameter in parameters], gradients)


class _LayerWise(GroupOptimizer):
    """What LARS and LAMB share: groups, and states laid out as their parameters."""

    _states: tuple[str, ...]

    def _new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        return {name: torch.zeros_like(parameter) for name in self._states}

    def _state(self, trained: ParameterShards, name: str) -> list[Tensor]:
        return [local(self.state[parameter][name]) for parameter in trained.parameters]


class LARS(_LayerWise):
    """SGD with momentum, each weight's gradient g scaled by trust x |w| / |g + decay x w| (arXiv 1708.03888)."""

    _states = ("momentum_buffer",)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 1e-3,
    ) -> None:
        _check("LARS", lr=lr, momentum=momentum, weight_decay=weight_decay, trust=trust)
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust})

    def _step_group(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        trained = _as_shards(parameters)
        steps = [gradient.clone() for gradient in trained.gradients]
        trained.adapt(steps, group["weight_decay"], group["trust"])
        buffers = self._state(trained, "momentum_buffer")
        foreach_mul_(buffers, group["momentum"])
        foreach_add_(buffers, steps)
        foreach_add_(trained.weights, buffers, alpha=-float(group["lr"]))


class LAMB(_LayerWise):
    """AdamW whose step u of each weight has the length rate x |w|: w -= rate x |w| / |u| x u (arXiv 1904.00962)."""

    _states = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        _check("LAMB", lr=lr, beta1=betas[0], beta2=betas[1], eps=eps, weight_decay=weight_decay)
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def _new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        return {**super()._new_state(parameter), "step": torch.zeros((), device=local(parameter).device)}

    def _step_group(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        trained = _as_shards(parameters)
        beta1, beta2 = group["betas"]
        averages, squares = self._state(trained, "exp_avg"), self._state(trained, "exp_avg_sq")
        counts = [self.state[parameter]["step"] for parameter in trained.parameters]
        foreach_add_(counts, 1)
        foreach_lerp_(averages, trained.gradients, 1 - beta1)
        foreach_mul_(squares, beta2)
        foreach_addcmul_(squares, trained.gradients, trained.gradients, 1 - beta2)
        # The counts stay on the device: a captured step counts on.
        step_counts = [count.double() for count in counts]
        roots = foreach_sqrt(foreach_div(squares, [1 - beta2**count for count in step_counts]))
        foreach_add_(roots, group["eps"])
        steps = list(foreach_div(foreach_div(averages, [1 - beta1**count for count in step_counts]), roots))
        trained.adapt(steps, group["weight_decay"])
        foreach_add_(trained.weights, steps, alpha=-float(group["lr"]))


def _check(name: str, **numbers: float) -> None:
    """Raise for numbers with which no step makes sense."""
    for option, number in numbers.items():
        if number < 0 or (option in ("momentum", "beta1", "beta2") and number >= 1):
            limit = "at least 0 and below 1" if option in ("momentum", "beta1", "beta2") else "0 or more"
            raise ValueError(f"{name} got {option} = {number}: it is {limit}")
