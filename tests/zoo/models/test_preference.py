"""DPO and KTO: losses and rewards, the reference with adapters and without, and what is around the model."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import phalanx
from phalanx.errors import UsageError
from phalanx.model import InitialisesWeights, WrapsModel, implements
from phalanx.zoo.export import export_folder
from phalanx.zoo.models import build
from phalanx.zoo.models.hf import load_pretrained
from phalanx.zoo.models.preference import (
    DPO,
    KTO,
    answer_log_probabilities,
    label_agreement,
    label_reward,
    reward_accuracy,
    reward_margin,
)


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return build("gpt", vocab_size=17, seq_len=8).double()


def pairs() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(17, (3, 2, 8), generator=torch.Generator().manual_seed(1))
    answers = tokens.roll(-1, 2)
    answers[:, :, :4] = -100
    answers[0, 0, 6:] = -100  # a shorter answer
    return tokens, answers


def by_hand(found: torch.nn.Module) -> torch.Tensor:
    tokens, answers = pairs()
    sums = torch.zeros(3, 2, dtype=torch.float64)
    for pair in range(3):
        for side in range(2):
            scores = found(tokens[pair, side][None])[0].log_softmax(-1)
            places = [place for place in range(8) if answers[pair, side, place] >= 0]
            sums[pair, side] = sum(scores[place, answers[pair, side, place]] for place in places)
    return sums


def test_log_probabilities_are_sums_over_the_answer():
    found = model()
    assert (answer_log_probabilities(found, *pairs()) - by_hand(found)).abs().max() < 1e-12


def test_the_loss_begins_at_log_2_and_the_formula_holds():
    tokens, answers = pairs()
    objective = DPO(model(), beta=0.3, label_smoothing=0.1)
    objective.begin()
    assert objective(tokens, answers).loss.item() == pytest.approx(torch.log(torch.tensor(2.0)).item())
    with torch.no_grad():
        for parameter in objective.model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)))
    rewards = 0.3 * (by_hand(objective.model) - by_hand(objective.reference))
    margin = rewards[:, 0] - rewards[:, 1]
    found = objective(tokens, answers)
    assert (found.logits - rewards).abs().max() < 1e-12
    expected = (-0.9 * F.logsigmoid(margin) - 0.1 * F.logsigmoid(-margin)).mean()
    assert found.loss.item() == pytest.approx(expected.item())
    assert torch.equal(reward_margin(found.logits, None), found.logits[:, 0] - found.logits[:, 1])
    assert reward_accuracy(found.logits, None).tolist() == (margin > 0).float().tolist()


def moved(objective: DPO | KTO) -> torch.Tensor:
    """Change the model a little; return the log-ratios of the answers to its reference, [3, 2]."""
    objective.begin()
    with torch.no_grad():
        for parameter in objective.model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)))
    return by_hand(objective.model) - by_hand(objective.reference)


def test_the_hinge_loss_wants_a_margin_of_one():
    objective = DPO(model(), beta=2.0, loss_type="hinge")
    ratios = moved(objective)
    expected = (1 - 2.0 * (ratios[:, 0] - ratios[:, 1])).clamp(min=0)
    assert expected.count_nonzero() > 0
    assert objective(*pairs()).loss.item() == pytest.approx(expected.mean().item())


def test_the_loss_of_ipo_wants_mean_log_ratios_apart_by_half_of_one_over_beta():
    objective = DPO(model(), beta=0.25, loss_type="ipo")
    means = moved(objective) / (pairs()[1] >= 0).sum(-1)
    expected = (means[:, 0] - means[:, 1] - 2.0) ** 2
    assert objective(*pairs()).loss.item() == pytest.approx(expected.mean().item())


def test_the_loss_of_kto_compares_answers_with_the_divergence():
    (own, other), (answers, other_answers) = (part.unbind(1) for part in pairs())
    label = torch.tensor([True, False, True])
    objective = KTO(model(), beta=0.5, desirable_weight=1.5, undesirable_weight=0.7)
    ratios = moved(objective)
    divergence = ratios[:, 1].mean().clamp(min=0)
    direction = torch.tensor([1.0, -1.0, 1.0], dtype=torch.float64)
    weights = torch.tensor([1.5, 0.7, 1.5], dtype=torch.float64)
    expected = weights * (1 - torch.sigmoid(0.5 * direction * (ratios[:, 0] - divergence)))
    output = objective(own, answers, other, other_answers, label)
    assert output.loss.item() == pytest.approx(expected.mean().item())
    assert (label_reward(output.logits, None) - 0.5 * direction * ratios[:, 0]).abs().max() < 1e-12
    assert label_agreement(output.logits, None).tolist() == (direction * ratios[:, 0] > 0).float().tolist()
    output.loss.backward()
    assert all(parameter.grad is not None for parameter in objective.model.parameters())


def test_with_adapters_the_reference_is_the_base_and_nothing_is_copied():
    tokens, answers = pairs()
    objective = DPO(phalanx.lora(model(), 2, dropout=0.5))
    objective.begin()
    assert objective.reference is None
    for adapter in phalanx.zoo.models.lora.adapters(objective).values():
        torch.nn.init.normal_(adapter.B)
        adapter.dropout.p = 0.0
    objective.train()
    rewards = objective(tokens, answers).logits
    expected = 0.1 * (by_hand(objective.model) - by_hand(model()))
    assert (rewards - expected).abs().max() < 1e-12
    assert all(module.training for module in objective.modules())


def test_a_forward_that_fails_leaves_the_modes_as_they_were():
    objective = DPO(phalanx.lora(model(), 2))
    objective.begin()
    objective.train()
    tokens, answers = pairs()
    with pytest.raises(IndexError):
        objective(tokens + 17, answers)  # beyond the vocabulary
    assert all(module.training for module in objective.modules())


def test_rows_of_float32_are_not_kept_until_backward():
    found = model().bfloat16()
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda held: kept.append(held) or held, lambda held: held):
        sums = answer_log_probabilities(found, *pairs())
    assert sums.dtype == torch.float32
    assert not [held.shape for held in kept if held.dtype == torch.float32 and held.shape[-1] == 17]
    sums.sum().backward()
    exact = model()
    exact.load_state_dict(found.state_dict())
    by_hand(exact).sum().backward()
    assert (found.head.weight.grad - exact.head.weight.grad).abs().max() < 0.1


def test_only_the_model_is_trained_and_a_second_begin_keeps_the_first_weights():
    objective = DPO(model())
    objective.begin()
    first = objective.reference
    objective(*pairs()).loss.backward()
    assert all(parameter.grad is None for parameter in first.parameters())
    assert all(parameter.grad is not None for parameter in objective.model.parameters())
    objective.begin()
    assert objective.reference is first


def test_without_answers_it_is_the_model_and_that_is_exported(tmp_path):
    objective = DPO(build("llama", layers=2))
    tokens = torch.randint(256, (1, 8))
    assert implements(objective, WrapsModel)
    assert implements(DPO, WrapsModel)
    assert torch.equal(objective(tokens), objective.model(tokens))
    assert torch.equal(objective.generate(tokens, 2, temperature=0), objective.model.generate(tokens, 2, temperature=0))
    export_folder(objective, tmp_path / "folder")
    assert torch.equal(load_pretrained(tmp_path / "folder")(tokens), objective.model(tokens))


def test_a_model_without_storage_gets_an_equal_reference():
    with torch.device("meta"):
        objective = DPO(build("gpt"))
    objective.begin()
    assert implements(objective, InitialisesWeights)
    objective.to_empty(device="cpu")
    objective.init_weights()
    pair = zip(objective.model.parameters(), objective.reference.parameters(), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pair)


@pytest.mark.parametrize("options", [{"beta": 0.0}, {"label_smoothing": 0.5}])
def test_wrong_options_are_refused(options):
    with pytest.raises(UsageError, match="must be above 0"):
        DPO(model(), **options)


def test_an_unknown_loss_and_options_without_effect_are_refused():
    with pytest.raises(UsageError, match=r"unknown loss_type 'hing'\. Did you mean 'hinge'"):
        DPO(model(), loss_type="hing")
    with pytest.raises(UsageError, match=r"label_smoothing = 0\.1 has no meaning for loss_type = 'ipo'"):
        DPO(model(), label_smoothing=0.1, loss_type="ipo")
    with pytest.raises(UsageError, match=r"undesirable_weight = -1\.0 must be above 0"):
        KTO(model(), undesirable_weight=-1.0)
