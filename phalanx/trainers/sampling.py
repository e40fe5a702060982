"""What a language model has learned, in its own words: a recipe's last line."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from phalanx.loop.hooks import Callback

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from phalanx.loop.trainer import TrainLoop

_BYTES = 256


class SampleText(Callback):
    """After training, continues a prompt byte by byte. All ranks take part, for each may hold a part of the model."""

    def __init__(self, prompt: str, count: int, *, temperature: float = 0.8) -> None:
        self.prompt = prompt
        self.count = count
        self.temperature = temperature

    def on_fit_end(self, trainer: TrainLoop) -> None:
        """Draw the text, the same on all ranks, and let the main rank tell it."""
        formation = trainer.formation
        model: Any = formation.unwrap(trainer.model)
        mesh = formation.world.mesh
        tokens = torch.tensor([list(self.prompt.encode())], device=formation.device)
        generator = torch.Generator(formation.device).manual_seed(trainer.config.seed)
        with _uncompiled(trainer.config.compile), formation.autocast():
            drawn = model.generate(
                tokens,
                self.count,
                temperature=self.temperature,
                generator=generator,
                multiple=mesh.tp * (2 * mesh.cp if mesh.cp > 1 else 1),
                through=trainer.model if formation.strategy.shards else None,
            )
        trainer.report.say(f"sample:\n{as_text(drawn[0].tolist())}")


def as_text(tokens: list[int]) -> str:
    """Return bytes as text that a terminal can show: a young model writes control characters as well."""
    text = bytes(token for token in tokens if token < _BYTES).decode("utf-8", errors="replace")
    return "".join(sign if sign.isprintable() or sign in "\n\t" else "\N{REPLACEMENT CHARACTER}" for sign in text)


def _uncompiled(compiled: bool) -> AbstractContextManager[Any]:
    """A text grows by one token a call: compiling each length would take longer than training."""
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()
