"""The schedulers of DeepSpeed's JSON in our words: the rate stays a function of the step, which a resumed run needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

_SHAPES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}


def schedule_settings(settings: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Yield (path in the JSON, our setting, its value) for a scheduler that ours can be; ValueError for another."""
    section = settings.get("scheduler")
    if not isinstance(section, Mapping):  # what else it is, is told with the other sections
        return
    kind, params = section.get("type"), section.get("params", {})
    if not isinstance(params, Mapping):
        raise ValueError(f"scheduler.params = {params!r}: expected an object.")
    if kind not in _SHAPES:
        raise ValueError(f"the scheduler {kind!r} is not one of {', '.join(_SHAPES)}. Use lr_schedule and warmup.")
    _check_shape(kind, params)
    yield "scheduler.type", "lr_schedule", _SHAPES[kind]
    for name, ours in (("warmup_num_steps", "warmup"), ("warmup_max_lr", "learning_rate")):
        value = params.get(name, "auto")
        if value != "auto":
            yield f"scheduler.params.{name}", ours, value
    if params.get("total_num_steps", "auto") != "auto":
        yield "scheduler.params.total_num_steps", "max_steps", params["total_num_steps"]


def _check_shape(kind: str, params: Mapping[str, Any]) -> None:
    """Refuse a warm-up that ours, which rises linearly from nothing, is not."""
    for name in ("warmup_min_lr", "warmup_min_ratio", "cos_min_ratio"):
        if params.get(name, "auto") not in ("auto", 0, 0.0):
            raise ValueError(f"the scheduler {kind} with {name} = {params[name]}: ours starts and ends at 0.")
    if params.get("warmup_num_steps", "auto") != 0 and params.get("warmup_type", "log") not in ("auto", "linear"):
        raise ValueError(
            f"the scheduler {kind} rises by a logarithm, DeepSpeed's default, and ours linearly: "
            'add "warmup_type": "linear".'
        )
