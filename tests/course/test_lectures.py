"""Lectures show what their code prints, and their notebooks are made from them."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from long_proofs import long_proof
from wrong import COURSE

BUILD = COURSE / "module-202" / "build.py"
LECTURES = sorted((COURSE / "module-202" / "lecture-notes").glob("*.md"))
LEAST_WORDS = {"01": 5000, "02": 5000, "03": 4500, "04": 4500, "05": 4000, "06": 4500, "07": 5000}
NEEDS = {"03": ("horovod", "tensorflow", "mpirun")}
"""Packages and programs that the code of a lecture needs beside torch and Phalanx."""


@pytest.fixture(scope="module")
def build():
    spec = importlib.util.spec_from_file_location("build_lectures", BUILD)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.mark.parametrize("path", LECTURES, ids=lambda path: path.stem)
def test_a_notebook_is_made_from_its_lecture(path, build):
    file = build.NOTEBOOKS / f"{path.stem}.ipynb"
    assert file.read_text() == build.notebook_text(path)
    assert json.loads(file.read_text())["cells"]


@pytest.mark.parametrize("path", LECTURES, ids=lambda path: path.stem)
def test_a_lecture_has_its_parts(path, build):
    text = path.read_text()
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    assert len(prose.split()) >= LEAST_WORDS[path.name[:2]]
    for part in ("Troubleshooting", "Exercises", "Summary", "Further reading"):
        assert re.search(rf"^## \d+\. {part}", text, re.MULTILINE), part
    shown = [block for block in build.blocks(text) if block.mark.startswith("output")]
    assert len(shown) >= 8
    assert all(block.text.strip() for block in shown)
    assert ".svg)" in text


@long_proof
@pytest.mark.parametrize("path", LECTURES, ids=lambda path: path.stem)
def test_a_lecture_shows_what_its_code_prints(path):
    for name in NEEDS.get(path.name[:2], ()):
        if importlib.util.find_spec(name) is None and shutil.which(name) is None:
            pytest.skip(f"{name}, which this lecture uses, is not installed")
    done = subprocess.run([sys.executable, BUILD, path.name[:2]], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr


# In a process of its own: the client's threads and the kernel's files outlive a test.
EXECUTE = """
import sys, nbclient, nbformat
notebook = nbformat.read(sys.argv[1], as_version=4)
nbclient.NotebookClient(notebook, timeout=400).execute()
assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code")
"""


@long_proof
@pytest.mark.parametrize("path", LECTURES, ids=lambda path: path.stem)
def test_a_notebook_runs_in_a_kernel(path, build, tmp_path):
    pytest.importorskip("nbclient")
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    command = [sys.executable, "-c", EXECUTE, build.NOTEBOOKS / f"{path.stem}.ipynb"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
