"""The examples of 02-fsdp and 05-advanced run as their first lines say, and show what they promise."""

from __future__ import annotations

import json
import os
import re
import runpy
import sys
from pathlib import Path

import programs
import pytest
from long_proofs import long_proof
from ranks import RecordingConsole

from phalanx.errors import PhalanxError
from phalanx.launch import LaunchSpec, ScriptTarget, launch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
FSDP, ADVANCED = EXAMPLES / "02-fsdp", EXAMPLES / "05-advanced"


@pytest.fixture
def run_example(tmp_path, monkeypatch, fork_server):
    """Run an example on warm ranks, in a folder of its own, and return what the console showed."""
    monkeypatch.chdir(tmp_path)

    def run(path: Path, *args: str, ranks: int = 2) -> str:
        console = RecordingConsole()
        target, env = ScriptTarget(path, args), {"PHALANX_DEVICE": "cpu"}
        spec = LaunchSpec(target=target, ranks_per_node=ranks, log_dir=tmp_path / "logs", env=env, threads_per_rank=1)
        result = launch(spec, console)
        assert result.failure is None, result.failure
        return console.text

    return run


def run_python(path, *args, cwd):
    """Run a script in a process that starts its own ranks; return both of its outputs."""
    env = {**os.environ, "PHALANX_DEVICE": "cpu", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    words = [sys.executable, str(path), *map(str, args)]
    done = programs.run(words, cwd=cwd, env=env, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def shares(text):
    return re.findall(r"(\d+)% of them all", text)


def test_fsdp_basics_learns_as_ddp_does_in_half_the_memory(run_example):
    sharded = run_example(FSDP / "fsdp_basics.py", "--epochs", "2")
    whole = run_example(FSDP / "fsdp_basics.py", "--epochs", "2", "--strategy", "ddp")
    assert "this rank holds [128, 128]" in sharded
    assert shares(sharded) == ["50", "50", "50"]
    assert shares(whole) == ["100", "100", "100"]
    accuracies = [re.findall(r"accuracy ([\d.]+)", text) for text in (sharded, whole)]
    assert accuracies[0] == accuracies[1]
    assert float(accuracies[0][-1]) > 0.9


def test_fsdp_basics_shards_in_groups(run_example):
    text = run_example(
        FSDP / "fsdp_basics.py", "--epochs", "1", "--sharding", "hybrid", "--shard-size", "2", "--blocks", "2", ranks=4
    )
    assert shares(text) == ["50", "50", "50"]


@long_proof
def test_the_transformer_holds_its_part_and_saves_the_whole(tmp_path):
    small = ("--steps", "12", "--batch-size", "4", "--bytes", "20000", "--window", "32")
    text = run_python(
        FSDP / "fsdp_transformer.py", "--num-workers", 2, *small, "--save", "model.safetensors", cwd=tmp_path
    )
    assert "of them on this rank (50%)" in text
    first, last = re.search(r"loss ([\d.]+) at first, ([\d.]+) at the end", text).groups()
    assert float(last) < float(first) - 0.5
    # The trained weights came back into a model that had no memory: in bf16 they still are whole, in float32.
    from safetensors.torch import load_file

    from phalanx.zoo.models import build

    weights = load_file(tmp_path / "model.safetensors")
    build("llama").load_state_dict(weights)
    assert all(bool(value.isfinite().all()) for value in weights.values())


@long_proof
def test_checkpoints_go_from_two_ranks_to_three_and_to_one(run_example):
    script = FSDP / "fsdp_checkpoint.py"
    saved = run_example(script, "--steps", "3")
    loss = re.search(r"step 3, loss ([\d.]+)", saved)[1]
    before, after, back = re.search(r"loss (\S+) when saved, (\S+) after 3 more steps, (\S+) read back", saved).groups()
    assert before == loss
    assert after != before
    assert back == before, "the asynchronous checkpoint must hold the moment of the save"
    assert f"resumed at step 3, loss {loss}" in run_example(script, "--resume", "--steps", "1", ranks=3)
    # Three ranks do not write the checkpoint that they read, so one rank finds the same.
    assert f"resumed at step 3, loss {loss}" in run_example(script, "--resume", "--strategy", "ddp", ranks=1)
    assert f"step 0, loss {loss}" in run_example(script, "--weights", "kept/weights.safetensors", "--steps", "0")


@long_proof
def test_three_axes_are_proved_equal_to_one_process(tmp_path):
    text = run_python(ADVANCED / "hybrid_parallelism.py", "--layers", 2, "--steps", 2, cwd=tmp_path)
    assert "pp 2 x dp_shard 2 x tp 2" in text
    assert "AGREES  fsdp x pp2 x tp2, 8 ranks" in text


@long_proof
def test_smaller_layouts_by_flags(run_example, tmp_path):
    text = run_python(
        ADVANCED / "hybrid_parallelism.py", "--data", 1, "--tensor", 1, "--schedule", "zero-bubble", cwd=tmp_path
    )
    assert re.search(r"^AGREES .*pp2, 2 ranks", text, flags=re.MULTILINE)
    ours = run_example(ADVANCED / "hybrid_parallelism.py", "--data", "1", "--tensor", "1", "--schedule", "zero-bubble")
    losses = [re.findall(r"^losses (.*)$", found, flags=re.MULTILINE)[-1].split() for found in (text, ours)]
    assert [float(loss) for loss in losses[0]] == pytest.approx([float(loss) for loss in losses[1]], rel=1e-5)


def test_accumulated_gradients_are_the_same(run_example):
    text = run_example(ADVANCED / "gradient_accumulation.py")
    rows = re.findall(r"^(\d) x (\d+) +(\S+) +(\S+) +(\S+)$", text, flags=re.MULTILINE)
    assert [row[:2] for row in rows] == [("1", "32"), ("2", "16"), ("4", "8")]
    for _, _, off, wrong, loss in rows:
        assert float(off) < 1e-12
        assert float(wrong) > 1e-3
        assert float(loss) == pytest.approx(float(rows[0][4]), rel=1e-9)


def test_overlap_is_measured_and_traced(run_example, tmp_path):
    small = ("--width", "64", "--layers", "3", "--batch-size", "16", "--repeats", "3", "--buckets", "0.01", "25")
    text = run_example(ADVANCED / "communication_overlap.py", *small, "--trace", "trace.json")
    rows = re.findall(r"^ +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+) +(?:-?\d+|nan)%$", text, flags=re.MULTILINE)
    assert [float(row[0]) for row in rows] == [0.01, 25]
    assert all(float(value) > 0 for row in rows for value in row)
    names = {event.get("name", "") for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]}
    assert any("all_reduce" in name or "allreduce" in name for name in names)


@pytest.mark.parametrize(
    ("script", "args", "says"),
    [
        (FSDP / "fsdp_transformer.py", ("--preset", "dbug"), "Did you mean 'debug'"),
        (ADVANCED / "communication_overlap.py", (), "one rank has no peer"),
        (ADVANCED / "gradient_accumulation.py", ("--batch", "30", "--accumulate", "4"), "30 samples cannot be cut"),
        (ADVANCED / "hybrid_parallelism.py", ("--tensor", "3", "--data", "1", "--pipeline", "1"), "kv_heads = 2"),
    ],
    ids=lambda given: given.name if isinstance(given, Path) else "",
)
def test_bad_input_is_answered(tmp_path, monkeypatch, fork_server, script, args, says):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PHALANX_DEVICE", "cpu")
    monkeypatch.setattr(sys, "argv", [str(script), *args])
    with pytest.raises((SystemExit, PhalanxError), match=says):
        runpy.run_path(str(script), run_name="__main__")


@pytest.mark.parametrize("path", sorted([*FSDP.glob("*.py"), *ADVANCED.glob("*.py")]), ids=lambda path: path.name)
def test_each_example_opens_with_its_command_and_is_in_the_readme(path):
    head = "\n".join(path.read_text().splitlines()[:12])
    assert re.search(rf"^\s*.*(phalanx train|python) .*{re.escape(path.name)}", head, flags=re.MULTILINE)
    assert f"[`{path.name}`]({path.name})" in (path.parent / "README.md").read_text()
