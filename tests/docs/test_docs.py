"""The documentation is true: its Python runs, its console sessions and flags are the program's."""

from __future__ import annotations

import re
import runpy
import shlex
from pathlib import Path

import pytest
from command import ROOT, finish, phalanx, start

from phalanx.cli.config import parser as config_parser
from phalanx.cli.parsers import PARSERS
from phalanx.cli.plan import parser as plan_parser
from phalanx.cli.strategies import parser as strategies_parser
from phalanx.config.aliases import NAMES

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
_BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
_OWN_FLAGS = {
    "--script",
    "--module",
    "--config",
    "--toml",
    "--help",
    "--preset",
    "--resume",
    "--reshard",
    "--json",
    "--changed",
}
_UNDER_LAUNCHER = {
    "raw_ddp.py",
    "own_loop.py",
    "resumable_loop.py",
    "gan.py",
    "pipeline_loop.py",
    "plain_ddp.py",
    "shared.py",
}
"""Scripts that are ranks themselves; the others start their ranks."""
_RUN_ELSEWHERE = {"quickstart.py", "phalanx_loop.py", "phalanx_trainer.py"}
"""The first below, with more checks; the others, which are files of `examples/`, in test_coming_from.py."""
_NEEDS = {"with_horovod.py": ("horovod.torch", "Horovod is not built: run make horovod")}
"""What a script imports that is not always installed, and why it is skipped then."""


def blocks(page: Path, language: str) -> list[tuple[str, str]]:
    """Return (title, text) of a page's fenced blocks in a language."""
    return [(title, text) for kind, title, text in _BLOCK.findall(page.read_text()) if kind == language]


def titled_scripts() -> dict[str, str]:
    """Every Python block with a file name; a name that occurs twice must be the same script."""
    scripts: dict[str, str] = {}
    for page in PAGES:
        for title, text in blocks(page, "python"):
            if title:
                assert scripts.setdefault(title, text) == text, f"{title} differs between pages ({page})"
    return scripts


def sessions() -> list[tuple[str, str]]:
    """Every `$ command` and the output that a page shows for it."""
    found = [text.partition("\n") for page in PAGES for _, text in blocks(page, "console")]
    return [(command.removeprefix("$ "), output) for command, _, output in found]


@pytest.fixture
def folder(tmp_path, monkeypatch, fork_server):
    """A folder of its own, and CPU ranks even where there are GPUs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PHALANX_DEVICE", "cpu")
    return tmp_path


@pytest.mark.parametrize("name", sorted(titled_scripts().keys() - _RUN_ELSEWHERE))
def test_the_script_runs(name, folder, capfd):
    if name in _NEEDS:
        package, reason = _NEEDS[name]
        pytest.importorskip(package, reason=reason)
    script = folder / name
    script.write_text(titled_scripts()[name])
    if name in _UNDER_LAUNCHER:
        answer = phalanx("train", "--script", script, "--num-workers", 2)
        assert answer.code == 0, answer.text
        assert answer.out.strip(), "every example prints what it shows"
        return
    runpy.run_path(str(script), run_name="__main__")
    assert capfd.readouterr().out.strip(), "every example prints what it shows"


def test_the_quick_start_is_short_and_learns(folder, capfd):
    source = titled_scripts()["quickstart.py"]
    lines = [line for line in source.splitlines() if line.strip()]
    assert len(lines) < 20
    (folder / "quickstart.py").write_text(source)
    names = runpy.run_path(str(folder / "quickstart.py"), run_name="__main__")
    assert names["history"].best_accuracy > 0.85
    assert names["trainer"].evaluate(names["val_loader"])["accuracy"] > 0.85


@pytest.mark.parametrize(("command", "expected"), sessions())
def test_the_console_session_is_what_the_program_says(command, expected, folder):
    program, *words = shlex.split(command)
    assert program == "phalanx"
    answer = phalanx(*words)
    shown = answer.text.replace(f"\n  Looked in {folder}.", "")
    assert shown.strip() == expected.strip()


def test_every_flag_that_the_docs_use_exists():
    parsers = [make() for make in (*PARSERS.values(), config_parser, plan_parser, strategies_parser)]
    of_verbs = {flag for parser in parsers for action in parser._actions for flag in action.option_strings}
    known = _OWN_FLAGS | of_verbs | {f"--{no}{name.replace('_', '-')}" for name in NAMES for no in ("", "no-")}
    for page in PAGES:
        for _, text in blocks(page, "bash"):
            for command in re.findall(
                r"phalanx (?:train|tune|verify|plan|config show)([^#|>&\n]*)", text.replace("\\\n", " ")
            ):
                ours = command.partition(" -- ")[0]
                unknown = set(re.findall(r"(?<!\S)--[a-z][a-z-]*", ours)) - known
                assert not unknown, f"{page.name}: phalanx {command}"
    inline = set(re.findall(r"(?<=[` ])--[a-z][a-z-]+", (DOCS / "how-to.md").read_text()))
    assert inline - known == {"--some-name"}


def test_a_loop_of_ones_own_saves_on_sigterm_and_resumes(folder):
    (folder / "loop.py").write_text(titled_scripts()["resumable_loop.py"])
    words = ("train", "--script", "loop.py", "--num-workers", 2, "--")
    process = start(*words, 1000, cwd=folder, PHALANX_DEVICE="cpu")
    assert process.stdout is not None
    while "1 of 1000" not in process.stdout.readline():
        assert process.poll() is None
    process.terminate()
    assert finish(process).code == 75
    answer = phalanx(*words, 1)
    assert answer.code == 0, answer.text
    assert int(answer.out.rsplit("step ")[-1]) > 20
