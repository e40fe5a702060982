"""NEFTune (Jain et al., 2023): noise on the embeddings of tokens while a model is fine-tuned."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.errors import UsageError, a_type


def neftune(model: nn.Module, alpha: float) -> nn.Module:
    """Add uniform noise of at most alpha / sqrt(tokens x width) to the embeddings in training; return the model.

    `alpha`: 5 to 15 in the paper.
    """
    if not alpha > 0:
        raise UsageError(f"model.neftune = {alpha}: expected a number above 0", hint="The paper takes 5 to 15.")
    owner: Any = model
    embedding = next(
        (
            getattr(owner, name)()
            for name in ("token_embedding", "get_input_embeddings")
            if callable(getattr(owner, name, None))
        ),
        None,
    )
    if not isinstance(embedding, nn.Module):
        raise UsageError(
            f"neftune adds noise to the embeddings of tokens, and {a_type(model)} names none",
            hint="Give a model with get_input_embeddings(), as transformers' have it, or leave neftune out.",
        )
    embedding.register_forward_hook(partial(_add_noise, alpha))
    return model


def _add_noise(alpha: float, embedding: nn.Module, _: Any, output: Tensor) -> Tensor:
    if not embedding.training:
        return output
    most = alpha / (output.shape[-2] * output.shape[-1]) ** 0.5
    return output + torch.empty_like(output).uniform_(-most, most)
