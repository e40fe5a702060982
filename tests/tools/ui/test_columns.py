"""Runs as columns: what is read once, what is continued, what is left out, and what a chart's width keeps."""

from __future__ import annotations

import base64
import itertools
import json
import math
import random

import numpy as np
import pytest

from phalanx.observe.events import Goodput, MetricsReported, Phase, RanksReported, RunStarted, StepDone
from phalanx.observe.goodput import account, read_events
from phalanx.tools.ui import columns
from phalanx.tools.ui.columns import RunEvents, preview


def started(time: float = 0.0) -> RunStarted:
    sizes = {"parameters": 1, "batch_size": 1, "accumulation": 1, "global_batch": 2, "world_size": 2}
    texts = {"name": "x", "run_dir": "x", "device": "cpu", "strategy": "ddp", "precision": "fp32"}
    return RunStarted(**texts, **sizes, time=time, rank=0)


def step(number: int, loss: float = 1.0, time: float | None = None) -> StepDone:
    when = float(number) if time is None else time
    return StepDone(step=number, epoch=1, loss=loss, learning_rate=0.1, time=when, rank=0)


@pytest.fixture
def file(tmp_path):
    """Return a function that appends events or text to a file, and the file's reader."""
    path = tmp_path / "events.jsonl"

    def write(*events):
        with path.open("a") as out:
            out.writelines(each if isinstance(each, str) else each.to_json() + "\n" for each in events)
        reader.refresh()
        return reader

    reader = RunEvents(path)
    return write


def values(reader: RunEvents, name: str, part: str = "low", width: int = 600) -> list[float]:
    """Return a curve as the page would decode it."""
    table = next(table for table in reader.curves(width) if name in table["curves"])
    text, kind = (table[part], "<f8") if part in ("step", "time") else (table["curves"][name][part], "<f4")
    return np.frombuffer(base64.b64decode(text), kind).tolist()


def test_a_file_is_continued_where_it_has_grown(file):
    reader = file(started(), step(1, 5.0))
    text = step(2, 4.0).to_json()
    assert values(file(text[:30]), "train/loss") == [5.0], "half a line is not a point yet"
    assert values(file(text[30:] + "\n"), "train/loss") == [5.0, 4.0]
    assert reader.damaged == 0


def test_damaged_lines_are_counted_and_left_out(file):
    reader = file(
        step(1, 3.0), '{"event":"step","ti\n', "\x00\x01\n", "[1, 2]\n", '"text"\n', step(2, 2.0), '{"time":1}\n'
    )
    assert values(reader, "train/loss") == [3.0, 2.0]
    assert reader.damaged == 5
    wrong = json.dumps({"event": "step", "time": 3.0, "step": "three", "loss": 1.0}) + "\n"
    assert values(file(wrong, step(4, 1.0)), "train/loss") == [3.0, 2.0, 1.0], "its neighbours stay"
    assert reader.damaged == 6


def test_values_that_are_not_finite_are_gaps_with_a_count(file):
    reader = file(step(1, 3.0), step(2, math.nan), step(3, math.inf), step(4, 1.0))
    assert values(reader, "train/loss")[0::3] == [3.0, 1.0]
    assert all(map(math.isnan, values(reader, "train/loss")[1:3]))
    loss = reader.curves(600)[0]["curves"]["train/loss"]
    assert (loss["not_finite"], loss["first"]) == (2, 2.0)
    assert "train/grad_norm" not in reader.curves(600)[0]["curves"], "it was never known"
    json.dumps(reader.curves(600), allow_nan=False)


def test_steps_that_are_done_again_replace_the_first_ones(file):
    reader = file(step(1, 9.0), step(2, 8.0), step(3, 7.0), started(10.0), step(2, 5.0, 12.0), step(3, 4.0, 13.0))
    assert values(reader, "train/loss") == [9.0, 5.0, 4.0]
    assert values(reader, "train/loss", "time") == [1.0, 12.0, 13.0]


@pytest.mark.parametrize("how", ["replaced", "shortened", "removed"])
def test_a_file_that_begins_again_is_read_from_its_beginning(file, how):
    reader = file(step(1, 9.0), step(2, 8.0))
    if how == "shortened":
        reader.path.write_text("")
    else:
        reader.path.unlink()
    if how == "removed":
        reader.refresh()
        assert reader.curves(600) == []
    assert values(file(step(1, 2.0)), "train/loss") == [2.0]


def test_a_reduced_curve_keeps_every_peak(file):
    chance = random.Random(0)
    losses = [chance.random() for _ in range(5000)]
    losses[1234], losses[4321] = 77.0, -5.0
    reader = file(*(step(number + 1, loss) for number, loss in enumerate(losses)))
    assert len(values(reader, "train/loss", "low", 100)) == len(values(reader, "train/loss", "step", 100)) == 100
    assert max(values(reader, "train/loss", "high", 100)) == 77.0
    assert min(values(reader, "train/loss", "low", 100)) == -5.0
    mean = sum(values(reader, "train/loss", "mean", 100)) / 100
    assert mean == pytest.approx(sum(losses) / 5000, rel=1e-5)
    inside = reader.curves(100, 1000.0, 1050.0)[0]
    assert inside["count"] == 51
    assert "high" not in inside["curves"]["train/loss"], "few points are sent as they are"


def test_metrics_ranks_and_phases_have_their_places(file):
    report = {
        "step": 1,
        "ranks": [0, 3],
        "values": {"gpu_power": [100.0, 300.0]},
        "percentiles": {"gpu_power": [1.0] * 5},
    }
    reader = file(
        started(),
        Phase(name="evaluate", state="begin", time=1.0),
        MetricsReported(step=1, epoch=1, split="val", values={"accuracy": 0.5}, time=2.0),
        Phase(name="evaluate", state="end", seconds=1.0, time=2.0),
        RanksReported(**report, slowest=3, counted=9, time=3.0),
        Phase(name="checkpoint", state="begin", time=4.0),
    )
    assert values(reader, "val/accuracy") == [0.5]
    assert values(reader, "system/gpu_power_watts") == [1.0]
    heat = reader.heat()
    assert (heat["ranks"], heat["slowest"], heat["counted"]) == ([0, 3], [3], 9)
    assert np.frombuffer(base64.b64decode(heat["gauges"]["gpu_power"]), "<f4").tolist() == [100.0, 300.0]
    assert reader.timeline() == [("evaluate", 1.0, 2.0), ("checkpoint", 4.0, 4.0)], "the second one goes on"
    assert [event["event"] for event in reader.listed] == ["run_started"]


def test_long_runs_keep_a_bounded_number_of_reports_and_spans(file):
    report = {"ranks": [0], "values": {"step_seconds": [1.0]}, "percentiles": {}}
    reader = file(*(RanksReported(step=number, **report, time=float(number)) for number in range(3000)))
    steps = reader.heat()["steps"]
    assert 100 < len(steps) <= columns._MOST_REPORTS
    assert steps[0] == 0
    assert steps[-1] > 2950
    assert len({b - a for a, b in itertools.pairwise(steps)}) <= 2, "they are evenly spread"
    file(*(Phase(name="evaluate", state="end", seconds=0.5, time=float(number)) for number in range(5000)))
    spans = reader.timeline()
    assert len(spans) <= columns._MOST_SPANS
    assert spans[-1][2] == 4999.0


def test_the_account_is_that_of_all_events(file):
    def goodput(number: int, began: float, time: float, **more):
        seconds = {"productive": time - began - 1.0, "import": 1.0}
        return Goodput(step=number, first_step=more.pop("first", 0), seconds=seconds, began=began, time=time, **more)

    attempts = []
    for began, first in ((0.0, 0), (100.0, 30), (250.0, 60)):
        attempts += [started(began + 1)]
        for number in range(1, 60):
            attempts.append(step(first + number, time=began + 1 + number))
            if number % 10 == 1:
                attempts.append(
                    goodput(first + number, began, began + 1 + number, first=first, attempt=first, samples=number)
                )
    reader = file(*attempts)
    assert reader.account([]) == account(read_events(reader.path))
    beat = [{"event": "heartbeat", "time": 400.0, "step": 130}]
    assert reader.account(beat) == account((*read_events(reader.path), *beat))
    assert len(reader._ledger) < 20


def test_a_long_file_is_shown_before_it_is_read(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text("".join(step(number, 1.0).to_json() + "\n" for number in range(1, 100)))
    assert preview(path, 50) == [], "a short one is read at once"
    assert preview(tmp_path / "missing", 50) == []
    path.write_text("".join(step(number, float(number)).to_json() + "\n" for number in range(1, 30_001)))
    (table,) = preview(path, 50)
    assert table["preview"]
    assert 40 <= table["count"] <= 50
    steps = np.frombuffer(base64.b64decode(table["step"]))
    assert (np.diff(steps) > 0).all()
    assert steps[0] < 100
    assert steps[-1] > 29_900
