"""What the user reads: stable lines in a pipe, a live bar on a terminal, a summary at the end."""

from __future__ import annotations

import dataclasses
import io
import re

import pytest
from rich.console import Console as Terminal

from phalanx.observe import events, format
from phalanx.observe.console import Console, PlainView
from phalanx.observe.format import Pace
from phalanx.observe.richview import RichView

RUN = events.RunStarted(
    "digits",
    "runs/1",
    2,
    "cpu",
    "ddp",
    "bf16",
    12345,
    32,
    1,
    64,
    450,
    5,
    tensorboard_dir="runs/1/tb",
    log_dir="runs/1/logs",
)
END = events.RunEnded(
    "finished", 450, 63.0, 1234.0, {"accuracy": 0.9833}, "runs/1/ckpt/step-00000450", ["phalanx eval runs/1"]
)


def step(number: int, **changes) -> events.StepDone:
    values = {"loss": 0.43117, "learning_rate": 1e-3, "grad_norm": 0.871, "samples_per_second": 1234.4}
    return events.StepDone(number, 2, **{**values, "memory_bytes": 312_000_000, **changes})


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_tokens_and_mfu_are_shown_where_they_are_known():
    step = events.StepDone(1, 1, 0.5, 1e-3, samples_per_second=10.0, tokens_per_second=10_240.0, mfu=0.4567)
    assert format.step_parts(step, None)[-2:] == ["10,240 tokens/s", "MFU 45.7%"]
    assert step.scalars()["perf/mfu"] == 0.4567
    end = events.RunEnded("finished", 1, 2.0, 10.0, tokens_per_second=10_240.0, mfu=0.4567)
    assert {("throughput", "10 samples/s, 10,240 tokens/s"), ("MFU", "45.7%")} <= set(format.summary_rows(end, None))


def test_the_summary_says_why_the_run_ended_and_which_checkpoint_is_the_best():
    end = events.RunEnded("finished", 9, 90.0, 10.0, reason="early stopping, ...", best_checkpoint="c/step-7")
    assert format.summary_title(end) == "Training finished: early stopping, ..."
    end = dataclasses.replace(end, best_metric="val/loss", best_value=0.25)
    assert ("best checkpoint", "c/step-7 (val/loss 0.2500)") in format.summary_rows(end, None)
    adapted = dataclasses.replace(RUN, trained_parameters=45, layout="fsdp 2 x tensor 2", world_size=4)
    rows = dict(format.summary_rows(end, adapted))
    assert (rows["layout"], rows["parameters"]) == (
        "4 ranks on cpu, fsdp 2 x tensor 2",
        "45 of 12,345 parameters trained",
    )
    assert "fsdp 2 x tensor 2 · bf16" in format.start_line(adapted)


def test_the_first_steps_are_shown_separately_where_they_took_long():
    long, short = (events.RunEnded("finished", 9, 90.0, 10.0, first_steps_seconds=time) for time in (61.0, 0.1))
    assert ("first step", "1:01, not in the throughput") in format.summary_rows(long, None)
    assert "first step" not in dict(format.summary_rows(short, None))


def test_what_the_throughput_leaves_out_and_what_it_does_not_is_named():
    end = events.RunEnded("finished", 9, 90.0, 10.0, compile_seconds=12.34, compile_graphs=7, slow_seconds=4.2,
                          slow_laps=3, laps=40)  # fmt: skip
    rows = dict(format.summary_rows(end, None))
    assert rows["compilation"] == "12.3 s (7 graphs), not in the throughput"
    assert rows["slow steps"] == "4.2 s in 3 of 40 laps, in the throughput"
    assert not {"compilation", "slow steps"} & dict(format.summary_rows(END, None)).keys()


def test_the_lines_in_a_pipe_are_stable():
    out, err = io.StringIO(), io.StringIO()
    console = Console(out=out, err=err)
    console.handle(RUN)
    console.rank_output(0, "r0", "hello\n")
    console.handle(step(120).to_dict())
    console.handle({"event": "joining", "rank": 1})
    console.handle(events.MetricsReported(120, 2, "val", {"loss": 0.5, "accuracy": 0.91}))
    console.handle(events.CheckpointSaved(120, "ckpt/quick", 0.05, 1_234_567))
    console.handle(events.CheckpointSaved(120, "ckpt/step-00000120", 5.5, 1_234_567))
    console.handle(events.Message("warning", "slow disk"))
    console.error("it broke")
    console.handle(END)
    console.close()
    timed = re.compile(r"^\d\d:\d\d:\d\d ")
    assert [bool(timed.match(line)) for line in out.getvalue().splitlines()] == [
        *map(bool, (1, 0, 1, 1, 1, 1)),
        *[False] * 10,
    ]
    assert [timed.sub("", line) for line in out.getvalue().splitlines()] == [
        "2 ranks on cpu · ddp · bf16 · global batch 64 = 32 x 1 x 2 · 12,345 parameters",
        "hello",
        "step 120/450 epoch 2/5 loss 0.4312 lr 1.0e-03 grad 0.87 1,234 samples/s mem 312 MB eta 0:00",
        "val step 120 epoch 2/5 loss 0.5000 accuracy 0.9100",
        "checkpoint ckpt/step-00000120 (1.2 MB in 5.50 s)",
        "warning: slow disk",
        "Training finished",
        "  time             1:03",
        "  steps            450 of 450",
        "  throughput       1,234 samples/s",
        "  layout           2 ranks on cpu, ddp",
        "  best accuracy    0.9833",
        "  last checkpoint  runs/1/ckpt/step-00000450",
        "  logs             runs/1/logs",
        "next:",
        "  phalanx eval runs/1",
    ]
    assert err.getvalue() == "it broke\n"


def test_in_a_pipe_the_first_the_last_and_one_every_few_seconds_are_shown():
    out, now = io.StringIO(), [0.0]
    view = PlainView(out, out, interval=5.0, clock=lambda: now[0])
    for number in range(1, 13):
        view.step(step(number), RUN)
        now[0] += 1.0
    view.close()
    assert re.findall(r"step (\d+)/", out.getvalue()) == ["1", "6", "11", "12"]


def test_several_ranks_are_labelled_and_redrawn_lines_stay_on_their_row():
    out = io.StringIO()
    console = Console(out=out, err=out, show_labels=True)
    console.rank_output(3, "r3 dp1", "50%\r")
    console.rank_output(3, "r3 dp1", "done\n")
    assert out.getvalue() == "[r3 dp1] 50%\r[r3 dp1] done\n"


def test_a_stream_without_unicode_does_not_stop_the_run():
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii")
    Console(out=out, err=out).handle(RUN)
    assert raw.getvalue().split(b" ", 1)[1].startswith(b"2 ranks on cpu ? ddp")


def test_a_dumb_terminal_gets_plain_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    out = Tty()
    console = Console(out=out, err=out)
    console.handle(RUN)
    console.handle(step(1))
    console.close()
    assert "\x1b" not in out.getvalue()
    assert "step 1/450" in out.getvalue()


def rendered(width: int, run=RUN, **changes) -> list[str]:
    """Return the two rows of the bar at a given width."""
    now = [0.0]
    view = RichView(Tty(), Tty(), clock=lambda: now[0])
    view._run, view._last, view._pace = run, step(120, **changes), Pace(0, run.total_steps, lambda: now[0])
    now[0] = 10.0
    view._terminal = Terminal(width=width, file=io.StringIO(), force_terminal=True, color_system=None)
    with view._terminal.capture() as capture:
        view._terminal.print(view._bar())
    return capture.get().splitlines()


def test_the_bar_fits_eighty_columns():
    first, second = rendered(80)
    assert len(first) <= 80
    assert first.startswith("digits ━")
    assert first.rstrip().endswith("120/450 epoch 2/5 0:10 < 0:27")
    assert second == "loss 0.4312 · lr 1.0e-03 · grad 0.87 · 1,234 samples/s · mem 312 MB"


@pytest.mark.parametrize("width", [30, 40, 60])
def test_a_narrow_terminal_drops_figures_from_the_end(width):
    first, second = rendered(width)
    assert len(first) <= width
    assert len(second) <= width
    assert second.startswith("loss 0.4312")


def test_without_a_total_there_is_no_remaining_time():
    run = events.RunStarted("digits", "runs/1", 1, "cpu", "ddp", "fp32", 10, 32, 1, 32)
    first, _ = rendered(80, run)
    assert first.rstrip().endswith("120 epoch 2 0:10")


def test_on_a_terminal_everything_scrolls_above_the_bar_and_nothing_is_left(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("NO_COLOR", raising=False)
    out, err = Tty(), Tty()
    console = Console(out=out, err=err)
    console.handle(RUN)
    console.handle(step(120))
    console.rank_output(0, "r0", "[bold]not markup[/bold]\n")
    console.error("it broke")
    console.handle(END)
    console.close()
    shown = out.getvalue()
    assert "[bold]not markup[/bold]" in shown
    assert "Training finished" in shown
    assert "phalanx eval runs/1" in shown
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") > 0, "the cursor must be given back"
    assert "it broke" in err.getvalue()


def test_a_line_that_comes_in_parts_has_a_row_below_the_bar_until_it_ends():
    out = Tty()
    view = RichView(out, Tty())
    view.begin(RUN)
    for text, row in (
        ("\r", ""),
        (" 10%", " 10%"),
        ("\r", " 10%\r"),
        (" 20%", " 20%"),
        ("\r", " 20%\r"),
        ("end", "end"),
    ):
        view.output(text)
        assert view._row.lstrip("\r") == row
    view.output("ed\n")
    view.close()
    assert (view._row, "ended" in out.getvalue(), "20%ended" in out.getvalue()) == ("", True, False)


def test_no_color_is_honoured(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1")
    out = Tty()
    console = Console(out=out, err=out)
    console.handle(RUN)
    console.handle(step(1))
    console.handle(END)
    console.close()
    assert not re.search(r"\x1b\[[0-9;]*3[0-9](;|m)", out.getvalue())


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (1_500, "1.5 kB"), (312_000_000, "312 MB"), (5e12, "5.0 TB")],
)
def test_sizes_read_well(count, text):
    assert format.size(count) == text
