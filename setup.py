"""What pyproject.toml cannot say: the course, which is a folder beside the package, becomes a part of it in a wheel."""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

COURSE = Path(__file__).parent / "course"


class BuildWithCourse(build_py):
    """Copy the course to `phalanx/_course`, where `phalanx learn` finds it; an editable install reads it in place."""

    def run(self) -> None:
        """Build the package, then copy."""
        super().run()
        if not self.editable_mode:
            ignored = shutil.ignore_patterns("__pycache__", ".course-progress.json", ".ruff_cache")
            shutil.copytree(COURSE, Path(self.build_lib) / "phalanx" / "_course", ignore=ignored, dirs_exist_ok=True)


setup(cmdclass={"build_py": BuildWithCourse})
