"""Several documents in one sequence: each is computed as if it were alone."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from phalanx.errors import UsageError
from phalanx.zoo.models import build
from phalanx.zoo.models.attention import InnerAttention, document_mask, positions_in

LENGTHS = (7, 1, 12, 5)


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def packed() -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Return documents, and two sequences with them in different orders, padded to 32, with the documents' numbers."""
    torch.manual_seed(1)
    documents = [torch.randint(256, (length,)) for length in LENGTHS]
    orders = [documents, documents[::-1]]
    pad = 32 - sum(LENGTHS)
    tokens = torch.stack([torch.cat([*order, torch.zeros(pad, dtype=torch.long)]) for order in orders])
    lengths = [[len(each) for each in order] for order in orders]
    rows = [[number for number, length in enumerate(row) for _ in range(length)] + [-1] * pad for row in lengths]
    return documents, tokens, torch.tensor(rows)


@pytest.mark.parametrize("name", ["gpt", "llama", "moe"])
def test_logits_are_those_of_each_document_alone(name):
    torch.manual_seed(0)
    model = build(name, seq_len=32).double().eval()
    documents, tokens, numbers = packed()
    found = model(tokens, documents=numbers)
    given = model(tokens, positions=positions_in(numbers), documents=numbers)
    assert torch.equal(found, given)
    for row, order in enumerate([documents, documents[::-1]]):
        start = 0
        for document in order:
            alone = model(document[None])[0]
            torch.testing.assert_close(found[row, start : start + len(document)], alone, rtol=0, atol=1e-10)
            start += len(document)
    assert not torch.allclose(found[0, 7:20], model(tokens)[0, 7:20])  # without the mask they do see each other


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_gradients_are_those_of_the_documents_alone(name):
    torch.manual_seed(0)
    model = build(name, seq_len=32).double()
    documents, tokens, numbers = packed()
    targets = torch.where(numbers < 0, -100, (tokens * 7 + 1) % 256)
    model(tokens[:1], targets[:1], documents=numbers[:1]).loss.backward()
    packed_gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    for document in documents:
        share = len(document) / sum(LENGTHS)
        (model(document[None], (document[None] * 7 + 1) % 256).loss * share).backward()
    for parameter, gradient in zip(model.parameters(), packed_gradients, strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=0, atol=1e-10)


def test_positions_restart_in_each_document():
    assert positions_in(torch.tensor([[3, 3, 5, 5, 5, -1], [0, 1, 1, 2, 2, 2]])).tolist() == [
        [0, 1, 0, 1, 2, 0],
        [0, 0, 1, 0, 1, 2],
    ]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_blocks_of_keys_give_what_the_whole_mask_gives():
    """What a compiled layer on a GPU calls, here as it is written."""
    numbers = packed()[2]
    query, key, value = (torch.randn(2, 4, 32, 16, dtype=torch.float64) for _ in range(3))
    expected = InnerAttention(causal=True)(query, key, value, document_mask(numbers, in_blocks=False))
    mask = document_mask(numbers, in_blocks=True)
    torch.testing.assert_close(flex_attention(query, key, value, block_mask=mask.blocks), expected, atol=1e-10, rtol=0)
    # Outside of a compiled layer the whole mask is used: FlexAttention as it is written stores all scores.
    torch.testing.assert_close(InnerAttention(causal=True)(query, key, value, mask), expected, atol=1e-12, rtol=0)


def test_what_cannot_keep_documents_apart_is_refused_by_name():
    from phalanx.strategies.context_parallel import _Calls

    _, tokens, numbers = packed()
    model = build("gpt", seq_len=32)
    calls = _Calls(inspect.signature(model.forward), SimpleNamespace())
    with pytest.raises(UsageError, match="context_parallel cannot keep documents apart"):
        calls.enter(model, (), {"tokens": tokens, "documents": numbers})
