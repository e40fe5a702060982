"""Without the zoo, the user's own model, script and loop train: the heart knows reference models by name only."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from command import ROOT, clean_environment, write_script

TRAINER = """
    import sys
    import torch
    from torch import nn
    from torch.utils.data import TensorDataset
    import phalanx

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x):
            return self.layer(x)

    def rows():
        x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
        return TensorDataset(x, (x.sum(1) > 0).long())

    if __name__ == "__main__":
        settings = {"num_workers": int(sys.argv[1]), "device": "cpu", "batch_size": 8, "epochs": 2}
        trainer = phalanx.Trainer(Net(), **settings)
        trainer.fit(rows(), rows())
        print("metrics", trainer.evaluate(rows()))
        trainer.save("net.safetensors")
        print(sorted(name for name in sys.modules if name.startswith("phalanx.zoo")))
"""
LOOP = """
    import torch
    from torch import nn
    from torch.utils.data import TensorDataset
    import phalanx

    with phalanx.Formation(batch_size=8) as f:
        x = torch.randn(64, 4)
        model, optimizer, loader = f.prepare(
            net := nn.Linear(4, 1), torch.optim.SGD(net.parameters(), lr=0.1), TensorDataset(x, x.sum(1, keepdim=True))
        )
        for inputs, targets in loader:
            f.backward(nn.functional.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
        print("steps", f.step)
"""


HIDE = """
    import sys

    class Hidden:
        def find_spec(self, name, path=None, target=None):
            if name == "phalanx.zoo":
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    sys.meta_path.insert(0, Hidden())
"""


@pytest.fixture(scope="module")
def without_zoo(tmp_path_factory) -> Path:
    """A folder that hides the zoo from every Python process that has it on its path."""
    folder = tmp_path_factory.mktemp("without-zoo")
    write_script(folder / "sitecustomize.py", HIDE)
    return folder


def run(folder: Path, cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = clean_environment(PYTHONPATH=f"{folder}:{ROOT}")
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_trainer_fits_the_users_model(without_zoo, tmp_path, ranks):
    done = run(without_zoo, tmp_path, str(write_script(tmp_path / "train.py", TRAINER)), str(ranks))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "metrics {" in done.stdout
    assert done.stdout.endswith("[]\n")
    assert (tmp_path / "net.safetensors").stat().st_size > 0


def test_a_script_and_a_loop_train(without_zoo, tmp_path):
    script = write_script(tmp_path / "loop.py", LOOP)
    flags = ("--num-workers", "2", "--device", "cpu")
    done = run(without_zoo, tmp_path, "-m", "phalanx.cli", "train", "--script", str(script), *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "steps 4" in done.stdout


def test_what_is_in_the_zoo_is_named(without_zoo, tmp_path):
    done = run(without_zoo, tmp_path, "-c", "from phalanx.features import feature; feature('lora')")
    assert "this run needs phalanx.zoo.models.lora, which is not installed" in done.stderr
