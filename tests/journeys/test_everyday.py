"""What is typed every day: predictions, output files, logs and stop, NaN, records, studies, a learning rate."""

from __future__ import annotations

import csv
import json
import os
import random
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from command import phalanx, start, write_script
from torch import nn
from torch.utils.data import TensorDataset
from waiting import LIMIT_SECONDS, until

import phalanx as px
from phalanx.cli.parsers import tune_parser
from phalanx.errors import UsageError
from phalanx.observe.events import RunEnded, RunStarted
from phalanx.observe.format import summary_rows
from phalanx.run.facts import surroundings
from phalanx.run.rate_finder import RateSweep, smoothed
from phalanx.run.record import RunRecord
from phalanx.run.stored import StoredRun, find_run

FAST = ("--device", "cpu", "--num-workers", 1, "--no-tensorboard", "--no-progress")


def write_rows(path: str, labels: tuple[str, ...], count: int) -> None:
    """Write points with the label that their sum has, of those that are named."""
    drawn = random.Random(0)
    with open(path, "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["a", "b", "c", "label"])
        while count:
            point = [drawn.gauss(0, 1) for _ in range(3)]
            label = "yes" if sum(point) > 0 else "no"
            if label in labels:
                rows.writerow([*point, label])
                count -= 1


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a folder with a run that learned the labels yes and no from a CSV file."""
    folder = tmp_path_factory.mktemp("everyday")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_rows("rows.csv", ("yes", "no"), 300)
        write_rows("new.csv", ("yes",), 5)
        model = ("--set", "model.in_features=3", "--set", "model.out_features=2")
        answer = phalanx(
            "train", "--model", "mlp", "--data", "./rows.csv", *model, "--epochs", 6, "--name", "names", *FAST
        )
        assert answer.code == 0, answer.text
    return folder


@pytest.fixture
def inside(trained, monkeypatch):
    monkeypatch.chdir(trained)
    return trained


def test_predictions_have_the_names_of_the_labels_and_are_counted(inside, tmp_path):
    out = tmp_path / "out.csv"
    said = phalanx("predict", "names", "--data", "new.csv", "-o", out, *FAST)
    assert said.code == 0, said.text
    assert f"wrote 5 rows to {out}" in said.out
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["row"] for row in rows] == ["0", "1", "2", "3", "4"]
    assert {row["name"] for row in rows} == {"yes"}
    assert {row["class"] for row in rows} == {"1"}
    assert all(0.5 < float(row["probability"]) <= 1 and len(row["probability"]) < 10 for row in rows)
    document = json.loads(phalanx("predict", "names", "--data", "new.csv", "--json", *FAST).out)
    assert [row["name"] for row in document["rows"]] == ["yes"] * 5


def test_columns_are_taken_by_their_names_and_not_by_their_places(inside, tmp_path):
    with Path("new.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    names = [name for name in rows[0] if name != "label"]
    turned, other = tmp_path / "turned.csv", tmp_path / "other.csv"
    for path, columns in ((turned, names[::-1]), (other, [*names[1:], "id"])):
        lines = [",".join(str(row.get(name, 7)) for name in columns) for row in rows]
        path.write_text("\n".join([",".join(columns), *lines]) + "\n")
    expected = phalanx("predict", "names", "--data", "new.csv", "--json", *FAST).out
    assert (
        json.loads(phalanx("predict", "names", "--data", turned, "--json", *FAST).out)["rows"]
        == (json.loads(expected)["rows"])
    )
    refused = phalanx("predict", "names", "--data", other, *FAST)
    assert refused.code == 2
    assert f"unknown column '{names[0]}' of {other}" in refused.err


def test_a_file_with_one_of_the_labels_is_measured_by_the_numbers_of_the_training_data(inside):
    answer = phalanx("evaluate", "names", "--data", "new.csv", "--json", *FAST)
    assert json.loads(answer.out)["metrics"]["accuracy"] == 1


def test_names_of_labels_reach_a_hugging_face_folder(tmp_path):
    from phalanx.zoo.export import export_folder
    from phalanx.zoo.models import build

    model = build("bert", preset="debug", task="classify", classes=2)
    export_folder(model, tmp_path / "hf", classes=["no", "yes"])
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (config["id2label"], config["label2id"]) == ({"0": "no", "1": "yes"}, {"no": 0, "yes": 1})


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("export", "names", "-o", "kept.onnx"), "kept.onnx: it exists already"),
        (("export", "names", "-o", "/no/such/x.onnx"), "there is no folder /no/such"),
        (("export", "names", "--format", "onnx", "-o", "x.safetensors"), "a file of the format onnx ends in .onnx"),
        (("export", "names", "-o", "x.bin"), "unknown ending '.bin'"),
        (("export", "names", "--format", "hf"), "Write its weights: --format safetensors"),
        (("predict", "names", "-o", "kept.csv"), "kept.csv: it exists already"),
        (("ui", "names", "--save", "kept.html"), "kept.html: it exists already"),
        (("ui", "names", "--save", "page.txt"), "Write: --save page.html"),
        (("report", "names", "--profile", "--svg", "kept.svg"), "kept.svg: it exists already"),
        (("doctor", "--record", "kept.json"), "kept.json: it exists already"),
    ],
)
def test_one_rule_for_output_files(inside, words, said):
    for ending in ("onnx", "csv", "html", "svg", "json"):
        Path(f"kept.{ending}").write_text("mine")
    answer = phalanx(*words)
    assert (answer.code, said in answer.err) == (2, True), answer.text
    assert {path.read_text() for path in Path().glob("kept.*")} == {"mine"}


def test_force_replaces_a_file(inside):
    Path("kept.safetensors").write_text("mine")
    assert phalanx("export", "names", "-o", "kept.safetensors", "--force").code == 0
    assert Path("kept.safetensors").stat().st_size > 1000


def test_runs_and_jobs_take_each_others_names(inside):
    assert "printed nothing" in phalanx("runs", "logs", "names").err
    assert "printed nothing" in phalanx("jobs", "logs", "names").err
    assert "phalanx runs logs names" in phalanx("logs", "names").err
    assert "status" in phalanx("jobs", "show", "names").out
    answer = phalanx("jobs", "cancel", "names")
    assert (answer.code, "is not in progress: its status is finished" in answer.err) == (2, True)
    answer = phalanx("jobs", "logs", "nams")
    assert (answer.code, "unknown run 'nams'. The latest: names-" in answer.err) == (2, True), answer.err


def test_a_run_is_stopped_with_a_checkpoint(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    process = start("train", "digits", "--epochs", 10_000, "--name", "long", *FAST, cwd=tmp_path)
    try:
        until(lambda: list(tmp_path.glob("runs/long-*/checkpoints/step-*")), lambda: "no checkpoint")
        answer = phalanx("runs", "stop", "long")
        assert process.wait(LIMIT_SECONDS) == 75
    finally:
        process.kill()
        process.communicate()
    assert "is preempted; to continue it: phalanx resume long-" in answer.out


def test_a_loss_that_is_not_finite_is_said_soon_with_the_command_that_looks_for_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    process = start("train", "digits", "--learning-rate", "1e30", "--log-every-n-steps", 1000, *FAST, cwd=tmp_path)
    text = "".join(filter(None, process.communicate(timeout=100)))
    assert process.returncode == 1
    (run,) = Path("runs").iterdir()
    assert StoredRun(run).ended["step"] <= 3
    assert "next: phalanx train digits --learning-rate 1e30" in text
    assert "--debug nan" in text


def test_a_run_keeps_the_code_and_the_packages_that_it_ran_with(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def git(*words: str) -> None:
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], check=True, capture_output=True)

    git("init")
    Path("net.py").write_text("width = 3\n")
    git("add", "net.py")
    git("commit", "-m", "first")
    Path("net.py").write_text("width = 4\n")
    (tmp_path / "runs" / "one").mkdir(parents=True)
    RunRecord.of_this_process({}).begin(Path("runs/one"), resumes=False)
    run = find_run("one")
    assert run.record is not None
    assert len(run.record.commit or "") == 40
    assert "+width = 4" in (run.path / "changes.diff").read_text()
    assert run.record.environment["torch"] == torch.__version__
    assert surroundings(run)["package torch"] == torch.__version__
    shown = phalanx("runs", "show", "one").out
    assert "changes.diff" in shown
    assert torch.__version__ in shown
    run.clear()
    assert not any(run.path.iterdir())


def test_a_repository_that_answers_slowly_is_not_left_locked(tmp_path, monkeypatch):
    """A filter holds git up while it compares the files again, for which it has locked the index."""
    monkeypatch.chdir(tmp_path)
    wait = "for i in $(seq 200); do test -e .git/index.lock || break; sleep 0.05; done; cat"
    for words in (
        ["init"],
        ["config", "filter.slow.clean", wait],
        ["add", "."],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-m", "first"],
    ):
        Path("net.py").write_text("width = 3\n")
        subprocess.run(["git", *words], check=True, capture_output=True)
    Path(".git/info/attributes").write_text("*.py filter=slow\n")
    os.utime("net.py", (0, 0))
    Path("run").mkdir()
    RunRecord.of_this_process({}).begin(Path("run"), resumes=False)
    assert not Path(".git/index.lock").exists()


@pytest.mark.timeout(60)
def test_a_git_that_ignores_its_end_holds_no_run_up(tmp_path, monkeypatch):
    """As one that waits for a network file system, which only SIGKILL ends."""
    git = tmp_path / "git"
    git.write_text("#!/bin/sh\ntrap '' TERM\nexec sleep 1000\n")
    git.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert RunRecord.of_this_process({}).commit is None


def test_trials_are_runs_that_do_not_hide_the_others(inside):
    study = Path("runs/tune-x-20260101-000000")
    shutil.copytree(find_run("names").path, study / "trials" / "0003", dirs_exist_ok=True)
    (study / "study.db").touch()
    try:
        listed = phalanx("runs").out
        assert "search tune-x-20260101-000000: 1 trials; see: phalanx runs --trials tune-x-20260101-000000" in listed
        assert "trials/0003" not in listed
        (row,) = json.loads(phalanx("runs", "--trials", "tune-x", "--json").out)
        assert row["name"] == "tune-x-20260101-000000/trials/0003"
        assert find_run(row["name"]).status == "finished"
        assert len(json.loads(phalanx("runs", "--trials", "--json").out)) == 2
        assert "unknown search 'nope'" in phalanx("runs", "--trials", "nope").err
    finally:
        shutil.rmtree(study)


def test_trials_is_the_number_of_trials_and_parallel_how_many_at_once():
    read = tune_parser().parse_all(["digits", "--num-samples", "7", "--parallel", "2"])
    assert (read.trials, read.parallel) == (7, 2)


def test_a_short_run_has_a_short_summary():
    begun = RunStarted("x", "runs/x", 1, "cpu", "ddp", "fp32", 100, 8, 1, 8, total_steps=9, log_dir="runs/x/logs")
    ended = RunEnded(
        "finished", 9, 3.0, 100.0, best={"accuracy": 0.9, "loss": 0.1}, checkpoint="c/1", best_checkpoint="c/1",
        sent_bytes=100, exchange_hidden=0.1, exchange_waited=0.1, goodput={"productive": 1.0, "import": 2.0},
    )  # fmt: skip
    short, whole = summary_rows(ended, begun, detailed=False), summary_rows(ended, begun)
    assert len(short) <= 10
    assert {name for name, _ in whole} - {name for name, _ in short} == {
        "goodput", "parameters", "sent", "exchange", "last checkpoint",
    }  # fmt: skip


def test_the_learning_rate_finder_ends_at_divergence_and_leaves_all_as_it_was(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    points = torch.randn(512, 4)
    model = nn.Linear(4, 1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    trainer = px.PyTorchDDPTrainer(model, optimizer, loss_fn="mse", num_workers=1, batch_size=32, device="cpu")
    found = trainer.find_lr(TensorDataset(points, points.sum(1, keepdim=True)), low=1e-5, high=100.0)
    assert found.suggestion is not None
    assert 1e-3 < found.suggestion < 1
    assert "diverged" in found.ended or "not finite" in found.ended
    assert found.rates[0] == pytest.approx(1e-5)
    assert len(found.rates) < 100
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert not (tmp_path / "runs").exists()
    assert "is in the model" not in capfd.readouterr().err
    with pytest.raises(UsageError, match="expected 0 < low < high"):
        trainer.find_lr(points, low=1.0, high=0.1)


def test_the_rate_of_the_steepest_fall_is_suggested_and_none_where_the_loss_only_grows():
    rates = [10.0 ** (place / 10 - 5) for place in range(50)]
    falls = [2.0 if rate < 1e-3 else max(0.5, 2.0 - 100 * rate) for rate in rates]
    assert 1e-3 <= (RateSweep(rates, falls, falls, "").suggestion or 0) <= 2e-2
    assert RateSweep(rates, rates, smoothed(rates), "").suggestion is None


def test_doctor_can_be_pasted_into_a_report():
    said = phalanx("doctor").out
    assert f"torch {torch.__version__}" in said
    assert "extras" in said
    assert "minutes" in said


def test_settings_are_taken_as_python_writes_them(inside):
    answer = phalanx("train", "digits", "--max_steps", 3, "--batch_size=8", "--dry-run", "--json")
    estimate = json.loads(answer.out)["estimate"]
    assert (estimate["steps"], estimate["global_batch"]) == (3, 16)
    refused = phalanx("train", "digits", "--max_stepz", 3)
    assert "unknown flag '--max_stepz'. Did you mean --max-steps?" in refused.err


def test_arguments_of_a_script_keep_their_underscores(inside):
    script = write_script(Path("words.py"), "import sys\nprint('got', sys.argv[1:])\n")
    answer = phalanx("train", "--script", script, "--num_workers", 1, "--", "--max_steps", 3)
    assert answer.code == 0, answer.text
    assert "got ['--max_steps', '3']" in answer.out


def test_resuming_a_script_names_no_flag_that_it_does_not_read(inside):
    script = write_script(Path("plain.py"), "print('done')\n")
    assert phalanx("train", "--script", script, "--num-workers", 1, "--run-dir", "plain").code == 0
    refused = phalanx("resume", "plain")
    assert refused.code == 2
    assert "has no checkpoint" in refused.err
    assert "--checkpoint-frequency" not in refused.err
    assert "A script that saves its own is started again" in refused.err
