"""Weights alone out of a checkpoint, for a model that is not being trained."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from phalanx import checkpoint

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn


def load_from_checkpoint(model: nn.Module, path: Path) -> None:
    """Read the newest complete checkpoint's weights (or those of the one given) into the model."""
    choice = checkpoint.choose(path, required=True)
    assert choice.checkpoint is not None, "required"
    state = get_model_state_dict(model)
    shapes = {name: (value.shape, value.dtype) for name, value in state.items() if isinstance(value, torch.Tensor)}
    checkpoint.compare_model(choice.checkpoint.manifest, shapes)
    checkpoint.read_tensors(choice.checkpoint, {"model": state})
    set_model_state_dict(model, state)
