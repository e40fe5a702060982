"""Sending tokens to experts and back: two functions on (tokens, expert index), and the loss that keeps experts busy.

No expert has a capacity, so no token is dropped and a sample's output depends on that sample only.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Dispatched(NamedTuple):
    """Copies of tokens, sorted by expert."""

    rows: Tensor
    """[tokens x top_k, width]: the rows of expert 0 first."""

    counts: Tensor
    """[experts]: how many rows each expert has; int64."""

    order: Tensor
    """[tokens x top_k]: row r is choice order[r] % top_k of token order[r] // top_k."""


def dispatch(tokens: Tensor, experts: Tensor, num_experts: int) -> Dispatched:
    """Sort a copy of each token [tokens, width] for each of its experts [tokens, top_k].

    Rows for one expert, and so for one rank's experts, lie together: `rows` and `counts` are what an all-to-all sends.
    """
    chosen = experts.flatten()
    order = chosen.argsort(stable=True)
    counts = torch.zeros(num_experts, dtype=torch.int64, device=chosen.device)
    counts = counts.scatter_add(0, chosen, torch.ones_like(chosen))
    return Dispatched(tokens[order // experts.shape[1]], counts, order)


def combine(rows: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """Bring the experts' rows back into the tokens' order and add each token's [tokens, top_k] weighted rows."""
    tokens, top_k = weights.shape
    restored = torch.empty_like(rows).index_copy(0, order, rows)
    return (restored.view(tokens, top_k, -1) * weights.to(rows.dtype).unsqueeze(-1)).sum(dim=1)


def balance_loss(probabilities: Tensor, experts: Tensor) -> Tensor:
    """Return experts x sum(share of choices x mean probability), from [batch, time, experts] and [batch, time, top_k].

    It is 1 when all experts are used alike and grows with the imbalance. It is taken of each sequence, then averaged:
    so, other than an average over the whole batch, it does not depend on how the batch is split over ranks.
    """
    chosen = experts.flatten(1)
    choice = probabilities.new_full((), 1 / chosen.shape[1]).expand(chosen.shape)
    shares = torch.zeros_like(probabilities[:, 0]).scatter_add(1, chosen, choice)
    return probabilities.shape[-1] * (shares * probabilities.mean(dim=1)).sum(dim=-1).mean()
