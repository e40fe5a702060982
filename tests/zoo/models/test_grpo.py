"""GRPO: its loss and gradient, what answers are made of, reward functions, and wrong options."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from phalanx.errors import UsageError
from phalanx.zoo.models import build
from phalanx.zoo.models.grpo import GRPO, reward_mean, token_log_probabilities

ROWS = [{"prompt": "ab", "wanted": "x"}, {"prompt": "c", "wanted": "y"}]


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Two prompts as the data set `prompts` gives them, with the template "none"."""
    texts = [json.dumps(row).encode() for row in ROWS]
    rows = torch.zeros(2, max(map(len, texts)), dtype=torch.uint8)
    for place, text in enumerate(texts):
        rows[place, : len(text)] = torch.tensor(list(text), dtype=torch.uint8)
    return torch.tensor([[97, 98], [99, -1]]), rows


class Judge:
    """A reward function that keeps what it was called with."""

    def __init__(self, *rewards: float) -> None:
        self.rewards, self.calls = list(rewards), []

    def __call__(self, prompts, completions, wanted):
        self.calls.append({"prompts": prompts, "completions": completions, "wanted": wanted})
        return self.rewards


def objective(reward, *, name: str = "gpt", **options) -> GRPO:
    torch.manual_seed(0)
    model = build(name, vocab_size=256, seq_len=16)
    return GRPO(model, reward, **{"num_generations": 3, "max_completion_length": 4, "template": "none", **options})


def by_hand(grpo: GRPO, completions: list[list[int]], advantages: list[float], lengths: int | None) -> torch.Tensor:
    """Return the gradient of the policy: that of - advantage x log-probability, per answer."""
    model, losses = grpo.model, []
    for number, (answer, advantage) in enumerate(zip(completions, advantages, strict=True)):
        prompt = list(ROWS[number // 3]["prompt"].encode())
        scores = model(torch.tensor([[*prompt, *answer]]))[0].log_softmax(-1)
        terms = [scores[len(prompt) - 1 + place, token] for place, token in enumerate(answer)]
        losses.append(-advantage * sum(terms) / (lengths or len(answer)))
    return torch.autograd.grad(sum(losses) / len(losses), model.layers[0].attention.project.weight)[0]


def drawn(grpo: GRPO, monkeypatch, completions: list[list[int]]) -> None:
    monkeypatch.setattr(grpo, "_draw", lambda prompts: completions)


ANSWERS = [[65, 66, 67, 68], [70, 3], [71, 72, 73, 74], [75, 76, 77, 78], [79, 3], [80, 81, 82, 83]]


@pytest.mark.parametrize(("loss_type", "scale"), [("grpo", True), ("grpo", False), ("dr_grpo", False)])
def test_the_gradient_is_that_of_the_policy(monkeypatch, loss_type, scale):
    judge = Judge(1.0, 0.0, 0.5, 2.0, 2.0, 5.0)
    grpo = objective(judge, loss_type=loss_type, scale_rewards=scale)
    drawn(grpo, monkeypatch, ANSWERS)
    rewards = torch.tensor(judge.rewards).view(2, 3)
    advantages = rewards - rewards.mean(1, keepdim=True)
    if scale:
        advantages = advantages / (rewards.std(1, keepdim=True) + 1e-4)
    expected = by_hand(grpo, ANSWERS, advantages.flatten().tolist(), 4 if loss_type == "dr_grpo" else None)
    output = grpo(*batch())
    output.loss.backward()
    found = grpo.model.layers[0].attention.project.weight.grad
    assert (found - expected).abs().max() < 1e-6
    assert torch.equal(output.logits, rewards)
    assert reward_mean(output.logits, None).tolist() == [0.5, 3.0]
    assert judge.calls == [
        {
            "prompts": ["ab"] * 3 + ["c"] * 3,
            "completions": ["ABCD", "F", "GHIJ", "KLMN", "O", "PQRS"],
            "wanted": ["x"] * 3 + ["y"] * 3,
        }
    ]


def test_where_all_answers_are_equally_good_nothing_is_learned(monkeypatch):
    grpo = objective(Judge(*[2.0] * 6))
    drawn(grpo, monkeypatch, ANSWERS)
    grpo(*batch()).loss.backward()
    assert all(parameter.grad.abs().max() == 0 for parameter in grpo.model.parameters())


def test_the_divergence_from_the_start_weights_is_added(monkeypatch):
    grpo = objective(Judge(*[2.0] * 6), beta=0.5)
    grpo.begin()
    drawn(grpo, monkeypatch, ANSWERS)
    assert grpo(*batch()).loss.item() == 0.0
    with torch.no_grad():
        grpo.model.layers[0].attention.project.weight.mul_(3)
    means = []
    for number, answer in enumerate(ANSWERS):
        whole = torch.tensor([[*ROWS[number // 3]["prompt"].encode(), *answer]])
        labels = whole[:, 1:].clone()
        labels[:, : -len(answer)] = -100
        model, reference = (token_log_probabilities(one, whole[:, :-1], labels) for one in (grpo.model, grpo.reference))
        apart = (reference - model)[labels >= 0]
        means.append((apart.exp() - apart - 1).mean())
    assert grpo(*batch()).loss.item() == pytest.approx(0.5 * torch.stack(means).mean().item(), rel=1e-5)


def test_without_a_divergence_no_weights_are_copied():
    grpo = objective(Judge())
    grpo.begin()
    assert grpo.reference is None


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_answers_are_drawn_from_the_model_and_end_with_its_end_token(name):
    judge = Judge(*range(6))
    grpo = objective(judge, name=name)
    grpo(*batch())
    assert len(judge.calls[0]["completions"]) == 6
    assert grpo.model.training
    with torch.no_grad():
        grpo.model.head.weight.zero_()
    grpo._draw([[97]])
    ended = grpo._draw([[97]] * 300)
    assert any(answer[-1] == 3 for answer in ended)  # the end of a text, as bytes
    assert not [answer for answer in ended if 3 in answer[:-1]]


def test_evaluation_draws_the_same_answers_each_time():
    judge = Judge(*range(6))
    grpo = objective(judge).eval()
    with torch.no_grad():
        grpo(*batch()), grpo(*batch())
    assert judge.calls[0] == judge.calls[1]


def test_models_of_transformers_draw_answers_too():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=256, n_positions=16, n_embd=8, n_layer=1, n_head=2)
    judge = Judge(*range(6))
    model = transformers.GPT2LMHeadModel(config)
    grpo = GRPO(model, judge, num_generations=3, max_completion_length=4, template="none")
    output = grpo(*batch())
    assert output.logits.tolist() == [[0, 1, 2], [3, 4, 5]]
    output.loss.backward()
    assert model.lm_head.weight.grad.abs().max() > 0
    assert model.training


def too_few(completions):
    return [1.0]


def not_finite(completions):
    return [float("nan")] * len(completions)


def texts(completions):
    return completions


def of_another_column(completions, wnted):
    return [0.0] * len(completions)


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (too_few, "'too_few' gave 1 values for 6 completions"),
        (not_finite, "'not_finite' gave nan: expected finite numbers"),
        (texts, "expected finite numbers"),
        (of_another_column, "unknown column 'wnted'. Did you mean 'wanted'"),
    ],
)
def test_wrong_reward_functions_are_named(reward, message):
    with pytest.raises(UsageError, match=message):
        objective(reward)(*batch())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reward": "accuracy"}, "reward = 'accuracy'"),
        ({"reward": "no_module_at_all:reward"}, "there is no module 'no_module_at_all'"),
        ({"reward": 3}, "reward is an int, expected a function"),
        ({"num_generations": 1}, "num_generations = 1: a group needs 2 answers"),
        ({"temperature": 0.0}, "temperature = 0.0 above 0"),
        ({"loss_type": "gro"}, "unknown loss_type 'gro'. Did you mean 'grpo'"),
        ({"template": None}, "the chat template is missing"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        objective(**{"reward": texts, **options})


def test_answers_that_do_not_fit_into_the_model_are_refused():
    with pytest.raises(
        UsageError, match="a prompt of 2 tokens and max_completion_length = 15 do not fit into the 16"
    ) as wrong:
        objective(texts, max_completion_length=15)(*batch())
    assert "max_completion_length=14" in wrong.value.hint


def test_other_models_are_refused():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))

    grpo = GRPO(Own(), texts, template="none")
    with pytest.raises(UsageError, match="an Own is none that is known"):
        grpo(*batch())
