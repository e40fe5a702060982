"""`Settings`: the values of all settings and what follows from them. Nothing is checked here.

`rules` and the other rule files check settings; `DistributedConfig` is a `Settings` that passed them.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn

from phalanx.config.backends import BACKENDS, DEFAULT_STRATEGY
from phalanx.config.fields import (
    ZERO_SHARDING,
    Adapters,
    Communication,
    Optimization,
    Parallelism,
    Resources,
    Synchronisation,
    Training,
)
from phalanx.config.option import load_entry_point, parse_frequency, read_hosts
from phalanx.config.rows import StrategyFacts
from phalanx.config.run_fields import Advanced, Checkpointing, Elasticity, Monitoring
from phalanx.config.strategies import AXES, TABLE, facts_of
from phalanx.errors import UsageError, nearest

if TYPE_CHECKING:
    from phalanx.config.profile import Profiling

ENV_PREFIX = "PHALANX_"
"""Of the environment variable of a setting."""
PrecisionName = Literal["fp32", "bf16", "fp16"]
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_IPV6 = re.compile(r"\[[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(%\w+)?\]")
_EVERY = re.compile(r"^\s*every[\s-]+(\d+)\s*$")
_BUDGET = re.compile(r"^\s*budget[\s=]+(0|1|[01]?\.\d+)\s*$")
_AUTO = re.compile(r"^\s*auto(?:[\s:]+(\S.*))?$")
_CPU_INFO = Path("/proc/cpuinfo")
_BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}
"""Two on x86, the last on ARM: instructions that multiply in bf16. Other CPUs emulate it."""


class Recompute(NamedTuple):
    """What activation_checkpointing recomputes: every n-th block, whole or all but its expensive operations.

    `budget`: the share of a compiled block's activations that is kept instead; torch recomputes what costs least.
    """

    every: int = 1
    selective: bool = False
    budget: float | None = None


class WatchedMetric(NamedTuple):
    """A metric by the name that dashboards show, such as val/loss, and whether lower or higher is better."""

    name: str
    mode: Literal["min", "max"]

    @property
    def is_logged(self) -> bool:
        """Whether the user logs it: evaluation measures val/<name>, and training train/loss."""
        return self.name != "train/loss" and not self.name.startswith("val/")


class Host(NamedTuple):
    """A node, and how many ranks may run there."""

    name: str
    slots: int


class Settings(
    Resources,
    Parallelism,
    Training,
    Optimization,
    Adapters,
    Communication,
    Synchronisation,
    Checkpointing,
    Monitoring,
    Elasticity,
    Advanced,
):
    """The values of all settings, as flat, frozen, plain data: a dataclass, with the fields of engines as well."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)

    def __repr__(self) -> str:
        """Return the settings that differ from their defaults."""
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.given().items())})"

    def __eq__(self, other: object) -> bool:
        """Whether all settings are equal."""
        return type(other) is type(self) and other.to_dict() == self.to_dict()

    def __hash__(self) -> int:
        return hash(tuple(self.to_dict().items()))

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise dataclasses.FrozenInstanceError(f"cannot assign to {name!r}: write config.replace({name}=...)")

    def __delattr__(self, name: str) -> NoReturn:
        raise dataclasses.FrozenInstanceError(f"cannot delete {name!r}")

    def changed(self, *names: str) -> list[str]:
        """Return which of these settings differ from their defaults."""
        return [name for name in names if getattr(self, name) != FIELDS[name].default]

    def given(self) -> dict[str, Any]:
        """Return the settings that differ from their defaults, with their values."""
        return {name: getattr(self, name) for name in self.changed(*FIELDS)}

    def mistake(self, name: str, text: str) -> tuple[str, str]:
        """Return what a rule yields about a setting: its name, and its value with what is wrong."""
        return name, f"{name} = {getattr(self, name)!r}{text}"

    @property
    def total_ranks(self) -> int | None:
        """Ranks of the whole job as configured, or None when the machine decides."""
        if self.num_workers is not None or self.hosts is None:
            return self.num_workers if isinstance(self.num_workers, int) else None  # else `problem` reports it
        try:
            return sum(host.slots for host in parse_hosts(self.hosts))
        except ValueError:  # a rule reports it
            return None

    @property
    def host_ranks(self) -> dict[str, int]:
        """Ranks of each node of `hosts`: its slots, or an equal share of a smaller number that was given."""
        hosts, total = parse_hosts(self.hosts or ""), self.total_ranks
        fits = total == sum(host.slots for host in hosts)
        return {host.name: host.slots if fits else (total or 0) // len(hosts) for host in hosts}

    @property
    def launcher(self) -> str:
        """What starts the ranks; an engine of another package is its own launcher."""
        return BACKENDS[self.backend][0] if self.backend in BACKENDS else self.backend

    @property
    def resolved_strategy(self) -> str:
        """The strategy, with "auto" resolved."""
        if self.strategy != "auto":
            return self.strategy
        if self.backend in BACKENDS:
            row = BACKENDS[self.backend]
            default = (row.strategy_of_many if (self.total_ranks or 1) > 1 else "") or row.strategy
        else:
            default = str(getattr(load_entry_point("phalanx.engines", self.backend), "strategy", DEFAULT_STRATEGY))
        implied = [strategy for name, strategy in IMPLIED.items() if getattr(self, name) is not None]
        return implied[-1] if implied and default == DEFAULT_STRATEGY else default

    @property
    def framework(self) -> str:
        """What the models are written in."""
        return BACKENDS[self.backend].framework if self.backend in BACKENDS else "torch"

    @property
    def facts(self) -> StrategyFacts:
        """What the strategy does with weights and gradients."""
        return facts_of(self.resolved_strategy)

    @property
    def recovery(self) -> str:
        """How a run goes on after a lost rank (`StrategyFacts.recovery`); "restart": all ranks start again."""
        axes = (self.pipeline_parallel, self.context_parallel, self.tensor_parallel, self.expert_parallel)
        if self.backend not in BACKENDS or not BACKENDS[self.backend].replaces_ranks:
            return "restart"
        return "replace" if max(axes) > 1 else self.facts.recovery

    @property
    def axis(self) -> str:
        """The first setting that splits a model over ranks, with its value; empty if there is none."""
        return next((f"{axis} = {size}" for axis in AXES if (size := getattr(self, axis)) > 1), "")

    @property
    def resolved_server_mode(self) -> Literal["sync", "async", "bounded"]:
        """The mode of parameter servers, with "auto" resolved."""
        if self.server_mode == "async":
            return "async"
        bounded = self.server_mode == "bounded" or (self.server_mode == "auto" and self.staleness is not None)
        return "bounded" if bounded else "sync"

    @property
    def resolved_sharding(self) -> str:
        """How fsdp shards, with "auto" resolved."""
        if self.sharding != "auto":
            return self.sharding
        return "full" if self.zero_stage is None else ZERO_SHARDING[self.zero_stage]

    @property
    def checkpoint_every(self) -> tuple[int, str] | None:
        """Return (n, "epochs" | "steps" | "auto"), or None without periodic saves; ValueError says what to write."""
        if self.checkpoint_frequency is None:
            return None
        if _AUTO.match(str(self.checkpoint_frequency)):
            _ = self.mtbf_seconds  # raises for a text that is not a duration
            return 1, "auto"
        return parse_frequency(self.checkpoint_frequency, FIELDS["checkpoint_frequency"].metadata["expects"])

    @property
    def evaluate_every(self) -> tuple[int, str] | None:
        """Return (n, "epochs" | "steps"), or (n, "times") for n times in an epoch; ValueError says what to write."""
        if self.eval_every in (0, "0"):
            return None
        return parse_frequency(self.eval_every, FIELDS["eval_every"].metadata["expects"], shares=True)

    @property
    def max_seconds(self) -> float | None:
        """`max_time` in seconds; ValueError says what to write."""
        return None if self.max_time is None else parse_duration(self.max_time)

    @property
    def mtbf_seconds(self) -> float | None:
        """The mean time between failures in `checkpoint_frequency = "auto 12h"`; None where it is not given."""
        auto = _AUTO.match(str(self.checkpoint_frequency))
        return parse_duration(auto[1]) if auto is not None and auto[1] else None

    @property
    def best_metric(self) -> WatchedMetric | None:
        """The metric of `keep_best`, or None where it is off; where none is named, that of `early_stopping`."""
        best = (self.early_stopping or "val/loss") if self.keep_best is True else self.keep_best
        return parse_metric(best) if best else None

    @property
    def stopping_metric(self) -> WatchedMetric | None:
        """The metric of `early_stopping`, or None; ValueError says what to write."""
        return None if self.early_stopping is None else parse_metric(self.early_stopping)

    @property
    def recompute(self) -> Recompute | None:
        """What is recomputed in backward, or None when all activations are kept; ValueError says what to write."""
        setting = self.activation_checkpointing
        if setting is False:
            return None
        if setting is True or setting == "full":
            return Recompute()
        if setting == "selective":
            return Recompute(selective=True)
        if (share := _BUDGET.match(setting)) and float(share[1]) <= 1:
            return Recompute(budget=float(share[1]))
        match = _EVERY.match(setting)
        if match is None or int(match[1]) == 0:
            close = nearest(setting, ("full", "selective", "every 2", "budget 0.5"))
            guess = f" Did you mean {close!r}?" if close else ""
            allowed = "false, true, 'full', 'selective', 'every <n>', 'budget <share from 0 to 1>'"
            raise ValueError(f"not one of {allowed}.{guess}")
        return Recompute(every=int(match[1]))

    @property
    def metrics_address(self) -> tuple[str, int] | None:
        """Host and port of `metrics_port`, or None where it is off; ValueError says what to write."""
        if self.metrics_port is None:
            return None
        host, _, port = str(self.metrics_port).rpartition(":")
        if not port.isdecimal() or int(port) > 65535:
            raise ValueError("a port is a number up to 65535 (9400); with a host: '0.0.0.0:9400'.")
        if host and not (_HOST.fullmatch(host) or _IPV6.fullmatch(host)):
            raise ValueError(f"{host!r} is not a host: write '0.0.0.0:9400', 'node1:9400' or '[::1]:9400'.")
        return host.strip("[]") or "127.0.0.1", int(port)

    @property
    def profiling(self) -> Profiling | None:
        """What `profile` records, or None where it is off; ValueError says what to write."""
        if self.profile is False:
            return None
        from phalanx.config.profile import parse_profile

        return parse_profile(self.profile)

    def to_dict(self) -> dict[str, Any]:
        """Return the values by field name."""
        return {name: getattr(self, name) for name in FIELDS}


ENGINE_GROUPS = tuple(backend.options for backend in BACKENDS.values() if backend.options is not None)
"""The classes with the settings of engines."""

GROUPS: list[Any] = [*Settings.__bases__, *ENGINE_GROUPS]
"""The groups of fields, in the order in which they are shown; that of another package's engine once it is chosen."""

FIELDS: dict[str, dataclasses.Field[Any]] = {}
"""Every field by name, in the order of the groups."""


def title_of(group: Any) -> str:
    """Return the title of a group of fields."""
    return str(group.__name__).removesuffix("Settings")


def add_fields(group: Any) -> None:
    """Add the fields of an engine's settings."""
    for name, field in group.__dataclass_fields__.items():
        FIELDS[name] = field
        setattr(Settings, name, field.default)  # of configs that were made before


Settings.__dataclass_fields__ = FIELDS
for _group in GROUPS:
    add_fields(_group)


def add_engine(name: object) -> Any:
    """Add the settings of an engine of another package, the class `options` of its `Engine`, and return the class."""
    return None if not isinstance(name, str) or name in BACKENDS else _add_engine(name)


@functools.cache
def _add_engine(name: str) -> Any:
    group = getattr(load_entry_point("phalanx.engines", name), "options", None)
    if group is not None:
        if duplicates := group.__dataclass_fields__.keys() & FIELDS.keys():
            raise UsageError(f"the engine {name} declares settings that exist already: {', '.join(sorted(duplicates))}")
        add_fields(group)
        GROUPS.append(group)
    return group


IMPLIED = {setting: row.name for row in TABLE for setting in row.implied_by}
"""The strategy that a setting chooses where none is named; of several the last."""


def settings_with(scope: str) -> list[str]:
    """Return the settings with a scope (see `option`)."""
    return [name for name, field in FIELDS.items() if scope in field.metadata["scope"]]


def parse_metric(text: str) -> WatchedMetric:
    """Read `val/loss`, `max:val/<name>`, or `min:<name>` of a logged value; ValueError says what to write."""
    mode, colon, name = (part.strip() for part in text.rpartition(":"))
    split, slash, metric = name.partition("/")
    if mode in ("min", "max") and name.strip("/") and split != "val" and name != "train/loss":
        return WatchedMetric(name, "min" if mode == "min" else "max")  # the user logs it
    if not slash or not metric or split not in ("val", "train") or (split == "train" and metric != "loss"):
        bare = re.sub(r"^(val|eval|valid|validation|train|test)[_/]", "", name) or "loss"  # as others write it
        advice = f"; for a value that you log, min:{name} or max:{name}" if name.strip("/") else ""
        raise ValueError(f"a metric is val/<name> (val/loss, val/accuracy) or train/loss: write val/{bare}{advice}.")
    if colon and mode not in ("min", "max"):
        raise ValueError(f"{mode!r} is neither min nor max: write min:{name} or max:{name}.")
    if colon:
        return WatchedMetric(name, "min" if mode == "min" else "max")
    words = re.split(r"[^a-z0-9]+", metric.lower())
    lower, higher = (any(re.fullmatch(words_of, word) for word in words) for words_of in (_LOWER, _HIGHER))
    if lower == higher:
        close = nearest(metric, ("loss", "accuracy", "perplexity", "error", "precision", "recall", "score"))
        guess = f" Or did you mean {split}/{close}?" if close else ""
        directions = f"write min:{name} or max:{name}.{guess}"
        raise ValueError(f"the name does not say whether lower or higher is better: {directions}")
    return WatchedMetric(name, "min" if lower else "max")


_LOWER = r".*loss|.*error|err|perplexity|ppl|mse|mae|rmse|wer|cer|nll|bpb|bpc|fid"
_HIGHER = r"acc|.*accuracy|f1|auc|auroc|precision|recall|bleu|rouge.*|iou|miou|map|ap|r2|score|top\d*|psnr|ssim"
_UNITS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0}
_PARTS = re.compile(r"(\d+(?:\.\d+)?)([dhms])")
_CLOCK = re.compile(r"(?:(\d+):)?(\d+):(\d{2})")


def parse_duration(value: float | str) -> float:
    """Return seconds of a number, `90`, `30m`, `1h30m` or `1:30:00`; ValueError says what to write."""
    if isinstance(value, (int, float)):
        return float(value)
    text = value.strip().lower().replace(" ", "")
    if clock := _CLOCK.fullmatch(text):
        seconds = float(int(clock[1] or 0) * 3600 + int(clock[2]) * 60 + int(clock[3]))
    elif text and not _PARTS.sub("", text):
        seconds = sum(float(number) * _UNITS[unit] for number, unit in _PARTS.findall(text))
    else:
        try:
            seconds = float(text)
        except ValueError:
            seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ValueError("expected a duration above 0, such as '30m', '2h', '1h30m', '1:30:00', or seconds (90).")
    return seconds


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Read nodes and slots, node1:8,node2:8 or a file of them (./hosts); ValueError says what to write."""
    hosts: list[Host] = []
    for part in read_hosts(text) if "/" in text else text.split(","):
        name, colon, slots = part.strip().partition(":")
        if not _HOST.fullmatch(name):
            raise ValueError(f"{part.strip()!r} is not the name of a host: write node1:8,node2:8.")
        if colon and not (slots.isdecimal() and int(slots) > 0):
            raise ValueError(f"{part.strip()!r} has no number of slots after the colon: write {name}:8.")
        if name in {host.name for host in hosts}:
            raise ValueError(f"{name} is listed twice: write it once, with all its slots.")
        hosts.append(Host(name, int(slots) if colon else 1))
    return tuple(hosts)


def precision_name(setting: bool | str, device_type: str) -> PrecisionName:
    """Return the precision of the forward pass; True picks what is fast: fp16 on CUDA, bf16 on a CPU that has it."""
    if setting is True:
        return "fp16" if device_type == "cuda" else "bf16" if cpu_has_bf16() else "fp32"
    if setting is False or (setting == "fp8" and device_type == "cpu" and not cpu_has_bf16()):
        return "fp32"
    return "fp16" if setting == "fp16" else "bf16"  # the config allows no other name


@functools.cache
def cpu_has_bf16() -> bool:
    """Whether the CPU of this machine has bf16 instructions; read from the kernel, without torch."""
    try:
        lines = _CPU_INFO.read_text().splitlines()
    except OSError:  # not Linux
        return False
    flags = (line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features")))
    return any(_BF16_FLAGS.intersection(words) for words in flags)
