"""What moves on the console between events, and what each verbosity shows."""

from __future__ import annotations

import io
import re
import time

import pytest
import torch
from rich.console import Console as Terminal
from torch import nn
from torch.utils.data import TensorDataset

from phalanx import PyTorchDDPTrainer
from phalanx.loop.reporting import _command
from phalanx.observe import events, heartbeat
from phalanx.observe.console import Console
from phalanx.observe.format import Pace
from phalanx.observe.heartbeat import Beat, HeartbeatBoard, board_path
from phalanx.observe.richview import RichView

RUN = events.RunStarted("digits", "runs/1", 2, "cpu", "ddp", "bf16", 12345, 32, 1, 64, 450, 5, log_dir="runs/1/logs")
END = events.RunEnded("finished", 450, 63.0, 1234.0, {"accuracy": 0.9833}, None, ["tensorboard --logdir runs/1"])
STEP = events.StepDone(10, 1, 0.5, 1e-3, samples_per_second=100.0)
ALL = (
    RUN,
    STEP,
    events.Phase("evaluate", "begin", total=12),
    events.Phase("evaluate", "end", 1.5),
    events.MetricsReported(10, 1, "val", {"loss": 0.5}, ends_epoch=True),
    events.EpochDone(10, 1, 0.6, {"loss": 0.5}, 2.0),
    events.CheckpointSaved(10, "ckpt/step-10", 0.1, 1000),
    events.Message("info", "a note"),
    events.Message("warning", "slow disk"),
    END,
)


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


def drawn(view: RichView, width: int = 80) -> list[str]:
    """Return the rows that the next refresh would draw; the spinner stands still."""
    view._terminal = Terminal(
        width=width, file=io.StringIO(), force_terminal=True, color_system=None, get_time=lambda: 0.0
    )
    with view._terminal.capture() as capture:
        view._terminal.print(view._bar())
    return [row.rstrip() for row in capture.get().splitlines()]


def shown(**settings) -> str:
    out = io.StringIO()
    console = Console(out=out, err=out, **settings)
    for event in ALL:
        console.handle(event)
    console.close()
    return re.sub(r"^\d\d:\d\d:\d\d ", "", out.getvalue(), flags=re.MULTILINE)


def test_the_bar_moves_between_two_events():
    beats = [None]
    view = RichView(Tty(), Tty(), lambda: beats[0])
    view.begin(RUN)
    view.step(STEP, RUN)
    assert " 10/450 " in drawn(view)[0]
    beats[0] = Beat(17, time.time())
    assert " 17/450 " in drawn(view)[0]
    view.close()


def test_the_console_reads_the_heartbeats_of_this_run_alone(tmp_path):
    board = HeartbeatBoard.create(board_path(tmp_path), 2)
    board.beat(444)  # of a run before
    time.sleep(0.01)
    console = Console(log_dir=tmp_path, out=io.StringIO(), err=io.StringIO())
    console.handle(events.RunStarted("digits", "runs/1", 2, "cpu", "ddp", "bf16", 1, 32, 1, 64, 450))
    assert console._beat() is None
    time.sleep(0.01)
    board.beat(3)
    assert console._beat().step == 3


def test_before_training_a_spinner_shows_the_phase(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    out = Tty()
    console = Console(out=out, err=out, clock=lambda: 0.0)
    console.handle(events.Phase("starting 2 ranks on cpu", "begin").to_dict())
    view = console._view
    assert drawn(view) == [f"{drawn(view)[0][0]} starting 2 ranks on cpu 0:00"]
    console.handle({"event": "joined", "rank": 0})
    assert drawn(view)[0].endswith("preparing the model and the data 0:00")
    console.handle(RUN)
    assert drawn(view)[1] == "waiting for the first step"
    console.handle(events.Phase("compile", "begin"))
    assert drawn(view)[2].endswith("compiling the model 0:00")
    console.handle(STEP)
    assert len(drawn(view)) == 2
    console.close()
    assert out.getvalue().count("\x1b[?25l") == out.getvalue().count("\x1b[?25h") > 0, "the cursor must be given back"


def test_an_evaluation_has_a_bar_and_a_remaining_time():
    now, beat = [0.0], Beat(10, 0.0, 0)
    beats = [beat]
    view = RichView(Tty(), Tty(), lambda: beats[0], clock=lambda: now[0])
    view.begin(RUN)
    view.step(STEP, RUN)
    view.activity("evaluating", 20)
    for second, part in ((1.0, 1), (5.0, 5)):
        now[0], beats[0] = second, Beat(10, second, part)
        rows = drawn(view)
    assert rows[2].startswith("evaluating ━")
    assert rows[2].endswith("5/20 0:05 < 0:15")
    view.activity(None)
    assert len(drawn(view)) == 2
    view.close()


@pytest.mark.parametrize("width", [20, 40])
def test_every_row_fits_a_narrow_terminal(width):
    view = RichView(Tty(), Tty(), lambda: Beat(10, 0.0, 5))
    view.begin(RUN)
    view.step(STEP, RUN)
    for name, total in (("evaluating", 2000), ("compiling the model", None)):
        view.activity(name, total)
        rows = drawn(view, width)
        assert len(rows) == 3
        assert max(map(len, rows)) <= width
    view.close()


def test_a_printed_line_stays_whole_above_the_bar(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")
    out = Tty()
    console = Console(out=out, err=out)
    console.handle(events.Phase("starting 2 ranks on cpu", "begin"))
    console.rank_output(0, "r0", "half a line, ")
    console.handle(RUN)
    console.rank_output(0, "r0", "and the rest of it, longer than the terminal\n")
    console.handle(STEP)
    console.close()
    assert "half a line, and the rest of it, longer than the terminal" in out.getvalue()


def test_quiet_leaves_one_line():
    assert shown(verbosity="quiet") == "Training finished: 450 steps in 1:03, best accuracy 0.9833, runs/1\n"


def test_quiet_without_progress_shows_errors_alone():
    assert shown(verbosity="quiet", progress=False) == ""
    err = io.StringIO()
    console = Console(verbosity="quiet", progress=False, out=io.StringIO(), err=err)
    console.handle(events.Message("error", "it broke"))
    assert err.getvalue() == "it broke\n"


def test_without_progress_the_summary_and_warnings_remain_on_standard_error():
    out, err = io.StringIO(), io.StringIO()
    console = Console(progress=False, out=out, err=err)
    for event in ALL:
        console.handle(event)
    console.rank_output(0, "r0", "mine\n")
    assert out.getvalue() == "mine\n"
    lines = re.sub(r"\d\d:\d\d:\d\d ", "", err.getvalue()).splitlines()
    assert lines[:2] == ["warning: slow disk", "Training finished"]
    assert lines[-1] == "  tensorboard --logdir runs/1"
    assert not any("loss 0.5" in line for line in lines)


def test_normal_leaves_out_quick_checkpoints_and_verbose_shows_every_event():
    normal, verbose = shown(), shown(verbosity="verbose")
    assert "checkpoint" not in normal
    assert "evaluating" not in normal
    for line in (
        "evaluating: 12 batches",
        "evaluating: 1.5 s",
        "val step 10 epoch 1/5 loss 0.5000",
        "checkpoint ckpt/step-10",
    ):
        assert line in verbose, line
    assert "a note" in normal
    out = io.StringIO()
    Console(out=out, err=out).handle(events.CheckpointSaved(10, "ckpt/step-10", 0.1, 1000, best=True))
    assert "best checkpoint ckpt/step-10 (" in out.getvalue()


def test_verbose_names_the_ranks_that_join():
    out = io.StringIO()
    console = Console(verbosity="verbose", out=out, err=out)
    console.handle({"event": "joining", "rank": 1})
    console.handle({"event": "joined", "rank": 1})
    assert re.sub(r"\d\d:\d\d:\d\d ", "", out.getvalue()) == "rank 1 is ready to join\nrank 1 has joined\n"


def test_the_remaining_time_leaves_the_start_out():
    now = [0.0]
    pace = Pace(100, 200, lambda: now[0])
    assert pace.remaining(100) is None
    now[0] = 60.0  # the first step compiles
    assert pace.remaining(101) == pytest.approx(60 * 99)
    now[0] = 61.0
    assert pace.remaining(111) == pytest.approx(0.1 * 89)
    assert Pace(0, None).remaining(5) is None


class Phases:
    """A sink that keeps the phases of a run."""

    def __init__(self) -> None:
        self.found: list[tuple[str, str, int | None]] = []

    def handle(self, event: events.Event) -> None:
        if isinstance(event, events.Phase):
            self.found.append((event.name, event.state, event.total))

    def close(self) -> None:
        pass


def test_a_run_reports_how_many_batches_an_evaluation_has(tmp_path):
    phases = Phases()
    data = TensorDataset(torch.ones(10, 2), torch.ones(10, 1))
    trainer = PyTorchDDPTrainer(nn.Linear(2, 1), num_workers=1, device="cpu", batch_size=2, callbacks=[phases],
                                loss_fn=nn.MSELoss(), run_dir=str(tmp_path), progress=False)  # fmt: skip
    trainer.fit(data, data)
    assert phases.found == [("evaluate", "begin", 5), ("evaluate", "end", None)]
    assert heartbeat.current().read(0).part == 4, "the batches before the last one are counted as done"


def test_a_program_that_is_not_installed_is_not_proposed(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    assert _command("tensorboard") is None
    (tmp_path / "tensorboard").touch(mode=0o755)
    assert _command("tensorboard") == "tensorboard"
