"""What is verified: a recipe, a reference model, a script with `build()`, or a model and data from Python."""

from __future__ import annotations

import copy
import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from phalanx.errors import UsageError, a_type, unknown_name
from phalanx.recipes import find_recipe, load_recipe, recipe_names
from phalanx.zoo.data import load, named_data
from phalanx.zoo.models import registry as models


def default_settings(*, faults: bool = False) -> dict[str, int]:
    """Return the settings of a proof where neither a flag nor a file gives them; each fault needs steps before it."""
    return {"num_workers": 2, "max_steps": 12 if faults else 5}


_IMAGE_SIZE = {3: 8, 7: 64}
"""A residual network takes any image; the size follows the kernel of its first convolution."""
_LONGEST_TEXT = 128


@dataclass
class Parts:
    """Model, data and loss; without a loss function the model's own or the usual one is used."""

    model: Any
    data: Any
    loss_fn: Any = None
    augment: Any = None
    """What makes a model's input of a batch, as in evaluation: two layouts see equal images."""
    callbacks: Sequence[Any] = ()


class Subject(Protocol):
    """Something that every rank can build; the caller has seeded before."""

    @property
    def name(self) -> str:
        """The name in the report."""

    def build(self) -> Parts:
        """Return a new model and its data."""


@dataclass(frozen=True)
class RecipeSubject:
    """A recipe, possibly with another preset of its model or other data."""

    name: str
    preset: str | None = None
    data: str | None = None

    def build(self) -> Parts:
        """Build what `phalanx train` would train."""
        from phalanx.zoo.recipe import recipe_augment, recipe_loss
        from phalanx.zoo.recipe_parts import recipe_parts

        recipe = load_recipe(self.name).with_preset(self.preset)
        recipe = recipe if self.data is None else recipe.with_parts(None, named_data(self.data, recipe.data))
        model, train, *_ = recipe_parts(recipe)
        return Parts(model, train, recipe_loss(recipe, model), recipe_augment(recipe, model))


@dataclass(frozen=True)
class ModelSubject:
    """A reference model, with suitable data."""

    name: str
    preset: str | None = None

    def build(self) -> Parts:
        """Build the model; text for a language model, made-up images or vectors for the others."""
        from phalanx.loop.forward import implied_loss

        model: Any = models.build(self.name, **({"preset": self.preset} if self.preset else {}))
        config: Any = getattr(model, "config", None)
        if hasattr(config, "vocab_size"):
            size = min(config.seq_len, _LONGEST_TEXT)
            return Parts(model, load("text", seq_len=size, max_bytes=500_000))
        return Parts(model, load("synthetic", **_made_up(config, self.name)), implied_loss)


def _made_up(config: Any, name: str) -> dict[str, Any]:
    if name == "convnet":
        return {"shape": (1, 8, 8)}
    if config is None:
        return {"shape": (64,)}
    size = getattr(config, "image_size", None) or _IMAGE_SIZE.get(config.stem, 64)
    return {"shape": (config.channels, size, size), "classes": config.classes}


@dataclass(frozen=True)
class ScriptSubject:
    """A script that defines `build()`."""

    path: str

    @property
    def name(self) -> str:
        """The script's file name."""
        return Path(self.path).name

    def build(self) -> Parts:
        """Run the script as a module and call its `build`."""
        sys.path.insert(0, str(Path(self.path).resolve().parent))
        function = runpy.run_path(self.path, run_name=Path(self.path).stem).get("build")
        if not callable(function):
            raise _no_parts(f"{self.path} defines no build()")
        parts = function()
        if not isinstance(parts, tuple) or len(parts) not in (2, 3):
            raise _no_parts(f"build() of {self.path} returned {a_type(parts)}")
        return Parts(*parts)


def _no_parts(problem: str) -> UsageError:
    return UsageError(
        problem, hint="Write: def build(): return model, data_set, loss_fn  (loss_fn may be None or left out)"
    )


@dataclass(frozen=True)
class GivenSubject:
    """A model (or a function that makes one) and data, given from Python."""

    name: str
    model: Any
    data: Any
    loss_fn: Any = None

    def build(self) -> Parts:
        """Return them: each rank has its own copy, from a pickle."""
        from torch import nn

        model = copy.deepcopy(self.model) if isinstance(self.model, nn.Module) else self.model()
        return Parts(model, self.data, self.loss_fn)


def find_subject(name: str | None, script: str | None, preset: str | None, data: str | None = None) -> Subject:
    """Return what the command line names: a recipe, a model or a script."""
    if (name is None) == (script is None):
        problem = "nothing to verify was named" if name is None else f"'{name}' and --script {script} were both given"
        raise UsageError(
            problem, hint="Write: phalanx verify digits, phalanx verify gpt, or phalanx verify --script FILE"
        )
    if script is not None:
        if preset is not None:
            raise UsageError("--preset is for the reference models; a script builds its own")
        if data is not None:
            raise UsageError("--data is for recipes; a script reads its own data")
        if not Path(script).is_file():
            raise UsageError(f"no script at {script}")
        return ScriptSubject(script)
    assert name is not None, "one of the two was given"
    if name in models.names() and data is None:  # also the recipes of that name, on shorter texts
        return ModelSubject(name, preset)
    if find_recipe(name) is not None:
        return RecipeSubject(name, preset, data)
    raise UsageError(unknown_name("recipe or model", name, {*recipe_names(), *models.names()}))
