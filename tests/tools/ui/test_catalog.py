"""The folder of runs as the page sees it: also where runs are damaged, closed, or not runs at all."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
from test_columns import started, step

from phalanx.host.files import open_below
from phalanx.observe.events import CheckpointSaved, RunEnded
from phalanx.observe.rank_statistics import beats_of
from phalanx.run.stored import StoredRun
from phalanx.tools.ui.catalog import Catalog
from phalanx.tools.ui.page import page_of


def make_run(path, *events, record=None):
    path.mkdir(parents=True)
    (path / "events.jsonl").write_text("".join(each.to_json() + "\n" for each in events or (started(), step(1, 2.0))))
    if record is not None:
        (path / "run.json").write_text(record)
    return path


def test_a_folder_without_runs_is_empty(tmp_path):
    assert Catalog(tmp_path).summaries() == []
    assert Catalog(tmp_path / "missing").summaries() == []
    (tmp_path / "notes.txt").write_text("")
    (tmp_path / "a folder").mkdir()
    assert Catalog(tmp_path).summaries() == []


@pytest.mark.parametrize("name", ["", ".", "..", "../other", "/etc", "a/../../other", "missing", "run\0", "folder"])
def test_only_runs_of_the_folder_can_be_asked_for(tmp_path, name):
    make_run(tmp_path / "other")
    make_run(tmp_path / "runs" / "run")
    (tmp_path / "runs" / "folder").mkdir()
    catalog = Catalog(tmp_path / "runs")
    assert catalog.detail("run")["id"] == "run"
    with pytest.raises(KeyError):
        catalog.detail(name)
    with pytest.raises(KeyError):
        catalog.events(name)


def test_a_damaged_record_and_a_damaged_line_are_reported(tmp_path):
    path = make_run(tmp_path / "run", record="{")
    with (path / "events.jsonl").open("a") as file:
        file.write("no json\n")
    (path / "config.toml").write_text("= nothing")
    problems = Catalog(tmp_path).detail("run")["problems"]
    assert len(problems) == 3
    assert "run.json" in problems[0]
    assert "config.toml" in problems[1]
    assert problems[2] == "1 line of events.jsonl cannot be read and is left out"


@pytest.mark.parametrize(
    "event",
    [
        {"event": "run_ended", "time": 3.0, "best": "x"},
        {"event": "checkpoint", "time": 3.0, "path": None},
        {"event": "metrics", "time": 3.0, "step": math.inf, "epoch": 1, "split": "val", "values": {"x": 1.0}},
        {"event": "step", "time": 3.0, "step": [2], "epoch": 1, "loss": [1.0], "learning_rate": 0.1},
        {"event": "ranks", "time": 3.0, "step": 2, "ranks": [0], "values": {"memory": []}, "percentiles": {}},
    ],
)
def test_an_event_with_wrong_values_harms_no_other_run(tmp_path, event):
    make_run(tmp_path / "good")
    with (make_run(tmp_path / "bad") / "events.jsonl").open("a") as file:
        file.write(json.dumps(event) + "\n")
    catalog = Catalog(tmp_path)
    assert {run["id"] for run in catalog.summaries()} == {"good", "bad"}
    assert beats_of(event) == {}
    json.dumps([catalog.detail("bad"), catalog.events("bad").curves(600)], allow_nan=False)


def test_runs_of_another_user_are_named_and_not_shown(tmp_path, monkeypatch):
    if os.geteuid() != 0:
        pytest.skip("only root can act as another user")
    make_run(tmp_path / "closed").chmod(0o700)
    make_run(tmp_path / "open")
    make_run(tmp_path / "events")
    (tmp_path / "events" / "events.jsonl").chmod(0o600)
    tmp_path.chmod(0o755)
    monkeypatch.chdir(tmp_path)  # the other user cannot enter the folders above it
    os.seteuid(65534)
    try:
        found = {run["id"]: run for run in Catalog(Path()).summaries()}
        with pytest.raises(PermissionError):
            Catalog(Path()).detail("events")
    finally:
        os.seteuid(0)
    assert found["closed"]["status"] == "unreadable"
    assert found["closed"]["reason"] == "Permission denied"
    assert found["open"]["steps"] == 1


def test_what_a_run_holds_is_shown(tmp_path):
    saved = CheckpointSaved(step=1, path=str(tmp_path / "run/checkpoints/step-1"), seconds=0.1, bytes=5, time=2.0)
    ended = RunEnded(status="failed", step=1, total_time=3.0, throughput=1.0, reason="the loss is nan", time=3.0)
    path = make_run(tmp_path / "run", started(), step(1, float("nan")), saved, ended)
    (path / "logs").mkdir()
    for rank, time in ((0, 3.0), (1, 2.5)):
        error = {
            "rank": rank,
            "host": "h",
            "time": time,
            "step": 1,
            "type": "ValueError",
            "message": "x",
            "traceback": [],
        }
        (path / "logs" / f"rank-{rank}.error.json").write_text(json.dumps(error))
        (path / "logs" / f"rank-{rank}.log").write_text("\n".join(f"line {number}" for number in range(500)))
    catalog = Catalog(tmp_path)
    (shown,) = catalog.summaries()
    assert (shown["status"], shown["values"]["train/loss"], shown["reason"]) == ("failed", "nan", "the loss is nan")
    detail = catalog.detail("run")
    assert [failure["rank"] for failure in detail["failures"]] == [1, 0], "the first one is the cause"
    assert detail["failures"][0]["output"].splitlines()[-1] == "line 499"
    (checkpoint,) = detail["checkpoints"]
    assert (checkpoint["step"], checkpoint["exists"], checkpoint["best"]) == (1, False, False)
    json.dumps([shown, detail], allow_nan=False)


def test_a_run_that_is_removed_leaves_the_list_and_its_columns(tmp_path):
    path, catalog = make_run(tmp_path / "run"), Catalog(tmp_path)
    catalog.events("run")
    assert len(catalog.summaries()) == 1
    (path / "events.jsonl").unlink()
    path.rmdir()
    assert catalog.summaries() == []
    assert not catalog._events


def test_a_page_of_its_own_holds_no_address_and_no_open_script(tmp_path):
    name = "a</script><script>alert(1)</script>"
    folder = tmp_path / "<b>&"
    text = page_of(
        [
            StoredRun(
                make_run(
                    folder, started(), step(1), record=json.dumps({"command": [name], "directory": "", "settings": {}})
                )
            )
        ]
    )
    assert "/static/" not in text
    assert name not in text
    assert "alert(1)\\u003c/script>" in text


def test_no_link_leads_out_of_a_run(tmp_path):
    """`ln -s ~/.ssh runs/evil/profile` in a folder that users share would show the keys of the page's user."""
    secret = tmp_path / "home"
    secret.mkdir()
    for name in ("key", "rank-0.log", "a.log"):
        (secret / name).write_text("PRIVATE")
    path = make_run(tmp_path / "runs" / "evil", record="{}")
    (path / "profile").symlink_to(secret)
    (path / "note.txt").symlink_to(secret / "key")
    (path / "logs").mkdir()
    (path / "logs" / "rank-0.error.json").write_text('{"type": "ValueError", "message": "no", "time": 1.0}')
    (path / "logs" / "rank-0.log").symlink_to(secret / "rank-0.log")
    catalog = Catalog(tmp_path / "runs")
    assert not {"profile/key", "note.txt", "logs/rank-0.log"} & catalog.detail("evil")["files"].keys()
    assert "PRIVATE" not in json.dumps(catalog.detail("evil"))
    for name in ("profile/key", "note.txt", "logs/rank-0.log"):
        with pytest.raises((KeyError, OSError)):
            catalog.open(f"evil/{name}")
        with pytest.raises((KeyError, OSError)):
            catalog.log(f"evil/{name}", 0)


def test_a_link_that_is_put_there_after_the_check_is_not_followed(tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "key").write_text("PRIVATE")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "profile").symlink_to(tmp_path / "home")
    (tmp_path / "run" / "key").symlink_to(tmp_path / "home" / "key")
    os.mkfifo(tmp_path / "run" / "pipe")
    for name in ("profile/key", "key", "pipe"):
        with pytest.raises(OSError, match=name.split("/")[0]):
            open_below(tmp_path / "run", name)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_links_of_another_user_are_no_runs(tmp_path):
    private = make_run(tmp_path / "private" / "run", record="{}")
    runs = tmp_path / "runs"
    make_run(runs / "shown")
    (runs / "linked").symlink_to(private)
    assert set(Catalog(runs).paths()) == {"shown", "linked"}, "a link of this user"
    os.lchown(runs / "linked", 12345, -1)
    make_run(runs / "evil")
    (runs / "evil" / "run.json").symlink_to(private / "run.json")
    os.lchown(runs / "evil" / "run.json", 12345, -1)
    assert set(Catalog(runs).paths()) == {"shown"}
    with pytest.raises(KeyError):
        Catalog(runs).detail("linked")
