"""Names that are not fields: aliases, which still work, and removed settings, with what to write instead.

Arguments, flags, files, environment variables and the settings of earlier runs are all read by this one table.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from phalanx.config.option import as_text, join_options, option, plain, problem, split_options
from phalanx.config.run_fields import OPTIONS
from phalanx.config.settings import CONSOLE_WORDS, FIELDS, parse_console

ENV_PREFIX = "PHALANX_"


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class Aliases:
    """Other spellings of the settings above."""

    num_gpus: int | None = option(None, "num_workers=N with device=cuda, unless another device is given", minimum=1)
    gpus_per_node: int | None = option(None, "num_workers=N x num_nodes with device=cuda", minimum=1)
    progress: bool = option(True, "console=plain: without the progress bar or lines")
    verbosity: str = option("normal", "console=quiet|verbose, also -q and -v", choices=("quiet", "normal", "verbose"))
    console_ranks: str = option("0", "console=all-ranks: the output of every rank", choices=("0", "all"))
    cpus_per_worker: float = option(1.0, "engine_options cpus_per_worker (ray)", above=0)
    resources_per_worker: str | None = option(None, "engine_options resources.<name> (ray): 'GPU=0.5,big_memory=1'")
    placement: str = option("pack", "engine_options placement (ray)")
    host_discovery_script: str | None = option(None, "engine_options host_discovery_script (horovod)")
    adasum: bool = option(False, "engine_options adasum (horovod)")
    horovod_timeline: str | None = option(None, "engine_options timeline (horovod)")
    nvme_path: str | None = option(None, "engine_options nvme_path (deepspeed)")
    mlflow_tracking: bool = option(False, "mlflow")
    mlflow_experiment: str | None = option(None, "mlflow=NAME")
    tensorboard_dir: str | None = option(None, "tensorboard=FOLDER", scope="place")
    fast: bool = option(False, "mixed_precision=fp8 and compile=true, unless these are given")
    memory: bool = option(
        False,
        "compile=true, activation_checkpointing='budget 0.4' (without compile: true), optimizer=adamw8bit, "
        "capture=false, unless given",
    )


ALIASES: dict[str, dataclasses.Field[Any]] = {**Aliases.__dataclass_fields__, **OPTIONS}
"""The other spellings, and the options of every engine."""

NAMES = {**FIELDS, **ALIASES}
"""All names that are accepted."""


def _engine_option(name: str) -> Callable[[Any], dict[str, Any]]:
    """Return the meaning of an alias that is an option of an engine."""
    return lambda value: {"engine_options": as_text({name: value})}


_MODES: dict[str, dict[str, Any]] = {
    "memory": {
        "compile": True,
        "activation_checkpointing": "budget 0.4",
        "optimizer": "adamw8bit",
        "capture": False,  # a graph has memory of its own
    },
    "fast": {"mixed_precision": "fp8", "compile": True},
}
"""Aliases of several settings; each of these may be given beside one, and then wins. Of two modes the first wins."""


def _mode(name: str, on: bool) -> dict[str, Any]:
    """Return the settings of a mode; turned off, in a later source than the one that has turned it on, the defaults."""
    return _MODES[name] if on else {each: FIELDS[each].default for each in _MODES[name]}


_OPTIONS = ("cpus_per_worker", "placement", "host_discovery_script", "adasum", "nvme_path", *OPTIONS)
"""Aliases with the names of options."""

_MEANINGS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "progress": lambda on: {"console": "progress" if on else "plain"},
    "verbosity": lambda word: {"console": word},
    "console_ranks": lambda ranks: {"console": "all-ranks" if ranks == "all" else "rank-0"},
    "resources_per_worker": lambda text: {
        "engine_options": ",".join(f"resources.{part.strip()}" for part in text.split(","))
    },
    "horovod_timeline": lambda path: {"engine_options": as_text({"timeline": path})},
    **{name: _engine_option(name) for name in _OPTIONS},
    "mlflow_tracking": lambda on: {"mlflow": on},
    "mlflow_experiment": lambda name: {"mlflow": name},
    "tensorboard_dir": lambda folder: {"tensorboard": folder},
    **{mode: partial(_mode, mode) for mode in _MODES},
}
"""The settings that a value of an alias means; of two aliases of one setting the later row wins."""


class Removed(NamedTuple):
    """What became of a removed setting, and the setting to write instead; {} in its value is the one that was given."""

    became: str
    setting: str = ""
    value: str = ""
    example: str = ""


REMOVED = {
    "loss_parallel": Removed("is on for every model that supports it"),
    "stall_notice": Removed("is 60 seconds"),
    "mtbf": Removed("is part of checkpoint_frequency", "checkpoint_frequency", "auto {}", "12h"),
    "pipeline_balance": Removed("is part of pipeline_cuts", "pipeline_cuts", "measured"),
    "metrics_host": Removed("is part of metrics_port", "metrics_port", "{}:9400", "0.0.0.0"),
}


def rename(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Return settings without aliases, and (name, message) for each alias and each setting with parts that is wrong.

    A wrong one is left out, so that it is not joined with those of other sources.
    """
    values = {name: value for name, value in given.items() if name not in _MEANINGS}
    mistakes = []
    for name in _PARTS.keys() & values.keys():
        try:
            values[name] = _PARTS[name].read(values[name])
        except ValueError as error:
            mistakes.append((name, f"{name} = {values.pop(name)!r}: {error}"))
    for name, meaning in _MEANINGS.items():
        value = plain(given.get(name))
        if wrong := problem(ALIASES[name], value) if value is not None else None:
            mistakes.append((name, wrong))
        elif value is not None:  # None: not given
            try:
                meant = meaning(value)
                split_options(meant.get("engine_options"))
            except ValueError as error:
                mistakes.append((name, f"{name} = {value!r}: {error}"))
                continue
            mistakes += [(name, f"{name} = {value!r} with {text}") for text in _contradicted(values, meant)]
            values = {**meant, **_without_compile(values, name), **values} if name in _MODES else merge(values, meant)
        elif name in given and name in OPTIONS and OPTIONS[name].default is None:  # set back what another source gave
            values = merge(values, {"engine_options": f"{name}=none"})
    return values, mistakes


def _without_compile(values: Mapping[str, Any], mode: str) -> dict[str, Any]:
    """Return how the memory mode recomputes activations beside compile = false: a budget is for compiled blocks."""
    return {"activation_checkpointing": True} if mode == "memory" and values.get("compile") is False else {}


def _contradicted(values: Mapping[str, Any], meant: Mapping[str, Any]) -> list[str]:
    """Return what of one source turns a tracker off that an alias turns on, or the other way round."""
    opposite = [n for n, v in meant.items() if n in _TRACKERS and n in values and bool(values[n]) != bool(v)]
    return [f"{name} = {values[name]!r}: leave one of them out." for name in opposite]


def _read_options(given: Any) -> str | None:
    """Return `engine_options` as text, None where it is empty; ValueError says what to write."""
    text = as_text(given) if isinstance(given, Mapping) else given
    if not isinstance(text, str | None):
        raise ValueError("expected 'name=value,name=value', or a table {'name': value}.")
    split_options(text)
    return text or None


def _read_console(given: Any) -> str:
    """Return `console`; ValueError says what to write."""
    parse_console(given if isinstance(given, str) else "")
    return str(given)


def merge(values: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with those of a later source, which win; of a setting with parts it replaces those it names.

    For example `console = "quiet all-ranks"` in a file and `-v` is `verbose all-ranks`.
    """
    joined: dict[str, Any] = {}
    for name, value in later.items():
        before = values.get(name)
        if name in _PARTS and before and isinstance(value, str):
            joined[name] = _PARTS[name].join(before, value)
        elif name in _TRACKERS and value is True and isinstance(before, str):  # on, with the name given before
            joined[name] = before
    return {**values, **later, **joined}


def join_words(text: str, more: str = "") -> str:
    """Return the words of `console`, of each kind the last, without those that say the default."""
    order = dict.fromkeys(CONSOLE_WORDS.values(), "normal")
    words = {**order, **{CONSOLE_WORDS.get(word, word): word for word in f"{text} {more}".split()}}
    return " ".join(word for word in words.values() if word not in ("normal", "progress", "rank-0")) or "normal"


def count_ranks(given: Mapping[str, Any], ranges: Container[str]) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Return settings with num_gpus and gpus_per_node as num_workers and device, and (name, message) for mistakes.

    For example num_nodes = 2 and gpus_per_node = 4 are num_workers = 8 and device = "cuda". `ranges`: those that
    are a pair (least, most); num_gpus is then checked as num_workers.
    """
    values = dict(given)
    gpus, per_node = plain(values.pop("num_gpus", None)), plain(values.pop("gpus_per_node", None))
    checked = {"num_gpus": None if "num_gpus" in ranges else gpus, "gpus_per_node": per_node}
    mistakes = [(n, text) for n, v in checked.items() if v is not None and (text := problem(ALIASES[n], v))]
    workers, nodes = values.get("num_workers"), values.get("num_nodes", 1)
    is_wrong = "num_workers" not in ranges and problem(FIELDS["num_workers"], plain(workers))  # `check` reports it
    if mistakes or is_wrong or (gpus is None and per_node is None):
        return values, mistakes
    total, name = (gpus, "num_gpus") if workers is None else (workers, "num_workers")
    if None not in (workers, gpus) and workers != gpus:
        mistakes = [(name, f"num_workers = {workers} and num_gpus = {gpus} name the same thing: give one of them.")]
    elif per_node is not None and values.get("hosts"):
        text = f"gpus_per_node = {per_node} with hosts = {values['hosts']!r}, which says it: leave gpus_per_node out."
        mistakes = [("gpus_per_node", text)]
    elif per_node is not None and isinstance(nodes, int):  # else `problem` reports the number of machines
        product = nodes * per_node
        if total not in (None, product):
            text = f"{name} = {total} is not num_nodes x gpus_per_node = {nodes} x {per_node} = {product}."
            mistakes = [(name, text)]
        total = product
    device = {"device": "cuda"} if values.get("device", "auto") == "auto" else {}
    return {**values, "num_workers": total, **device}, mistakes


_TRACKERS = ("tensorboard", "mlflow", "wandb")


class _Parts(NamedTuple):
    """How a setting with parts is read, and how a later source's value changes an earlier one's."""

    read: Callable[[Any], str | None]
    join: Callable[[str, str], str]


_PARTS = {"console": _Parts(_read_console, join_words), "engine_options": _Parts(_read_options, join_options)}


def of_earlier_run(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that a run's files hold as those of this version; removed ones are left out."""
    at_default = {name for name, field in ALIASES.items() if given.get(name) == field.default}
    kept = {name: value for name, value in given.items() if name not in REMOVED and name not in at_default}
    return rename(kept)[0]


def removed(name: str, as_written: str, given: Any = None) -> str:
    """Return the message about a removed setting; empty for another name.

    What to write has the form in which it was written (flag, variable, setting), and the value that was given.
    """
    if name not in REMOVED:
        return ""
    became, setting, value, example = REMOVED[name]
    if not setting:
        return f"{as_written} {became}: leave it out."
    value = value.format(example if given in (None, "") else given)
    if as_written.startswith("--"):
        instead = f"--{setting.replace('_', '-')} {shlex.quote(value)}"
    elif as_written.startswith(ENV_PREFIX):
        instead = f"{ENV_PREFIX}{setting.upper()}={shlex.quote(value)}"
    else:
        instead = f"{setting} = {value!r}"
    return f"{as_written} {became}: write {instead}, or leave it out."
