"""Public names of a package that are imported when first used, so that `import phalanx` never pays for torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package whose names are in other modules; a name may be a module itself."""

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        module = import_module(homes[name])
        is_module = homes[name].endswith(f".{name}") and not hasattr(module, name)  # `phalanx.lora` is a function
        value = module if is_module else getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    return load
