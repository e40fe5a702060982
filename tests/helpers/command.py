"""Run the command line as a user does: in this process on the warm ranks, or as a program of its own."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import programs
import psutil

from phalanx.cli import main

ROOT = Path(__file__).resolve().parents[2]
COMMAND = (sys.executable, "-m", "phalanx.cli")
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_", "OMPI_", "PMI_", "PHALANX_", "TORCHELASTIC_")


@dataclass(frozen=True)
class Answer:
    """What a command said and how it left."""

    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        return self.out + self.err


def phalanx(*words: object) -> Answer:
    """Run a command here; the ranks come from the tests' own fork server."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main([str(word) for word in words])
        except SystemExit as leaving:  # --help
            code = int(leaving.code or 0)
    return Answer(code, out.getvalue(), err.getvalue())


def completions(line: str) -> list[str]:
    """Return what argcomplete offers for a line; a real shell asks in test_help_and_completion."""
    from argcomplete import CompletionFinder
    from argcomplete.lexers import split_line

    from phalanx.cli.completion import parser_for

    finder = CompletionFinder(parser_for(line.split()[1:]), always_complete_options=False)
    quote, prefix, _, words, last_break = split_line(line)
    return [word.rstrip() for word in finder._get_completions(words, prefix, quote, last_break)]


def clean_environment(**added: str) -> dict[str, str]:
    """This process's environment without what a launcher would have put there."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(RANK_VARIABLES)}
    return {**kept, "PYTHONPATH": str(ROOT), **added}


def start(*words: object, cwd: Path, fresh: bool = False, **environment: str) -> subprocess.Popen[str]:
    """Start `python -m phalanx.cli` with the words, in a process group of its own.

    `fresh`: in an interpreter of its own, whose stacks begin with the launcher, for tests of stacks.
    """
    return (subprocess.Popen if fresh else programs.Popen)(
        [*COMMAND, *map(str, words)],
        cwd=cwd,
        env=clean_environment(**environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], seconds: float = 300) -> Answer:
    """Wait for a program and return what it said; one that does not end is killed with all it started."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        end(process)
        out, err = process.communicate()
        raise AssertionError(f"not over after {seconds} s\n{out}\n{err}") from None
    return Answer(process.returncode, out, err or "")  # none where it goes with the output


def end(process: subprocess.Popen[str]) -> None:
    """Kill a program and everything it started, itself first: it must not answer the end of a rank."""
    with contextlib.suppress(psutil.NoSuchProcess):
        family = psutil.Process(process.pid)
        for member in [family, *family.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()


def write_script(path: Path, source: str) -> Path:
    """Write a script given as indented text."""
    path.write_text(textwrap.dedent(source))
    return path


def files_under(directory: Path) -> set[str]:
    """Every file below a directory."""
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}


def install_package(site: Path, modules: dict[str, str], entry_points: str) -> dict[str, str]:
    """Install a package of these modules into a separate folder; return the environment in which Python finds it."""
    info = site / "outside-1.0.dist-info"
    info.mkdir(parents=True)
    for name, text in modules.items():
        (site / f"{name}.py").write_text(text)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entry_points)
    path = os.pathsep.join(part for part in (str(site), os.environ.get("PYTHONPATH")) if part)
    return {**clean_environment(), "PYTHONPATH": path}


@contextlib.contextmanager
def installed_package(site: Path, modules: dict[str, str], entry_points: str) -> Iterator[dict[str, str]]:
    """Install a package, and have this process and its ranks find it too."""
    environment = install_package(site, modules, entry_points)
    sys.path.insert(0, str(site))
    importlib.invalidate_caches()
    try:
        yield environment
    finally:
        sys.path.remove(str(site))
        for name in modules:
            sys.modules.pop(name, None)
