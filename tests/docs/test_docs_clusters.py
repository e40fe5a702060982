"""Commands on the pages about clusters: sound for the shell, and with flags and targets that exist. None is run."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
from command import ROOT

from phalanx.cli.parsers import train_parser
from phalanx.cli.submit import submit_parser
from phalanx.tools.submit.target import TARGETS, target_class

PAGES = sorted((ROOT / "docs/clusters").glob("*.md"))
_BLOCK = re.compile(r"^```(bash|yaml)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SUBMIT = re.compile(r"phalanx submit (\w+)([^#|&;\n]*)")


def blocks(page: Path, language: str) -> list[str]:
    return [text for kind, text in _BLOCK.findall(page.read_text()) if kind == language]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_are_sound_for_the_shell(page):
    for text in blocks(page, "bash"):
        assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0, text
        if shutil.which("shellcheck"):
            # Variables are the reader's, and files of a cloud's own are not here.
            command = ["shellcheck", "--shell=bash", "--exclude=SC2154,SC1091,SC2215", "-"]
            said = subprocess.run(command, input=text, text=True, capture_output=True)
            assert said.returncode == 0, said.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_submit_commands_have_flags_that_exist(page):
    for text in blocks(page, "bash"):
        for target, words in _SUBMIT.findall(text.replace("\\\n", " ")):
            assert target in TARGETS
            if find_spec(TARGETS[target][0].partition(":")[0]) is None:
                continue
            rest = submit_parser(target, target_class(target).options_class).parse_known_args(
                shlex.split(words.partition(" > ")[0])
            )[1]
            assert not train_parser().parse_known_args(rest)[1], f"{page.name}: phalanx submit {target}{words}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_yaml_is_valid(page):
    yaml = pytest.importorskip("yaml")
    for text in blocks(page, "yaml"):
        assert isinstance(yaml.safe_load(text), dict)


def test_cloud_pages_say_that_nothing_was_run():
    for text in (ROOT / "docs/clusters/clouds.md").read_text().split("\n## ")[1:]:
        assert "None of these commands has been run" in text
        used = set(re.findall(r"--?nccl-env[ =]?`?([a-z-]+)", text)) | set(
            re.findall(r"phalanx doctor --nccl-env ([a-z-]+)", text)
        )
        assert used <= {"ethernet", "gcp", "aws-efa", "infiniband"}
