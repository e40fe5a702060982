"""The Hugging Face layout of a family of models: its config, and a rule for each parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from phalanx.errors import ModelError


def same(tensor: Tensor) -> Tensor:
    """Leave a tensor as it is."""
    return tensor


def transposed(tensor: Tensor) -> Tensor:
    """Swap in and out: GPT-2's layout keeps matrices as [in, out]."""
    return tensor.T


class TensorRule(NamedTuple):
    """One parameter: its name in Phalanx and in the file ("#" stands for the layer), and both conversions."""

    ours: str
    theirs: str
    export: Callable[[Tensor], Tensor] = same
    load: Callable[[Tensor], Tensor] = same


@dataclass(frozen=True, kw_only=True)
class HFMapping:
    """A family of models. Functions take its config as `Any`, because each family has its own class."""

    model_type: str
    """The `model_type` of config.json."""

    architecture: str
    """The class that `transformers` builds."""

    model: type[nn.Module]
    build: Callable[[Any], nn.Module]
    config_to_hf: Callable[[Any], dict[str, Any]]
    config_from_hf: Callable[[Mapping[str, Any]], Any]
    rules: Callable[[Any], list[TensorRule]]
    prefix: str
    """The prefix that base models, saved without their head, leave out of names."""

    ignored: tuple[str, ...] = ()
    """Endings of tensors in old files that are not parameters."""

    def expanded(self, config: Any) -> Iterator[TensorRule]:
        """Yield the rules with "#" replaced by every layer, without the head where it is the embedding."""
        for rule in self.rules(config):
            if rule.ours == "head.weight" and getattr(config, "tie_weights", False):
                continue
            for layer in range(config.layers) if "#" in rule.ours else (0,):
                ours, theirs = (name.replace("#", str(layer)) for name in rule[:2])
                yield TensorRule(ours, theirs, rule.export, rule.load)


def require(config: Mapping[str, Any], wanted: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise for a value in a config under which the model would compute something else."""
    for key, allowed in wanted.items():
        if (value := config.get(key, allowed[0])) not in allowed:
            raise ModelError(
                f"config.json has {key}={value!r}, which this model does not compute.",
                hint=f"Supported: {key} = {' or '.join(repr(each) for each in allowed)}.",
            )


def needed(config: Mapping[str, Any], key: str) -> Any:
    """Return an entry that a config must have."""
    if key not in config:
        raise ModelError(f"config.json has no '{key}', which a model of type '{config.get('model_type')}' needs.")
    return config[key]
