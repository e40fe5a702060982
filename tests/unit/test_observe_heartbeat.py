"""The heartbeat board: ranks write steps, the launcher reads them, at little cost."""

from __future__ import annotations

import time

import pytest

from phalanx.observe import heartbeat


def test_beats_are_read_by_rank(tmp_path):
    reader = heartbeat.HeartbeatBoard.create(tmp_path / "heartbeats", 3)
    assert [reader.read(rank) for rank in range(3)] == [None, None, None]
    before = time.time()
    writer = heartbeat.HeartbeatBoard(tmp_path / "heartbeats", 1)
    writer.beat(7)
    beat = reader.read(1)
    assert beat is not None
    assert beat.step == 7
    assert before <= beat.time <= time.time()
    assert reader.read(0) is None
    writer.close()
    reader.close()


def test_a_rank_that_is_not_on_the_board_is_refused(tmp_path):
    heartbeat.HeartbeatBoard.create(tmp_path / "heartbeats", 2).close()
    with pytest.raises(IndexError, match="rank 2 is not on the board"):
        heartbeat.HeartbeatBoard(tmp_path / "heartbeats", 2)


def test_the_current_board_comes_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.delenv("PHALANX_LOG_DIR", raising=False)
    heartbeat.current().beat(1)
    heartbeat.HeartbeatBoard.create(heartbeat.board_path(tmp_path, 1), 4)
    for name, value in {"PHALANX_LOG_DIR": str(tmp_path), "GROUP_RANK": "1", "RANK": "3"}.items():
        monkeypatch.setenv(name, value)
    heartbeat.current().beat(5)
    beat = heartbeat.current().read(3)
    assert beat is not None
    assert beat.step == 5


def test_a_beat_makes_no_file_grow(tmp_path):
    path = tmp_path / "heartbeats"
    writer = heartbeat.HeartbeatBoard.create(path, 2)
    size = path.stat().st_size
    for step in range(100):
        writer.beat(step)
    assert path.stat().st_size == size
    writer.close()


def test_the_batches_of_an_evaluation_are_counted_and_the_next_step_forgets_them(tmp_path):
    board = heartbeat.HeartbeatBoard.create(tmp_path / "heartbeats", 1)
    for each in (board, heartbeat.LocalBoard()):
        each.beat(7)
        each.count(3)
        assert (each.read(0).step, each.read(0).part) == (7, 3)
        each.beat(8)
        assert (each.read(0).step, each.read(0).part) == (8, 0)
    board.close()
