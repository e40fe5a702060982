"""Hooks on backward passes: nested and interrupted passes are distinguished, on one rank."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from phalanx.engines.horovod.strategy import HorovodReducer
from phalanx.errors import CommunicationError, ModelError


def alone():
    """Horovod among one rank: an average is what was sent."""
    none = SimpleNamespace(compress=lambda tensor: (tensor, None), decompress=lambda tensor, context: tensor)
    return SimpleNamespace(
        Compression=SimpleNamespace(none=none), Average=1, Adasum=2, Max=3, rank=lambda: 0,
        allreduce_async_=lambda tensor, name, op: tensor, poll=lambda handle: True, synchronize=lambda handle: handle,
    )  # fmt: skip


def reduced(*layers):
    HorovodReducer(alone(), list(torch.nn.Sequential(*layers).named_parameters()))
    return torch.randn(2, 4, requires_grad=True)


def test_reentrant_checkpointing_is_named_when_gradients_were_sent_before():
    body, head = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
    inputs = reduced(body, head)
    with pytest.raises(ModelError, match=r"(?s)reentrant checkpointing.*the pass around it.*use_reentrant=False"):
        head(checkpoint(body, inputs, use_reentrant=True)).sum().backward()


def test_reentrant_checkpointing_is_named_when_gradients_are_still_to_come():
    first, second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    inputs = reduced(first, second)
    hidden = checkpoint(first, inputs, use_reentrant=True)
    with pytest.raises(ModelError, match=r"ended without 2 of 4 gradients, such as 0\.weight's"):
        checkpoint(second, hidden, use_reentrant=True).sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradients_that_can_be_averaged_are_averaged(reentrant):
    """A model that is checkpointed as a whole has one inner pass with all gradients."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    inputs = reduced(*model)
    for _ in range(2):
        checkpoint(model, inputs, use_reentrant=reentrant).sum().backward()
    assert model[1].bias.grad.item() == 4.0, "two passes over two samples"


def test_an_interrupted_pass_is_not_a_nested_pass():
    body, head = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
    inputs = reduced(body, head)

    def refuse(gradient):
        raise RuntimeError("no gradient here")

    hidden = body(inputs)
    hidden.register_hook(refuse)
    with pytest.raises(RuntimeError, match="no gradient here"):
        head(hidden).sum().backward()
    with pytest.raises(CommunicationError, match="The ranks no longer agree"):
        head(body(inputs)).sum().backward()
