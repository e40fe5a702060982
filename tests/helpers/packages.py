"""Packages that a file of tests needs, not imported while tests are collected, and packages that are missing."""

from __future__ import annotations

import importlib
import sys
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


def hide(monkeypatch: pytest.MonkeyPatch, name: str, *importers: str) -> None:
    """Let a package be missing during a test, and modules of ours that import it be imported anew.

    A module that is imported anew is also an attribute of its parent, and tests that replace `parent.module.name` would
    change the new one ever after: both are put back.
    """
    for loaded in [loaded for loaded in sys.modules if loaded.startswith(f"{name}.")]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, name, None)
    for importer in importers:
        parent, _, child = importer.rpartition(".")
        monkeypatch.delattr(importlib.import_module(parent), child, raising=False)
        monkeypatch.delitem(sys.modules, importer, raising=False)


class _OnFirstUse(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest looks for these in everything that a file of tests has
            raise AttributeError(name)
        return getattr(importlib.import_module(self.__name__), name)
