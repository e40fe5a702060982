"""`DistributedConfig`: all settings of a run, checked. Ranks, which get a checked one, import no rules with it."""

from __future__ import annotations

import os
from collections.abc import Container, Mapping
from typing import TYPE_CHECKING, Any, NoReturn, Unpack

from phalanx.config import user_settings
from phalanx.config.backends import BACKENDS
from phalanx.config.settings import FIELDS, Settings, add_engine
from phalanx.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from phalanx.config.arguments import AllSettings

RECORD_HEADER = "# The resolved settings of this run."
"""The beginning of the file that each run writes."""

_LEFT_OUT = (
    "checkpoint_dir", "checkpoint_frequency", "load_best_at_end", "max_restarts", "eval_every", "tensorboard", "mlflow",
    "wandb", "sinks", "metrics_port", "profile", "warmup",
)  # fmt: skip
"""Settings that a fast_dev_run has at their defaults."""


class DistributedConfig(Settings):
    """All settings of a run. Building one checks every value and reports all mistakes at once."""

    def __init__(self, **values: Unpack[AllSettings]) -> None:
        complete, mistakes = user_settings.check(values)
        if mistakes:
            raise ConfigError([message for _, message in mistakes])
        self.__dict__.update(complete)

    if not TYPE_CHECKING:  # else every attribute would be known to a type checker

        def __getattr__(self, name: str) -> NoReturn:
            """Raise for an unknown attribute; Python calls it for these alone."""
            problem = f"{type(self).__name__!r} object has no attribute {name!r}"
            raise AttributeError(f"{problem}: `phalanx config show` lists all settings", name=name, obj=self)

    @classmethod
    def trusted(cls, values: Mapping[str, Any]) -> DistributedConfig:
        """Return a config of values that were checked before, such as those that a rank gets from its parent."""
        add_engine(values["backend"])
        config = cls.__new__(cls)
        config.__dict__.update({name: values[name] for name in FIELDS})
        return config

    @property
    def unused(self) -> dict[str, str]:
        """Settings that the backend ignores, by name, each with what to write instead.

        A config that several backends share may hold them: the run warns at its start. As an argument or a flag to this
        backend they are refused.
        """
        if self.backend not in BACKENDS or not BACKENDS[self.backend].engine:
            return {}  # only the rules of engines name such settings
        engines = user_settings.engine_rules({"backend": self.backend})
        pairs_of_engines = [rules.unused(self) for rules in engines if hasattr(rules, "unused")]
        return dict(pair for pairs in pairs_of_engines for pair in pairs)

    @property
    def unused_note(self) -> str:
        """The warning about settings that the backend ignores; empty where every setting is used."""
        unused = self.unused
        values = ", ".join(f"{name} = {getattr(self, name)!r}" for name in unused)
        if not unused:
            return ""
        engines = [
            rules for rules in user_settings.engine_rules({"backend": self.backend}) if hasattr(rules, "instead")
        ]
        instead = "".join(rules.instead(self, unused) for rules in engines)
        return f"not used by backend = {self.backend!r}: {values}.{instead}"

    def refuse_unused(self, settings: Mapping[str, Any]) -> None:
        """Raise for settings given to this backend that it would ignore."""
        named = user_settings.rename(settings)[0]
        refused = [text for name, text in self.unused.items() if name in named]
        if refused:
            raise ConfigError(refused)

    def require_torch(self, user: str) -> None:
        """Raise if the backend trains models of another framework; `user` is what trains those of torch."""
        if self.framework != "torch":
            raise UsageError(
                f"backend = {self.backend!r} trains {self.framework} models, and {user} torch's",
                hint=f"Use {BACKENDS[self.backend].trainer}, or another backend.",
            )

    def replace(self, **changes: Unpack[AllSettings]) -> DistributedConfig:
        """Return a copy with some values changed, checked again."""
        renamed, mistakes = user_settings.rename(changes)
        if mistakes:
            raise ConfigError([message for _, message in mistakes])
        counted = {"num_workers": None} if {"num_gpus", "gpus_per_node"} & changes.keys() else {}
        return DistributedConfig(**user_settings.merge({**self.to_dict(), **counted}, renamed))

    @property
    def settled(self) -> DistributedConfig:
        """The config with what fast_dev_run means: a few steps, one evaluation, and nothing that stays."""
        tried = int(self.fast_dev_run)
        if not tried:
            return self
        given_folder = "PHALANX_RUN_DIR" in os.environ  # the process that made it removes it
        return self.with_trusted(
            **{name: FIELDS[name].default for name in _LEFT_OUT},
            run_dir=self.run_dir if given_folder else None,
            epochs=1,
            max_steps=tried,
            limit_val_batches=tried,
            sanity_val_batches=0,
            keep_best=False,
        )

    def with_trusted(self, **changes: Any) -> DistributedConfig:
        """Return a copy with values that the program itself computed (the device, a folder), without a new check."""
        return self.trusted({**self.to_dict(), **changes})


def write_toml(config: Settings, *, as_comments: Container[str] = ()) -> str:
    """Return the config as TOML that `--config` reads back; unset values and those in `as_comments` become comments."""
    lines = []
    for name, field in FIELDS.items():
        value = getattr(config, name)
        lines.append(f"# {field.metadata['help']}")
        if value is None and field.default is None:
            lines.append(f"# {name} = (unset)")
        else:
            lines.append(f"{'# ' if name in as_comments else ''}{name} = {toml_value(value)}")
    return "\n".join(lines) + "\n"


def toml_value(value: Any) -> str:
    """Return a value as TOML."""
    if value is None:
        return '"none"'
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        return f'"{escaped}"'
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(toml_value(item) for item in value)}]"
    return repr(value)
