"""A run from its record to its end, by `recorded_run`."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from phalanx import DistributedConfig
from phalanx.errors import PhalanxError, PreemptedError
from phalanx.observe.run_folder import make_run_dir
from phalanx.run.conductor import recorded_run
from phalanx.run.record import RunRecord
from phalanx.run.stored import StoredRun


@pytest.fixture(autouse=True)
def _in_own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


NEW = DistributedConfig()


def conduct(
    error: BaseException | None = None,
    *,
    steps: int = 1,
    config: DistributedConfig = NEW,
    was_started: bool = False,
    **how: Any,
) -> Path:
    """Conduct a run that takes steps and raises an error; return its folder."""
    folder = make_run_dir(config, "one")

    def take_steps() -> None:
        with recorded_run(folder, config, RunRecord.of_this_process({}), **how) as run:
            run.was_started = was_started
            for step in range(1, steps + 1):
                (folder / "events.jsonl").write_text(json.dumps({"event": "step", "time": 1.0, "step": step}) + "\n")
            if error is not None:
                raise error

    with nullcontext() if error is None else pytest.raises(type(error)):
        take_steps()
    return folder


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (None, "finished"),
        (PhalanxError("no memory"), "failed"),
        (ZeroDivisionError(), "failed"),
        (SystemExit(3), "failed"),
        (PreemptedError("stopped by SIGTERM"), "preempted"),
        (KeyboardInterrupt(), "interrupted"),
    ],
)
def test_the_record_says_how_a_run_ended(error, outcome):
    record = StoredRun(conduct(error)).record
    assert record is not None
    assert record.outcome == outcome


@pytest.mark.parametrize("error", [PhalanxError("no memory"), ZeroDivisionError(), KeyboardInterrupt()])
def test_a_run_that_took_no_step_leaves_no_folder(error):
    conduct(error, steps=0)
    assert not Path("runs").exists()
    assert conduct(error, steps=0, config=DistributedConfig(run_dir="mine")).is_dir()


def test_a_try_of_a_few_steps_leaves_no_folder():
    assert not conduct(config=DistributedConfig(fast_dev_run=3)).exists()
    assert not conduct(PhalanxError("no memory"), config=DistributedConfig(fast_dev_run=3)).exists()


def test_of_several_nodes_the_first_one_writes_the_record():
    folders = [
        conduct(config=DistributedConfig(num_nodes=2, node_rank=rank, rdzv_endpoint="a:1", run_dir=f"run{rank}"))
        for rank in (0, 1)
    ]
    assert [(folder / "run.json").exists() for folder in folders] == [True, False]


def test_a_script_that_was_started_keeps_its_folder():
    assert conduct(PhalanxError("no memory"), steps=0, of_script=True, was_started=True).is_dir()
    assert not conduct(PhalanxError("refused"), steps=0, of_script=True).exists()


def test_why_a_run_of_this_process_failed_is_in_its_folder():
    assert StoredRun(conduct(ZeroDivisionError("by zero"), in_place=True)).failure["message"] == "by zero"
    assert not StoredRun(conduct(ZeroDivisionError("by zero"))).failure


def test_advice_is_given_before_an_unused_folder_goes():
    advised = []

    def advise(error: BaseException, is_kept: bool) -> None:
        advised.append((str(error), is_kept, len(list(Path("runs").iterdir()))))

    conduct(PhalanxError("no memory"), steps=0, advise=advise)
    assert advised == [("no memory", False, 1)]
