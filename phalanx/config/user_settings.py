"""What settings need when a user writes them: all rules, other spellings, merging.

Each name is imported when it is used. A rank gets settings that were checked, and uses none of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.lazy import lazy_names

if TYPE_CHECKING:
    from phalanx.config.aliases import merge, rename
    from phalanx.config.checking import check
    from phalanx.config.rules import engine_rules

__all__ = ["check", "engine_rules", "merge", "rename"]

_NAMES = {
    "phalanx.config.aliases": "merge rename",
    "phalanx.config.checking": "check",
    "phalanx.config.rules": "engine_rules",
}
__getattr__ = lazy_names(__name__, _NAMES)
