"""The parts of the launcher that need no process: specs, causes, reports, restarts, stacks, counters, output."""

from __future__ import annotations

import io
import linecache
import os
import time

import pytest
import torch
from command import ROOT
from ranks import RecordingConsole

from phalanx.diagnosis.exits import RankExit, explain, find_first_cause
from phalanx.diagnosis.stacks import _RECORDER, whereabouts
from phalanx.errors import UsageError
from phalanx.host.gpus import count_gpus, count_visible
from phalanx.host.processes import oom_kills
from phalanx.launch import CallTarget, FailureReport, LaunchSpec, ModuleTarget, PlainConsole, ScriptTarget
from phalanx.launch.environment import threads_per_rank
from phalanx.launch.gathering import check_numbers, order_nodes
from phalanx.launch.launcher_loop import Outcome, may_restart
from phalanx.launch.output import LineSplitter, OutputPump, RankLog, log_path
from phalanx.launch.spec import check_endpoint, split_endpoint


def _spec(tmp_path, **fields):
    return LaunchSpec(**{"target": ScriptTarget("train.py"), "ranks_per_node": 2, "log_dir": tmp_path, **fields})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"ranks_per_node": 0}, "ranks_per_node is 0"),
        ({"num_nodes": 0}, "num_nodes is 0"),
        ({"max_restarts": -1}, "max_restarts is -1"),
        ({"console_ranks": "1"}, "console_ranks is '1'"),
        ({"num_nodes": 2}, "need a rendezvous"),
        ({"num_nodes": 2, "node_rank": 2, "rdzv_endpoint": "a:1"}, "node_rank is 2, but there are 2 nodes"),
        ({"num_nodes": 2, "rdzv_endpoint": "a:port"}, "'a:port' is not host:port"),
    ],
)
def test_a_bad_spec_is_refused_at_once(tmp_path, fields, words):
    with pytest.raises(UsageError, match=words):
        _spec(tmp_path, **fields)


def test_targets_are_checked_before_anything_starts(tmp_path):
    for target in (ScriptTarget(tmp_path), ModuleTarget("a/b.py"), CallTarget("no_colon")):
        with pytest.raises(UsageError):
            target.check()


def test_endpoints():
    assert split_endpoint("node0:123") == ("node0", 123)
    assert split_endpoint("node0") == ("node0", 29400)
    assert split_endpoint("[::1]:5") == ("::1", 5)


def test_an_unknown_host_is_refused_at_once():
    check_endpoint("127.0.0.1:5")
    with pytest.raises(UsageError, match=r"the host 'nowhere\.invalid' of rdzv_endpoint .* is not known") as caught:
        check_endpoint("nowhere.invalid:29400")
    assert ":29400" in caught.value.hint


def test_labels_and_threads(tmp_path):
    spec = _spec(tmp_path, labels=("r0 dp0", "r1 dp1"))
    assert [spec.label(rank) for rank in range(3)] == ["r0 dp0", "r1 dp1", "r2"]
    assert threads_per_rank(spec, {"OMP_NUM_THREADS": "3"}) == 3
    assert threads_per_rank(spec, {}) == max(1, len(os.sched_getaffinity(0)) // 2)
    assert threads_per_rank(_spec(tmp_path, threads_per_rank=5), {"OMP_NUM_THREADS": "3"}) == 5


def _exit(rank, when, message=None, code=1, tail=()):
    record = None if message is None else {"time": when, "message": message}
    return RankExit(rank, code, when, record, tuple(tail))


def test_the_earliest_real_cause_is_guilty():
    lost = _exit(0, 1.0, "[gloo/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:3")
    reset = _exit(3, 0.5, "recv: Connection reset by peer")
    aborted = _exit(4, 0.4, code=-6, tail=["Watchdog caught collective operation timeout"])
    cause, later = _exit(1, 2.0, "bad batch"), _exit(2, 3.0, "also bad")
    assert find_first_cause([lost, later, cause, reset, aborted]) is cause
    assert find_first_cause([lost, reset]) is reset


@pytest.mark.parametrize(
    ("outcome", "attempt", "restarts"),
    [
        (Outcome(0), 0, False),
        (Outcome(1, FailureReport(cause="x", exit_code=1)), 0, True),
        (Outcome(1, FailureReport(cause="x", exit_code=1)), 2, False),
        (Outcome(2, FailureReport(cause="x", exit_code=2)), 0, False),
        (Outcome(75), 0, False),
        (Outcome(130, interrupted=True), 0, False),
    ],
)
def test_policy(outcome, attempt, restarts):
    assert may_restart(outcome, failures=attempt, max_restarts=2) is restarts


def test_memory_is_blamed_only_on_evidence(tmp_path):
    def words(killed_for_memory):
        ended = RankExit(1, -9, 0.0, None, ())
        return explain(
            ended, label="r1", host="a", step=4, killed_for_memory=killed_for_memory, log=tmp_path / "rank-1.log"
        )

    assert words(True).cause == "was killed by the kernel because memory ran out (SIGKILL)"
    assert "or memory ran out" in words(False).cause
    assert str(words(True)).startswith("rank 1 on a at step 4 was killed by the kernel")
    assert words(True).exit_code == 137


def test_a_failure_survives_the_way_to_another_node():
    failure = FailureReport(cause="raised X", exit_code=1, rank=3, label="r3 dp1", host="a", details=("one", "two"))
    assert FailureReport.from_message(failure.to_message()) == failure
    assert str(failure).splitlines()[0] == "rank 3 [r3 dp1] on a raised X"


def test_oom_counters_of_both_cgroup_versions(tmp_path):
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "vmstat").write_text("nr_free 3\noom_kill 2\n")
    (proc / "self" / "cgroup").write_text("4:memory:/job\n0::/slice\n")
    for folder, name in (("memory/job", "memory.oom_control"), ("slice", "memory.events")):
        (cgroups / folder).mkdir(parents=True)
        (cgroups / folder / name).write_text("oom 9\noom_kill 5\n")
    assert oom_kills(proc, cgroups) == 12
    assert oom_kills(tmp_path / "none", tmp_path / "none") == 0


def test_whereabouts_prefer_the_users_line(tmp_path):
    path = tmp_path / "stack"
    library = os.__file__
    path.write_text(
        'Thread 0x1 (most recent call first):\n  File "/x/other.py", line 1 in worker\n\n'
        f'Current thread 0x2 (most recent call first):\n  File "{library}", line 9 in read\n'
        '  File "/home/me/train.py", line 12 in main\n  File "/home/me/train.py", line 20 in <module>\n'
    )
    assert whereabouts(path) == "at train.py:12 in main (in read, os.py:9)"
    assert "did not answer" in whereabouts(tmp_path / "none")


def test_node_order_fills_the_gaps():
    assert order_nodes([None, 0, None]) == [1, 0, 2]
    assert order_nodes([3, None, 1]) == [1, 2, 0], "node 2 has not come"
    entries = {name: {"host": name, "node_rank": 1} for name in "ab"}
    with pytest.raises(UsageError, match="two nodes say they are node 1: 'a' and 'b'"):
        check_numbers(entries)


def test_visible_gpus_are_counted_as_cuda_counts_them(monkeypatch):
    assert [count_visible(text, 4) for text in ("", "0,1", "2,-1,3", "0,9,1", "1,1", "GPU-a,GPU-b")] == [
        0,
        2,
        1,
        1,
        1,
        2,
    ]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert count_gpus() == 0


def test_output_goes_whole_to_the_log_and_in_lines_to_the_console(tmp_path):
    console = RecordingConsole()
    log = RankLog(tmp_path, 3, console.notice)
    pump = OutputPump(3, "r3", log, console)
    for chunk in (b"one\ntw", b"o\r\n10%\r", b"20%\r", b"last"):
        os.write(pump.write_end, chunk)
        assert pump.pump()
    pump.close_write_end()
    pump.close()
    log.close()
    assert console.lines == [(3, "one"), (3, "two"), (3, "10%\r"), (3, "20%\r"), (3, "last")]
    assert log_path(tmp_path, 3).read_bytes() == b"one\ntwo\r\n10%\r20%\rlast"


def test_a_line_that_does_not_end_costs_neither_time_nor_memory():
    lines, chunk = LineSplitter(), b"z" * (1 << 14)
    began = time.process_time()
    pieces = [piece for _ in range(1 << 10) for piece in lines.split(0, chunk)]  # 16 MB
    assert time.process_time() - began < 2
    rest = "".join(text for _, text in lines.rest())
    assert len(rest) <= 1 << 16
    assert "".join(pieces) + rest == "z" * (1 << 24)


def test_a_character_that_comes_in_two_pieces_is_whole():
    lines = LineSplitter()
    assert list(lines.split(0, "é".encode()[:1])) == []
    assert list(lines.split(0, "é\n".encode()[1:])) == ["é\n"]


def test_one_turn_reads_a_bounded_amount(tmp_path):
    """A rank that prints faster than the console shows must not keep the launcher from its signals."""
    console = RecordingConsole()
    log = RankLog(tmp_path, 0, console.notice)
    pump = OutputPump(0, "r0", log, console)
    console.on_line = lambda line: os.write(pump.write_end, b"again\n")
    os.write(pump.write_end, b"line\n" * 100)
    assert pump.pump()
    assert len(console.lines) == 100
    pump.close_write_end()
    console.on_line = lambda line: None
    pump.close()
    log.close()


def test_a_log_that_fails_is_dropped_with_one_notice(tmp_path):
    console = RecordingConsole()
    log = RankLog(tmp_path, 0, console.notice)
    with open("/dev/full", "wb") as full:
        os.dup2(full.fileno(), log.descriptor)
    pump = OutputPump(0, "r0", log, console)
    for _ in range(3):
        os.write(pump.write_end, b"line\n")
        assert pump.pump()
    pump.close_write_end()
    pump.close()
    log.close()
    assert len(console.lines) == 3
    (notice,) = console.notices
    assert "No space left on device" in notice


def test_a_stream_that_fails_is_reported_once_on_the_other(tmp_path):
    err = io.StringIO()
    with open("/dev/full", "w") as full:
        console = PlainConsole(out=full, err=err)
        for _ in range(3):
            console.rank_output(0, "r0", "line\n")
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), full.fileno())  # else closing it fails as well
    assert err.getvalue().splitlines() == [
        "phalanx: standard output failed (No space left on device): nothing more is written there, the run continues"
    ]


def _report_of(traceback, tmp_path):
    record = {"time": 0.0, "type": "ValueError", "message": "bad", "hint": "", "step": None, "traceback": traceback}
    ended = RankExit(0, 1, 0.0, record, ())
    return explain(ended, label="r0", host="a", step=None, killed_for_memory=False, log=tmp_path / "rank-0.log").details


@pytest.mark.parametrize(
    ("code", "traceback", "named"),
    [
        (1, ["one"], True),
        (1, [], False),  # a PhalanxError has none, and says what is wrong
        (-11, None, True),
        (-9, None, False),
        (3, None, False),
    ],
)
def test_an_error_under_an_untested_torch_names_it(tmp_path, monkeypatch, code, traceback, named):
    monkeypatch.setattr("phalanx.host.versions.NEWEST_TORCH", "2.0")
    record = {"time": 0.0, "type": "ValueError", "message": "bad", "hint": "", "step": None, "traceback": traceback}
    ended = RankExit(0, code, 0.0, None if traceback is None else record, ())
    report = explain(ended, label="r0", host="a", step=None, killed_for_memory=False, log=tmp_path / "rank-0.log")
    note = f"Torch {torch.__version__} is newer than 2.0, the newest that Phalanx was tested with."
    assert (note in report.hint) is named
    assert report.was_killed is (code == -9)


def test_only_a_log_that_holds_something_is_named(tmp_path):
    ended, log = RankExit(0, 3, 0.0, None, ()), tmp_path / "rank-0.log"

    def named() -> str:
        return explain(ended, label="r0", host="a", step=None, killed_for_memory=False, log=log).logs

    assert named() == ""
    log.touch()
    assert named() == ""
    log.write_text("bye")
    assert named() == str(log)


def test_a_long_traceback_is_cut_before_a_frame_with_a_note(tmp_path):
    frames = [line for n in range(20) for line in (f'  File "/x/train.py", line {n}, in f', f"    f({n})", "    ^^^^")]
    head, mark, first, *rest = _report_of(["Traceback (most recent call last):", *frames, "ValueError: bad"], tmp_path)
    assert head == "Traceback (most recent call last):"
    assert first.startswith('  File "/x/train.py"')
    assert mark == f"  ... {60 - 1 - len(rest) + 1} lines are left out here: the log has them"
    assert rest[-1] == "ValueError: bad"
    assert len(rest) + 3 <= 16


def test_a_traceback_shows_the_line_of_a_notebooks_cell(tmp_path, monkeypatch):
    """Only the notebook's own process knows it."""
    cell = "/tmp/ipykernel_1/123.py"
    monkeypatch.setitem(linecache.cache, cell, (9, None, ["def forward(x):\n", "    return x.no_such\n"], cell))
    lines = ["Traceback (most recent call last):", f'  File "{cell}", line 2, in forward', "ValueError: bad"]
    assert _report_of(lines, tmp_path) == (*lines[:2], "    return x.no_such", lines[2])


def test_the_module_that_waits_for_messages_is_where_stacks_show_it():
    assert (ROOT / _RECORDER).is_file()
