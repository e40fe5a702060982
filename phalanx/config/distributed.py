"""`DistributedConfig`: every setting of a run as flat, frozen, plain data. Importable without torch."""

from __future__ import annotations

import dataclasses
import numbers
import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from phalanx.config import deepspeed
from phalanx.config.beside import compression_mistakes, pipeline_mistakes, server_mistakes, sharding_mistakes
from phalanx.config.engine_groups import Engines
from phalanx.config.engines import engine_mistakes, unused_note, unused_settings
from phalanx.config.groups import (
    BACKENDS,
    GROUPS,
    TORCH_SHARDING,
    ZERO_SHARDING,
    Adapters,
    Checkpointing,
    Communication,
    Elasticity,
    Monitoring,
    Optimization,
    Parallelism,
    Resources,
    Synchronisation,
    Training,
)
from phalanx.config.hosts import slots_of
from phalanx.config.option import problem, url_problem
from phalanx.config.synchronisation import synchronisation_mistakes
from phalanx.errors import ConfigError, nearest

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

_RECOMPUTE_WORDS = ("full", "selective", "every 2")
_EVERY = re.compile(r"^\s*every[\s-]+(\d+)\s*$")
_FOLDERS = ("checkpoint_dir", "resume_from_checkpoint", "run_dir", "tensorboard_dir", "data_dir", "nvme_path")
_FREQUENCY = re.compile(r"^\s*(\d+)\s*(epochs?|steps?)?\s*$")


class Recompute(NamedTuple):
    """What activation_checkpointing asks for: every n-th block, whole or all but its expensive operations."""

    every: int = 1
    selective: bool = False


@dataclass(frozen=True, kw_only=True)
class DistributedConfig(
    Resources,
    Parallelism,
    Training,
    Optimization,
    Adapters,
    Communication,
    Synchronisation,
    Engines,
    Checkpointing,
    Monitoring,
    Elasticity,
):
    """All settings of a run. Building one checks every value and reports all mistakes at once."""

    if not TYPE_CHECKING:  # type checkers and editors see the dataclass's own signature

        def __init__(self, **values: Any) -> None:
            if isinstance(values.get("num_workers"), (tuple, list)):  # (least, most), as Ray writes it
                values |= split_pair(values["num_workers"])
            values = translate_sharding(values)
            unknown = [unknown_field(name) for name in values if name not in FIELDS]
            for name, field in FIELDS.items():
                object.__setattr__(self, name, _plain(values.get(name, field.default)))
            mistakes = unknown + self._take_over_deepspeed() + self._mistakes()
            if mistakes:
                raise ConfigError(mistakes)

    def _take_over_deepspeed(self) -> list[str]:
        """Fill in what DeepSpeed's JSON says, and return where it contradicts us."""
        if self.deepspeed_config is None:
            return []
        source = deepspeed.source_of(self.deepspeed_config)
        try:
            object.__setattr__(self, "deepspeed_config", deepspeed.as_text(self.deepspeed_config))
        except ValueError as error:
            object.__setattr__(self, "deepspeed_config", None)
            return [f"deepspeed_config: {error}"]
        changes, mistakes = deepspeed.reconcile(self, FIELDS, source)
        for name, value in changes.items():
            object.__setattr__(self, name, value)
        return mistakes

    def _mistakes(self) -> list[str]:
        wrong = {name: text for name, field in FIELDS.items() if (text := problem(field, getattr(self, name)))}
        if not wrong.keys() & {"num_workers", "num_gpus", "num_nodes", "gpus_per_node", "node_rank"}:
            wrong.update(_rank_arithmetic(self))
        defaults = {name: field.default for name, field in FIELDS.items()}
        if not wrong.keys() & {"zero_stage", "strategy", "backend", "sharding", "offload"}:
            wrong.update(_zero_contradictions(self))
            wrong.update(deepspeed.contradictions(self, defaults))
            wrong.update(sharding_mistakes(self, defaults, wrong.keys()))
        wrong.update(pipeline_mistakes(self, defaults, wrong.keys()))
        wrong.update(compression_mistakes(self, defaults, wrong.keys()))
        wrong.update(synchronisation_mistakes(self, defaults, wrong.keys()))
        wrong.update(engine_mistakes(self, defaults, wrong.keys()))
        if "momentum" not in wrong and self.optimizer in ("adam", "adamw") and self.momentum >= 1:
            wrong["momentum"] = f"momentum = {self.momentum}: it is beta1 of {self.optimizer}, and must be below 1."
        if not wrong.keys() & {"strategy", "backend", "server_mode"}:
            wrong.update(server_mistakes(self, defaults, wrong.keys()))
        if "checkpoint_frequency" not in wrong and not _frequency_is_valid(self.checkpoint_frequency):
            wrong["checkpoint_frequency"] = (
                f"checkpoint_frequency = {self.checkpoint_frequency!r}: "
                "expected a number of epochs (10), or '500 steps'."
            )
        wrong.update(_adapter_mistakes(self, wrong.keys()))
        if "activation_checkpointing" not in wrong and _recompute(self.activation_checkpointing) is None:
            wrong["activation_checkpointing"] = _unknown_recompute(self.activation_checkpointing)
        urls = {name: url_problem(name, getattr(self, name)) for name in _FOLDERS if name not in wrong}
        wrong.update({name: text for name, text in urls.items() if text})
        if (
            "warmup" not in wrong
            and isinstance(self.warmup, float)
            and self.warmup >= 1
            and not self.warmup.is_integer()
        ):
            wrong["warmup"] = (
                f"warmup = {self.warmup}: a share of the run is below 1 (0.1), a number of steps is whole (500)."
            )
        return list(wrong.values())

    @property
    def total_ranks(self) -> int | None:
        """Ranks of the whole job as asked for, or None when the machine is to decide."""
        if self.num_workers is not None or self.num_gpus is not None:
            return self.num_workers or self.num_gpus
        if self.hosts is not None and self.gpus_per_node is None:
            return slots_of(self.hosts)
        return None if self.gpus_per_node is None else self.gpus_per_node * self.num_nodes

    @property
    def launcher(self) -> str:
        """Who starts the ranks."""
        return BACKENDS[self.backend][0]

    @property
    def resolved_strategy(self) -> str:
        """Who keeps the ranks in step."""
        if self.strategy != "auto":
            return self.strategy
        if self.backend == "tensorflow":
            return "mirrored" if (self.total_ranks or 1) == 1 else "multiworker"
        backends = BACKENDS[self.backend][1]
        if backends == "ddp" and self.deepspeed_config is not None:
            return "deepspeed"
        return "fsdp" if backends == "ddp" and self.zero_stage is not None else backends

    @property
    def resolved_server_mode(self) -> Literal["sync", "async", "bounded"]:
        """How parameter servers take steps."""
        if self.server_mode == "async":
            return "async"
        bounded = self.server_mode == "bounded" or (self.server_mode == "auto" and self.staleness is not None)
        return "bounded" if bounded else "sync"

    @property
    def resolved_sharding(self) -> str:
        """How fsdp shards."""
        if self.sharding != "auto":
            return self.sharding
        return "full" if self.zero_stage is None else ZERO_SHARDING[self.zero_stage]

    @property
    def checkpoint_every(self) -> tuple[int, str] | None:
        """Return (n, "epochs" | "steps"), or None when no periodic checkpoint is wanted."""
        if self.checkpoint_frequency is None:
            return None
        match = _FREQUENCY.match(str(self.checkpoint_frequency))
        assert match is not None, "checked when the config was built"
        return int(match[1]), "steps" if (match[2] or "").startswith("step") else "epochs"

    @property
    def recompute(self) -> Recompute | None:
        """What is recomputed in backward, or None when all activations are kept."""
        return None if self.activation_checkpointing is False else _recompute(self.activation_checkpointing)

    @property
    def unused(self) -> dict[str, str]:
        """Settings that the backend passes over, by name, each with what to write instead."""
        return unused_settings(self, {name: field.default for name, field in FIELDS.items()})

    @property
    def unused_note(self) -> str:
        """The same as the one line that a run begins with; empty where every setting is used."""
        return unused_note(self, {name: field.default for name, field in FIELDS.items()})

    def refuse_unused(self, given: Collection[str]) -> None:
        """Raise for settings given to this very backend that it would pass over."""
        refused = [text for name, text in self.unused.items() if name in given]
        if refused:
            raise ConfigError(refused)

    def replace(self, **changes: Any) -> DistributedConfig:
        """Return a copy with some values changed, checked anew."""
        return DistributedConfig(**{**self.to_dict(), **changes})

    def to_dict(self) -> dict[str, Any]:
        """Return the values by field name."""
        return {name: getattr(self, name) for name in FIELDS}


FIELDS: dict[str, dataclasses.Field[Any]] = {
    field.name: field for group in GROUPS for field in dataclasses.fields(group)
}
"""Every field by name, in the order of the groups."""


def split_pair(pair: Sequence[Any]) -> dict[str, Any]:
    """Read num_workers = (least, most) as the two settings that it means; anything else stays, to be refused."""
    return {"min_workers": pair[0], "num_workers": pair[1]} if len(pair) == 2 else {}


def translate_sharding(values: dict[str, Any]) -> dict[str, Any]:
    """Read torch's names of sharding strategies, as text or as members of its enum, in our words."""
    given = values.get("sharding")
    name = str(getattr(given, "name", given)).lstrip("_")  # torch's _HYBRID_SHARD_ZERO2
    if name == "NO_SHARD" and values.get("strategy", "auto") in ("auto", "fsdp", "ddp"):
        return {**values, "strategy": "ddp", "sharding": "auto"}
    return {**values, "sharding": TORCH_SHARDING[name]} if name in TORCH_SHARDING else values


def _plain(value: Any) -> Any:
    """Turn what means a path, a whole number or a number (pathlib, NumPy) into the plain thing."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return value
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def unknown_field(name: str) -> str:
    """Say that `name` is no setting, and which one was probably meant."""
    close = nearest(name.replace("-", "_"), FIELDS)
    guess = f" Did you mean '{close}'?" if close else " `phalanx config show` lists all of them."
    return f"unknown setting '{name}'.{guess}"


def _frequency_is_valid(value: int | str | None) -> bool:
    if value is None:
        return True
    match = _FREQUENCY.match(str(value))
    return match is not None and int(match[1]) > 0


def _adapter_mistakes(config: DistributedConfig, known: Collection[str]) -> dict[str, str]:
    """Check the settings of LoRA that are well-formed by themselves against each other."""
    wrong: dict[str, str] = {}
    for name in ("lora_alpha", "lora_dropout", "lora_targets"):
        if config.lora_rank is None and name not in known and getattr(config, name) != FIELDS[name].default:
            wrong[name] = f"{name} = {getattr(config, name)!r} without lora_rank: give the adapters a rank, such as 8."
    if "lora_dropout" not in known and config.lora_dropout >= 1:
        wrong["lora_dropout"] = f"lora_dropout = {config.lora_dropout}: must be below 1."
    if not {"lora_rank", "tensor_parallel"} & set(known) and config.lora_rank and config.tensor_parallel > 1:
        wrong["lora_rank"] = (
            f"lora_rank = {config.lora_rank} with tensor_parallel = {config.tensor_parallel}: adapters are not split "
            "over ranks. Use strategy = 'fsdp', which shards the frozen model."
        )
    return wrong


def _recompute(value: bool | str) -> Recompute | None:
    """Read activation_checkpointing; None for a word that means nothing."""
    if isinstance(value, bool) or value == "full":
        return Recompute()
    if value == "selective":
        return Recompute(selective=True)
    match = _EVERY.match(value)
    return Recompute(every=int(match[1])) if match is not None and int(match[1]) > 0 else None


def _unknown_recompute(value: bool | str) -> str:
    close = nearest(str(value), _RECOMPUTE_WORDS)
    guess = f" Did you mean {close!r}?" if close else ""
    return f"activation_checkpointing = {value!r}: not one of false, true, 'full', 'selective', 'every <n>'.{guess}"


def _rank_arithmetic(config: DistributedConfig) -> dict[str, str]:
    """Check num_workers, num_gpus, num_nodes, gpus_per_node and node_rank against each other."""
    wrong: dict[str, str] = {}
    workers, gpus, nodes, per_node = config.num_workers, config.num_gpus, config.num_nodes, config.gpus_per_node
    if workers is not None and gpus is not None and workers != gpus:
        wrong["num_workers"] = f"num_workers = {workers} and num_gpus = {gpus} name the same thing: give one of them."
    total = workers if workers is not None else gpus
    name = "num_workers" if workers is not None else "num_gpus"
    if total is not None and per_node is not None and total != nodes * per_node:
        wrong["gpus_per_node"] = (
            f"{name} = {total} is not num_nodes x gpus_per_node = {nodes} x {per_node} = {nodes * per_node}."
        )
    elif total is not None and total % nodes:
        wrong["num_nodes"] = f"{name} = {total} cannot be spread evenly over num_nodes = {nodes}."
    if config.node_rank is not None and config.node_rank >= nodes:
        wrong["node_rank"] = f"node_rank = {config.node_rank}: must be below num_nodes = {nodes}."
    return wrong


def _zero_contradictions(config: DistributedConfig) -> dict[str, str]:
    """Check zero_stage against the settings that say the same in other words."""
    stage = config.zero_stage
    if stage is None or config.resolved_strategy == "deepspeed":
        return {}
    if config.strategy == "ddp":
        return {
            "zero_stage": f"zero_stage = {stage} shards, but strategy = 'ddp' replicates: "
            "leave strategy out, or write 'fsdp'."
        }
    meant = ZERO_SHARDING[stage]
    if config.sharding not in ("auto", meant):
        return {
            "zero_stage": f"zero_stage = {stage} means sharding = {meant!r}, but sharding = {config.sharding!r} was "
            "given: leave one of them out."
        }
    return {}
