"""Folders of runs: what removes files, which runs count as running, and folders that are damaged."""

from __future__ import annotations

import dataclasses
import fcntl
import itertools
import json
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest
import torch
from command import phalanx

import phalanx as px
from phalanx.config import DistributedConfig
from phalanx.errors import UsageError
from phalanx.host.files import is_trusted, writer_of
from phalanx.host.processes import began_at
from phalanx.loop.recorders import own_run_dir
from phalanx.observe.best_mark import Best, mark_best
from phalanx.run.record import RunRecord, end_record
from phalanx.run.resume import check_run_dir, how_to_resume, resume_settings
from phalanx.run.stored import StoredRun, find_run, list_runs
from phalanx.trackers.tensorboard import TensorBoardSink


def make_run(path: Path, *events: dict, host: str | None = None, pid: int | None = None) -> StoredRun:
    """Write the folder of a run, with a checkpoint, as a process of this or another host would leave it."""
    checkpoint = path / "checkpoints" / "step-00000010"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")
    (path / "logs").mkdir()
    (path / "logs" / "rank-0.log").write_text("hello")
    record = RunRecord.of_this_process({"epochs": 1})
    document = {**record.__dict__, "host": host or record.host}
    if pid is not None:
        document |= {"pid": pid, "pid_started": 1}
    (path / "run.json").write_text(json.dumps(document))
    (path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return StoredRun(path)


def started() -> dict:
    layout = {"strategy": "ddp", "world_size": 1, "device": "cpu", "precision": "fp32", "parameters": 6}
    return {"event": "run_started", "time": time.time(), "total_steps": 10, **layout}


def ended() -> dict:
    return {"event": "run_ended", "time": time.time() + 1, "status": "finished", "total_time": 1.0, "best": {}}


@pytest.fixture(autouse=True)
def inside(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_one_damaged_record_does_not_hide_the_other_runs():
    make_run(Path("runs/whole"), ended())
    for name, text in {
        "a": '{"command": [',
        "b": "[]",
        "c": "{}",
        "d": '{"command": "x", "directory": 3, "settings": []}',
    }.items():
        make_run(Path("runs") / name, started()).path.joinpath("run.json").write_text(text)
    assert {run.path.name: run.status for run in list_runs()}["whole"] == "finished"
    assert phalanx("runs").code == 0
    for name in "abcd":
        assert StoredRun(Path("runs") / name).status == "damaged"
        assert phalanx("runs", "show", name).code == 0
        for words in (("resume", name), ("runs", "tag", name, "x")):
            answer = phalanx(*words)
            assert answer.code == 2
            assert "run.json" in answer.text


def test_an_empty_name_is_not_the_beginning_of_the_only_run():
    make_run(Path("runs/only"), ended())
    answer = phalanx("runs", "rm", "", "--yes")
    assert answer.code == 2
    assert Path("runs/only").is_dir()
    with pytest.raises(UsageError, match="does not name a run"):
        find_run(3)  # type: ignore[arg-type]


def test_rm_of_a_folder_that_is_not_in_runs_leaves_other_files():
    run = make_run(Path("project"), ended())
    for name in ("train.py", "checkpoints/mine.pt", "logs/mine.txt", "fit-notes.md"):
        (run.path / name).write_text("mine")
    answer = phalanx("runs", "rm", "project", "--yes")
    assert answer.code == 0
    assert "other files stay in project" in answer.text
    left = sorted(str(path.relative_to(run.path)) for path in run.path.rglob("*") if path.is_file())
    assert left == ["checkpoints/mine.pt", "fit-notes.md", "logs/mine.txt", "train.py"]


def test_overwriting_removes_everything_that_checkpoints_leave():
    run = make_run(Path("runs/again"), ended())
    for name in ("step-00000001", ".chunks-run", ".writing-x", ".removing-x", ".copying-step-00000001"):
        (run.path / "checkpoints" / name / "ab").mkdir(parents=True)
    replaced = check_run_dir(DistributedConfig(run_dir="runs/again"), overwrite=True)
    assert replaced is not None
    replaced.clear()
    assert not (run.path / "checkpoints").exists()


def test_overwriting_leaves_what_other_programs_and_runs_have_written(monkeypatch):
    """wandb/, event files, fit-2 and model/ are names of a run's files, too: those of the run alone are removed."""
    run = make_run(Path("exp"), ended())
    mine = ["events.out.tfevents.1.host", "fit-2025/results.csv", "model/config.json", "tensorboard/other/events.out"]
    mine += ["wandb/offline-run-abc/run.wandb"]
    for name in mine:
        (run.path / name).parent.mkdir(parents=True, exist_ok=True)
        (run.path / name).write_text("mine")
    TensorBoardSink(run.path, run_dir=run.path).close()
    monkeypatch.setattr("phalanx.loop.recorders._NUMBERS", itertools.count(2))
    monkeypatch.setenv("PHALANX_RUN_DIR", "exp")
    second = own_run_dir(lambda: run.path)
    (second / "events.jsonl").write_text("{}\n")
    (second / "notes.txt").write_text("mine")
    (run.path / "written.txt").open("a").write("../outside\nwandb/../../outside\n")
    Path("outside").write_text("mine")
    replaced = check_run_dir(DistributedConfig(run_dir="exp"), overwrite=True)
    assert replaced is not None
    replaced.clear()
    left = sorted(str(path.relative_to(run.path)) for path in run.path.rglob("*") if path.is_file())
    assert left == sorted([*mine, "fit-2/notes.txt"])
    assert Path("outside").exists()


def test_the_current_folder_is_neither_removed_nor_overwritten(monkeypatch):
    run = make_run(Path("project"), ended())
    (run.path / "wandb").mkdir()
    monkeypatch.chdir("project")
    refused = phalanx("runs", "rm", ".", "--yes")
    assert refused.code == 2
    assert "contains the current folder" in refused.text
    with pytest.raises(UsageError, match="contains the current folder"):
        check_run_dir(DistributedConfig(run_dir="."), overwrite=True)
    assert Path("wandb").is_dir()


def test_a_run_on_another_host_that_wrote_lately_is_not_removed():
    run = make_run(Path("runs/far"), started(), host="another")
    assert run.status == "unknown"
    refused = phalanx("runs", "rm", "far", "--yes")
    assert refused.code == 2
    assert "may be running on another" in refused.text
    with pytest.raises(UsageError, match="may be running on another"):
        check_run_dir(DistributedConfig(run_dir="runs/far"), overwrite=True)
    long_ago = time.time() - 7200
    os.utime(run.path / "events.jsonl", (long_ago, long_ago))
    assert phalanx("runs", "rm", "far", "--yes").code == 0


def test_a_run_that_may_be_running_on_another_host_is_not_continued_until_the_user_says_that_it_has_ended():
    run = make_run(Path("runs/far"), started(), host="another")
    again = DistributedConfig(run_dir="runs/far", resume_from_checkpoint=True)
    for start in (
        lambda: resume_settings(run),
        lambda: check_run_dir(again, overwrite=False),
        lambda: fit_in("runs/far"),
    ):
        with pytest.raises(UsageError, match="may be running on another: it has not reported its end") as refused:
            start()
        assert refused.value.hint.endswith("say so: phalanx runs stop far --ended")
    assert phalanx("runs", "stop", "far", "--ended").out == "far has ended: killed\n"
    check_run_dir(again, overwrite=False)
    assert resume_settings(StoredRun(run.path))["run_dir"] == "runs/far"


def fit_in(folder: str) -> None:
    data = torch.utils.data.TensorDataset(torch.zeros(4, 2), torch.zeros(4, 1))
    px.PyTorchDDPTrainer(
        torch.nn.Linear(2, 1), device="cpu", epochs=1, batch_size=2, loss_fn="mse", run_dir=folder
    ).fit(data)


def test_a_run_of_another_process_is_not_replaced_by_a_fit_and_one_of_this_process_is():
    make_run(Path("runs/busy"), started(), pid=os.getppid())
    document = json.loads(Path("runs/busy/run.json").read_text())
    Path("runs/busy/run.json").write_text(json.dumps({**document, "pid_started": began_at(os.getppid())}))
    with pytest.raises(UsageError, match="is running"):
        fit_in("runs/busy")
    make_run(Path("runs/own"), started())
    fit_in("runs/own")


def test_a_job_that_slurm_puts_back_into_the_queue_continues_its_run_on_another_host(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    make_run(Path("runs/job"), started(), host="another")
    config = DistributedConfig(run_dir="runs/job", resume_from_checkpoint=True)
    with pytest.raises(UsageError, match="may be running"):  # a second command in the same job
        check_run_dir(config, overwrite=False)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    check_run_dir(config, overwrite=False)
    monkeypatch.setenv("SLURM_JOB_ID", "4712")
    with pytest.raises(UsageError, match="may be running"):
        check_run_dir(config, overwrite=False)


def test_the_lock_in_a_folder_that_runs_share_is_that_of_its_run():
    kept = Path("kept").absolute()
    kept.mkdir()
    run = make_run(Path("runs/one"), {**started(), "run_id": "one"}, host="another")
    record = json.loads((run.path / "run.json").read_text())
    (run.path / "run.json").write_text(json.dumps({**record, "settings": {"checkpoint_dir": str(kept)}}))
    for name, status in (("two", "unknown"), ("one", "running")):
        with (kept / f".run-{name}.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            assert StoredRun(run.path).status == status


def test_a_held_checkpoint_lock_means_running_whatever_the_process_id_says():
    run = make_run(Path("runs/locked"), started(), pid=1)
    assert run.status == "killed"
    with (run.path / "checkpoints" / ".run-1.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert StoredRun(run.path).status == "running"
    assert StoredRun(run.path).status == "killed"


def test_a_resumed_run_is_running_before_its_ranks_report():
    run = make_run(Path("runs/again"), started(), {**ended(), "time": time.time() - 60})
    record = run.record
    assert record is not None
    record.begin(run.path, resumes=True)
    assert StoredRun(run.path).status == "running"


def failed_at_the_start(path: Path, recipe: dict | None, **more: object) -> StoredRun:
    """Write the folder of a run whose ranks refused to train."""
    (path / "logs").mkdir(parents=True)
    record = {**RunRecord.of_this_process({}).__dict__, "recipe": recipe, "pid": 1, "pid_started": 1, **more}
    (path / "run.json").write_text(json.dumps(record))
    (path / "events.jsonl").write_text(json.dumps({**ended(), "status": "failed"}) + "\n")
    return StoredRun(path)


def test_a_recipe_that_failed_before_its_first_step_does_not_block_its_folder():
    run = failed_at_the_start(Path("first"), {"name": "digits"})
    replaced = check_run_dir(DistributedConfig(run_dir="first"), overwrite=False, settled=True)
    assert replaced is not None
    replaced.clear()
    assert not (run.path / "run.json").exists()


def test_a_script_that_failed_and_runs_with_steps_or_checkpoints_keep_their_folders():
    failed_at_the_start(Path("script"), None)  # which may have trained for hours without a report
    reported = failed_at_the_start(Path("reported"), {"name": "digits"})
    (reported.path / "events.jsonl").write_text(
        "".join(json.dumps(event) + "\n" for event in (started(), {"event": "step", "time": 1.0, "step": 3}, ended()))
    )
    saved = failed_at_the_start(Path("saved"), {"name": "digits"})
    (saved.path / "checkpoints" / "step-00000010").mkdir(parents=True)
    (saved.path / "checkpoints" / "step-00000010" / "manifest.json").write_text("{}")
    for folder in ("script", "reported", "saved"):
        with pytest.raises(UsageError, match="already holds a run"):
            check_run_dir(DistributedConfig(run_dir=folder), overwrite=False)


def test_a_running_run_is_refused_also_when_it_is_resumed_from_a_checkpoint():
    make_run(Path("runs/busy"), started())
    with pytest.raises(UsageError, match="is running"):
        check_run_dir(DistributedConfig(run_dir="runs/busy", resume_from_checkpoint=True), overwrite=False)


def test_only_the_first_of_several_machines_checks_the_folder_they_share():
    make_run(Path("shared"), started())
    several = {"run_dir": "shared", "num_nodes": 2, "num_workers": 2, "rdzv_endpoint": "127.0.0.1:1"}
    with pytest.raises(UsageError, match="is running"):
        check_run_dir(DistributedConfig(**several, node_rank=0), overwrite=True)
    check_run_dir(DistributedConfig(**several, node_rank=1), overwrite=True)
    assert Path("shared/run.json").is_file()


def fit(**settings: object) -> None:
    data = torch.utils.data.TensorDataset(torch.randn(8, 2), torch.randn(8, 2))
    px.PyTorchDDPTrainer(torch.nn.Linear(2, 2), device="cpu", num_workers=1, progress=False, **settings).fit(data)


def test_a_second_fit_of_another_process_in_a_folder_is_recorded_as_its_own():
    run = make_run(Path("mine"), started(), ended(), pid=1)
    fit(run_dir="mine", batch_size=4, epochs=1)
    record = StoredRun(run.path).record
    assert record is not None
    assert record.pid == os.getpid()


def test_a_fit_that_is_refused_leaves_no_folder():
    with pytest.raises(UsageError, match="batch_size is not known"):
        fit(epochs=1)
    assert not Path("runs").exists()


def saved(path: Path) -> dict:
    return {"event": "checkpoint", "time": time.time(), "step": 10, "path": str(path)}


def test_checkpoints_of_other_runs_in_a_shared_folder_are_not_this_run_s():
    for name in ("step-00000010", "step-00000010-b", "step-00000090"):
        Path("kept", name).mkdir(parents=True)
        Path("kept", name, "manifest.json").write_text("{}")
    run = make_run(Path("runs/one"), started(), saved(Path("kept/step-00000010-b")), pid=1)
    record = run.record
    assert record is not None
    record.settings["checkpoint_dir"] = "kept"
    assert [path.name for path in run.checkpoints] == ["step-00000010-b"]
    assert resume_settings(run)["resume_from_checkpoint"].endswith("kept/step-00000010-b")
    assert "that of step 10." in how_to_resume(run)


def test_a_name_in_a_shared_folder_that_another_run_has_taken_since_is_not_this_run_s():
    kept = Path("kept").absolute()
    for step, run_id in ((10, "two"), (20, "one")):
        (kept / f"step-000000{step}").mkdir(parents=True)
        (kept / f"step-000000{step}" / "manifest.json").write_text(json.dumps({"run_id": run_id}))
    saved = [{"event": "checkpoint", "time": 1.0, "path": str(kept / f"step-000000{step}")} for step in (10, 20)]
    run = make_run(Path("runs/one"), {**started(), "run_id": "one"}, *saved, ended())
    record = json.loads((run.path / "run.json").read_text())
    (run.path / "run.json").write_text(json.dumps({**record, "settings": {"checkpoint_dir": str(kept)}}))
    assert [path.name for path in StoredRun(run.path).checkpoints] == ["step-00000020"]


def test_the_best_checkpoint_of_a_killed_run_is_found_by_its_mark():
    run = make_run(Path("runs/killed"), started(), pid=1)
    assert run.best_checkpoint is None
    later = run.path / "checkpoints" / "step-00000020"
    later.mkdir()
    (later / "manifest.json").write_text("{}")
    mark_best(Best(run.path / "checkpoints" / "step-00000010", 10, "val/loss", "min", 0.5))
    assert run.best_checkpoint == run.path / "checkpoints" / "step-00000010"


def test_a_run_whose_rank_raised_is_failed_and_shown_with_its_error():
    run = make_run(Path("runs/raised"), started())
    assert run.status == "running"
    error = {"rank": 0, "time": time.time() + 1, "type": "KeyError", "message": "'x'"}
    (run.path / "logs" / "rank-0.error.json").write_text(json.dumps(error))
    assert StoredRun(run.path).status == "failed"
    assert "KeyError: 'x'" in phalanx("runs", "show", "raised").text
    with (run.path / "events.jsonl").open("a") as file:  # it was started again
        file.write(json.dumps({**started(), "time": time.time() + 2}) + "\n")
    assert StoredRun(run.path).status == "running"


def test_a_fit_that_raises_in_this_process_is_failed_although_the_process_lives():
    calls = []

    def broken(output, target):
        calls.append(1)
        if len(calls) == 2:  # the run has taken a step: without one it would leave nothing
            raise ValueError("not today")
        return (output - target).square().mean()

    with pytest.raises(ValueError, match="not today"):
        fit(batch_size=4, epochs=1, loss_fn=broken)
    (run,) = list_runs()
    assert run.status == "failed"
    assert run.failure["message"] == "not today"
    with pytest.raises(UsageError, match="has no checkpoint '7'"):
        px.load_run("last", checkpoint=7)


def test_events_without_the_usual_fields_and_an_empty_tag():
    make_run(Path("runs/odd"), {"event": "run_ended", "time": 1.0}, {"event": "run_started", "time": 2.0})
    assert phalanx("runs", "show", "odd").code == 0
    assert phalanx("runs", "tag", "odd", " ").code == 2


def test_commands_that_are_shown_can_be_pasted():
    run = make_run(Path("a b"), ended(), pid=1)
    assert "phalanx resume 'a b'" in how_to_resume(run)
    assert "phalanx evaluate 'a b'" in phalanx("runs", "show", "a b").text


def test_a_script_that_wrote_no_events_has_the_status_of_its_command():
    run = make_run(Path("runs/script"), pid=1)
    assert run.status == "killed"
    end_record(run.path, "finished")
    assert StoredRun(run.path).status == "finished"


def test_a_recipe_of_another_user_is_not_imported(monkeypatch):
    run = make_run(Path("runs/other"), started())
    record = dataclasses.replace(run.record, recipe={"name": "x", "summary": "", "data": {}, "model": {"name": "m:f"}})
    record.write(run.path)
    assert StoredRun(run.path).recipe is not None
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    os.chown(run.path / "run.json", 12345, -1)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(UsageError, match="belongs to another user"):
        _ = StoredRun(run.path).recipe


def strangers(run, uid=12345):
    """Give a run's folder to another user."""
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    for path in (run.path, *run.path.rglob("*")):
        os.lchown(path, uid, -1)
    return StoredRun(run.path)


def test_a_run_of_another_user_is_shown_and_nothing_is_done_by_it(tmp_path):
    proof = tmp_path / "proof"
    script = tmp_path / "evil.py"
    script.write_text(f"open({str(proof)!r}, 'w')")
    run = make_run(Path("runs/evil"), started(), pid=1)
    dataclasses.replace(run.record, script=str(script), settings={"num_workers": 1}, started=9e9).write(run.path)
    assert StoredRun(run.path).is_trusted
    strangers(run)
    assert "evil" in phalanx("runs").out
    words = (["resume", "evil"], ["resume", "last"], ["runs", "tag", "evil", "mine"], ["runs", "note", "evil", "mine"])
    for command in words:
        answer = phalanx(*command)
        assert (answer.code, "belongs to another user" in answer.err) == (2, True), (command, answer.text)
    assert not proof.exists()
    own = make_run(Path("runs/own"), started(), pid=1)
    assert find_run("last").path == own.path, "the last run of this user"


def test_the_process_that_a_stranger_names_gets_no_signal():
    with subprocess.Popen(["sleep", "60"]) as process:
        run = make_run(Path("runs/evil"), started(), pid=process.pid)
        dataclasses.replace(run.record, pid_started=began_at(process.pid)).write(run.path)
        assert strangers(run).status == "running"
        answer = phalanx("runs", "stop", "evil")
        assert (answer.code, "names the process" in answer.err) == (2, True), answer.text
        time.sleep(0.2)
        assert process.poll() is None
        process.kill()


def test_a_run_that_others_can_write_to_is_not_trusted():
    run = make_run(Path("runs/open"), started())
    for mode, path in ((0o777, run.path), (0o666, run.path / "run.json")):
        before = path.stat().st_mode
        run.path.chmod(0o755)
        path.chmod(mode)
        with pytest.raises(UsageError, match="can be written by other users") as refused:
            StoredRun(run.path).require_trust("names code")
        assert "chmod go-w runs/open" in refused.value.hint
        path.chmod(before)
    assert StoredRun(run.path).is_trusted
    run.path.chmod(0o700)
    (run.path / "run.json").chmod(0o666)
    assert StoredRun(run.path).is_trusted, "others cannot open the folder"


def test_links_of_another_user_lead_to_no_checkpoints_and_no_files(tmp_path):
    mine = make_run(Path("runs/mine"), started())
    run = make_run(Path("elsewhere"), started(), pid=1)
    shutil.rmtree(run.path / "checkpoints")
    (run.path / "checkpoints").symlink_to((mine.path / "checkpoints").resolve())
    dataclasses.replace(run.record, settings={"checkpoint_dir": str(tmp_path / "other")}).write(run.path)
    found = strangers(run)
    assert found.checkpoint_dir == run.path / "checkpoints"
    for command in (["ckpt", "prune", "elsewhere", "--keep-last", "1"], ["runs", "rm", "elsewhere", "--yes"]):
        answer = phalanx(*command)
        assert (answer.code, "belongs to another user" in answer.err) == (2, True), (command, answer.text)
    assert mine.checkpoints


def test_the_settings_of_another_user_are_not_used_with_a_model_of_this_user():
    run = make_run(Path("runs/other"), started())
    (run.path / "config.toml").write_text('batch_size = 7\nsinks = "spy"\n')
    strangers(run)
    config = px.load_run("other", model=torch.nn.Linear(1, 1)).config
    assert (config.batch_size, config.sinks) == (7, None)


def test_what_others_can_write_is_trusted_in_no_group_but_that_of_the_user_alone(tmp_path):
    file = tmp_path / "folder" / "file"
    file.parent.mkdir(mode=0o755)
    file.touch(mode=0o644)
    assert writer_of(file) == writer_of(file.parent) == os.geteuid()
    link = tmp_path / "link"
    link.symlink_to(file)
    for shared in (file, file.parent):
        before = shared.stat().st_mode
        shared.chmod(before | 0o002)
        assert writer_of(file) is writer_of(link) is None, "all can write"
        shared.chmod(before)
    file.parent.chmod(0o1777)
    assert writer_of(file) == os.geteuid(), "in a folder such as /tmp others cannot replace it"
    file.parent.chmod(0o755)
    assert is_trusted(tmp_path / "missing")
    if os.geteuid() == 0:
        file.chmod(0o664)
        assert writer_of(file) == 0, "the group of root"
        os.chown(file, -1, 12345)
        assert writer_of(file) is None, "a group of several users"
        file.chmod(0o644)
        os.chown(file, 12345, -1)
        assert writer_of(file) == 12345, "in a folder of root"
        os.chown(file.parent, 54321, -1)
        assert writer_of(file) is None
        assert not is_trusted(file)
