"""Past runs: list, show, compare, tag, remove, resume, evaluate, predict, export, and load in Python."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from command import Answer, phalanx, start
from waiting import LIMIT_SECONDS

import phalanx as px
from phalanx.errors import UsageError
from phalanx.run.export import export_model
from phalanx.run.record import is_unused
from phalanx.run.stored import StoredRun, find_run, list_runs
from phalanx.zoo.models import build

FAST = ("--device", "cpu", "--num-workers", 2, "--no-tensorboard", "--no-progress")


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """Return a project of `phalanx init` with one finished run of two epochs."""
    folder = tmp_path_factory.mktemp("work") / "spirals"
    before = Path.cwd()
    os.chdir(folder.parent)
    try:
        assert phalanx("init", "spirals").code == 0
        os.chdir(folder)
        answer = phalanx("train", "recipe.toml", "--epochs", 2, "--checkpoint-frequency", 1, *FAST)
        assert answer.code == 0, answer.text
    finally:
        os.chdir(before)
    return folder


@pytest.fixture
def inside(project, tmp_path, monkeypatch):
    """Return a copy of the project as the current folder."""
    shutil.copytree(project, tmp_path / "spirals", dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path / "spirals")
    record = json.loads(only_run().path.joinpath("run.json").read_text())
    record["directory"] = str(tmp_path / "spirals")
    record["recipe"]["paths"] = [str(tmp_path / "spirals")]
    only_run().path.joinpath("run.json").write_text(json.dumps(record))
    return tmp_path / "spirals"


def only_run() -> StoredRun:
    (run,) = list_runs()
    return run


def ran(*words: object) -> Answer:
    answer = phalanx(*words)
    assert answer.code == 0, answer.text
    return answer


def test_a_run_is_listed_and_shown_with_how_it_was_started(inside):
    (row,) = json.loads(ran("runs", "--json").out)
    assert (row["status"], row["steps"], row["total_steps"]) == ("finished", 32, 32)
    assert row["best_value"] is not None
    assert row["bytes"] > 10_000
    listed = ran("runs").out
    assert row["name"] in listed
    assert "finished" in listed
    shown = ran("runs", "show", "last").out
    assert str(inside) in shown
    assert f"phalanx evaluate {row['name']}" in shown


def test_a_tag_and_the_beginning_of_a_name_find_a_run(inside):
    run = only_run()
    assert ran("runs", "tag", run.name, "good").out == f"tags of {run.name}: good\n"
    assert find_run("good").path == find_run(run.name[:-2]).path == find_run("last").path == run.path
    assert phalanx("runs", "tag", "last", "last").code == 2
    assert ran("runs", "tag", "good", "good", "--remove").out == f"tags of {run.name}: (none)\n"
    with pytest.raises(UsageError, match="unknown run 'good'"):
        find_run("good")


def test_a_note_stays_with_the_run(inside):
    run = only_run()
    assert ran("runs", "note", "last", "  lr too high  ").out == f"note of {run.name}: lr too high\n"
    assert "lr too high" in ran("runs", "show", "last").out
    assert json.loads((run.path / "run.json").read_text())["note"] == "lr too high"
    ran("resume", run.name, "--epochs", 3)
    assert only_run().record.note == "lr too high"
    ran("runs", "note", run.name, "")
    assert only_run().record.note == ""


def test_tags_and_a_note_may_be_given_at_the_start(inside):
    words = ("train", "recipe.toml", "--max-steps", 2, "--checkpoint-frequency", 1, *FAST)
    ran(*words, "--tags", "wide, warm", "--note", "wider")
    record = find_run("warm").record
    assert (record.tags, record.note) == (["wide", "warm"], "wider")


def test_a_tag_belongs_to_many_runs_and_a_name_to_one(inside):
    words = ("train", "recipe.toml", "--max-steps", 1, *FAST)
    for _ in range(2):
        ran(*words, "--tags", "sweep")
    newest, other, first = list_runs()
    assert [run.tags for run in (newest, other, first)] == [["sweep"], ["sweep"], []]
    listed = json.loads(ran("runs", "--tag", "sweep", "--json").out)
    assert [row["name"] for row in listed] == [newest.name, other.name]
    lines = ran("runs", "--group-by-tag").out.splitlines()
    assert [line for line in lines if line.startswith(("sweep (", "no tag ("))] == ["sweep (2)", "no tag (1)"]
    assert lines.index("sweep (2)") < lines.index("no tag (1)")
    refused = phalanx("runs", "show", "sweep")
    assert refused.code == 2
    assert f"'sweep' is a tag of 2 runs: {newest.name}, {other.name}" in refused.err
    assert "phalanx runs --tag sweep" in refused.err
    assert "unknown tag 'sweeps'" in phalanx("runs", "--tag", "sweeps").err

    assert ran("runs", "name", newest.name, "baseline").out == f"name of {newest.name}: baseline\n"
    assert find_run("baseline").path == newest.path
    assert f"{newest.name} (baseline)" in ran("runs").out
    assert "baseline" in ran("runs", "show", "baseline").out
    taken = phalanx("runs", "name", other.name, "baseline")
    assert (taken.code, f"{newest.name} has it" in taken.err) == (2, True)
    assert f"phalanx runs name {newest.name} --remove" in taken.err
    for wrong in ("last", "a/b", " ", first.path.name):
        assert "cannot be the name of" in phalanx("runs", "name", other.name, wrong).err, wrong
    ran("runs", "tag", other.name, "baseline")
    assert find_run("baseline").path == newest.path, "a name comes before a tag"
    ran("resume", "baseline", "--max-steps", 2)
    assert find_run("baseline").path == newest.path, "it stays after a resumption"
    assert ran("runs", "name", "baseline", "--remove").out == f"name of {newest.name}: (removed)\n"
    assert find_run("baseline").path == other.path
    assert phalanx("runs", "name", "last").code == 2


def test_resume_continues_in_the_same_folder_with_the_same_settings(inside):
    run = only_run()
    ran("resume", run.name, "--epochs", 4)
    resumed = only_run()
    assert resumed.path == run.path
    assert resumed.steps == (64, 64)
    assert resumed.record.command == run.record.command
    history = px.load_run("last").history
    assert [epoch.epoch for epoch in history.epochs] == [1, 2, 3, 4]
    assert history.status == "finished"


@pytest.mark.parametrize(
    ("words", "asked", "more"),
    [
        ((), "epochs = 2,", "--epochs 4."),
        (("--epochs", 1), "epochs = 1,", "--epochs 4."),
        (("--max-steps", 9, "--epochs", 9), "max_steps = 9,", "--max-steps 64."),
    ],
)
def test_a_resume_with_nothing_left_to_train_is_refused_and_changes_nothing(inside, words, asked, more):
    run = only_run()
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    answer = phalanx("resume", run.name, *words)
    assert answer.code == 2
    assert f"nothing left to train: {asked} and its checkpoint is at step 32, after 2 whole epochs" in answer.err
    assert f"Train on: phalanx resume {run.name} {more}" in answer.err
    assert before == {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}


def test_train_resume_takes_the_last_run_of_the_recipe(inside):
    ran("train", "recipe.toml", "--resume", "--epochs", 3, *FAST)
    assert only_run().steps == (48, 48)
    ran("train", "--resume", only_run().name, "--epochs", 4)
    assert only_run().steps == (64, 64)
    message = phalanx("train", "digits", "--resume").text
    assert re.search(rf"there is no run of 'digits' in .*; the latest: {only_run().name}\n", message)
    assert f"Write: phalanx resume {only_run().name}. Or leave --resume out." in message


def test_what_took_no_step_leaves_no_run(inside):
    run = only_run()
    refused = phalanx("train", "recipe.toml", "--num-nodes", 2, *FAST)
    assert refused.code == 2
    assert "need a rendezvous" in refused.err
    own = Path("model.py")
    own.write_text(
        own.read_text() + "\n\ndef raises(*inputs):\n    raise ValueError('my mistake')\n\n\nNet.forward = raises\n"
    )
    failed = phalanx("train", "recipe.toml", *FAST)
    assert failed.code == 1
    assert "my mistake" in failed.err
    log = Path(failed.err.split("Logs: ")[1].strip())
    assert "my mistake" in log.read_text()
    shutil.rmtree(log.parent)
    assert [path.name for path in Path("runs").iterdir()] == [run.path.name]
    alone = px.PyTorchDDPTrainer(torch.nn.Linear(3, 2), device="cpu", batch_size=1)
    with pytest.raises(px.PhalanxError, match="Linear"):
        alone.fit(torch.utils.data.TensorDataset(torch.ones(2, 2), torch.zeros(2, 2)))
    assert only_run().path == run.path


def test_a_run_whose_error_names_a_file_in_it_stays(tmp_path):
    run_dir = tmp_path / "runs" / "one"
    for error in (px.PhalanxError(f"read {run_dir}/memory.json"), px.PhalanxError("no memory")):
        (run_dir / "logs").mkdir(parents=True, exist_ok=True)
        assert is_unused(px.DistributedConfig(), run_dir, error) != ("memory.json" in error.message)


def test_last_is_the_last_run_with_a_checkpoint_where_a_model_is_needed(inside):
    run = only_run()
    later = shutil.copytree(run.path, "runs/later", ignore=shutil.ignore_patterns("checkpoints"))
    record = json.loads(Path(later, "run.json").read_text())
    Path(later, "run.json").write_text(json.dumps({**record, "started": time.time()}))
    assert find_run("last").name == "later"
    answer = ran("evaluate", "last")
    assert f"last is {run.name}" in answer.err
    assert ran("evaluate", run.name).out == answer.out


def test_a_run_dir_in_use_is_refused_unless_it_is_overwritten_or_resumed(inside):
    where = str(only_run().path)
    own = Path(where, "notes.txt")
    own.write_text("mine")
    refused = phalanx("train", "recipe.toml", "--run-dir", where, *FAST)
    assert refused.code == 2
    assert "already holds a run (finished, 32 of 32 steps)" in refused.text
    assert "--overwrite" in refused.text
    ran("train", "recipe.toml", "--run-dir", where, "--overwrite", "--epochs", 1, *FAST)
    assert only_run().steps == (16, 16)
    assert own.read_text() == "mine"
    assert [path.name for path in only_run().checkpoints] == ["step-00000016"]


def test_diff_names_what_differs_alone(inside):
    ran("train", "recipe.toml", "--epochs", 1, "--set", "model.width=8", "--name", "small", *FAST)
    differs = json.loads(ran("runs", "diff", "spirals", "small", "--json").out)
    assert differs["model.width"] == [64, 8]
    assert differs["epochs"] == [2, 1]
    assert "batch_size" not in differs


def test_a_resumed_run_is_not_described_by_how_it_ended_before(inside):
    run = only_run()
    events = run.path / "events.jsonl"
    begun = next(line for line in events.read_text().splitlines() if '"run_started"' in line)
    with events.open("a") as file:
        file.write(begun + "\n")
    again = only_run()
    assert (again.status, again.ended) == ("running", {})  # by this process, which started it
    # What the best checkpoint says does not need the end of the run.
    assert again.best_checkpoint == run.best_checkpoint is not None
    assert again.best == run.best


def test_a_resumption_that_fails_at_once_does_not_report_the_end_before(inside):
    (inside / "model.py").write_text("def Net(**options):\n    raise ValueError('broken')\n")
    answer = phalanx("resume", "last", "--epochs", 4, "--json")
    assert answer.code != 0
    found = json.loads(answer.out)
    assert found["status"] == "failed"
    assert found["metrics"] == {}


def test_json_of_one_run_takes_no_file(inside):
    assert json.loads(ran("runs", "show", "--json", "last").out)["name"] == only_run().name


def test_a_run_whose_files_vanish_is_listed(inside, monkeypatch):
    lstat = os.lstat

    def lost(path, **options):
        if str(path).endswith(".safetensors"):
            raise FileNotFoundError(path)
        return lstat(path, **options)

    monkeypatch.setattr(os, "lstat", lost)
    assert only_run().size > 0


def test_a_run_of_another_user_does_not_hide_one_s_own(inside, monkeypatch):
    closed = Path("runs/closed")
    closed.mkdir()
    is_file = Path.is_file

    def refuse(path):
        if path.parent == closed:
            raise PermissionError(13, "Permission denied", str(path))
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", refuse)
    assert len(list_runs()) == 1


def test_rm_asks_and_removes(inside):
    asked = phalanx("runs", "rm", "last")
    assert asked.code == 2
    assert "--yes" in asked.text
    ran("runs", "rm", "last", "--yes")
    assert list_runs() == []
    assert "no runs" in ran("runs").out


def test_rm_leaves_other_files_of_a_run_dir_that_the_user_chose(inside):
    shutil.move(only_run().path, "own")
    Path("own/notes.txt").write_text("mine")
    assert "other files stay in own" in ran("runs", "rm", "own", "--yes").out
    assert [path.name for path in Path("own").iterdir()] == ["notes.txt"]


def test_evaluate_gives_what_training_measured(inside):
    run = px.load_run("last")
    measured = {epoch.step: epoch.val for epoch in run.history.epochs}
    for step, expected in measured.items():
        answer = json.loads(ran("evaluate", "last", "--checkpoint", step, "--num-workers", 1, "--json").out)
        assert answer["metrics"] == pytest.approx(expected, rel=1e-5)
    direct = json.loads(ran("evaluate", run.checkpoint, "--num-workers", 1, "--json").out)
    assert direct["metrics"]["loss"] == pytest.approx(measured[int(run.checkpoint.name[-8:])]["loss"], rel=1e-5)


def test_predict_writes_one_output_per_sample_in_order(inside):
    run = px.load_run("last")
    _, val = run.data()
    expected = run.model(val[:][0])
    rows = json.loads(ran("predict", "last", "--num-workers", 2, "--raw", "--json").out)["rows"]
    outputs = torch.tensor([row["output"] for row in rows])
    torch.testing.assert_close(outputs, expected, rtol=1e-5, atol=1e-5)
    ran("predict", "last", "-o", "out.pt", "--num-workers", 1)
    torch.testing.assert_close(torch.load("out.pt"), expected, rtol=1e-5, atol=1e-5)
    again = phalanx("predict", "last", "-o", "out.pt", "--num-workers", 1)
    assert (again.code, "out.pt: it exists already" in again.err, "--force" in again.err) == (2, True, True)
    assert "unknown ending '.xls'" in phalanx("predict", "last", "-o", "out.xls").text


def test_exports_compute_what_the_model_computes(inside):
    run = px.load_run("last")
    points = run.data()[1][:][0][:7]
    expected = run.model(points)
    ran("export", "last", "-o", "net.ts")
    torch.testing.assert_close(torch.jit.load("net.ts")(points), expected)
    ran("export", "last")
    from safetensors.torch import load_file

    weights = load_file(f"{run.name}.safetensors")
    torch.testing.assert_close(weights["layers.0.weight"], run.model.state_dict()["layers.0.weight"])
    assert "has no Hugging Face layout" in phalanx("export", "last", "--format", "hf").text
    assert "unknown format 'onxx'. Did you mean 'onnx'" in phalanx("export", "last", "--format", "onxx").text


def test_onnx_computes_what_the_model_computes_for_any_batch(inside):
    pytest.importorskip("onnxscript")
    reference = pytest.importorskip("onnx.reference")
    run = px.load_run("last")
    ran("export", "last", "-o", "net.onnx")
    points = run.data()[1][:][0][:7]
    session = reference.ReferenceEvaluator("net.onnx")
    (found,) = session.run(None, {session.input_names[0]: points.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), run.model(points).detach(), rtol=1e-4, atol=1e-5)


def test_onnx_of_a_language_model_takes_sequences_of_any_length(tmp_path):
    pytest.importorskip("onnxscript")
    reference = pytest.importorskip("onnx.reference")
    model = build("gpt", layers=1).eval()
    tokens = torch.randint(256, (2, 16))
    export_model(model, tmp_path / "x.onnx", "onnx", (tokens, tokens))
    session = reference.ReferenceEvaluator(str(tmp_path / "x.onnx"))
    (found,) = session.run(None, {session.input_names[0]: tokens[:1, :9].numpy()})
    torch.testing.assert_close(torch.from_numpy(found), model(tokens[:1, :9]).detach(), rtol=1e-4, atol=1e-5)


def test_a_trainer_saves_onnx_or_refuses(tmp_path):
    pytest.importorskip("onnxscript")
    model = torch.nn.Linear(3, 2)
    trainer = px.PyTorchDDPTrainer(model, num_workers=1, device="cpu", run_dir=str(tmp_path / "run"), progress=False)
    with pytest.raises(UsageError, match="need an example"):
        trainer.save(tmp_path / "x.onnx")
    trainer.save(tmp_path / "x.onnx", data=torch.randn(2, 3))
    assert (tmp_path / "x.onnx").read_bytes()[:1] == b"\x08"
    with pytest.raises(UsageError, match=r"unknown ending '\.h5'"):
        trainer.save(tmp_path / "x.h5")


def test_runs_that_python_started_are_listed_and_say_what_they_need(inside):
    shutil.rmtree("runs")
    data = torch.utils.data.TensorDataset(torch.randn(32, 2), torch.randint(0, 2, (32,)))
    model = torch.nn.Linear(2, 2)
    trainer = px.PyTorchDDPTrainer(model, batch_size=8, num_workers=1, device="cpu", checkpoint_frequency=1)
    trainer.fit(data, data)
    run = px.load_run("last", model=torch.nn.Linear(2, 2))
    torch.testing.assert_close(run.model.weight, model.weight)
    assert run.evaluate(data)["loss"] == pytest.approx(run.history.epochs[-1].val["loss"], rel=1e-5)
    with pytest.raises(UsageError, match="not trained from a recipe"):
        _ = px.load_run("last").model
    assert "was not started by phalanx train" in phalanx("resume", "last").text
    assert "--model is needed" in phalanx("evaluate", "last").text
    assert json.loads(ran("runs", "--json").out)[0]["best_metric"] == "val/loss"
    trainer.fit(data, checkpoint_frequency=None)
    assert json.loads(ran("runs", "--json").out)[0]["best_metric"] == "train/loss"


def test_a_run_that_python_continues_belongs_to_the_process_that_trains(tmp_path):
    run_dir = tmp_path / "run"
    data = torch.utils.data.TensorDataset(torch.randn(8, 2), torch.randint(0, 2, (8,)))
    settings = {"batch_size": 8, "device": "cpu", "run_dir": str(run_dir), "checkpoint_frequency": 1}
    px.PyTorchDDPTrainer(torch.nn.Linear(2, 2), epochs=1, **settings).fit(data)
    record = json.loads((run_dir / "run.json").read_text())
    (run_dir / "run.json").write_text(json.dumps({**record, "pid": 1, "started": 7.0, "tags": ["mine"]}))

    class Look(px.Callback):
        def on_step_end(self, trainer, info):
            seen.append(StoredRun(run_dir).status)

    seen: list[str] = []
    again = {**settings, "epochs": 2, "resume_from_checkpoint": str(run_dir / "checkpoints")}
    px.PyTorchDDPTrainer(torch.nn.Linear(2, 2), callbacks=[Look()], **again).fit(data)
    assert seen == ["running"]
    assert (StoredRun(run_dir).started, StoredRun(run_dir).tags) == (7.0, ["mine"])


def test_ctrl_c_prints_the_command_that_resumes(inside):
    shutil.rmtree("runs")
    words = ("train", "recipe.toml", "--epochs", 100_000, "--checkpoint-frequency", "20 steps", *FAST)
    program = start(*words, cwd=inside)
    deadline = time.monotonic() + LIMIT_SECONDS
    while not (list_runs() and only_run().checkpoints) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert only_run().status == "running"
    assert "is running" in phalanx("resume", "last").text
    assert "is running; nothing was removed" in phalanx("runs", "rm", "last", "--yes").text
    program.send_signal(signal.SIGINT)
    _, err = program.communicate(timeout=240)
    assert program.returncode == 130
    assert f"To resume: phalanx resume {only_run().name}" in err
    assert only_run().status in ("killed", "interrupted", "preempted")
    last = int(only_run().checkpoints[-1].name[-8:])
    ran("resume", "last", "--max-steps", last + 20)
    assert only_run().steps[0] == last + 20


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("runs", "shwo"), "Did you mean 'show'"),
        (("runs", "show", "nope"), "unknown run 'nope'"),
        (("resume", "nope"), "unknown run 'nope'"),
        (("evaluate", "last", "--checkpoint", "7"), "has no checkpoint '7'; it has: step-"),
        (("evaluate", "last", "--data", "data:laod"), "Did you mean 'load'"),
        (("evaluate", "last", "--data", "recipe.csv"), "there is nothing at that path. Did you mean 'recipe.toml'?"),
        (("predict", "last", "--prompt", "x"), "does not continue texts"),
        (("train", "--resume"), "which run"),
    ],
)
def test_mistakes_are_named_and_exit_with_2(inside, words, says):
    answer = phalanx(*words)
    assert answer.code == 2, answer.text
    assert says in answer.text


def test_what_the_users_code_raises_is_shown_without_our_frames(inside):
    inside.joinpath("faulty.py").write_text("def load(split):\n    raise KeyError('x')\n")
    answer = phalanx("evaluate", "last", "--data", "faulty:load")
    assert answer.code == 1
    assert "phalanx: KeyError: 'x'" in answer.err
    assert "faulty.py" in answer.err
    assert "imports.py" not in answer.err
