"""Events survive JSON, streams survive their sinks, and the launcher's socket never holds up a rank."""

from __future__ import annotations

import json
import math
import os
import select
import socket
import subprocess
import sys

import pytest

from phalanx.observe import events
from phalanx.observe.sinks import EVENTS_FD, EventStream, FdSink, JsonlSink

STEP = events.StepDone(3, 1, 0.5, 1e-3, 0.9, 100.0, 0.01, 1_000, 96)
ALL = [
    events.RunStarted("digits", "runs/1", 2, "cpu", "ddp", "fp32", 10, 32, 1, 64, 100, 5, None, {"dp": 2}),
    STEP,
    events.Phase("evaluate", "end", 0.5),
    events.MetricsReported(3, 1, "val", {"loss": math.inf, "accuracy": 0.5}),
    events.EpochDone(3, 1, math.nan, {"accuracy": 0.5}, 1.5, 64.0),
    events.CheckpointSaved(3, "ckpt/step-00000003", 0.1, 99),
    events.Message("warning", "nan"),
    events.SampleDrawn(3, "To be"),
    events.Failure(1, "host", 3, "ValueError", "bad"),
    events.RankLost(1, "was killed", "replace", 2, "failure 1 of at most 3"),
    events.Recovered(7, 0, 0.4, "rank 1 was killed", 2, [1]),
    events.ServersReported("bounded", 8, 40.0, 0.5, 2, 1, 0, 1.5, 0.5, [{"bytes_in": 9, "busy": 0.1}]),
    events.RanksReported(8, [0, 3], {"memory": [1.0, math.nan]}, {"memory": [1.0] * 5}, 2, 3),
    events.RankSuspected(8, "straggler", [3], "rank 3 needs 9 ms", "warn"),
    events.Goodput(9, 4, {"productive": 3.5, "idle": 1.0}, 1000.0, before=[6, 999.0]),
    events.RunEnded("finished", 3, 1.5, 64.0, {"loss": -math.inf}, None, ["phalanx eval runs/1"]),
]


@pytest.mark.parametrize("event", ALL, ids=lambda event: event.kind)
def test_every_event_survives_json(event):
    line = event.to_json()
    assert json.loads(line, parse_constant=pytest.fail)["event"] == event.kind
    assert events.from_json(line) == event


def test_every_kind_is_tested():
    assert {event.kind for event in ALL} == set(events.KINDS)


def test_not_a_number_survives_json():
    event = events.from_json(events.StepDone(1, 1, math.nan, 1e-3).to_json())
    assert isinstance(event, events.StepDone)
    assert math.isnan(event.loss)
    assert '"loss":"nan"' in event.to_json()


def test_unknown_kinds_are_refused_and_unknown_fields_left_out():
    assert events.from_dict({**STEP.to_dict(), "invented_later": 1}) == STEP
    with pytest.raises(ValueError, match="unknown event 'stop'; known: checkpoint, epoch, failure"):
        events.from_dict({"event": "stop"})


class Kept:
    def __init__(self):
        self.events = []
        self.closed = False

    def handle(self, event):
        self.events.append(event)

    def close(self):
        self.closed = True


class Broken(Kept):
    def handle(self, event):
        super().handle(event)
        raise RuntimeError("the dashboard is down")


def test_a_broken_sink_is_reported_once_and_the_others_go_on(capsys):
    broken, kept = Broken(), Kept()
    stream = EventStream([broken, kept], rank=3)
    stream.emit(STEP)
    stream.emit(STEP)
    stream.close()
    assert len(broken.events) == 1
    assert [event.rank for event in kept.events] == [3, 3]
    assert kept.closed
    shown = capsys.readouterr().err
    assert shown.count("Broken failed and gets no more events") == 1
    assert "the dashboard is down" in shown


def test_a_failures_rank_is_the_guilty_one():
    kept = Kept()
    EventStream([kept], rank=0).emit(events.Failure(5, "host", 1, "E", "m"))
    assert kept.events[0].rank == 5


def test_jsonl_goes_on_where_a_killed_writer_stopped(tmp_path):
    path = tmp_path / "logs" / "events.jsonl"
    sink = JsonlSink(path)
    sink.handle(STEP)
    assert path.read_text().count("\n") == 1, "a line must be on disk before the sink is closed"
    sink.close()
    with path.open("a") as file:
        file.write('{"event":"st')
    sink = JsonlSink(path)
    sink.handle(STEP)
    sink.close()
    lines = path.read_text().splitlines()
    assert len(lines) == 3
    assert events.from_json(lines[2]) == STEP


@pytest.fixture
def connection():
    parent, child = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    yield parent, child
    parent.close()
    child.close()


def test_events_reach_the_launcher_one_datagram_each(connection):
    parent, child = connection
    sink = FdSink.from_environment({EVENTS_FD: str(child.fileno())})
    sink.handle(STEP)
    sink.handle(ALL[0])
    assert [events.from_json(parent.recv(65536)) for _ in range(2)] == [STEP, ALL[0]]
    sink.close()
    os.fstat(child.fileno())  # The launcher's own descriptor is still open.


def test_a_launcher_that_does_not_read_costs_steps_not_time(connection):
    parent, child = connection
    sink = FdSink.from_environment({EVENTS_FD: str(child.fileno())})
    for _ in range(20_000):
        sink.handle(STEP)
    received = 0
    while select.select([parent], [], [], 0)[0]:
        parent.recv(65536)
        received += 1
    assert 0 < received < 20_000
    sink.handle(STEP)
    assert events.from_json(parent.recv(65536)) == STEP
    sink.close()


def test_a_launcher_that_has_ended_gets_no_more_events(connection):
    parent, child = connection
    sink = FdSink.from_environment({EVENTS_FD: str(child.fileno())})
    parent.close()
    sink.handle(STEP)
    sink.handle(STEP)
    assert sink._socket is None


def test_a_descriptor_that_is_not_a_socket_is_left_alone(tmp_path):
    with (tmp_path / "file").open("w") as file:
        assert FdSink.from_environment({EVENTS_FD: str(file.fileno())}) is None
    assert FdSink.from_environment({EVENTS_FD: "987654"}) is None
    assert FdSink.from_environment({EVENTS_FD: "three"}) is None
    assert FdSink.from_environment({}) is None


def test_observing_imports_neither_torch_nor_rich():
    modules = "events sinks step_clock history console format trial_control guard heartbeat"
    code = (
        "import sys, importlib\n"
        f"for name in {modules.split()}: importlib.import_module('phalanx.observe.' + name)\n"
        "import phalanx.trackers\n"
        "print(sorted({'torch', 'rich', 'mlflow', 'tensorboard', 'pandas', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_event_that_no_datagram_can_hold_is_left_out_and_the_next_ones_are_shown(connection):
    parent, child = connection
    sink = FdSink.from_environment({EVENTS_FD: str(child.fileno())})
    stream = EventStream([sink])
    large = events.SampleDrawn(7, "x" * (1 << 22))
    for event in (large, large, STEP):
        stream.emit(event)
    note, step = (events.from_json(parent.recv(65536)) for _ in range(2))
    assert note.level == "warning"
    assert "events 'sample' of 4.2 MB are not shown here" in note.text
    assert step.step == STEP.step
    assert stream.find(FdSink) is sink
    stream.close()
