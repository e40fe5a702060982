"""Grade the templates of phase 2: `python test_phase2.py [EXERCISE ...]`, or pytest test_phase2.py."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from grader.catalog import PHASES
from grader.progress import names
from grader.report import assert_passed, main


def pytest_generate_tests(metafunc: Any) -> None:
    """One test per exercise; pytest itself is not needed to run this file."""
    metafunc.parametrize("exercise", names(PHASES[2 - 1]))


def test_exercise(exercise: str) -> None:
    """The answer in the template passes."""
    assert_passed(2, exercise)


if __name__ == "__main__":
    sys.exit(main(2))
