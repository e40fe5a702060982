"""The heartbeat board: ranks write steps, the launcher reads them, at little cost."""

from __future__ import annotations

import time

import pytest
from waiting import LIMIT_SECONDS

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


def test_progress_within_a_step_and_before_the_first_one_is_seen(tmp_path):
    board = heartbeat.HeartbeatBoard.create(tmp_path / "heartbeats", 2)
    assert board.last_progress(0) == 0.0
    before = time.time()
    board.alive()
    first = board.last_progress(0)
    assert before <= first <= time.time()
    assert board.read(0) is None, "no step was taken"
    for each in (board, heartbeat.LocalBoard()):
        each.beat(7)
        each.count(3)
        each.alive()
        assert (each.read(0).step, each.read(0).part) == (7, 3)
    assert board.last_progress(0) > first
    board.close()


def test_a_machine_that_gets_another_number_keeps_its_board(tmp_path, monkeypatch):
    mine = heartbeat.HeartbeatBoard.create(heartbeat.board_path(tmp_path, 1), 4)
    for name, value in {"PHALANX_LOG_DIR": str(tmp_path), "GROUP_RANK": "0", "PHALANX_SLOT": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(heartbeat.BOARD_VARIABLE, str(heartbeat.board_path(tmp_path, 1)))
    heartbeat.current().beat(5)
    assert mine.read(2).step == 5


@pytest.mark.parametrize("busy", [True, False])
def test_a_process_that_uses_the_cpu_beats_and_one_that_waits_does_not(ranks, busy):
    """In a process that started no others: their CPU time counts too."""

    def run() -> bool:
        beats: list[float] = []

        class Board(heartbeat.LocalBoard):
            def alive(self) -> None:
                beats.append(time.time())

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(heartbeat, "_LOCAL", Board())
            patch.setattr(heartbeat, "_BUSY_SHARE", 0.02 if busy else 0.2)  # a busy machine gives it a share only
            patch.delenv("PHALANX_LOG_DIR", raising=False)
            beat = heartbeat.BusyBeat()
            beat.begin()
            until = time.monotonic() + (LIMIT_SECONDS if busy else 2.5)
            while time.monotonic() < until and not beats:
                if not busy:
                    time.sleep(0.1)
            beat.end()
        return bool(beats)

    assert ranks(run, world_size=1) == [busy]
