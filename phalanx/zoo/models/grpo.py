"""GRPO (Shao et al., 2024): a language model learns from rewards of the answers that it draws itself.

Each prompt gets a group of answers, drawn on the rank that trains on it. An answer's advantage is its reward beside
those of its group; the gradient makes answers with a higher one likelier. Answers are drawn once per update, so the
ratio to the probabilities they were drawn with is 1, and nothing is clipped.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import phalanx
from phalanx.config.fields import IGNORED_LABEL
from phalanx.errors import UsageError, a_type, unknown_name
from phalanx.recipes.imports import is_import_path, load_import
from phalanx.zoo.data.prompts import PromptCode
from phalanx.zoo.models.decoder import Decoder
from phalanx.zoo.models.generation import Sampling
from phalanx.zoo.models.loss import LMOutput
from phalanx.zoo.models.preference import AgainstReference, PreferenceOutput
from phalanx.zoo.models.registry import longest_input

Reward = Callable[..., Sequence[float]]
"""Called with `prompts`, `completions` and columns of the rows as lists; returns a number for each completion."""

_LOSS_TYPES = ("grpo", "dr_grpo")
_LEAST_SPREAD = 1e-4
"""Added to the standard deviation of a group's rewards: where all are equal, nothing is learned."""
_FIXED_SEED = 0
"""Evaluation draws the same answers each time, as far as the model gives the same probabilities."""


class GRPO(AgainstReference):
    """A language model and the loss of GRPO, with a reward function of the user."""

    def __init__(
        self,
        model: nn.Module,
        reward: Reward | str,
        num_generations: int = 8,
        max_completion_length: int = 64,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int | None = None,
        beta: float = 0.0,
        loss_type: str = "grpo",
        scale_rewards: bool = True,
        tokenizer: str | None = None,
        template: str | None = None,
    ) -> None:
        """`reward`: a function, or its import path "my_module:reward".

        `beta` weighs the divergence from the start weights; 0 needs no reference. `loss_type`: "grpo" is the mean over
        answers of the mean over their tokens; "dr_grpo" divides by `max_completion_length` instead, so that long
        answers are not favoured. `scale_rewards` divides advantages by the standard deviation of their group.
        """
        super().__init__(model)
        if num_generations < 2:
            raise UsageError(f"grpo: num_generations = {num_generations}: a group needs 2 answers, which are compared")
        if max_completion_length < 1 or beta < 0 or not temperature > 0:
            raise UsageError(
                f"grpo: max_completion_length = {max_completion_length} must be at least 1, beta = {beta} at least 0, "
                f"and temperature = {temperature} above 0"
            )
        if loss_type not in _LOSS_TYPES:
            raise UsageError(f"grpo: {unknown_name('loss_type', loss_type, _LOSS_TYPES)}")
        self.reward = _RewardFunction(reward)
        self.code = PromptCode(tokenizer, template)
        self.num_generations, self.max_completion_length = num_generations, max_completion_length
        self.sampling: dict[str, Any] = asdict(Sampling(temperature=temperature, top_p=top_p, top_k=top_k))
        self.beta, self.loss_type, self.scale_rewards = beta, loss_type, scale_rewards

    def begin(self) -> None:
        """Keep a frozen copy of the weights if the divergence from them has a weight."""
        if self.beta:
            super().begin()

    def forward(self, prompts: Tensor, rows: Tensor | None = None) -> Any:
        """Draw answers to prompts [rows, time] (filled up with -1), and return the loss and their rewards.

        `rows`: the bytes of each row as JSON, for the reward function. Without it, the logits of tokens `prompts`.
        """
        if rows is None:
            return self.model(prompts)
        asked = [[token for token in prompt if token >= 0] for prompt in prompts.tolist()]
        self._check_length(max(map(len, asked)))
        repeated = [prompt for prompt in asked for _ in range(self.num_generations)]
        drawn = self._draw(repeated)
        documents = [json.loads(bytes(row).rstrip(b"\0")) for row in rows.tolist()]
        columns = {
            name: [one.get(name) for one in documents for _ in range(self.num_generations)] for name in documents[0]
        }
        texts = [self.code.decode(answer) for answer in drawn]
        rewards = self.reward(texts, columns).to(prompts.device).view(-1, self.num_generations)
        tokens, answers = _rows(repeated, drawn, prompts.device)
        advantages = rewards - rewards.mean(dim=1, keepdim=True)
        if self.scale_rewards:
            advantages = advantages / (rewards.std(dim=1, keepdim=True) + _LEAST_SPREAD)
        loss, divergence = self._loss(tokens, answers, advantages.flatten())
        if self.training:
            self._report(rewards, drawn, divergence)
        return PreferenceOutput(loss, rewards)

    def _loss(self, tokens: Tensor, answers: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the loss of answers, and their mean divergence from the reference, if it has a weight."""
        counts = (answers != IGNORED_LABEL).float()
        log_probabilities = token_log_probabilities(self.model, tokens, answers)
        ratio = (log_probabilities - log_probabilities.detach()).exp()  # 1, with the gradient of the probabilities
        losses, divergence = -ratio * advantages[:, None], None
        if self.beta:
            with self.as_reference() as reference:
                apart = token_log_probabilities(reference, tokens, answers) - log_probabilities
            divergences = apart.exp() - apart - 1  # Schulman's estimator: never below 0
            losses = losses + self.beta * divergences
            divergence = (divergences.detach() * counts).sum() / counts.sum().clamp(min=1)
        sums = (losses * counts).sum(dim=1)
        lengths = counts.sum(dim=1).clamp(min=1) if self.loss_type == "grpo" else self.max_completion_length
        return (sums / lengths).mean(), divergence

    @torch.no_grad()
    def _draw(self, prompts: list[list[int]]) -> list[list[int]]:
        """Return an answer to each prompt, up to its first end token.

        All ranks draw the same number of tokens: under fsdp each token needs all of them.
        """
        model: Any = self.model
        device = next(model.parameters()).device
        count, was_training = self.max_completion_length, model.training
        generator = None if self.training else torch.Generator(device).manual_seed(_FIXED_SEED)
        with torch.compiler.set_stance("force_eager"):  # each length would be compiled
            if isinstance(model, Decoder):
                rows = model.generate(prompts, count, generator=generator, **self.sampling)
            elif hasattr(model, "generation_config"):
                rows = self._drawn_by_transformers(model, prompts, count, device)
            else:
                raise UsageError(
                    f"grpo draws answers of language models, and {a_type(model)} is none that is known",
                    hint="Give gpt, llama, moe, or the folder of a causal language model of transformers.",
                )
        model.train(was_training)
        answers = [row[len(prompt) :] for row, prompt in zip(rows, prompts, strict=True)]
        return [answer[: _length(answer, self.code.end_tokens)] for answer in answers]

    def _drawn_by_transformers(
        self, model: Any, prompts: list[list[int]], count: int, device: torch.device
    ) -> list[list[int]]:
        longest = max(map(len, prompts))
        padded = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts], device=device)
        shown = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
        model.eval()
        options = {name: value for name, value in self.sampling.items() if value is not None}
        drawn = model.generate(
            padded,
            attention_mask=shown,
            do_sample=True,
            **{"top_k": 0, **options},
            min_new_tokens=count,
            max_new_tokens=count,
            eos_token_id=None,
            pad_token_id=0,
        )
        return [row[longest - len(prompt) :] for row, prompt in zip(drawn.tolist(), prompts, strict=True)]

    def _check_length(self, prompt: int) -> None:
        longest = longest_input(self.model)
        if prompt + self.max_completion_length > longest:
            raise UsageError(
                f"grpo: a prompt of {prompt} tokens and max_completion_length = {self.max_completion_length} do not "
                f"fit into the {longest} tokens that the model takes",
                hint=f"Write: --set loss.max_completion_length={max(1, longest - prompt)}, or a lower data.seq_len",
            )

    def _report(self, rewards: Tensor, drawn: list[list[int]], divergence: Tensor | None) -> None:
        values: dict[str, Any] = {
            "reward": rewards.mean(),
            "reward_std": rewards.std(dim=1).mean(),
            "completion_length": sum(map(len, drawn)) / len(drawn),
        }
        phalanx.log(values if divergence is None else {**values, "divergence": divergence})


class _RewardFunction:
    """A reward function of the user: called with the columns that it takes, its numbers checked."""

    def __init__(self, reward: Reward | str) -> None:
        self.name = reward if isinstance(reward, str) else getattr(reward, "__name__", type(reward).__name__)
        if isinstance(reward, str):
            if not is_import_path(reward):
                raise UsageError(f"grpo: reward = '{reward}'", hint="Write the path of a function: my_module:reward")
            reward = load_import(reward, "loss.reward")
        if not callable(reward):
            raise UsageError(f"grpo: reward is {a_type(reward)}, expected a function of prompts and completions")
        self._function = reward
        parameters = list(inspect.signature(reward).parameters.values())
        self._takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        parameters = [parameter for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD]
        self._takes = [parameter.name for parameter in parameters]
        self._needs = [parameter.name for parameter in parameters if parameter.default is parameter.empty]

    def __call__(self, completions: list[str], columns: Mapping[str, list[Any]]) -> Tensor:
        """Return the reward of each completion; `columns`: those of its row."""
        given = {**columns, "prompts": columns["prompt"], "completions": completions}
        for name in self._needs:
            if name not in given:
                raise UsageError(f"the reward function '{self.name}': {unknown_name('column', name, given)}")
        values = self._function(**{k: v for k, v in given.items() if self._takes_all or k in self._takes})
        if hasattr(values, "tolist"):  # a tensor, or an array of numpy
            values = values.tolist()
        if not isinstance(values, Sequence) or len(values) != len(completions):
            what = f"{len(values)} values" if isinstance(values, Sequence) else repr(values)
            raise UsageError(
                f"the reward function '{self.name}' gave {what} for {len(completions)} completions",
                hint="Return a list with a number for each completion.",
            )
        wrong = next((value for value in values if not _is_finite(value)), None)
        if wrong is not None or None in values:
            raise UsageError(f"the reward function '{self.name}' gave {wrong!r}: expected finite numbers")
        return torch.tensor([float(value) for value in values])


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except TypeError:
        return False


def _length(answer: Sequence[int], ends: frozenset[int]) -> int:
    """Return the tokens of an answer up to its first end token, which counts."""
    return next((place + 1 for place, token in enumerate(answer) if token in ends), len(answer))


def _rows(prompts: list[list[int]], drawn: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return tokens [rows, time], and the next token where it belongs to an answer, -100 elsewhere."""
    time = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, drawn, strict=True)) - 1
    tokens = torch.zeros(len(prompts), time, dtype=torch.long)
    answers = torch.full((len(prompts), time), IGNORED_LABEL)
    for row, (prompt, answer) in enumerate(zip(prompts, drawn, strict=True)):
        whole = torch.tensor([*prompt, *answer])
        tokens[row, : len(whole) - 1] = whole[:-1]
        answers[row, len(prompt) - 1 : len(whole) - 1] = whole[len(prompt) :]
    return tokens.to(device), answers.to(device)


def token_log_probabilities(model: nn.Module, tokens: Tensor, answers: Tensor) -> Tensor:
    """Return the log-probability of each next token [rows, time]; 0 where none belongs to an answer."""
    output: Any = model(tokens)
    logits: Tensor = output.logits if isinstance(output, LMOutput) or hasattr(output, "logits") else output
    precise = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return -F.cross_entropy(precise.transpose(1, 2), answers, ignore_index=IGNORED_LABEL, reduction="none")


def reward_mean(rewards: Tensor, _: Any) -> Tensor:
    """Return the mean reward of each prompt's answers."""
    return rewards.mean(dim=1)
