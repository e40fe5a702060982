"""Names of a package or module that are imported when first used, so that `import phalanx` never pays for torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package or module whose names are in others; a name may be a module itself.

    `modules`: the names in each module, separated by spaces; a module's name may be relative to the package (".find").
    """
    homes = {name: module for module, names in modules.items() for name in names.split()}

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        module = import_module(homes[name], package)
        is_module = homes[name].rpartition(".")[2] == name and not hasattr(module, name)
        value = module if is_module else getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    return load
