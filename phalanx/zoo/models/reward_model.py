"""A reward model: a language model whose last layer gives one number for an answer, trained on pairs of answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.config.fields import IGNORED_LABEL
from phalanx.errors import UsageError, a_type
from phalanx.model import CompileRegions, implements
from phalanx.zoo.models.decoder import Decoder
from phalanx.zoo.models.preference import PreferenceOutput
from phalanx.zoo.models.registry import longest_input


class RewardModel(nn.Module):
    """A language model without its head, a matrix of one row in its place, and the loss of Bradley and Terry.

    The reward is read after the last token of an answer. A recipe names the class as the `loss` around its model; the
    trained model is the reward model itself.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, width = _without_head(model)
        self.score = nn.Linear(width, 1, bias=False)
        self._draw_score()

    def begin(self) -> None:
        """Keep nothing: the loss does not need the start weights."""

    def trained_model(self) -> nn.Module:
        """Return the reward model."""
        return self

    def forward(self, tokens: Tensor, answers: Tensor | None = None) -> Any:
        """Return the loss and rewards of pairs, as `DPO` takes them; without `answers`, the reward after each token."""
        if answers is None:
            return self._rewards(tokens)
        places = torch.arange(answers.shape[-1], device=answers.device)
        last = torch.where(answers != IGNORED_LABEL, places, 0).amax(dim=-1, keepdim=True)
        # `answers` has each next token: the last one is put behind the tokens before it, if the model takes as many.
        whole = F.pad(tokens, (0, 1)).scatter(-1, last + 1, answers.gather(-1, last).clamp(min=0))
        time = min(whole.shape[-1], longest_input(self.model))
        rewards = self._rewards(whole[..., :time].flatten(0, 1)).view(*whole.shape[:-1], time)
        rewards = rewards.gather(-1, (last + 1).clamp(max=time - 1))[..., 0]
        return PreferenceOutput(-F.logsigmoid(rewards[:, 0] - rewards[:, 1]).mean(), rewards)

    def _rewards(self, tokens: Tensor) -> Tensor:
        hidden: Any = self.model(tokens)
        hidden = getattr(hidden, "last_hidden_state", hidden)
        return self.score(hidden)[..., 0].float()  # type: ignore[no-any-return]

    def loss_weight(self, batch: Any) -> float:
        """Return the number of pairs, whose mean the loss is."""
        parts = list(batch.values()) if isinstance(batch, Mapping) else batch
        return float(len(parts[0]))

    @property
    def config(self) -> Any:
        """The shape of the language model."""
        return self.model.config

    def compile_regions(self) -> list[tuple[nn.Module, str]]:
        """Return what torch.compile compiles: the same parts as of the model alone."""
        return list(
            self.model.compile_regions() if implements(self.model, CompileRegions) else [(self.model, "forward")]
        )

    def init_weights(self) -> None:
        """Draw the weights of a model that was built on the meta device."""
        model: Any = self.model
        model.init_weights()
        self._draw_score()

    def _draw_score(self) -> None:
        nn.init.normal_(self.score.weight, std=(self.score.in_features + 1) ** -0.5)


def _without_head(model: Any) -> tuple[nn.Module, int]:
    """Return what gives the last hidden states of a language model, and their width."""
    if isinstance(model, Decoder):
        model.head = None
        return model, model.config.hidden
    if isinstance(getattr(model, "base_model", None), nn.Module) and hasattr(model.config, "hidden_size"):
        return model.base_model, model.config.hidden_size
    raise UsageError(
        f"a reward model is made of a language model, and {a_type(model)} is none that is known",
        hint="Give gpt, llama, moe, or the folder of a causal language model of transformers.",
    )
