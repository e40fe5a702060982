"""Every test is found: by pytest, and by a reader who knows the room of what it tests."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from package_tree import PACKAGE

TESTS = Path(__file__).resolve().parents[1]
KINDS = {"benchmarks", "course", "docs", "faults", "gpu", "journeys", "parity", "shape", "simulation"}
"""Folders of tests that belong to no single room."""


def _files() -> list[Path]:
    return sorted(TESTS.rglob("test_*.py"))


def test_pytest_looks_into_every_folder(pytestconfig: pytest.Config):
    """It skips folders with usual names of build outputs, such as dist, without a word."""
    skipped = pytestconfig.getini("norecursedirs")
    folders = {folder for path in _files() for folder in path.relative_to(TESTS).parents if folder.name}
    assert not [str(folder) for folder in folders for pattern in skipped if Path(folder.name).match(pattern)]


def test_a_file_of_tests_has_a_name_of_its_own():
    names = Counter(path.name for path in _files())
    assert not [name for name, count in names.items() if count > 1], "pytest imports by the name alone"


def test_tests_stand_in_rooms_of_the_package():
    rooms = {path.parent.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py")}
    folders = {path.parent.relative_to(TESTS) for path in _files()}
    assert not [str(folder) for folder in folders - rooms if folder.parts[0] not in KINDS]
