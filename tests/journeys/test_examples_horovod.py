"""The Horovod example, started by the command line, on two host names of this machine."""

from __future__ import annotations

import re

import pytest
from command import ROOT, finish, start

pytest.importorskip("horovod.torch", reason="Horovod is not built: run make horovod")

EXAMPLES = ROOT / "examples" / "06-horovod"


def test_the_example_trains_and_saves(tmp_path):
    words = ("train", "--script", EXAMPLES / "horovod_train.py", "--backend", "horovod", "--device", "cpu")
    own = ("--epochs", 2, "--compression", "fp16", "--save", "weights.safetensors")
    hosts = ("--hosts", "localhost:1,127.0.0.1:1")
    answer = finish(start(*words, *hosts, "--", *own, cwd=tmp_path, OMP_NUM_THREADS="1"), seconds=300)
    assert answer.code == 0, answer.text
    assert "2 ranks on cpu · horovod" in answer.text
    assert float(re.findall(r"accuracy ([\d.]+), the mean", answer.out)[-1]) > 0.7
    assert (tmp_path / "weights.safetensors").exists()
