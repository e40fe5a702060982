"""DeepSpeed's JSON beside our settings: what either leaves open the other fills, and what they disagree on is told.

`deepspeed_config` is a file, JSON text, or in Python a dict; the config keeps it as JSON text, so that it stays plain
data and a run's config holds all of it. "auto", or nothing, in the JSON means: as our setting says. A setting of ours
at its default means: as the JSON says.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any

from phalanx.config.deepspeed_schedule import schedule_settings
from phalanx.config.option import problem
from phalanx.errors import UsageError

if TYPE_CHECKING:
    import dataclasses
    from collections.abc import Iterator

    from phalanx.config.distributed import DistributedConfig

AUTO = "auto"
_SAME = (
    ("train_micro_batch_size_per_gpu", "batch_size"),
    ("gradient_accumulation_steps", "gradient_accumulation_steps"),
    ("gradient_clipping", "gradient_clipping"),
    ("zero_optimization.stage", "zero_stage"),
    ("zero_optimization.offload_optimizer.device", "offload"),
    ("zero_optimization.offload_optimizer.nvme_path", "nvme_path"),
    ("optimizer.params.lr", "learning_rate"),
    ("optimizer.params.weight_decay", "weight_decay"),
)
"""Where the JSON and our config say the same thing."""

_SECTIONS = ("zero_optimization", "optimizer", "scheduler", "bf16", "fp16")
_ZERO_MEANS_UNSET = {"gradient_clipping", "zero_stage"}
_REFUSED = {
    "pipeline": "DeepSpeed's pipeline needs a loop of its own",
    "tensor_parallel": "ranks that share samples must be known to our data loaders",
    "sequence_parallel_size": "ranks that share samples must be known to our data loaders",
    "data_parallel_size": "ranks that share samples must be known to our data loaders",
    "amp": "apex is not used: write bf16 or fp16",
    "bfloat16": 'write it as "bf16"',
    "managed_gradient_accumulation": "the loop tells the engine where a step ends",
    "curriculum_learning": "our data loaders decide the batches",
    "data_efficiency": "our data loaders decide the batches",
}
_TAKEN_BY_THE_ENGINE = {
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


MISSING = "strategy = 'deepspeed' needs DeepSpeed, which is not installed"
INSTALL = "Run: pip install 'phalanx[deepspeed]' (with DS_BUILD_OPS=0, and DS_ACCELERATOR=cpu without a GPU)."


def is_missing(values: Mapping[str, Any]) -> bool:
    """Whether these settings, checked or not, ask for a DeepSpeed that is not installed."""
    strategy = values.get("strategy", AUTO)
    by_others = values.get("backend") == "deepspeed" or values.get("deepspeed_config") is not None
    wanted = strategy == "deepspeed" or (strategy == AUTO and by_others)
    return wanted and importlib.util.find_spec("deepspeed") is None


def source_of(given: Any) -> str:
    """Return what a mistake in the JSON begins with: the setting, and the file that holds it."""
    is_file = isinstance(given, str) and not given.strip().startswith("{")
    return f"deepspeed_config ({given})" if is_file else "deepspeed_config"


def as_text(given: Any) -> str | None:
    """Return a dict, a file or text as JSON text; raises ValueError with what is wrong."""
    if given is None:
        return None
    given = getattr(given, "_param_dict", given)  # what a deepspeed.DeepSpeedConfig was built from
    if isinstance(given, Mapping):
        try:
            return json.dumps(given)
        except TypeError as error:
            raise ValueError(f"a dict must hold plain values only: {error}") from None
    if not isinstance(given, str):
        raise ValueError(f"expected a path, JSON text, a dict or a DeepSpeedConfig, and got {type(given).__name__}")
    text = given.strip()
    if text.startswith("{"):
        return json.dumps(_parsed(text, "the text"))
    try:
        return json.dumps(_parsed(Path(given).read_text(encoding="utf-8"), given))
    except OSError as error:
        raise ValueError(f"{given} cannot be read: {error.strerror}") from None


def _parsed(text: str, where: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{where} holds a {type(found).__name__}, not an object with DeepSpeed's settings")
    return found


def engine_settings(config: DistributedConfig) -> dict[str, Any]:
    """Return DeepSpeed's settings as they were given: a copy, with "auto" still in it."""
    found: dict[str, Any] = json.loads(config.deepspeed_config or "{}")
    return found


def look_up(settings: Mapping[str, Any], path: str) -> Any:
    """Return what stands at a dotted path, or None where nothing or "auto" does."""
    found: Any = settings
    for part in path.split("."):
        if not isinstance(found, Mapping) or part not in found:
            return None
        found = found[part]
    return None if found == AUTO else found


def reconcile(
    config: DistributedConfig, fields: Mapping[str, dataclasses.Field[Any]], source: str
) -> tuple[dict[str, Any], list[str]]:
    """Return what the JSON adds to our settings, and every contradiction between the two with both values."""
    settings = engine_settings(config)
    mistakes = [f"{source}: {text}" for text in _own_mistakes(settings)]
    changes: dict[str, Any] = {}
    try:
        said = list(_said(settings, config.mixed_precision))
    except ValueError as error:
        return {}, [*mistakes, f"{source}: {error}"]
    for path, name, value in said:
        ours = changes.get(name, getattr(config, name))  # two places of the JSON may speak of one setting
        wrong = problem(fields[name], value)
        if wrong is not None:
            mistakes.append(f"{source}: {path} = {_shown(settings, path)} becomes {wrong}")
        elif ours == value or (ours is True and value in ("bf16", "fp16")):  # true means either, by the device
            continue
        elif name not in changes and ours == fields[name].default:
            changes[name] = value
        else:
            mistakes.append(
                f"{name} = {ours!r}, but deepspeed_config says {path} = {_shown(settings, path)}: "
                'change one of them, or write "auto" there.'
            )
    return changes, mistakes


def settled(given: Any, mixed_precision: Any) -> set[str]:
    """Return our settings that the JSON decides, where it can be read; `DistributedConfig` tells where it cannot."""
    try:
        settings = json.loads(as_text(given) or "{}")
        names = {name for _, name, _ in _said(settings, mixed_precision)}
    except ValueError:
        return set()
    return names | ({"batch_size"} if look_up(settings, "train_batch_size") is not None else set())


def _own_mistakes(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with the JSON by itself."""
    for name, why in _refused(settings):
        yield f"{name} cannot be used here: {why}."
    for name, meant in _misspelt(settings):
        yield f"unknown '{name}'. Did you mean '{meant}'?"
    for name in _SECTIONS:
        if not isinstance(settings.get(name, {}), (Mapping, NoneType)):
            yield f"{name} = {json.dumps(settings[name])}: expected an object."
    total = look_up(settings, "train_batch_size")
    if total is not None and (not isinstance(total, int) or isinstance(total, bool) or total < 1):
        yield f"train_batch_size = {json.dumps(total)}: expected a whole number, 1 or more."


def _refused(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, why in _REFUSED.items():
        value = settings.get(name)
        on = value not in (None, 1, True, {}) if name != "managed_gradient_accumulation" else value is False
        if on and not (isinstance(value, Mapping) and value.get("enabled") is False):
            yield name, why


def _misspelt(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield keys that are nearly one of those read here: DeepSpeed itself passes over what it does not know."""
    read = {path.split(".")[0] for path, _ in _SAME} | {"train_batch_size", "bf16", "fp16", "scheduler"}
    for name in settings.keys() - read:
        close = difflib.get_close_matches(name, read, n=1, cutoff=0.85)
        if close:
            yield name, close[0]


def _said(settings: Mapping[str, Any], mixed_precision: bool | str) -> Iterator[tuple[str, str, Any]]:
    """Yield (path, our setting, value in our words) for all that the JSON says outright."""
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
    yield from schedule_settings(settings)


def optimizer_name(settings: Mapping[str, Any]) -> str | None:
    """Return our name for the JSON's optimizer; None where it names none, or one that only DeepSpeed has."""
    kind = look_up(settings, "optimizer.type")
    known = {"adamw": "adamw", "sgd": "sgd", "adagrad": "adagrad", "rmsprop": "rmsprop"}
    if isinstance(kind, str) and kind.lower() == "adam":  # DeepSpeed's Adam decouples the decay unless told not to
        return "adam" if look_up(settings, "optimizer.params.adam_w_mode") is False else "adamw"
    return known.get(kind.lower()) if isinstance(kind, str) else None


def _shown(settings: Mapping[str, Any], path: str) -> str:
    return json.dumps(look_up(settings, path))


def contradictions(config: DistributedConfig, defaults: Mapping[str, Any]) -> dict[str, str]:
    """Check the settings that an engine of DeepSpeed leaves no room for, and those that only it has."""
    if config.resolved_strategy != "deepspeed":
        wrong = {}
        if config.deepspeed_config is not None:
            named = "strategy" if config.strategy != "auto" else "backend"
            wrong["deepspeed_config"] = (
                f"{named} = {getattr(config, named)!r}, but deepspeed_config asks for DeepSpeed: leave one of them out."
            )
        if config.offload == "nvme":
            wrong["offload"] = "offload = 'nvme' is DeepSpeed's: add strategy = 'deepspeed' and zero_stage = 3."
        return wrong
    wrong = {
        name: f"{name} = {getattr(config, name)!r} does not go with strategy = 'deepspeed': {why}."
        for name, why in _TAKEN_BY_THE_ENGINE.items()
        if getattr(config, name) != defaults[name]
    }
    if config.offload == "nvme" and (config.zero_stage != 3 or config.nvme_path is None):
        wrong["offload"] = (
            f"offload = 'nvme' needs zero_stage = 3 and nvme_path = '<folder on a fast disk>'; "
            f"they are {_unset(config.zero_stage)} and {_unset(config.nvme_path)}."
        )
    elif config.offload == "cpu" and config.zero_stage is None:
        wrong["offload"] = "offload = 'cpu' needs DeepSpeed's ZeRO: write zero_stage = 2, or 3."
    if config.mixed_precision is not False and config.zero_stage is None:
        wrong["mixed_precision"] = (
            f"mixed_precision = {config.mixed_precision!r} with DeepSpeed needs one of ZeRO's stages, which keep fp32 "
            "weights to step on: write zero_stage = 1."
        )
    return wrong


def _unset(value: Any) -> str:
    return "unset" if value is None else repr(value)


def batch_size_for(config: DistributedConfig, dp_size: int) -> int | None:
    """Return the samples per rank and micro-batch; the JSON's train_batch_size gives them where nothing else does."""
    total = look_up(engine_settings(config), "train_batch_size")
    if total is None:
        return config.batch_size
    parts = config.gradient_accumulation_steps * dp_size
    if config.batch_size is not None and config.batch_size * parts != total:
        raise UsageError(
            f"deepspeed_config says train_batch_size = {total}, but batch_size = {config.batch_size} x "
            f"gradient_accumulation_steps = {config.gradient_accumulation_steps} x {dp_size} ranks = "
            f"{config.batch_size * parts}",
            hint='Write "train_batch_size": "auto", or change one of the others.',
        )
    if total % parts:
        raise UsageError(
            f"deepspeed_config says train_batch_size = {total}, which does not divide by "
            f"gradient_accumulation_steps = {config.gradient_accumulation_steps} x {dp_size} ranks = {parts}",
            hint=f"The nearest are {max(1, total // parts) * parts} and {(total // parts + 1) * parts}.",
        )
    return int(total) // parts
