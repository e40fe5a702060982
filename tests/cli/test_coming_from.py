"""The page "Coming from another library": each version of the training runs and learns, and our words exist."""

from __future__ import annotations

import inspect
import re
import runpy
import textwrap

import pytest
from command import ROOT, finish, phalanx, start
from long_proofs import long_proof

from phalanx.config.renamed import NAMES
from phalanx.trainers.torch import TorchTrainer

PAGE = (ROOT / "docs" / "coming-from.md").read_text()
_BLOCK = re.compile(r'^( *)```python title="([^"]+)"\n(.*?)^\1```$', re.MULTILINE | re.DOTALL)
UNDER_LAUNCHER = {
    "with_torchrun.py": "torch",
    "with_accelerate.py": "accelerate",
    "with_lightning.py": "lightning",
    "with_hf_trainer.py": "transformers",
    "phalanx_loop.py": "torch",
}
"""Scripts that are ranks themselves, and the library that each needs."""


def scripts() -> dict[str, str]:
    """Every script of the page by its file name; the same name is the same script."""
    found: dict[str, str] = {}
    for _, name, text in _BLOCK.findall(PAGE):
        script = textwrap.dedent(text)
        assert found.setdefault(name, script) == script, f"{name} differs between sections"
    return found


@pytest.fixture
def folder(tmp_path, monkeypatch, fork_server):
    """The working folder, with all the scripts."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PHALANX_DEVICE", "cpu")
    for name, text in scripts().items():
        (tmp_path / name).write_text(text)
    return tmp_path


def learned(output: str) -> None:
    """Check the accuracy that a script printed: once, and far from chance."""
    printed = re.findall(r"^(?:\[.*>:)?accuracy (\d\.\d+)$", output, re.MULTILINE)
    assert len(printed) == 1, output
    assert float(printed[0]) > 0.8


def test_the_page_has_every_script():
    assert scripts().keys() == {*UNDER_LAUNCHER, "parts.py", "with_horovod_loop.py", "phalanx_trainer.py"}


@pytest.mark.parametrize("name", UNDER_LAUNCHER)
def test_the_loop_runs_and_learns(name, folder):
    pytest.importorskip(UNDER_LAUNCHER[name], reason="pip install 'phalanx[bench]'")
    answer = phalanx("train", "--script", name, "--num-workers", 2, "-q")
    assert answer.code == 0, answer.text
    learned(answer.out)
    assert (folder / "model.pt").exists()


@long_proof
def test_the_horovod_loop_runs_and_learns(folder):
    pytest.importorskip("horovod.torch", reason="Horovod is not built: run make horovod")
    words = ("train", "--script", "with_horovod_loop.py", "--backend", "horovod", "--num-workers", 2, "-q")
    answer = finish(start(*words, cwd=folder))
    assert answer.code == 0, answer.text
    learned(answer.out)


def test_the_trainer_runs_and_learns(folder, capfd, monkeypatch):
    monkeypatch.syspath_prepend(folder)
    runpy.run_path("phalanx_trainer.py", run_name="__main__")
    learned(capfd.readouterr().out)


def test_the_words_on_our_side_exist():
    rows = PAGE.partition("## Words")[2].partition("\n## ")[0].splitlines()
    ours = [name for row in rows if row.startswith("|") for name in re.findall(r"`(\w+)=", row.rpartition(" | ")[2])]
    assert len(ours) > 30
    arguments = inspect.signature(TorchTrainer.__init__).parameters
    assert not [name for name in ours if name not in NAMES and name not in arguments]
