"""Weights & Biases: runs without a network, read back from the files that `wandb sync` would upload."""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from command import phalanx

from phalanx.config import DistributedConfig
from phalanx.errors import UsageError
from phalanx.run.resume import check_run_dir

if importlib.util.find_spec("wandb") is None:  # importing it takes seconds, which collecting tests need not
    pytest.skip("Weights & Biases is not installed: pip install 'phalanx[wandb]'", allow_module_level=True)

DIGITS = ("train", "digits", "--num-workers", "2", "--run-dir", "run", "--log-every-n-steps", "1")


@pytest.fixture(autouse=True)
def _offline(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, fork_server: None
) -> None:
    """No network; what W&B itself leaves in the temporary folder is its own affair, and not a leak."""
    monkeypatch.chdir(tmp_path)
    temporary = str(tmp_path_factory.mktemp("w"))
    monkeypatch.setenv("TMPDIR", temporary)
    monkeypatch.setattr(tempfile, "tempdir", temporary)
    for name, value in {"PHALANX_DEVICE": "cpu", "WANDB_MODE": "offline", "WANDB_ERROR_REPORTING": "false"}.items():
        monkeypatch.setenv(name, value)


def records(folder: Path) -> dict[str, list[Any]]:
    """Every record of an offline run, by its kind."""
    from wandb.proto import wandb_internal_pb2
    from wandb.sdk.internal.datastore import DataStore

    (path,) = folder.glob("*.wandb")
    store, found = DataStore(), {}
    store.open_for_scan(str(path))
    while (data := store.scan_data()) is not None:
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        kind = record.WhichOneof("record_type")
        found.setdefault(kind, []).append(getattr(record, kind))
    return found


def values(items: Any) -> dict[str, Any]:
    return {item.key or item.nested_key[0]: json.loads(item.value_json) for item in items}


def curve(kept: dict[str, list[Any]], name: str) -> list[tuple[int, float]]:
    rows = [
        {item.key or item.nested_key[0]: json.loads(item.value_json) for item in row.item} for row in kept["history"]
    ]
    return [(row["step"], row[name]) for row in rows if name in row]


def losses() -> list[tuple[int, float]]:
    found = [json.loads(line) for line in Path("run/events.jsonl").read_text().splitlines()]
    return [(event["step"], event["loss"]) for event in found if event["event"] == "step"]


def test_a_run_is_kept_offline_and_a_resumed_one_continues_it():
    done = phalanx(*DIGITS, "--max-steps", 4, "--checkpoint-frequency", "2 steps", "--wandb", "mine", "--name", "first")
    assert done.code == 0, done.text
    (folder,) = Path("run/wandb").glob("offline-run-*")
    assert done.out.rstrip().endswith(f"wandb sync {folder}")
    kept = records(folder)
    (run,) = kept["run"]
    assert (run.project, run.display_name) == ("mine", "first")
    assert curve(kept, "train/loss") == losses()
    assert [step for step, _ in curve(kept, "val/accuracy")] == [4]
    settings = {name: value for part in kept["config"] for name, value in values(part.update).items()}
    assert (settings["max_steps"], settings["world_size"]) == (4, 2)
    assert "num_gpus" not in settings, "what is not set is not logged"
    assert kept["exit"][0].exit_code == 0

    again = phalanx(*DIGITS, "--max-steps", 5, "--wandb", "mine", "--resume-from-checkpoint",
                    "run/checkpoints/step-00000002")  # fmt: skip
    assert again.code == 0, again.text
    second = next(path for path in Path("run/wandb").glob("offline-run-*") if path != folder)
    assert again.out.rstrip().endswith(f"wandb sync --append {second}")
    kept_again = records(second)
    assert kept_again["run"][0].run_id == run.run_id
    assert [step for step, _ in curve(kept_again, "train/loss")] == [3, 4, 5]

    others = Path("run/wandb/offline-run-20260101_000000-others")
    others.mkdir()
    replaced = check_run_dir(DistributedConfig(run_dir="run"), overwrite=True)
    assert replaced is not None
    replaced.clear()
    assert list(Path("run/wandb").iterdir()) == [others], "data of other runs stay"


def test_a_run_of_the_calling_process_is_joined_and_left_open(tmp_path):
    import wandb

    from phalanx.observe import events
    from phalanx.trackers.wandb import WandbSink

    with wandb.init(project="theirs", dir=tmp_path) as theirs:
        sink = WandbSink(tmp_path, "mine")
        sink.handle(events.StepDone(1, 1, 0.5, 0.1))
        sink.handle(events.MetricsReported(2, 1, events.LOGGED, {"step": 7.0, "fid": 3.0}))
        sink.close()
        assert wandb.run is theirs
        assert sink.next_commands == []
        folder = Path(theirs.settings.sync_dir)
    wandb.teardown()
    assert curve(records(folder), "train/loss") == [(1, 0.5)]
    assert curve(records(folder), "fid") == [(2, 3.0)], "a value that is called step does not move the others"


def test_without_wandb_the_extra_is_named_before_training(monkeypatch):
    from phalanx.trackers.wandb import import_wandb

    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UsageError, match=r"pip install 'phalanx\[wandb\]'"):
        import_wandb()
