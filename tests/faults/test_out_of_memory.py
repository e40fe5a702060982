"""Memory that runs out: the rank's own exception, and the kernel's kill in a control group."""

from __future__ import annotations

import os
from pathlib import Path

import programs
import pytest
from command import COMMAND, clean_environment, write_script

SCRIPT = """
import resource
import torch
from torch import nn
from torch.utils.data import TensorDataset
from phalanx import PyTorchDDPTrainer

kept = []

class Layer(nn.Linear):
    def forward(self, x):
        {wrong}
        return super().forward(x)

model = nn.Sequential(nn.Linear(8, 8), Layer(8, 1))
data = TensorDataset(torch.randn(4000, 8), torch.randn(4000, 1))
PyTorchDDPTrainer(model, loss_fn=nn.functional.mse_loss, batch_size=8, device="cpu", run_dir="run").fit(data)
"""
REFUSED = "torch.empty(2 ** 36) if resource.setrlimit(resource.RLIMIT_AS, (2**34, 2**34)) is None else 0"
LEAK = "kept.append(torch.ones(8 << 20))"
GROUPS = Path("/sys/fs/cgroup")


def train(folder: Path, wrong: str, group: Path | None = None) -> str:
    path = write_script(folder / "train.py", SCRIPT.format(wrong=wrong))
    enter = (lambda: (group / "cgroup.procs").write_text(str(os.getpid()))) if group else None
    # A fork server of its own, which is in the group as well.
    env = clean_environment(TMPDIR=str(folder), XDG_RUNTIME_DIR=str(folder))
    words = [*COMMAND, "train", "--script", str(path), "--num-workers", "2"]
    done = programs.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=240, check=False,
                          preexec_fn=enter)  # fmt: skip
    assert done.returncode not in (0, 2), done.stdout + done.stderr
    return done.stdout + done.stderr


def test_a_refused_allocation_names_module_line_and_what_to_change(tmp_path):
    text = train(tmp_path, REFUSED)
    assert "out of memory in forward of 1 (Layer), train.py:12: 275 GB more were asked for" in text
    for part in ("parameters ", "optimizer states", "activations", "batch_size=4, gradient_accumulation_steps=2"):
        assert part in text


@pytest.fixture
def group():
    """A control group that allows 1.2 GB."""
    old = (GROUPS / "memory").is_dir()
    folder = (GROUPS / "memory" if old else GROUPS) / f"phalanx-test-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / ("memory.limit_in_bytes" if old else "memory.max")).write_text(str(1_200_000_000))
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    yield folder
    folder.rmdir()


def test_a_rank_that_the_kernel_killed_leaves_its_bill_and_what_grew(tmp_path, group):
    text = train(tmp_path, LEAK, group)
    assert "was killed by the kernel because memory ran out (SIGKILL)" in text
    assert "of 1.2 GB, shared by 2 ranks" in text
    assert "memory that is held between steps grew from" in text
    assert "num_workers=1" in text
