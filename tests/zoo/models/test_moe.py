"""The mixture of experts: routing, dispatch and combine, and the balance loss."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

from phalanx.errors import ModelError
from phalanx.zoo.models import build
from phalanx.zoo.models.moe import balance_loss, combine, dispatch, mean_over_labels


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Tiny layers run faster on one thread, above all on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_dispatch_sorts_by_expert_and_combine_brings_back():
    tokens = torch.arange(5.0)[:, None].expand(5, 3)
    experts = torch.tensor([[2, 0], [0, 3], [3, 2], [2, 3], [0, 2]])
    weights = torch.rand(5, 2)
    sent = dispatch(tokens, experts, 5)
    assert sent.counts.tolist() == [3, 0, 4, 3, 0]
    assert sent.rows[:, 0].tolist() == [0, 1, 4, 0, 2, 3, 4, 1, 2, 3]
    per_expert = torch.arange(5.0).repeat_interleave(sent.counts)  # let expert e multiply by e
    combined = combine(sent.rows * per_expert[:, None], sent.order, weights)
    torch.testing.assert_close(combined[:, 0], torch.arange(5.0) * (weights * experts).sum(1))


def test_the_feed_forward_equals_every_expert_computed_for_every_token():
    torch.manual_seed(0)
    feed = build("moe").layers[0].feed.double()
    for parameter in feed.parameters():
        torch.nn.init.normal_(parameter)
    inputs = torch.randn(2, 8, 48, dtype=torch.float64)
    output, _ = feed(inputs)
    routed, net = feed.router(inputs), feed.experts
    gated = F.silu(torch.einsum("btw,ewf->btef", inputs, net.gate)) * torch.einsum("btw,ewf->btef", inputs, net.up)
    every = torch.einsum("btef,efw->btew", gated, net.down)
    chosen = every.gather(2, routed.experts[..., None].expand(-1, -1, -1, 48))
    torch.testing.assert_close(output, (chosen * routed.weights[..., None]).sum(2), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(routed.weights.sum(-1), torch.ones(2, 8, dtype=torch.float64))


def test_an_idle_expert_gets_a_gradient_of_zero():
    """Every parameter always takes part, so no rank waits for the gradient of an expert that another rank used."""
    model = build("moe")
    for layer in model.layers:
        torch.nn.init.zeros_(layer.feed.router.score.weight)  # ties: experts 0 and 1 get every token
    text = torch.randint(256, (1, 8))
    model(text, text).loss.backward()
    gradient = model.layers[0].feed.experts.gate.grad
    used = {index for index in range(4) if gradient[index].abs().sum() > 0}
    assert len(used) == 2


def test_balance_is_one_when_even_and_the_number_of_experts_when_all_go_to_one():
    even = torch.full((2, 8, 4), 0.25)
    spread = torch.arange(8).remainder(4)[None, :, None].expand(2, 8, 1)
    assert balance_loss(even, spread).tolist() == pytest.approx([1, 1])
    certain = torch.zeros(2, 8, 4)
    certain[..., 3] = 1
    assert balance_loss(certain, torch.full((2, 8, 1), 3)).tolist() == pytest.approx([4, 4])


def test_the_balance_loss_does_not_depend_on_the_split_of_the_batch():
    torch.manual_seed(0)
    probabilities = torch.rand(6, 8, 4, dtype=torch.float64).softmax(-1)
    experts = probabilities.topk(2, dim=-1).indices
    parts = [balance_loss(probabilities[part], experts[part]) for part in (slice(0, 2), slice(2, 6))]
    torch.testing.assert_close(balance_loss(probabilities, experts), torch.cat(parts))


def test_what_is_added_to_the_loss_is_weighed_by_the_labels_that_count():
    targets = torch.tensor([[1, 2, -100, -100], [3, -100, -100, -100], [-100] * 4])
    values = torch.tensor([1.0, 4.0, 100.0])
    assert mean_over_labels(values, targets).item() == pytest.approx((2 * 1 + 4) / 3)
    assert mean_over_labels(values[2:], targets[2:]).item() == 0


def test_the_balance_loss_is_part_of_the_training_loss_only():
    torch.manual_seed(0)
    model, text = build("moe", balance=0.5), torch.randint(256, (2, 16))
    plain = copy.deepcopy(model).eval()(text, text).loss
    added = model(text, text).loss - plain
    assert 0.45 < added.item() < 0.75  # 0.5 times a balance a little above 1
    added.backward()
    assert model.layers[0].feed.router.score.weight.grad.abs().sum() > 0


def test_descending_the_balance_loss_evens_the_load():
    torch.manual_seed(0)
    feed = build("moe").layers[0].feed
    inputs = torch.randn(4, 32, 48) + 1  # what the tokens have in common makes some experts favourites
    torch.nn.init.normal_(feed.router.score.weight, std=0.3)

    def busiest() -> int:
        return int(feed.router(inputs).experts.flatten().bincount().max())

    before = busiest()
    optimizer = torch.optim.SGD(feed.router.parameters(), lr=0.1)
    for _ in range(20):
        optimizer.zero_grad()
        feed(inputs)[1].mean().backward()
        optimizer.step()
    assert before > 110
    assert busiest() < 90  # of 256 choices, 64 when even


def test_more_choices_than_experts_are_refused():
    with pytest.raises(ModelError, match=r"top_k=5 of experts=4.*1\.\.4"):
        build("moe", top_k=5)
    model = build("moe")
    model.embed = None
    with pytest.raises(ModelError, match="cannot be a pipeline stage"):
        model(torch.zeros(1, 8, 48))
