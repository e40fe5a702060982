"""Gradients as vectors, compared with those that typical mistakes give."""

from __future__ import annotations

import torch
from torch import Tensor, nn

Pair = tuple[Tensor, Tensor]
Guess = tuple[Tensor, str]
NO_GRADIENT = {
    "NoneType": "A parameter may have no gradient here: its grad is None. Leave such a parameter out of this step."
}
"""What to add to errors that name NoneType."""


def flat_gradient(model: nn.Module) -> Tensor | None:
    """Return all gradients in one vector, or None if one is missing."""
    params = list(model.parameters())
    grads = [param.grad for param in params if param.grad is not None]
    return torch.cat([grad.flatten() for grad in grads]) if len(grads) == len(params) else None


def first_match(found: Tensor, guesses: list[Guess]) -> str:
    """Return the text of the first guess with the value that was found, or nothing."""
    for value, text in guesses:
        if torch.allclose(found, value, rtol=1e-9, atol=1e-11):
            return text
    return ""
