"""Run the code of the lectures, compare or write the output that they show, and make their notebooks.

    python build.py                  run all lectures and compare what they show
    python build.py 01 --write       run lecture 1 and put its output into the text
    python build.py --notebooks      write notebooks/*.ipynb from the lectures

A block with `<!-- run -->` above it is run (Python blocks of a lecture share their names; bash blocks run in the same
folder), one with `<!-- file: NAME -->` is written to that folder. `<!-- output -->` above a text block compares it with
what the last run printed; `<!-- output: lines 1-8 -->` with these lines of it; `<!-- output: form -->` compares
everything but the numbers, for what depends on the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MODULE = Path(__file__).resolve().parent
LECTURES = MODULE / "lecture-notes"
NOTEBOOKS = MODULE / "notebooks"
_BLOCK = re.compile(
    r"<!-- (?P<mark>run|file: \S+|output(?:: [\w -]+)?) -->\n```(?P<language>\w+)\n(?P<text>.*?)```\n", re.DOTALL
)
_NUMBER = re.compile(r"\d[\d,.]*")


@dataclass(frozen=True)
class Block:
    """A fenced block of a lecture with a mark above it."""

    mark: str
    language: str
    text: str
    start: int
    end: int


def blocks(source: str) -> list[Block]:
    """Return the marked blocks of a lecture."""
    return [
        Block(found["mark"], found["language"], found["text"], found.start("text"), found.end("text"))
        for found in _BLOCK.finditer(source)
    ]


class Runner:
    """Runs the blocks of one lecture in its own folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._names: dict[str, Any] = {"__name__": "__main__"}

    def run(self, block: Block) -> str:
        """Run a block and return what it printed."""
        printed = self._python(block.text) if block.language == "python" else self._bash(block.text)
        lines = printed.replace(str(self._folder), ".").splitlines()
        return "".join(f"{line.rstrip()}\n" for line in lines)

    def _python(self, text: str) -> str:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(text, "<lecture>", "exec"), self._names)
        return out.getvalue()

    def _bash(self, text: str) -> str:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        variables = {**os.environ, "PATH": path, "COLUMNS": "110", "NO_COLOR": "1", "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(
            ["bash", "-eo", "pipefail", "-c", text],
            cwd=self._folder,
            env=variables,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(f"exit code {done.returncode} of:\n{text}\n{done.stdout}{done.stderr}")
        return done.stdout


def expected(mark: str, printed: str) -> str:
    """Return the part of an output that a mark asks for."""
    lines = re.search(r"lines (\d+)-(\d+)", mark)
    if lines is None:
        return printed
    return "".join(printed.splitlines(keepends=True)[int(lines[1]) - 1 : int(lines[2])])


def built(path: Path) -> tuple[str, list[str]]:
    """Run a lecture; return its text with the output of now, and what differs from what it shows."""
    source = path.read_text()
    pieces, differences, at, printed = [], [], 0, ""
    here = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="lecture-") as name:
        runner = Runner(Path(name))
        os.chdir(name)
        try:
            for block in blocks(source):
                if block.mark.startswith("file: "):
                    Path(block.mark.removeprefix("file: ")).write_text(block.text)
                elif block.mark == "run":
                    printed = runner.run(block)
                else:
                    now = expected(block.mark, printed)
                    if not is_equal(block, now):
                        differences.append(_difference(path, source, block, now))
                    pieces += [source[at : block.start], now]
                    at = block.end
        finally:
            os.chdir(here)
    return "".join([*pieces, source[at:]]), differences


def is_equal(block: Block, now: str) -> bool:
    """Whether a lecture shows what was printed, or its form where only that is promised."""
    if block.mark == "output: form":
        return _form(block.text) == _form(now)
    return block.text == now


def _form(text: str) -> list[list[str]]:
    return [_NUMBER.sub("#", line).split() for line in text.splitlines()]


def _difference(path: Path, source: str, block: Block, now: str) -> str:
    line = source[: block.start].count("\n") + 1
    shown = difflib.unified_diff(block.text.splitlines(), now.splitlines(), "shown", "printed", lineterm="", n=1)
    return "\n".join([f"{path.name}:{line}", *shown])


def notebook(path: Path) -> dict[str, Any]:
    """Return a lecture as a notebook: text, code to run, files to write; outputs are left out."""
    source = path.read_text()
    cells, at = [], 0
    for found in _BLOCK.finditer(source):
        cells.append(_cell("markdown", source[at : found.start()]))
        at = found.end()
        text = found["text"]
        if found["mark"].startswith("file: "):
            cells.append(_cell("code", f"%%writefile {found['mark'].removeprefix('file: ')}\n{text}"))
        elif found["mark"] == "run":
            cells.append(_cell("code", text if found["language"] == "python" else f"%%bash\n{text}"))
    cells.append(_cell("markdown", source[at:]))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {
        "cells": [
            {**cell, "id": f"cell-{number}"} for number, cell in enumerate(cells) if "".join(cell["source"]).strip()
        ],
        "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def _cell(kind: str, text: str) -> dict[str, Any]:
    lines = text.strip("\n").splitlines(keepends=True)
    extra = {"execution_count": None, "outputs": []} if kind == "code" else {}
    return {"cell_type": kind, "metadata": {}, "source": lines, **extra}


def notebook_text(path: Path) -> str:
    """Return the file of a lecture's notebook."""
    return json.dumps(notebook(path), indent=1, ensure_ascii=False) + "\n"


def main() -> int:
    """Run, compare, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("lectures", nargs="*", help="numbers, such as 01 [all]")
    parser.add_argument("--write", action="store_true", help="put the output of now into the lectures")
    parser.add_argument("--notebooks", action="store_true", help="write the notebooks instead")
    words = parser.parse_args()
    wrong = 0
    for path in sorted(LECTURES.glob("*.md")):
        if words.lectures and not path.name.startswith(tuple(words.lectures)):
            continue
        if words.notebooks:
            (NOTEBOOKS / f"{path.stem}.ipynb").write_text(notebook_text(path))
            continue
        text, differences = built(path)
        if words.write:
            path.write_text(text)
        else:
            print("\n".join(differences) or f"{path.name}: as shown")
            wrong += len(differences)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
