"""stall_timeout: which processes of a machine are asked where they are, and killed."""

from __future__ import annotations

import signal
import time
from types import SimpleNamespace

import pytest

from phalanx.diagnosis.evidence import Evidence
from phalanx.launch.environment import NodeInfo
from phalanx.launch.error_file import record_exception
from phalanx.launch.group import RankState
from phalanx.launch.rank_files import stack_path
from phalanx.launch.spec import CallTarget, Elastic, LaunchSpec
from phalanx.observe.heartbeat import HeartbeatBoard, board_path, within
from phalanx.recovery.launcher.stall import StallWatch

STACK = 'Current thread 0x1 (most recent call first):\n  File "{}", line 1 in function\n'
WAITS, SLEEPS = STACK.format("torch/distributed/distributed_c10d.py"), STACK.format("train.py")


@pytest.fixture
def machine(tmp_path):
    """Three processes: two ranks, of which the second sleeps, and a spare one, which waits for a place."""
    target, elastic = CallTarget("module:function", ""), Elastic((2,), 1, stall_seconds=0.0)
    spec = LaunchSpec(target=target, ranks_per_node=2, log_dir=tmp_path, elastic=elastic, join_timeout=600.0)
    evidence = Evidence(spec, NodeInfo(0, 1, 0, 2, "127.0.0.1", 1))
    states = [RankState(number, f"r{number}", f"r{number}", number) for number in range(3)]
    for state, stack in zip(states, (WAITS, SLEEPS, SLEEPS), strict=True):
        stack_path(tmp_path, state.slot).write_text(stack)
    for slot in (0, 1):
        HeartbeatBoard(board_path(tmp_path), slot).beat(5)
    killed: list[tuple[int, list[str]]] = []
    group = SimpleNamespace(signal=lambda number, which: killed.append((number, [each.key for each in which])))
    questions: list = []
    inquiry = SimpleNamespace(
        ask_ranks=lambda then, which: questions.append((then, [each.key for each in which])),
    )
    console = SimpleNamespace(notice=lambda text: None)
    context = SimpleNamespace(spec=spec, group=group, console=console)
    watch = StallWatch(context, SimpleNamespace(inquiry=inquiry, evidence=evidence, report=None))
    role = SimpleNamespace(unchanged_since=time.monotonic() - 1, members_here=states[:2])
    yield SimpleNamespace(watch=watch, role=role, questions=questions, killed=killed)
    evidence.close()


def test_the_stalled_rank_is_killed_and_a_spare_one_is_not(machine):
    machine.watch.check(machine.role)
    ((then, asked),) = machine.questions
    assert asked == ["r0", "r1"]
    then([])
    assert machine.killed == [(signal.SIGKILL, ["r1"])]


def test_a_rank_that_took_a_place_while_the_others_answered_is_not_killed(machine):
    machine.watch.check(machine.role)
    machine.role.unchanged_since = time.monotonic()
    machine.questions[0][0]([])
    assert machine.killed == []


def test_a_rank_with_progress_is_not_stuck(machine):
    evidence, (one, *_) = machine.watch._evidence, machine.role.members_here
    assert not evidence.is_stuck(one, 60.0)
    assert evidence.is_stuck(one, -1.0)
    assert evidence.is_stuck(RankState(2, "r2", "r2", 2), 60.0), "it has never shown any"


def test_a_rank_in_code_of_the_user_is_alive_as_long_as_others_would_wait_for_it(machine, tmp_path, monkeypatch):
    evidence, (one, *_) = machine.watch._evidence, machine.role.members_here
    board = HeartbeatBoard(board_path(tmp_path), 0)
    now = time.time()
    monkeypatch.setattr("time.time", lambda: now + 100)
    assert evidence.is_stuck(one, 60.0)
    monkeypatch.setattr("time.time", lambda: now)
    with within("on_epoch_end", board):
        assert evidence.activity(one) == "on_epoch_end"
        with within("a save", board):
            assert evidence.activity(one) == "a save"
        assert evidence.activity(one) == "on_epoch_end"
        monkeypatch.setattr("time.time", lambda: now + 590)
        assert not evidence.is_stuck(one, 60.0)
        monkeypatch.setattr("time.time", lambda: now + 610)
        assert evidence.is_stuck(one, 60.0), "`timeout` is over"
    assert evidence.activity(one) == ""


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (AssertionError(), "raised AssertionError"),
        (KeyError(), "raised KeyError"),
        (ValueError("\n\n  no\nmore"), "raised ValueError: no"),
    ],
)
def test_an_exception_without_a_text_is_described(machine, tmp_path, error, said):
    evidence, (one, *_) = machine.watch._evidence, machine.role.members_here
    one.code = 1
    request = {"log_dir": str(tmp_path), "rank": 0, "attempt": 0}
    record_exception(error, request)
    assert evidence.describe(one) == said
    assert evidence.find_failure([one]).cause == said
