"""Packages that a file of tests needs, not imported while tests are collected: each worker collects all of them."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest


def require(name: str, reason: str | None = None) -> None:
    """Skip the file if a package is not installed."""
    if find_spec(name) is None:
        pytest.skip(reason or f"{name} is not installed", allow_module_level=True)


def on_first_use(name: str) -> ModuleType:
    """Return a package that is imported when a test reads a name of it; skip the file if it is not installed."""
    require(name)
    return _OnFirstUse(name)


class _OnFirstUse(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest looks for these in everything that a file of tests has
            raise AttributeError(name)
        return getattr(importlib.import_module(self.__name__), name)
