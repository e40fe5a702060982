"""DeepSpeed's JSON and Phalanx's settings: each fills in what the other leaves open; contradictions are reported.

`deepspeed_config` is a file, JSON text, or in Python a dict; the config keeps it as JSON text, so that it stays plain
data and the config of a run is complete. "auto", or nothing, in the JSON means: as the setting says. A setting at its
default means: as the JSON says.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import NoneType
from typing import Any

from phalanx.config.option import options_of, problem
from phalanx.config.pairs import Pair, other_than
from phalanx.config.rules import STRATEGY, Mistakes, rule
from phalanx.config.settings import FIELDS, Settings
from phalanx.engines.deepspeed.declaration import DeepSpeedSettings
from phalanx.errors import UsageError, a_type, nearest

AUTO = "auto"
_SAME = (
    ("train_micro_batch_size_per_gpu", "batch_size"),
    ("gradient_accumulation_steps", "gradient_accumulation_steps"),
    ("gradient_clipping", "gradient_clipping"),
    ("zero_optimization.stage", "zero_stage"),
    ("zero_optimization.offload_optimizer.device", "offload"),
    ("optimizer.params.lr", "learning_rate"),
    ("optimizer.params.weight_decay", "weight_decay"),
)
"""Paths in the JSON, and settings with the same meaning."""

_SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
_SECTIONS = ("zero_optimization", "optimizer", "scheduler", "bf16", "fp16")
_ZERO_MEANS_UNSET = {"gradient_clipping", "zero_stage"}
_REFUSED = {
    "pipeline": "DeepSpeed's pipeline needs its own loop",
    "tensor_parallel": "ranks that share samples must be known to Phalanx's data loaders",
    "sequence_parallel_size": "ranks that share samples must be known to Phalanx's data loaders",
    "data_parallel_size": "ranks that share samples must be known to Phalanx's data loaders",
    "amp": "apex is not used: write bf16 or fp16",
    "bfloat16": 'write it as "bf16"',
    "managed_gradient_accumulation": "the loop decides where a step ends",
    "curriculum_learning": "Phalanx's data loaders decide the batches",
    "data_efficiency": "Phalanx's data loaders decide the batches",
}
_EXCLUDED = {
    "sharding": "zero_stage says how DeepSpeed shards",
    "shard_size": "zero_stage says how DeepSpeed shards",
    "wrap_class": "DeepSpeed gathers by module",
    "tensor_parallel": "use strategy='fsdp' for it",
    "pipeline_parallel": "use strategy='fsdp' for it",
    "context_parallel": "use strategy='fsdp' for it",
    "expert_parallel": "use strategy='fsdp' for it",
    "compile": "it has not been tried with DeepSpeed's engine",
    "on_nonfinite": "DeepSpeed skips steps itself, with fp16",
}


_NVME_PATH = "zero_optimization.offload_optimizer.nvme_path"


def nvme_path(settings: Settings) -> str | None:
    """Return the folder of offload='nvme': the option, or what the JSON says."""
    return options_of(DeepSpeedSettings, settings).nvme_path or look_up(engine_settings(settings), _NVME_PATH)


MISSING = "strategy = 'deepspeed' needs DeepSpeed, which is not installed"
INSTALL = "Run: pip install 'phalanx[deepspeed]' (with DS_BUILD_OPS=0, and DS_ACCELERATOR=cpu without a GPU)."


def missing(values: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return what is missing, and how to install it, where these settings ask for a DeepSpeed that is not there."""
    strategy = values.get("strategy", AUTO)
    by_others = values.get("backend") == "deepspeed" or values.get("deepspeed_config") is not None
    is_needed = strategy == "deepspeed" or (strategy == AUTO and by_others)
    return (MISSING, INSTALL) if is_needed and importlib.util.find_spec("deepspeed") is None else None


def source_of(value: Any) -> str:
    """Return what a message about the JSON begins with: the setting, and the file that holds it."""
    is_file = isinstance(value, str) and not value.strip().startswith("{")
    return f"deepspeed_config ({value})" if is_file else "deepspeed_config"


def as_text(value: Any) -> str | None:
    """Return a dict, a file or text as JSON text; raises ValueError with what is wrong."""
    if value is None:
        return None
    value = getattr(value, "_param_dict", value)  # what a deepspeed.DeepSpeedConfig was built from
    if isinstance(value, Mapping):
        try:
            return json.dumps(value)
        except TypeError as error:
            raise ValueError(f"a dict must hold plain values only: {error}") from None
    if not isinstance(value, str):
        raise ValueError(f"expected a path, JSON text, a dict or a DeepSpeedConfig, and got {type(value).__name__}")
    text = value.strip()
    if text.startswith("{"):
        return json.dumps(_parsed(text, "the text"))
    try:
        return json.dumps(_parsed(Path(value).read_text(encoding="utf-8"), value))
    except OSError as error:
        raise ValueError(f"{value} cannot be read: {error.strerror}") from None


def _parsed(text: str, where: str) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{where} holds {a_type(content)}, not an object with DeepSpeed's settings")
    return content


def engine_settings(settings: Settings) -> dict[str, Any]:
    """Return DeepSpeed's settings as they were given: a copy, with "auto" still in it."""
    parsed: dict[str, Any] = json.loads(str(options_of(DeepSpeedSettings, settings).deepspeed_config or "{}"))
    return parsed


def look_up(settings: Mapping[str, Any], path: str) -> Any:
    """Return what stands at a dotted path, or None where nothing or "auto" does."""
    node: Any = settings
    for part in path.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return None
        node = node[part]
    return None if node == AUTO else node


def reconcile(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Return what DeepSpeed's JSON changes in the settings, and (field, message) for each contradiction."""
    if values["deepspeed_config"] is None:
        return {}, []
    source = source_of(values["deepspeed_config"])
    try:
        text = as_text(values["deepspeed_config"])
        settings = json.loads(text or "{}")
    except ValueError as error:
        return {"deepspeed_config": None}, [("deepspeed_config", f"deepspeed_config: {error}")]
    changes: dict[str, Any] = {"deepspeed_config": text}
    mistakes = [("deepspeed_config", f"{source}: {text}") for text in _own_mistakes(settings)]
    try:
        rows = list(_values_of(settings, values["mixed_precision"]))
    except ValueError as error:
        return changes, [*mistakes, ("deepspeed_config", f"{source}: {error}")]
    for path, name, value in rows:
        ours = changes.get(name, values[name])  # two places of the JSON may set one setting
        in_json = json.dumps(look_up(settings, path))
        wrong = problem(FIELDS[name], value)
        if wrong is not None:
            mistakes.append(("deepspeed_config", f"{source}: {path} = {in_json} becomes {wrong}"))
        elif ours == value or (ours is True and value in ("bf16", "fp16")):  # true means either, by the device
            continue
        elif name not in changes and ours == FIELDS[name].default:
            changes[name] = value
        else:
            text = f"{name} = {ours!r}, but deepspeed_config says {path} = {in_json}: change one of them, or write "
            mistakes.append((name, text + '"auto" there.'))
    return changes, mistakes


def settled(values: Mapping[str, Any]) -> set[str]:
    """Return the settings that the JSON decides; none where it cannot be read, which `reconcile` reports."""
    try:
        settings = json.loads(as_text(values.get("deepspeed_config")) or "{}")
        names = {name for _, name, _ in _values_of(settings, values.get("mixed_precision", False))}
    except ValueError:
        return set()
    return names | ({"batch_size"} if look_up(settings, "train_batch_size") is not None else set())


def _own_mistakes(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with the JSON alone."""
    for name, why in _REFUSED.items():
        value = settings.get(name)
        on = value not in (None, 1, True, {}) if name != "managed_gradient_accumulation" else value is False
        if on and not (isinstance(value, Mapping) and value.get("enabled") is False):
            yield f"{name} cannot be used here: {why}."
    # Keys that are nearly one of those read here: DeepSpeed itself ignores unknown keys.
    read = {path.split(".")[0] for path, _ in _SAME} | {"train_batch_size", "bf16", "fp16", "scheduler"}
    for name in settings.keys() - read:
        if close := nearest(name, read, cutoff=0.85):
            yield f"unknown '{name}'. Did you mean '{close}'?"
    for name in _SECTIONS:
        if not isinstance(settings.get(name, {}), (Mapping, NoneType)):
            yield f"{name} = {json.dumps(settings[name])}: expected an object."
    total = look_up(settings, "train_batch_size")
    if total is not None and (not isinstance(total, int) or isinstance(total, bool) or total < 1):
        yield f"train_batch_size = {json.dumps(total)}: expected a whole number, 1 or more."


def _values_of(settings: Mapping[str, Any], mixed_precision: bool | str) -> Iterator[tuple[str, str, Any]]:
    """Yield (path, setting, value) for everything that the JSON sets."""
    for path, name in _SAME:
        value = look_up(settings, path)
        if value is not None:
            yield path, name, None if value == 0 and name in _ZERO_MEANS_UNSET else value
    kind = optimizer_name(settings)
    if kind is not None:
        yield "optimizer.type", "optimizer", kind
    for precision in ("bf16", "fp16"):
        enabled = look_up(settings, f"{precision}.enabled")
        if enabled is True or (enabled is False and mixed_precision == precision):
            yield f"{precision}.enabled", "mixed_precision", precision if enabled else False
    yield from _schedule_settings(settings)


def _schedule_settings(settings: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Yield (path, setting, value) for a scheduler; ValueError for one that `lr_schedule` does not have.

    With Phalanx's scheduler the rate stays a function of the step, which a resumed run needs.
    """
    section = settings.get("scheduler")
    if not isinstance(section, Mapping):  # `_own_mistakes` reports another type
        return
    kind, params = section.get("type"), section.get("params", {})
    if not isinstance(params, Mapping):
        raise ValueError(f"scheduler.params = {params!r}: expected an object.")
    if kind not in _SCHEDULES:
        raise ValueError(f"the scheduler {kind!r} is not one of {', '.join(_SCHEDULES)}. Use lr_schedule and warmup.")
    _check_shape(kind, params)
    yield "scheduler.type", "lr_schedule", _SCHEDULES[kind]
    for name, ours in (("warmup_num_steps", "warmup"), ("warmup_max_lr", "learning_rate")):
        value = params.get(name, "auto")
        if value != "auto":
            yield f"scheduler.params.{name}", ours, value
    if params.get("total_num_steps", "auto") != "auto":
        yield "scheduler.params.total_num_steps", "max_steps", params["total_num_steps"]


def _check_shape(kind: str, params: Mapping[str, Any]) -> None:
    """Refuse a warm-up that differs from that of `warmup`, which rises linearly from 0."""
    for name in ("warmup_min_lr", "warmup_min_ratio", "cos_min_ratio"):
        if params.get(name, "auto") not in ("auto", 0, 0.0):
            raise ValueError(f"the scheduler {kind} with {name} = {params[name]}: lr_schedule starts and ends at 0.")
    if params.get("warmup_num_steps", "auto") != 0 and params.get("warmup_type", "log") not in ("auto", "linear"):
        raise ValueError(
            f"the scheduler {kind} rises by a logarithm, DeepSpeed's default, and warmup linearly: "
            'add "warmup_type": "linear".'
        )


def optimizer_name(settings: Mapping[str, Any]) -> str | None:
    """Return the `optimizer` that equals the JSON's; None without one, or for one that only DeepSpeed has."""
    kind = look_up(settings, "optimizer.type")
    names = {"adamw": "adamw", "sgd": "sgd", "adagrad": "adagrad", "rmsprop": "rmsprop"}
    if isinstance(kind, str) and kind.lower() == "adam":  # DeepSpeed's Adam decouples the decay by default
        return "adam" if look_up(settings, "optimizer.params.adam_w_mode") is False else "adamw"
    return names.get(kind.lower()) if isinstance(kind, str) else None


@rule(*STRATEGY, "sharding", "offload", "nvme_path")
def engine_conflicts(settings: Settings) -> Mistakes:
    """Report settings that DeepSpeed's engine excludes, and those that only it has."""
    if settings.resolved_strategy != "deepspeed":
        return
    for name in settings.changed(*_EXCLUDED):
        value = getattr(settings, name)
        yield name, f"{name} = {value!r} does not go with strategy = 'deepspeed': {_EXCLUDED[name]}."
    path = nvme_path(settings)
    if settings.offload == "nvme" and (settings.zero_stage != 3 or path is None):
        settings_text = ["unset" if value is None else repr(value) for value in (settings.zero_stage, path)]
        yield (
            "offload",
            f"offload = 'nvme' needs zero_stage = 3 and nvme_path = '<folder on a fast disk>'; they are "
            f"{settings_text[0]} and {settings_text[1]}.",
        )
    elif path != (look_up(engine_settings(settings), _NVME_PATH) or path):
        in_json = look_up(engine_settings(settings), _NVME_PATH)
        yield (
            "nvme_path",
            f"nvme_path = {path!r}, but deepspeed_config says {_NVME_PATH} = {in_json!r}: leave one out.",
        )


@rule("strategy", "backend")
def other_strategy(settings: Settings) -> Mistakes:
    """Report DeepSpeed's JSON together with another strategy."""
    config = options_of(DeepSpeedSettings, settings).deepspeed_config
    if config is not None and settings.resolved_strategy != "deepspeed":
        named = "strategy" if settings.strategy != "auto" else "backend"
        value = getattr(settings, named)
        yield named, f"{named} = {value!r}, but deepspeed_config asks for DeepSpeed: leave one of them out."


def batch_size_for(settings: Settings, dp_size: int) -> int | None:
    """Return the samples per rank and micro-batch; the JSON's train_batch_size gives them where nothing else does."""
    total = look_up(engine_settings(settings), "train_batch_size")
    if total is None:
        return settings.batch_size
    parts = settings.gradient_accumulation_steps * dp_size
    if settings.batch_size is not None and settings.batch_size * parts != total:
        raise UsageError(
            f"deepspeed_config says train_batch_size = {total}, but batch_size = {settings.batch_size} x "
            f"gradient_accumulation_steps = {settings.gradient_accumulation_steps} x {dp_size} ranks = "
            f"{settings.batch_size * parts}",
            hint='Write "train_batch_size": "auto", or change one of the others.',
        )
    if total % parts:
        raise UsageError(
            f"deepspeed_config says train_batch_size = {total}, which does not divide by "
            f"gradient_accumulation_steps = {settings.gradient_accumulation_steps} x {dp_size} ranks = {parts}",
            hint=f"The nearest are {max(1, total // parts) * parts} and {(total // parts + 1) * parts}.",
        )
    return int(total) // parts


_HERE = {"resolved_strategy": "deepspeed", "zero_stage": None}
PAIRS = (
    Pair(
        "offload",
        {"offload": "nvme", "resolved_strategy": other_than("deepspeed")},
        " is DeepSpeed's",
        "add strategy = 'deepspeed' and zero_stage = 3",
    ),
    Pair("offload", {"offload": "cpu", **_HERE}, " needs DeepSpeed's ZeRO", "write zero_stage = 2, or 3"),
    Pair(
        "mixed_precision",
        _HERE,
        " with DeepSpeed needs one of ZeRO's stages, which keep fp32 weights to step on",
        "write zero_stage = 1",
    ),
)
RULES = (engine_conflicts, other_strategy, *(pair.rule() for pair in PAIRS))
FILLS_FROM = "deepspeed_config"
"""The setting that `reconcile` fills in others from."""
