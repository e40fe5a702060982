"""What the core asks of tools: functions by name, imported when they are called. The core never imports a tool.

A tool is a package in `phalanx/tools/`. This table is the only place where the core names one.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

TOOLS = {
    "choose-strategy": "phalanx.tools.plan.auto:choose_strategy",
    "step-profile": "phalanx.tools.profile.record:StepProfile",
    "verify-rank": "phalanx.tools.verify.rank:run_request",
}


def tool(name: str) -> Any:
    """Return the function of a tool."""
    module, _, function = TOOLS[name].partition(":")
    return getattr(import_module(module), function)
