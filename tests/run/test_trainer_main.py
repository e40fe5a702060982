"""Where a trainer is called from: a script without a main guard, standard input, a prompt, a rank that runs already."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import programs
import pytest
from command import clean_environment, phalanx, write_script
from waiting import LIMIT_SECONDS

if TYPE_CHECKING:
    from pathlib import Path

SOURCE = """
import torch
from torch import nn
from torch.utils.data import Dataset
from phalanx import PyTorchDDPTrainer

class Pairs(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, place):
        return torch.full((2,), float(place)), place % 2

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x):
        return self.layer(x)

def loss(output, target):
    return nn.functional.cross_entropy(output, target)

torch.manual_seed(0)
net = Net()
before = net.layer.weight.clone()
history = PyTorchDDPTrainer(net, num_workers=2, device="cpu", batch_size=4, loss_fn=loss, progress=False).fit(Pairs())
print("moved", not torch.equal(net.layer.weight, before), "status", history.status)
"""


def python(*words: str, cwd: Path, given: str | None = None) -> subprocess.CompletedProcess[str]:
    return programs.run(
        [sys.executable, *words],
        cwd=cwd,
        env=clean_environment(),
        input=given,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_a_script_without_a_main_guard_trains_what_it_defines(tmp_path):
    write_script(tmp_path / "mine.py", SOURCE)
    done = python("mine.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["moved True status finished"]


def test_standard_input_trains_what_it_defines(tmp_path):
    done = python("-", cwd=tmp_path, given=SOURCE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["moved True status finished"]


def test_a_prompt_trains_what_was_typed(tmp_path):
    """A real terminal, so that Python is interactive: what is typed has no file that ranks could import."""
    leader, follower = pty.openpty()
    process = programs.Popen(
        [sys.executable, "-q"],
        cwd=tmp_path,
        env=clean_environment(TERM="dumb"),
        stdin=follower,
        stdout=follower,
        stderr=follower,
        start_new_session=True,
    )
    os.close(follower)
    try:
        os.write(leader, (SOURCE.replace("\n\n    ", "\n    ") + "\nexit()\n").encode())
        shown = _read_terminal(leader, process, seconds=LIMIT_SECONDS)
        assert process.wait(LIMIT_SECONDS) == 0, shown
        assert "moved True status finished" in shown, shown
    finally:
        process.kill()
        process.wait()
        os.close(leader)


def _read_terminal(leader: int, process: subprocess.Popen[bytes], seconds: float) -> str:
    shown, deadline = b"", time.monotonic() + seconds
    while time.monotonic() < deadline:
        if select.select([leader], [], [], 0.2)[0]:
            try:
                piece = os.read(leader, 4096)
            except OSError:  # the terminal's other end has closed
                break
            shown += piece
        elif process.poll() is not None:
            break
    return shown.decode(errors="replace")


JOINING = """
import json, os, sys
import torch
from torch import nn
from torch.utils.data import TensorDataset
from phalanx import PyTorchDDPTrainer

torch.manual_seed(0)
x = torch.randn(18, 4)
data = TensorDataset(x, (x.sum(1) > 0).long())
model = nn.Linear(4, 2)
trainer = PyTorchDDPTrainer(model, learning_rate=0.25)
history = trainer.fit(data)
measured = trainer.evaluate(data)
predicted = trainer.predict(data)
again = trainer.fit(data, epochs=1)
trainer.save("weights.pt")
if os.environ["RANK"] == "0":
    found = {
        "config": [getattr(trainer.config, name) for name in ("batch_size", "epochs", "learning_rate", "optimizer")],
        "steps": history.steps[-1]["step"],
        "accuracy": measured["accuracy"],
        "predicted": (predicted.argmax(1) == data.tensors[1]).double().mean().item(),
        "again": again.steps[-1]["step"],
        "script": sys.argv[1:],
    }
    print(json.dumps(found))
"""


@pytest.fixture
def joining(tmp_path, monkeypatch, fork_server):
    monkeypatch.chdir(tmp_path)
    return write_script(tmp_path / "train.py", JOINING)


def test_inside_a_started_rank_a_trainer_joins_and_flags_reach_it(joining, tmp_path):
    """Fit, evaluate, predict and fit again in the same ranks; the script's own argument wins over the flag."""
    answer = phalanx(
        *("train", "--script", joining, "--num-workers", 2, "--device", "cpu", "--no-progress"),
        *("--epochs", 3, "--batch-size", 3, "--learning-rate", "0.5", "--optimizer", "sgd", "--", "own", "--words"),
    )
    assert answer.code == 0, answer.text
    found = json.loads(answer.out.splitlines()[-1])
    assert found["config"] == [3, 3, 0.25, "sgd"]
    assert found["steps"] == 9
    assert found["again"] == 3
    assert found["accuracy"] == pytest.approx(found["predicted"])
    assert found["script"] == ["own", "--words"]
    assert (tmp_path / "weights.pt").is_file()


def test_a_module_runs_like_a_script(joining, tmp_path):
    answer = phalanx(
        *("train", "-m", "train", "--num-workers", 2, "--device", "cpu", "--no-progress"),
        *("--epochs", 1, "--batch-size", 9),
    )
    assert answer.code == 0, answer.text
    assert json.loads(answer.out.splitlines()[-1])["steps"] == 1


def test_a_second_fit_under_the_command_line_has_a_separate_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = write_script(
        tmp_path / "train.py",
        """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from phalanx import PyTorchDDPTrainer
data = TensorDataset(torch.randn(8, 4), torch.arange(8) % 2)
for width in (2, 3):
    PyTorchDDPTrainer(nn.Linear(4, width), batch_size=4, max_steps=1, checkpoint_frequency=1).fit(data)
""",
    )
    answer = phalanx("train", "--script", script, "--num-workers", 2, "--device", "cpu", "--run-dir", "run")
    assert answer.code == 0, answer.text
    for folder in (tmp_path / "run", tmp_path / "run" / "fit-2"):
        assert (folder / "events.jsonl").read_text().count('"event":"run_started"') == 1
        assert len(list((folder / "checkpoints").glob("step-*"))) == 1


def test_a_refused_evaluation_leaves_no_log_folder(tmp_path, monkeypatch, fork_server):
    import tempfile
    from pathlib import Path

    from torch import nn

    from phalanx import PyTorchDDPTrainer
    from phalanx.errors import PhalanxError

    monkeypatch.chdir(tmp_path)
    before = set(Path(tempfile.gettempdir()).glob("phalanx-*"))  # of refused runs of other tests
    with pytest.raises(PhalanxError, match=r"empty|no "):
        PyTorchDDPTrainer(nn.Linear(4, 2), num_workers=2, device="cpu", progress=False).evaluate([])
    assert set(Path(tempfile.gettempdir()).glob("phalanx-*")) == before
    assert not (tmp_path / "runs").exists()
