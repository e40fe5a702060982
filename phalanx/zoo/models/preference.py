"""Preference tuning: DPO (with the losses of IPO and SLiC) and KTO, as modules around the language model they train.

The reward of an answer is beta x (its log-probability under the model - that under the reference). DPO (Rafailov et
al., 2023) wants the chosen answer's reward above the rejected one's; KTO (Ethayarajh et al., 2024) learns from single
answers that are labelled desirable or not. The reference is the model without its adapters, or a frozen copy.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from phalanx.config.fields import IGNORED_LABEL
from phalanx.errors import UsageError, unknown_name
from phalanx.model import CompileRegions, implements
from phalanx.zoo.models.lora import adapters, without_adapters


class PreferenceOutput(NamedTuple):
    """The loss of answers, and what metrics see."""

    loss: Tensor
    logits: Tensor
    """The rewards of the chosen and the rejected answers, [pairs, 2]; of single answers [rows]."""


class AgainstReference(nn.Module):
    """A language model beside the weights it began with; a `WrapsModel` (see `model.py`)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.reference: nn.Module | None = None

    def begin(self) -> None:
        """Keep a frozen copy of the weights, unless there is one; with adapters none is needed."""
        if self.reference is None and not adapters(self.model):
            self.reference = copy.deepcopy(self.model).requires_grad_(False)

    def trained_model(self) -> nn.Module:
        """Return the language model."""
        return self.model

    def loss_weight(self, batch: Any) -> float:
        """Return the number of rows: the loss is their mean, however many tokens their answers have."""
        parts = list(batch.values()) if isinstance(batch, Mapping) else batch
        return float(len(parts[0]))

    @contextmanager
    def as_reference(self) -> Iterator[nn.Module]:
        """Yield the model as it was before training, without gradients and without dropout."""
        reference = self.model if self.reference is None else self.reference
        modes = [(module, module.training) for module in reference.modules()]
        try:
            with torch.no_grad(), without_adapters(reference):
                reference.eval()
                yield reference
        finally:
            for module, training in modes:
                module.training = training

    @property
    def config(self) -> Any:
        """The shape of the language model."""
        return self.model.config

    def generate(self, tokens: Tensor, count: int, **options: Any) -> Tensor:
        """Continue tokens as the language model does."""
        model: Any = self.model
        continued: Tensor = model.generate(tokens, count, **options)
        return continued

    def compile_regions(self) -> list[tuple[nn.Module, str]]:
        """Return what torch.compile compiles: the same parts as of the model alone."""
        models = [module for module in (self.model, self.reference) if module is not None]
        return [
            region
            for model in models
            for region in (model.compile_regions() if implements(model, CompileRegions) else [(model, "forward")])
        ]

    def init_weights(self) -> None:
        """Draw the weights of a model that was built on the meta device; the reference gets the same."""
        models: list[Any] = [model for model in (self.model, self.reference) if model is not None]
        for model in models:
            model.init_weights()  # which also ties weights again
        for ours, theirs in zip(models[0].parameters(), models[-1].parameters(), strict=True):
            theirs.detach().copy_(ours.detach())


class DPO(AgainstReference):
    """A language model and the loss of pairs of answers, a chosen one and a rejected one."""

    def __init__(
        self, model: nn.Module, beta: float = 0.1, label_smoothing: float = 0.0, loss_type: str = "sigmoid"
    ) -> None:
        """`loss_type`: "sigmoid" (DPO), "hinge" (SLiC) or "ipo" (Azar et al., 2023).

        `label_smoothing`: the share of pairs that may be labelled the wrong way round, below a half; for "sigmoid".
        """
        super().__init__(model)
        if beta <= 0 or not 0 <= label_smoothing < 0.5:
            raise UsageError(
                f"dpo: beta = {beta} must be above 0, label_smoothing = {label_smoothing} from 0 to below 0.5"
            )
        if loss_type not in _PAIR_LOSSES:
            raise UsageError(f"dpo: {unknown_name('loss_type', loss_type, _PAIR_LOSSES)}")
        if label_smoothing and loss_type != "sigmoid":
            raise UsageError(
                f"dpo: label_smoothing = {label_smoothing} has no meaning for loss_type = '{loss_type}'",
                hint="Leave label_smoothing out, or write loss_type = 'sigmoid'.",
            )
        self.beta, self.label_smoothing, self.loss_type = beta, label_smoothing, loss_type

    def forward(self, tokens: Tensor, answers: Tensor | None = None) -> Any:
        """Return the loss and rewards of pairs: `tokens` and `answers` are [pairs, 2, time], chosen and rejected.

        `answers` has the next token where it belongs to an answer, -100 elsewhere. Without it, the model's logits.
        """
        if answers is None:
            return self.model(tokens)
        with self.as_reference() as reference:
            before = answer_log_probabilities(reference, tokens, answers)
        rewards = self.beta * (answer_log_probabilities(self.model, tokens, answers) - before)
        if self.loss_type == "ipo":  # whose authors take the mean over an answer's tokens
            rewards = rewards / (answers != IGNORED_LABEL).sum(dim=-1).clamp(min=1)
        loss = _PAIR_LOSSES[self.loss_type](rewards[:, 0] - rewards[:, 1], self)
        return PreferenceOutput(loss.mean(), rewards)


def _sigmoid(margin: Tensor, dpo: DPO) -> Tensor:
    wrong = dpo.label_smoothing
    return -(1 - wrong) * F.logsigmoid(margin) - wrong * F.logsigmoid(-margin)


_PAIR_LOSSES: dict[str, Callable[[Tensor, DPO], Tensor]] = {
    "sigmoid": _sigmoid,
    "hinge": lambda margin, _: F.relu(1 - margin),
    # The margin of log-probabilities is wanted at 1 / (2 beta).
    "ipo": lambda margin, dpo: (margin / dpo.beta - 1 / (2 * dpo.beta)) ** 2,
}
"""The loss of each pair, of the difference between the two rewards."""


class KTO(AgainstReference):
    """A language model and the loss of single answers, each labelled desirable or undesirable."""

    def __init__(
        self,
        model: nn.Module,
        beta: float = 0.1,
        desirable_weight: float = 1.0,
        undesirable_weight: float = 1.0,
    ) -> None:
        """`desirable_weight`, `undesirable_weight`: raise that of the rarer kind until both kinds weigh about alike."""
        super().__init__(model)
        if beta <= 0 or desirable_weight <= 0 or undesirable_weight <= 0:
            raise UsageError(
                f"kto: beta = {beta}, desirable_weight = {desirable_weight} and undesirable_weight = "
                f"{undesirable_weight} must be above 0"
            )
        self.beta, self.weights = beta, (undesirable_weight, desirable_weight)

    def forward(
        self,
        tokens: Tensor,
        answers: Tensor | None = None,
        other_tokens: Tensor | None = None,
        other_answers: Tensor | None = None,
        desirable: Tensor | None = None,
    ) -> Any:
        """Return the loss of answers [rows, time] and, as logits, the reward of each in the direction of its label.

        `other_tokens`, `other_answers`: the same prompts with answers of other rows, by which the divergence from the
        reference is estimated, one number per batch of a rank. `desirable`: booleans [rows].
        """
        if answers is None or other_tokens is None or other_answers is None or desirable is None:
            return self.model(tokens)
        pairs = torch.stack([tokens, other_tokens], dim=1), torch.stack([answers, other_answers], dim=1)
        with self.as_reference() as reference:
            before = answer_log_probabilities(reference, *pairs)
        ratios = answer_log_probabilities(self.model, *pairs) - before
        divergence = ratios[:, 1].detach().mean().clamp(min=0)
        direction = desirable.to(ratios.dtype) * 2 - 1
        weights = torch.where(desirable.bool(), self.weights[1], self.weights[0])
        loss = weights * (1 - torch.sigmoid(self.beta * direction * (ratios[:, 0] - divergence)))
        return PreferenceOutput(loss.mean(), self.beta * direction * ratios[:, 0].detach())


def answer_log_probabilities(model: nn.Module, tokens: Tensor, answers: Tensor) -> Tensor:
    """Return the log-probability of each answer, [pairs, 2]: the sum over its tokens."""
    output: Any = model(tokens.flatten(0, 1))
    logits: Tensor = getattr(output, "logits", output)
    # Answer by answer, and again in backward: all of them in float32 at once may not fit on a GPU.
    sums = [
        checkpoint(_log_probability, row, labels, use_reentrant=False, preserve_rng_state=False)
        for row, labels in zip(logits, answers.flatten(0, 1), strict=True)
    ]
    return torch.stack(sums).view(answers.shape[:2])


def _log_probability(logits: Tensor, labels: Tensor) -> Tensor:
    precise = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return -F.cross_entropy(precise, labels, ignore_index=IGNORED_LABEL, reduction="sum")


def reward_accuracy(rewards: Tensor, _: Any) -> Tensor:
    """Return for each pair whether the chosen answer has the higher reward."""
    return (rewards[:, 0] > rewards[:, 1]).float()


def reward_margin(rewards: Tensor, _: Any) -> Tensor:
    """Return for each pair by how much the chosen answer's reward is higher."""
    return rewards[:, 0] - rewards[:, 1]


def label_agreement(rewards: Tensor, _: Any) -> Tensor:
    """Return for each answer whether its probability has changed in the direction of its label (KTO)."""
    return (rewards > 0).float()


def label_reward(rewards: Tensor, _: Any) -> Tensor:
    """Return the reward of each answer in the direction of its label (KTO)."""
    return rewards
