"""The reward model: where it reads an answer's reward, its loss, and models that it can be made of."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from phalanx.errors import UsageError
from phalanx.model import WrapsModel, implements
from phalanx.zoo.models import build
from phalanx.zoo.models.reward_model import RewardModel

TOKENS = torch.randint(17, (3, 2, 9), generator=torch.Generator().manual_seed(1))
LENGTHS = ((9, 7), (6, 9), (5, 5))


def pairs() -> tuple[torch.Tensor, torch.Tensor]:
    """Conversations of different lengths, as the data set `preferences` gives them."""
    tokens, answers = torch.zeros(3, 2, 8, dtype=torch.long), torch.full((3, 2, 8), -100)
    for pair, lengths in enumerate(LENGTHS):
        for side, length in enumerate(lengths):
            tokens[pair, side, : length - 1] = TOKENS[pair, side, : length - 1]
            answers[pair, side, 2 : length - 1] = TOKENS[pair, side, 3:length]
    return tokens, answers


@torch.no_grad()
def rewards_by_hand(model: RewardModel, seq_len: int) -> torch.Tensor:
    rows = [
        [model(TOKENS[pair, side, : min(length, seq_len)][None])[0, -1] for side, length in enumerate(lengths)]
        for pair, lengths in enumerate(LENGTHS)
    ]
    return torch.tensor(rows)


@pytest.mark.parametrize("name", ["gpt", "llama", "moe"])
def test_the_reward_is_read_after_the_last_token_of_an_answer(name):
    model = RewardModel(build(name, vocab_size=17, seq_len=16)).eval()
    output = model(*pairs())
    expected = rewards_by_hand(model, 16)
    assert output.logits.shape == (3, 2)
    assert (output.logits - expected).abs().max() < 1e-5
    assert output.loss.item() == pytest.approx(-F.logsigmoid(expected[:, 0] - expected[:, 1]).mean().item(), abs=1e-5)


def test_of_an_answer_that_fills_the_model_the_last_token_is_left_out():
    model = RewardModel(build("gpt", vocab_size=17, seq_len=8)).eval()
    assert (model(*pairs()).logits - rewards_by_hand(model, 8)).abs().max() < 1e-5


def test_it_learns_which_answers_are_preferred():
    torch.manual_seed(0)
    model = RewardModel(build("gpt", vocab_size=17, seq_len=16))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(30):
        optimizer.zero_grad()
        loss = model(*pairs()).loss
        loss.backward()
        optimizer.step()
    rewards = model(*pairs()).logits
    assert (rewards[:, 0] > rewards[:, 1] + 1).all()


def test_it_is_the_trained_model_and_has_no_head():
    model = RewardModel(build("llama"))
    assert implements(model, WrapsModel)
    assert model.trained_model() is model
    assert model.model.head is None
    assert not [name for name, _ in model.named_parameters() if "head" in name]


def test_it_is_made_of_a_causal_model_of_transformers():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=17, n_positions=16, n_embd=8, n_layer=1, n_head=2)
    model = RewardModel(transformers.GPT2LMHeadModel(config)).eval()
    assert (model(*pairs()).logits - rewards_by_hand(model, 16)).abs().max() < 1e-5


def test_without_storage_all_weights_can_be_drawn():
    with torch.device("meta"):
        model = RewardModel(build("gpt"))
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.constant_(parameter, torch.nan)
    model.init_weights()
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_other_models_are_refused():
    with pytest.raises(UsageError, match="a Linear is none that is known"):
        RewardModel(nn.Linear(2, 2))
