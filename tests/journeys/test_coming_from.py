"""The page "Coming from another library": each version of the training runs and learns, and our words exist."""

from __future__ import annotations

import inspect
import re
import runpy
import shutil

import pytest
from command import ROOT, finish, phalanx, start
from long_proofs import long_proof

from phalanx.config.aliases import NAMES
from phalanx.run.trainer import TorchTrainer

PAGE = (ROOT / "docs" / "coming-from.md").read_text()
FOLDER = ROOT / "examples" / "11-coming-from"
UNDER_LAUNCHER = {
    "with_torchrun.py": "torch",
    "with_accelerate.py": "accelerate",
    "with_lightning.py": "lightning",
    "with_hf_trainer.py": "transformers",
    "phalanx_loop.py": "torch",
}
"""Scripts that are ranks themselves, and the library that each needs."""


@pytest.fixture
def folder(tmp_path, monkeypatch, fork_server):
    """The working folder, with all the scripts."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PHALANX_DEVICE", "cpu")
    for script in FOLDER.glob("*.py"):
        shutil.copy(script, tmp_path)
    return tmp_path


def learned(output: str) -> None:
    """Check the accuracy that a script printed: once, and far from chance."""
    printed = re.findall(r"^(?:\[.*>:)?accuracy (\d\.\d+)$", output, re.MULTILINE)
    assert len(printed) == 1, output
    assert float(printed[0]) > 0.8


@pytest.mark.parametrize("name", ["phalanx_loop.py", "phalanx_trainer.py"])
def test_the_page_shows_the_file(name):
    shown = re.search(rf'^```python title="{name}"\n(.*?)^```$', PAGE, re.MULTILINE | re.DOTALL)
    assert (FOLDER / name).read_text().endswith(shown[1])


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=long_proof if name == "with_lightning.py" else ()) for name in UNDER_LAUNCHER]
)
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
    rows = PAGE.partition("## Settings side by side")[2].partition("\n## ")[0].splitlines()
    ours = [name for row in rows if row.startswith("|") for name in re.findall(r"`(\w+)=", row.rpartition(" | ")[2])]
    assert len(ours) > 30
    arguments = inspect.signature(TorchTrainer.__init__).parameters
    assert not [name for name in ours if name not in NAMES and name not in arguments]
