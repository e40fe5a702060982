"""Matrix products in 8 bits (fp8) for linear layers: forward and backward products where they pay, in training only.

A matrix is rounded to e4m3 with a scale for each row, or in transposed form with one scale for all of it. Parameters,
their gradients and the names in checkpoints stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from phalanx.model import MultipliesIn8Bits, implements
from phalanx.torch_compat import has_triton, scaled_product

_MULTIPLE = 16
"""Of which 8-bit products need both sizes of a matrix."""
_SMALLEST_OUTPUT = 1536
"""A product pays from this many output features on: with fewer, rounding its input takes longer than is saved.

For example (H200, 32,768 tokens of 768 features): rounding takes 0.025 ms; with 3,072 outputs the product takes 0.145
instead of 0.22 ms, with 768 outputs 0.042 instead of 0.060.
"""
_SMALLEST_WEIGHT = 800
"""The gradient of a weight in 8 bits pays from this in x out / (in + out) on: both its factors must be transposed."""
_FIRST_CAPABILITY = (8, 9)
"""Compute capability of the first GPUs with products in 8 bits: Ada; Hopper is 9.0."""


def why_no_fp8(device: torch.device) -> str:
    """Return why a device computes no products in 8 bits, in words; empty where it does."""
    if device.type != "cuda":
        return "the CPU has no products in 8 bits"
    if torch.cuda.get_device_capability(device) < _FIRST_CAPABILITY:
        return (
            f"{torch.cuda.get_device_name(device)} has no products in 8 bits (Ada and Hopper GPUs, and later ones, do)"
        )
    return "" if has_triton() else "Triton is not installed (pip install triton)"


def use_fp8(model: nn.Module, blocks: list[nn.Module]) -> tuple[int, Callable[[], None]]:
    """Let the linear layers of the blocks, and the head, multiply in 8 bits; return how many, and what undoes it.

    Layers of a subclass (adapters, other quantised layers) and those with sizes that 8-bit products do not take stay.
    """
    linears = {layer: nn.Linear for block in blocks for layer in block.modules() if _takes_fp8(layer)}
    for layer in linears:
        layer.__class__ = Fp8Linear  # in place: the layer stays the same object, with its names, hooks and state
    able: list[MultipliesIn8Bits] = [layer for layer in model.modules() if implements(layer, MultipliesIn8Bits)]
    heads = [head for head in able if not head.in_features % _MULTIPLE]
    for head in heads:
        head.fp8 = True
    return len(linears) + len(heads), partial(_undo, linears, heads)


def _takes_fp8(layer: nn.Module) -> bool:
    if type(layer) is not nn.Linear:
        return False
    sizes = (layer.in_features, layer.out_features)
    return max(sizes) >= _SMALLEST_OUTPUT and not any(size % _MULTIPLE for size in sizes)


def _undo(linears: dict[nn.Module, Any], heads: list[MultipliesIn8Bits]) -> None:
    for layer, kind in linears.items():
        layer.__class__ = kind
    for head in heads:
        head.fp8 = False


class Fp8Linear(nn.Linear):
    """A linear layer that multiplies in 8 bits when it trains."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Return inputs @ weight.t() + bias."""
        if not torch.is_grad_enabled() or inputs.numel() // self.in_features % _MULTIPLE:
            return super().forward(inputs)
        rows = inputs.to(torch.bfloat16).flatten(0, -2)
        product: Tensor = _Product.apply(rows, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return product.view(*inputs.shape[:-1], -1)


class _Product(torch.autograd.Function):
    """rows @ weight.t() + bias, and its gradients; each of the three products is in 8 bits where that pays."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.bias_type = None if bias is None else bias.dtype
        bias = None if bias is None else bias.to(rows.dtype)
        if weight.shape[0] < _SMALLEST_OUTPUT:
            ctx.save_for_backward(rows, weight, None, None)
            return F.linear(rows, weight.to(rows.dtype), bias)
        first, scales = _kernels().round_rows(rows)
        second, weight_scales = _kernels().round_rows(weight)
        ctx.save_for_backward(rows, weight, scales.amax(), weight_scales.amax())
        return scaled_product(first, second, (scales, weight_scales), rows.dtype, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        rows, weight, row_scale, weight_scale = ctx.saved_tensors
        outputs, inputs = weight.shape
        gradient_scale = None
        if inputs >= _SMALLEST_OUTPUT:
            first, scales = _kernels().round_rows(gradient)
            gradient_scale = scales.amax()
            for_rows = _times_transposed(first, scales, weight, weight_scale, gradient.dtype)
        else:
            for_rows = gradient @ weight.to(gradient.dtype)
        if outputs * inputs >= _SMALLEST_WEIGHT * (outputs + inputs):
            for_weight = _weight_gradient(gradient, rows, gradient_scale, row_scale)
        else:
            for_weight = gradient.t() @ rows
        for_bias = None if ctx.bias_type is None else gradient.float().sum(0).to(ctx.bias_type)
        return for_rows, for_weight.to(weight.dtype), for_bias


def _kernels() -> Any:
    from phalanx.speed import kernels  # imports Triton

    return kernels


def _scale(values: Tensor) -> Tensor:
    """Return the scale of a matrix as a whole in e4m3; where its rows have scales, the largest of those is the same."""
    largest: float = _kernels().E4M3_LARGEST
    return values.abs().amax().float().clamp_min(1e-12) / largest


def _times_transposed(
    first: Tensor, scales: Tensor, weight: Tensor, weight_scale: Tensor | None, dtype: torch.dtype
) -> Tensor:
    scale = _scale(weight) if weight_scale is None else weight_scale
    second = _kernels().round_transposed(weight, scale, False)
    # Both factors must have scales of one kind: one for each row.
    every_row = scale.expand(weight.shape[1], 1).contiguous()
    return scaled_product(first, second, (scales, every_row), dtype)


def _weight_gradient(gradient: Tensor, rows: Tensor, gradient_scale: Tensor | None, row_scale: Tensor | None) -> Tensor:
    """Return gradient.t() @ rows; gradients in e5m2, whose range is wider, as one scale must do for all of them."""
    kernels = _kernels()
    wide: float = kernels.E4M3_LARGEST / kernels.E5M2_LARGEST
    first_scale = (_scale(gradient) if gradient_scale is None else gradient_scale) * wide
    second_scale = _scale(rows) if row_scale is None else row_scale
    first = kernels.round_transposed(gradient, first_scale, True)
    second = kernels.round_transposed(rows, second_scale, False)
    return scaled_product(first, second, (first_scale, second_scale), torch.float32)
