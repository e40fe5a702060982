"""QLoRA: frozen weights of linear layers in 4 bits (NF4; Dettmers et al., 2023), computed back where they are used.

A row of a weight is stored as bytes: two weights in each, then a bfloat16 scale for every 64 weights, 4.25 bits per
weight in all. The bytes are a parameter that is still called `weight`: FSDP shards its rows, and checkpoints hold it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from phalanx.errors import UsageError
from phalanx.torch_compat import let_fsdp_shard_bytes

_BLOCK = 64
"""Weights that share a scale, the largest of their absolute values."""
_STD = 0.02
"""Of weights that are drawn for a model without any, as the reference models draw theirs."""
_LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""Quantiles of a normal distribution, scaled to -1 and 1: each level stands for about as many weights."""
_PAIRS: dict[torch.device, Tensor] = {}


def _pairs(device: torch.device) -> Tensor:
    """Return the two levels of every byte, float32 [256, 2]; made once per device."""
    if device not in _PAIRS:
        levels = torch.tensor(_LEVELS)
        _PAIRS[device] = torch.cartesian_prod(levels, levels).to(device)
    return _PAIRS[device]


def _blocks(features: int) -> int:
    return -(-features // _BLOCK)


def quantise(weight: Tensor) -> Tensor:
    """Return the bytes of a matrix: [rows, 34 for every 64 columns]; the last block of a row is filled with zeros."""
    rows, features = weight.shape
    count = _blocks(features)
    if weight.is_meta:
        return torch.empty(rows, count * (_BLOCK // 2 + 2), dtype=torch.uint8, device="meta")
    values = F.pad(weight.detach().float(), (0, count * _BLOCK - features)).view(rows, count, _BLOCK)
    scales = values.abs().amax(-1, keepdim=True).to(torch.bfloat16)
    values = values / scales.float().where(scales > 0, 1.0)
    levels = torch.tensor(_LEVELS, device=weight.device)
    codes = torch.bucketize(values, (levels[1:] + levels[:-1]) / 2, out_int32=True).view(rows, -1, 2)
    packed = (codes[..., 0] * 16 + codes[..., 1]).to(torch.uint8)
    return torch.cat([packed, scales.view(rows, count).view(torch.uint8)], dim=1)


def dequantise(packed: Tensor, features: int, dtype: torch.dtype) -> Tensor:
    """Return the matrix [rows, features] of its bytes."""
    rows, count = packed.shape[0], _blocks(features)
    codes, scales = packed[:, : count * _BLOCK // 2], packed[:, count * _BLOCK // 2 :]
    values = F.embedding(codes.int(), _pairs(packed.device)).view(rows, count, _BLOCK)
    values = values * scales.contiguous().view(torch.bfloat16)[..., None]
    return values.view(rows, -1)[:, :features].to(dtype)


class _Product(torch.autograd.Function):
    """inputs @ weight.t(); the weight is computed again in the backward pass, and its bytes alone wait for that."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, packed: Tensor) -> Tensor:
        ctx.save_for_backward(packed)
        ctx.features = inputs.shape[-1]
        return F.linear(inputs, dequantise(packed, ctx.features, inputs.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (packed,) = ctx.saved_tensors
        return gradient @ dequantise(packed, ctx.features, gradient.dtype), None


class NF4Linear(nn.Module):
    """A linear layer whose weight is frozen, and kept in 4 bits. Made of one in place, by `quantise_layer`."""

    in_features: int
    out_features: int
    weight: nn.Parameter
    bias: nn.Parameter | None
    dtype: torch.dtype
    """Of the weight as it was."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Return inputs @ weight.t() + bias, in the type of autocast or of the inputs."""
        device = inputs.device.type
        if torch.is_autocast_enabled(device):
            inputs = inputs.to(torch.get_autocast_dtype(device))
        product: Tensor = _Product.apply(inputs, self.weight)  # type: ignore[no-untyped-call]
        return product if self.bias is None else product + self.bias.to(product.dtype)

    def reset_adapter(self) -> None:
        """Draw a weight, for a model that was built on the meta device: its `init_weights` does not know bytes."""
        weight: Any = self.weight.detach()
        weight = weight.to_local() if hasattr(weight, "to_local") else weight
        weight.copy_(quantise(_STD * torch.randn(len(weight), self.in_features, device=weight.device)))
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def extra_repr(self) -> str:
        """Return the text for `print(model)`."""
        return f"in_features={self.in_features}, out_features={self.out_features}, nf4"


def quantise_layer(layer: nn.Module) -> None:
    """Keep the weight of an nn.Linear in 4 bits, in place: the layer stays the same object, with names and hooks."""
    weight: Any = layer.weight
    layer.dtype = weight.dtype
    layer.weight = nn.Parameter(quantise(weight), requires_grad=False)
    layer.__class__ = NF4Linear


def quantise_base(model: nn.Module, blocks: Iterable[nn.Module]) -> int:
    """Keep the weights of all linear layers inside a model's blocks in 4 bits; return how many layers that are.

    Embeddings and the head stay as they are. Weights that two layers share stay too: both would have to change.
    """
    inside = {id(layer): layer for block in blocks for layer in block.modules()}.values()
    owners: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    for layer in inside:
        if type(layer) is nn.Linear and owners[id(layer.weight)] == 1:
            quantise_layer(layer)
    let_fsdp_shard_bytes()
    count = sum(isinstance(layer, NF4Linear) for layer in inside)
    if not count:
        raise UsageError(
            f"lora_base = 'nf4': the blocks of {type(model).__name__} have no linear layer to keep in 4 bits",
            hint="Blocks are several modules of one class in an nn.ModuleList or nn.Sequential, with nn.Linear in "
            "them. Leave lora_base out for other models.",
        )
    return count


def restore_base(model: nn.Module) -> None:
    """Give all layers in 4 bits plain weights again, in place: those that they have computed with."""
    for layer in model.modules():
        if isinstance(layer, NF4Linear):
            weight = dequantise(layer.weight.detach(), layer.in_features, layer.dtype)
            layer.weight = nn.Parameter(weight, requires_grad=False)
            layer.__class__ = nn.Linear  # type: ignore[assignment]
