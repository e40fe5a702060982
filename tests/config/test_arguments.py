"""Editors and type checkers know every setting: the types equal the fields, and mypy refuses a wrong call."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from long_proofs import long_proof

from phalanx.config.aliases import NAMES
from phalanx.config.arguments import AllSettings, TrainerSettings

ROOT = Path(__file__).resolve().parents[2]

RIGHT = """
import torch
from phalanx import DistributedConfig, Formation, HorovodTrainer, PyTorchDDPTrainer, RayTrainer

model = torch.nn.Linear(2, 2)
trainer = PyTorchDDPTrainer(model, num_workers=2, learning_rate=0.1, device="cpu", optimizer="sgd", loss_fn="mse")
trainer.fit([], epochs=2, mixed_precision="bf16", optimizer="adamw")
HorovodTrainer(model, compression=object, batch_size=4)
RayTrainer(model, {"lr": 0.1}, num_workers=(1, 4), callbacks=[])
DistributedConfig(num_gpus=None, zero_stage=3, deepspeed_config={"a": 1}).replace(seed=1)
Formation(seed=3)
"""
WRONG = [
    ("PyTorchDDPTrainer(model, lerning_rate=0.1)", "lerning_rate"),
    ("PyTorchDDPTrainer(model, epochs='three')", "epochs"),
    ("PyTorchDDPTrainer(model, device='gpu')", "device"),
    ("PyTorchDDPTrainer(model).fit([], epoch=3)", "epoch"),
    ("HorovodTrainer(model, batch_sze=4)", "batch_sze"),
    ("RayTrainer(model, num_workers='2')", "num_workers"),
    ("DistributedConfig(seeds=1)", "seeds"),
    ("DistributedConfig(zero_stage=4)", "zero_stage"),
]
HEAD = """
import torch
from phalanx import DistributedConfig, HorovodTrainer, PyTorchDDPTrainer, RayTrainer
model = torch.nn.Linear(2, 2)
"""


def test_the_types_are_those_of_the_fields():
    assert set(AllSettings.__annotations__) == set(NAMES)
    assert set(TrainerSettings.__annotations__) == set(NAMES) - {"optimizer"}
    spec = importlib.util.spec_from_file_location("settings_arguments", ROOT / "tools" / "settings_arguments.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert tool.FILE.read_text() == tool.written(), "run: python tools/settings_arguments.py"


def test_no_program_imports_the_types():
    code = "import sys, phalanx.run.trainer; sys.exit('phalanx.config.arguments' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=240).returncode == 0


@long_proof
def test_a_type_checker_accepts_right_calls_and_names_wrong_ones(tmp_path):
    pytest.importorskip("mypy")
    (tmp_path / "right.py").write_text(RIGHT)
    (tmp_path / "wrong.py").write_text(HEAD + "\n".join(call for call, _ in WRONG) + "\n")
    flags = ["--follow-imports=silent", "--ignore-missing-imports", "--python-version=3.11", "--implicit-reexport"]
    command = [sys.executable, "-m", "mypy", "--config-file=", *flags, "right.py", "wrong.py"]
    environment = {"PATH": "/usr/bin:/bin", "MYPYPATH": str(ROOT), "HOME": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    first = HEAD.count("\n") + 1
    said = [line for line in done.stdout.splitlines() if ": error:" in line]
    assert not [line for line in said if line.startswith("right.py")], done.stdout
    for number, (call, word) in enumerate(WRONG, first):
        assert any(line.startswith(f"wrong.py:{number}:") and word in line for line in said), (call, done.stdout)
