"""Grade the templates of phase 4: `python test_phase4.py [EXERCISE ...]`, or pytest test_phase4.py."""

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
    metafunc.parametrize("exercise", names(PHASES[4 - 1]))


def test_exercise(exercise: str) -> None:
    """The answer in the template passes."""
    assert_passed(4, exercise)


if __name__ == "__main__":
    sys.exit(main(4))
