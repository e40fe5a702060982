"""Rules of Ray: none beyond those of all backends."""

from __future__ import annotations

from phalanx.config.rules import Rule

RULES: tuple[Rule, ...] = ()
