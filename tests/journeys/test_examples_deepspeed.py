"""The DeepSpeed examples run as their first lines say: under phalanx, on one rank, and under DeepSpeed's launcher."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from long_proofs import long_proof
from ranks import RecordingConsole

from phalanx.launch import LaunchSpec, ScriptTarget, launch

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed: pip install 'phalanx[deepspeed]'"
)
EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "03-deepspeed"
CONFIGS = EXAMPLES / "configs"
BIN = Path(sys.executable).parent


@pytest.fixture
def run_example(tmp_path, monkeypatch, fork_server):
    """Run an example on warm ranks, in a folder of its own, and return what the console showed."""
    monkeypatch.chdir(tmp_path)

    def run(name: str, *args: str, ranks: int = 2) -> str:
        console = RecordingConsole()
        env = {"PHALANX_DEVICE": "cpu"}
        spec = LaunchSpec(
            target=ScriptTarget(EXAMPLES / name, args),
            ranks_per_node=ranks,
            log_dir=tmp_path / "logs",
            env=env,
            threads_per_rank=1,
        )
        result = launch(spec, console)
        assert result.failure is None, result.failure
        return console.text

    return run


def accuracy(text: str) -> float:
    return float(re.findall(r"accuracy ([\d.]+)", text)[-1])


@long_proof
def test_training_moves_between_stages_and_its_weights_serve(run_example, tmp_path):
    """One epoch by stage 1 on one rank, the next by stage 3 on two, a third without DeepSpeed; then its inference."""
    common = ("--checkpoint-dir", "ckpt", "--resume", "--epochs")
    alone = ("--config", str(CONFIGS / "zero1_config.json"), "--batch-size", "32")
    first = run_example("deepspeed_train.py", *alone, *common, "1", ranks=1)
    run_example("deepspeed_train.py", "--config", str(CONFIGS / "zero3_config.json"), *common, "2")
    last = run_example("deepspeed_train.py", "--native", "3", *common, "3", "--save", "model.safetensors")
    assert accuracy(last) > accuracy(first) > 0.5
    assert [int(path.name[-2:]) for path in sorted((tmp_path / "ckpt").glob("step-*"))] == [23, 46, 69]
    weights = ("--weights", "model.safetensors")
    for text in (
        run_example("deepspeed_inference.py", *weights, ranks=1),
        run_example("deepspeed_inference.py", *weights, "--zero", "--offload"),
    ):
        assert accuracy(text) == pytest.approx(accuracy(last), abs=0.01)
        assert float(re.search(r"at most (\S+) from plain torch", text)[1]) < 1e-5


@long_proof
def test_deepspeeds_launcher_gives_what_phalanx_gives(run_example, tmp_path):
    arguments = ["--config", str(CONFIGS / "zero2_config.json"), "--epochs", "1"]
    ours = accuracy(run_example("deepspeed_train.py", *arguments))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [BIN / "deepspeed", "--num_gpus", 2, "--master_port", port, EXAMPLES / "deepspeed_train.py", *arguments]
    env = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "DS_ACCELERATOR": "cpu"}
    env |= {"PHALANX_DEVICE": "cpu", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(list(map(str, words)), cwd=tmp_path, env=env, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    assert accuracy(done.stdout) == pytest.approx(ours, abs=0.01)


def test_offload_trains_alike(run_example):
    text = run_example("zero_offload.py", "--steps", "10", ranks=1)
    losses = dict(re.findall(r"^offload (\w+) .*loss ([\d.]+)", text, flags=re.MULTILINE))
    assert float(losses["cpu"]) == pytest.approx(float(losses["none"]), abs=1e-3)


def built_reader() -> Path:
    from torch.utils.cpp_extension import get_default_build_root

    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    return next(iter(root.rglob("async_io.so")), Path("missing"))


@pytest.mark.skipif(not built_reader().exists(), reason="DeepSpeed's reader of NVMe is not compiled (ds_report tells)")
def test_offload_to_disk_writes_there(run_example, tmp_path):
    (tmp_path / "disk").mkdir()
    text = run_example("zero_offload.py", "--offload", "nvme", "--nvme-path", "disk", "--width", "1024", ranks=1)
    assert float(re.search(r"([\d.,]+) MiB in", text)[1].replace(",", "")) > 1


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_configs_are_what_their_names_say(stage):
    settings = json.loads((CONFIGS / f"zero{stage}_config.json").read_text())
    assert settings["zero_optimization"]["stage"] == stage


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_each_example_opens_with_its_command_and_is_in_the_readme(path):
    head = "\n".join(path.read_text().splitlines()[:12])
    assert re.search(rf"^\s+.*(phalanx train|python|deepspeed) .*{re.escape(path.name)}", head, flags=re.MULTILINE)
    assert f"[`{path.name}`]({path.name})" in (EXAMPLES / "README.md").read_text()
