"""The head of a language model: loss and gradients by chunks of tokens equal those over all logits at once."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from phalanx.zoo.models import loss
from phalanx.zoo.models.gpt import gpt
from phalanx.zoo.models.loss import LMHead, token_loss


@pytest.mark.parametrize("chunk_logits", [2**28, 100 * 37, 1], ids=["one chunk", "uneven chunks", "a token each"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)]
)
def test_loss_and_gradients_equal_those_of_whole_logits(monkeypatch, chunk_logits, dtype, tolerance):
    monkeypatch.setattr(loss, "_CHUNK_LOGITS", chunk_logits)
    torch.manual_seed(0)
    head = LMHead(16, 100, bias=False).to(dtype)
    hidden = torch.randn(3, 50, 16, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, 100, (3, 50))
    targets[0, :7] = -100
    ours = 3 * head(hidden, targets)
    theirs = 3 * token_loss(nn.functional.linear(hidden, head.weight), targets)
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    for found, expected in zip(
        *(torch.autograd.grad(each, [hidden, head.weight]) for each in (ours, theirs)), strict=True
    ):
        assert found.dtype is dtype
        assert (found - expected).abs().max() <= tolerance * expected.abs().max()


def test_autocast_computes_in_half_precision_and_gives_precise_gradients():
    head, hidden, targets = LMHead(16, 64, bias=False), torch.randn(2, 8, 16), torch.randint(0, 64, (2, 8))
    with torch.autocast("cpu", torch.bfloat16):
        head(hidden.requires_grad_(), targets).backward()
    assert head.weight.grad.dtype is hidden.grad.dtype is torch.float32
    assert hidden.grad.unique().numel() > 1


def test_fp16_keeps_the_loss_scale_in_the_gradients_of_logits():
    """The gradients of logits are below 1 / tokens: unscaled they would vanish in fp16."""
    head, targets = LMHead(16, 64, bias=False).half(), torch.randint(0, 64, (2, 8))
    assert "HeadLoss" not in type(head(torch.randn(2, 8, 16).half(), targets).grad_fn).__name__


def test_logits_wait_for_no_backward_pass():
    kept: list[torch.Tensor] = []
    model, tokens = gpt("debug", vocab_size=5000), torch.randint(5000, (2, 64))
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        model(tokens, tokens)
    assert max(tensor.numel() for tensor in kept) <= 5000 * 64, "the matrix, and not 128 x 5000 logits"


def test_a_compiled_model_has_the_same_loss():
    model, tokens = gpt("debug"), torch.randint(256, (2, 64))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)(tokens, tokens).loss
    torch.testing.assert_close(compiled, model(tokens, tokens).loss)


def test_a_batch_without_a_label_that_counts_has_no_gradient():
    """As of torch's cross entropy: the loss is NaN, and what other micro-batches add up stays as it is."""
    head, hidden = LMHead(16, 64, bias=False), torch.randn(2, 8, 16, requires_grad=True)
    loss = head(hidden, torch.full((2, 8), -100))
    assert loss.isnan()
    (0.0 * loss).backward()
    assert not hidden.grad.any()
    assert not head.weight.grad.any()


def test_a_frozen_matrix_gets_no_gradient():
    head, hidden = LMHead(16, 64, bias=False).requires_grad_(False), torch.randn(2, 8, 16, requires_grad=True)
    head(hidden, torch.randint(64, (2, 8))).backward()
    assert hidden.grad.any()
    assert head.weight.grad is None


def test_evaluation_by_chunks_has_the_same_loss(monkeypatch):
    logits, targets = torch.randn(3, 50, 100), torch.randint(100, (3, 50))
    targets[0, :7] = -100
    whole = token_loss(logits, targets)
    monkeypatch.setattr(loss, "_CHUNK_LOGITS", 1000)
    with torch.no_grad():
        torch.testing.assert_close(token_loss(logits, targets), whole)
