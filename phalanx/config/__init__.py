"""The configuration of a run: a field is a Python argument, a flag, an environment variable and a TOML key.

fields, run_fields, engines/<name>/declaration.py (all settings) -> settings (`Settings`: values and what follows from
them) -> pairs (a table), rules, backend_rules (each yields a field and a message; engines bring theirs) -> checking
(`check`: all rules in order) -> distributed (`DistributedConfig`: checked settings) -> sources (files, variables,
arguments). A rank loads no rules.
"""

from typing import TYPE_CHECKING

from phalanx.config.backends import BACKENDS
from phalanx.config.distributed import DistributedConfig, write_toml
from phalanx.config.option import parse_text
from phalanx.config.settings import FIELDS, GROUPS
from phalanx.lazy import lazy_names

if TYPE_CHECKING:
    from phalanx.config.aliases import given_names
    from phalanx.config.sources import ResolvedConfig, read_settings, resolve

__all__ = [
    "BACKENDS",
    "FIELDS",
    "GROUPS",
    "DistributedConfig",
    "ResolvedConfig",
    "given_names",
    "parse_text",
    "read_settings",
    "resolve",
    "write_toml",
]

__getattr__ = lazy_names(__name__, {".aliases": "given_names", ".sources": "ResolvedConfig read_settings resolve"})
