"""Preference tuning: DPO (Rafailov et al., 2023) as a module around the language model that it trains.

The reward of an answer is beta x (its log-probability under the model - that under the reference), and the loss wants
the chosen answer's reward above the rejected one's. The reference is the model without its adapters, or a frozen copy.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from phalanx.config.fields import IGNORED_LABEL
from phalanx.errors import UsageError
from phalanx.model import CompileRegions, implements
from phalanx.zoo.models.lora import adapters, without_adapters


class PreferenceOutput(NamedTuple):
    """The loss of pairs of answers, and what metrics see."""

    loss: Tensor
    logits: Tensor
    """The rewards of the chosen and the rejected answers, [pairs, 2]."""


class DPO(nn.Module):
    """A language model and the loss of preferences; a `WrapsModel` (see `model.py`)."""

    def __init__(self, model: nn.Module, beta: float = 0.1, label_smoothing: float = 0.0) -> None:
        """`label_smoothing`: the share of pairs that may be labelled the wrong way round, below a half."""
        super().__init__()
        if beta <= 0 or not 0 <= label_smoothing < 0.5:
            raise UsageError(
                f"dpo: beta = {beta} must be above 0, label_smoothing = {label_smoothing} from 0 to below 0.5"
            )
        self.model = model
        self.reference: nn.Module | None = None
        self.beta, self.label_smoothing = beta, label_smoothing

    def begin(self) -> None:
        """Keep a frozen copy of the weights, unless there is one; with adapters none is needed."""
        if self.reference is None and not adapters(self.model):
            self.reference = copy.deepcopy(self.model).requires_grad_(False)

    def trained_model(self) -> nn.Module:
        """Return the language model."""
        return self.model

    def forward(self, tokens: Tensor, answers: Tensor | None = None) -> Any:
        """Return the loss and rewards of pairs: `tokens` and `answers` are [pairs, 2, time], chosen and rejected.

        `answers` has the next token where it belongs to an answer, -100 elsewhere. Without it, the model's logits.
        """
        if answers is None:
            return self.model(tokens)
        with self._as_reference() as reference:
            before = answer_log_probabilities(reference, tokens, answers)
        rewards = self.beta * (answer_log_probabilities(self.model, tokens, answers) - before)
        margin, wrong = rewards[:, 0] - rewards[:, 1], self.label_smoothing
        loss = -(1 - wrong) * F.logsigmoid(margin) - wrong * F.logsigmoid(-margin)
        return PreferenceOutput(loss.mean(), rewards)

    def loss_weight(self, batch: Any) -> float:
        """Return the number of pairs: the loss is their mean, however many tokens their answers have."""
        parts = list(batch.values()) if isinstance(batch, Mapping) else batch
        return float(len(parts[0]))

    @contextmanager
    def _as_reference(self) -> Iterator[nn.Module]:
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
