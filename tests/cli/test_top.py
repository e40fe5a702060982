"""`phalanx top` on recorded heartbeats: few ranks, many ranks, bad input."""

from __future__ import annotations

import json
import time

import pytest
from command import phalanx

from phalanx.cli import top
from phalanx.observe import rank_statistics
from phalanx.observe.heartbeat import Beat, Gauges, HeartbeatBoard
from phalanx.run.stored import StoredRun


@pytest.fixture(autouse=True)
def _in_own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def record(folder, ranks: int, slow: int) -> None:
    logs = folder / "runs" / "seen" / "logs"
    logs.mkdir(parents=True)
    started = {"event": "run_started", "time": time.time(), "name": "seen", "total_steps": 100}
    (logs.parent / "events.jsonl").write_text(json.dumps(started) + '\n{"event": "st')  # it is being written
    HeartbeatBoard.create(logs / "heartbeats", ranks + 1).close()
    for rank in range(ranks):
        board = HeartbeatBoard(logs / "heartbeats", rank)
        board.beat(50)
        own = 0.3 if rank == slow else 0.1
        board.gauge(Gauges(samples_per_second=80, step_seconds=0.4, own_seconds=own, data_wait=0.25, memory=2e9))
        board.close()


def test_few_ranks_are_shown_one_by_one_and_the_slowest_is_marked(tmp_path):
    record(tmp_path, 4, slow=2)
    lines = phalanx("top", "seen", "--once").out.splitlines()
    assert "step 50/100, 4 ranks; rank 2 is the slowest: its own work takes 3.00 times that of the others" in lines[0]
    assert lines[2].split()[:4] == ["rank", "step", "samples/s", "step"]
    assert [line.split()[0] for line in lines[3:]] == ["0", "1", "2", "3"]
    assert lines[5].startswith("2 slowest ")
    assert "exposed comm." not in lines[2], "what no rank knows has no column"


def test_ten_thousand_ranks_are_percentiles_and_the_slowest_in_seconds(tmp_path):
    record(tmp_path, 10_000, slow=777)
    began = time.process_time()
    answer = phalanx("top")
    assert time.process_time() - began < 10
    assert "median" in answer.out
    assert "99th percentile" in answer.out
    assert len(answer.out.splitlines()) < 25
    assert any(line.startswith("777 ") and "slowest" in line for line in answer.out.splitlines())


def test_a_rank_is_silent_only_while_the_run_goes_on_and_a_restart_has_no_ranks(tmp_path):
    record(tmp_path, 2, slow=0)
    path, later = tmp_path / "runs" / "seen", time.time() + 60
    beats = top.read_beats(path / "logs")
    assert top.lines(StoredRun(path), beats, later)[2].count("silent") == 2
    assert top.lines(StoredRun(path), {}) == ["seen: unknown, no rank has given a heartbeat yet"]
    ended = {"event": "run_ended", "time": time.time(), "status": "finished"}
    (path / "events.jsonl").write_text(json.dumps(ended) + "\n")
    shown = top.lines(StoredRun(path), beats, later)
    assert "seen: finished, step 50, 2 ranks, as in its last steps; rank 0 was the slowest" in shown[0]
    assert "silent" not in shown[2]


def test_a_run_without_a_launcher_is_shown_by_its_last_report(tmp_path):
    path = tmp_path / "runs" / "alone"
    path.mkdir(parents=True)
    event = rank_statistics.report({0: Beat(7, 1.0, 0, Gauges(step_seconds=0.5, memory=2e9))})
    (path / "events.jsonl").write_text(json.dumps(event.to_dict()) + "\n")
    [rank] = json.loads(phalanx("top", "alone", "--json").out)["ranks"]
    assert (rank["rank"], rank["step"], rank["step_seconds"], rank["memory"]) == (0, 7, 0.5, 2e9)


def test_the_help_says_what_each_column_means():
    out = phalanx("top", "--help").out
    assert not [name for name, _ in top._COLUMNS.values() if name not in out.partition("columns:")[2]]
    assert "The rest of a step is the backward pass" in out


def test_bad_input_is_answered(tmp_path):
    assert "holds no runs" in phalanx("top").err
    (tmp_path / "empty").mkdir()
    assert "is not the folder of a run" in phalanx("top", "empty").err
    young = tmp_path / "runs" / "young"
    young.mkdir(parents=True)
    (young / "events.jsonl").write_text('{"event": "phase", "time": 1, "name": "x", "state": "begin"}\n')
    assert "no rank of young has given a heartbeat" in phalanx("top", "young").err
    assert "--interval 0" in phalanx("top", "young", "--interval", "0").err
