"""The one configuration: a field is the Python argument, the flag, the environment variable and the TOML key."""

from phalanx.config.distributed import FIELDS, DistributedConfig
from phalanx.config.groups import BACKENDS, GROUPS
from phalanx.config.option import parse_text
from phalanx.config.sources import Resolved, read_toml, resolve, write_toml

__all__ = [
    "BACKENDS",
    "FIELDS",
    "GROUPS",
    "DistributedConfig",
    "Resolved",
    "parse_text",
    "read_toml",
    "resolve",
    "write_toml",
]
