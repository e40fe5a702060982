"""The private torch APIs of flash attention, which returns the log-sum-exp that ring attention needs.

`tools/private_torch.py` lists them with all others.
"""

from __future__ import annotations

import torch
from torch import Tensor


def flash_cpu(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Return the output of flash attention on a CPU and its log-sum-exp."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal)
    return out, lse


def flash_cpu_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value."""
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    found: tuple[Tensor, Tensor, Tensor] = backward(gradient, query, key, value, out, lse, 0.0, causal)
    return found


def flash_cuda(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Return the output of flash attention on a GPU and its log-sum-exp."""
    found = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal)
    return found[0], found[1]


def flash_cuda_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value."""
    unused = torch.empty(0, dtype=torch.int64, device=query.device)  # generator state: there is no dropout
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_backward(
        *(tensor.contiguous() for tensor in (gradient, query, key, value, out, lse)),
        None,
        None,
        query.shape[2],
        key.shape[2],
        0.0,
        causal,
        unused,
        unused,
    )
    return found
