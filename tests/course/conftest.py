"""The course is on the path, and the process that starts the ranks of its graders lives as long as these tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "course"))

from grader.ranks import end_zygote, start_zygote


@pytest.fixture(scope="session", autouse=True)
def zygote():
    start_zygote()
    yield
    end_zygote()
