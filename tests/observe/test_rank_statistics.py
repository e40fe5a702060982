"""All ranks at one moment: percentiles, the slowest, what the boards of several machines hold together."""

from __future__ import annotations

import math
import time

import pytest

from phalanx.observe import rank_statistics
from phalanx.observe.heartbeat import Beat, Gauges, HeartbeatBoard, board_path, read_beats
from phalanx.observe.step_clock import StepClock


def beats(*own: float, step: int = 7) -> dict[int, Beat]:
    return {rank: Beat(step, 1.0, 0, Gauges(step_seconds=0.5, own_seconds=value)) for rank, value in enumerate(own)}


def test_beats_of_all_machines_are_read_together_and_gauges_survive(tmp_path):
    for node, rank in ((0, 1), (1, 2)):
        board = HeartbeatBoard.create(board_path(tmp_path, node), 4)
        board.close()
        own = HeartbeatBoard(board_path(tmp_path, node), rank)
        own.beat(rank * 10)
        own.gauge(Gauges(memory=rank * 1.5))
        own.count(3)
        own.close()
    found = read_beats(tmp_path)
    assert {rank: (beat.step, beat.part, beat.gauges.known()) for rank, beat in found.items()} == {
        1: (10, 3, {"memory": 1.5}),
        2: (20, 3, {"memory": 3.0}),
    }
    HeartbeatBoard.create(board_path(tmp_path, 0), 4).close()
    assert list(read_beats(tmp_path)) == [2], "the board of the attempt before does not count"


@pytest.mark.parametrize(
    ("own", "slowest"),
    [((0.1, 0.1, 0.2, 0.1), 2), ((0.1, 0.105, 0.11, 0.1), None), ((0.3,), None), ((math.nan, 0.1, 0.3), 2)],
)
def test_the_slowest_rank_is_named_only_where_it_is_clearly_slower(own, slowest):
    assert rank_statistics.slowest_of(beats(*own)) == (None if len(own) == 1 else slowest)


def test_ten_thousand_ranks_become_percentiles_in_little_time():
    many = beats(*(0.1 + rank / 1e5 for rank in range(10_000)))
    many[77] = Beat(6, 1.0, 0, Gauges(step_seconds=0.5, own_seconds=0.1))
    began = time.process_time()
    event = rank_statistics.report(many)
    assert time.process_time() - began < 1.0
    assert (event.counted, len(event.ranks), event.slowest) == (10_000, rank_statistics.SHOWN_RANKS, 9_999)
    assert 77 in event.ranks, "a rank that is behind is shown"
    assert event.percentiles["own_seconds"] == pytest.approx([0.1, 0.15, 0.19, 0.199, 0.2], abs=1e-3)
    assert "memory" not in event.values, "what no rank knows is left out"


def test_phases_add_up_to_the_wall_time():
    now = [0.0]
    entered: list[str] = []
    phases = StepClock(lambda: now[0])
    phases.on_enter = entered.append
    for name, at in (("data", 1.0), ("forward", 3.0), ("backward", 6.0), ("other", 10.0), ("data", 15.0)):
        now[0] = at
        phases.enter(name)
    assert phases.phase_seconds == {"data": 2.0, "forward": 3.0, "backward": 4.0, "optimizer": 0.0, "other": 6.0}
    assert (phases.read().own_work, entered[-1]) == (5.0, "data")
