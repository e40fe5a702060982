"""`phalanx train`: recipes, flags, files and what a run leaves behind, as the user sees them."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from command import COMMAND, Answer, clean_environment, phalanx, write_script
from curves import scalars

from phalanx.config.settings import cpu_has_bf16, precision_name

DIGITS = ("train", "digits", "--device", "cpu", "--run-dir", "run")


@pytest.fixture(autouse=True)
def _in_own_folder(tmp_path, monkeypatch, fork_server):
    monkeypatch.chdir(tmp_path)


def trained(*words: object) -> Answer:
    answer = phalanx(*words)
    assert answer.code == 0, answer.text
    return answer


def events(run: str = "run") -> list[dict]:
    return [json.loads(line) for line in Path(run, "events.jsonl").read_text().splitlines()]


def of_kind(kind: str, run: str = "run") -> list[dict]:
    return [event for event in events(run) if event["event"] == kind]


def test_the_real_command_trains_the_digits_well(tmp_path):
    """The promise of the first page: a real model, two ranks, seconds, no flag needed."""
    done = subprocess.run(
        [*COMMAND, "train", "digits", "--epochs", "4"],
        cwd=tmp_path,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "2 ranks on cpu · ddp · fp32 · global batch 64 = 32 x 1 x 2" in done.stdout
    assert "Training finished" in done.stdout
    best = re.search(r"best accuracy +(0\.\d+)", done.stdout)
    assert best, done.stdout
    assert float(best[1]) > 0.9
    (run,) = (tmp_path / "runs").iterdir()
    assert run.name.startswith("digits-")


def test_a_fast_dev_run_leaves_nothing(tmp_path):
    answer = trained(
        "train", "digits", "--device", "cpu", "--fast-dev-run", "2", "--tensorboard", "--max-restarts", "2"
    )
    said = "Training finished: fast_dev_run, at most 2 batches of training and of evaluation per rank; nothing is kept"
    assert said in answer.text
    assert "steps          2 of 2" in answer.text
    assert list(tmp_path.iterdir()) == []


def test_evaluation_inside_an_epoch_is_shown_and_recorded():
    answer = trained(*DIGITS, "--epochs", "1", "--eval-every", "10 steps", "--early-stopping", "val/accuracy")
    assert [event["step"] for event in of_kind("metrics") if event["split"] == "val"] == [10, 20, 23]
    assert re.search(r"val step 10 epoch 1/1 accuracy 0\.\d+ loss \d", answer.text)
    assert 10 in [event["step"] for event in of_kind("checkpoint")], "the best so far"


@pytest.mark.parametrize("flag", ["--val-check-interval", "--eval-steps"])
def test_the_names_of_others_for_it_are_answered_with_its_form(flag):
    answer = phalanx("train", "digits", flag, "10")
    assert (answer.code, "Did you mean --eval-every '500 steps'?" in answer.text) == (2, True)


def test_a_run_leaves_its_config_events_logs_checkpoint_and_curves():
    answer = trained(*DIGITS, "--max-steps", 3, "--log-every-n-steps", 1)
    assert [event["step"] for event in of_kind("step")] == [1, 2, 3]
    assert {"run_started", "step", "phase", "metrics", "checkpoint", "run_ended"} <= {e["event"] for e in events()}
    for event in of_kind("step"):
        assert {"loss", "learning_rate", "grad_norm", "samples_per_second", "memory_bytes"} <= event.keys()
    (started,), (ended,) = of_kind("run_started"), of_kind("run_ended")
    assert (started["world_size"], started["global_batch"], started["total_steps"]) == (2, 64, 3)
    assert ended["status"] == "finished"
    assert Path(ended["checkpoint"]).is_dir()
    assert [path for path in Path("run").rglob("*") if path.is_file() and path.stat().st_size == 0] == []
    assert "step 3/3" in answer.out
    assert answer.out.rstrip().endswith("tensorboard --logdir run")


def test_what_a_run_makes_is_for_its_owner_and_what_the_user_made_stays():
    Path("kept").mkdir(mode=0o755)
    trained(*DIGITS, "--max-steps", 1, "--checkpoint-dir", "kept/of-phalanx")
    made = ("run", "kept/of-phalanx", "kept")
    assert [Path(name).stat().st_mode & 0o777 for name in made] == [0o700, 0o700, 0o755]


def test_tensorboard_files_hold_the_promised_curves():
    trained(*DIGITS, "--max-steps", 3, "--log-every-n-steps", 1)
    curves = scalars("run")
    promised = {
        "train/loss",
        "train/learning_rate",
        "train/grad_norm",
        "perf/samples_per_second",
        "system/memory_bytes",
    }
    assert promised | {"val/loss", "val/accuracy"} <= set(curves)
    read = curves["train/loss"]
    told = [(event["step"], event["loss"]) for event in of_kind("step")]
    assert [step for step, _ in read] == [step for step, _ in told]
    assert [value for _, value in read] == pytest.approx([loss for _, loss in told], rel=1e-6)


def test_the_saved_config_repeats_the_run():
    trained(*DIGITS, "--max-steps", 3, "--seed", 5, "--gradient-accumulation-steps", 2)
    saved = tomllib.loads(Path("run/config.toml").read_text())
    assert (saved["max_steps"], saved["seed"], saved["gradient_accumulation_steps"]) == (3, 5, 2)
    trained("train", "digits", "--config", "run/config.toml", "--run-dir", "again")
    first, again = ([event["loss"] for event in of_kind("step", run)] for run in ("run", "again"))
    assert first == again


def test_flags_win_over_the_file_and_the_file_over_the_recipe():
    Path("run.toml").write_text("max_steps = 2\nbatch_size = 8\n[anything]\nlearning-rate = 0.5\n")
    trained(*DIGITS, "--config", "run.toml", "--batch-size", 4)
    (started,) = of_kind("run_started")
    assert (started["total_steps"], started["batch_size"]) == (2, 4)
    shown = trained("config", "show", "digits", "--config", "run.toml", "--batch-size", 4).out
    assert re.search(r"batch_size +4 +flag", shown)
    assert re.search(r"learning_rate +0\.5 +file run\.toml", shown)
    assert re.search(r"warmup +0\.1 +recipe digits", shown)
    assert re.search(r"seed +0 +default", shown)


def test_the_environment_sets_what_no_flag_does(monkeypatch):
    monkeypatch.setenv("PHALANX_MAX_STEPS", "1")
    monkeypatch.setenv("PHALANX_SEED", "9")
    trained(*DIGITS, "--seed", 4)
    saved = tomllib.loads(Path("run/config.toml").read_text())
    assert (saved["max_steps"], saved["seed"]) == (1, 4)


@pytest.mark.parametrize("recipe", ["synthetic", "text"])
def test_other_recipes_train_too(recipe):
    trained("train", recipe, "--device", "cpu", "--max-steps", 2, "--run-dir", "run")
    (ended,) = of_kind("run_ended")
    assert (ended["status"], ended["step"]) == ("finished", 2)


BF16 = """
    import torch
    from torch.utils.data import TensorDataset
    from phalanx import PyTorchDDPTrainer

    data = TensorDataset(torch.ones(48, 2), torch.zeros(48, 1))
    PyTorchDDPTrainer(torch.nn.Linear(2, 1), batch_size=2, mixed_precision="bf16", log_every_n_steps=1).fit(data)
"""


@pytest.mark.parametrize(
    ("asked", "name"), [("bf16", "bf16"), ("true", precision_name(True, "cpu")), ("false", "fp32")]
)
def test_mixed_precision_trains_on_the_cpu(asked, name):
    """A tiny model where the CPU may have to emulate bf16."""
    if asked == "bf16":
        words = ("--script", write_script(Path("low.py"), BF16), "--num-workers", 2, "--device", "cpu")
        answer = trained("train", *words, "--run-dir", "run")
    else:
        answer = trained(*DIGITS, "--max-steps", 12, "--mixed-precision", asked, "--log-every-n-steps", 1)
    emulated = not cpu_has_bf16()
    assert answer.text.count("this CPU emulates bf16") == (asked == "bf16" and emulated)
    assert answer.text.count("so it computes in fp32") == (asked == "true" and emulated)
    assert "mkldnn_matmul failed" not in answer.text
    assert of_kind("run_started")[0]["precision"] == name
    losses = [event["loss"] for event in of_kind("step")]
    assert losses[-1] < losses[0]


def test_a_run_resumes_where_it_stopped_and_ends_as_if_it_never_had():
    """A constant rate, for a run that is planned shorter has another schedule."""
    words = ("train", "digits", "--device", "cpu", "--lr-schedule", "constant", "--warmup", 0, "--log-every-n-steps", 1)
    trained(*words, "--max-steps", 10, "--run-dir", "whole")
    trained(*words, "--max-steps", 7, "--run-dir", "first", "--checkpoint-dir", "ckpt")
    answer = trained(
        *words, "--max-steps", 10, "--run-dir", "second", "--checkpoint-dir", "ckpt", "--resume-from-checkpoint"
    )
    assert "step-00000007" in answer.out
    whole, second = ({event["step"]: event["loss"] for event in of_kind("step", run)} for run in ("whole", "second"))
    assert second == {step: whole[step] for step in (8, 9, 10)}


def test_resuming_where_nothing_is_yet_starts_from_the_beginning():
    answer = trained(*DIGITS, "--max-steps", 1, "--checkpoint-dir", "fresh", "--resume-from-checkpoint")
    assert "no checkpoint in fresh yet: starting from the beginning" in answer.out


def test_a_script_gets_its_own_arguments_and_the_torchrun_environment():
    script = write_script(
        Path("mine.py"),
        """
        import os, sys
        print(os.environ["RANK"], os.environ["WORLD_SIZE"], sys.argv)
        """,
    )
    words = ("--num-workers", 2, "--device", "cpu", "--console-ranks", "all", "--run-dir", "run")
    answer = trained("train", "--script", script, *words, "--", "--lr", "3", "--", "x")
    said = [line for line in answer.out.splitlines() if "mine.py" in line]
    assert sorted(said) == [f"[r{rank}] {rank} 2 ['mine.py', '--lr', '3', '--', 'x']" for rank in range(2)]
    assert "0 2 ['mine.py'" in Path("run/logs/rank-0.log").read_text()


def test_the_backend_of_the_command_line_reaches_a_trainer_in_a_script():
    script = write_script(
        Path("mine.py"),
        """
        import torch
        from phalanx import PyTorchDDPTrainer
        data = torch.utils.data.TensorDataset(torch.randn(8, 4), torch.arange(8) % 2)
        PyTorchDDPTrainer(torch.nn.Linear(4, 2), max_steps=1, batch_size=4).fit(data)
        """,
    )
    words = ("--num-workers", 2, "--device", "cpu", "--backend", "pytorch-fsdp")
    assert "2 ranks on cpu · fsdp" in trained("train", "--script", script, *words).out


def test_one_rank_has_no_prefix_and_no_group():
    script = write_script(Path("mine.py"), "import os\nprint('alone', os.environ['WORLD_SIZE'])\n")
    answer = trained("train", "--script", script, "--num-workers", 1, "--device", "cpu", "--console-ranks", "all")
    assert any(line.endswith("alone 1") and "dp" not in line for line in answer.out.splitlines()), answer.out


def test_help_names_recipes_and_every_group_of_flags():
    shown = trained("train", "--help-all").out
    for word in (
        "digits",
        "imagefolder",
        "--script",
        "optimization:",
        "checkpointing:",
        "--gradient-accumulation-steps",
    ):
        assert word in shown
