"""Failures of a rank: the guilty rank is named with its cause and its exit code, and no process is left."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from pathlib import Path

import psutil
import pytest
import torch
from command import end, finish, start, write_script
from ranks import RecordingConsole, kept_pids, warm_pid
from waiting import LIMIT_SECONDS

import phalanx
from phalanx import PyTorchDDPTrainer
from phalanx.errors import RankFailedError, UsageError
from phalanx.launch import CallTarget, LaunchSpec, ScriptTarget, launch, launcher_loop, watches
from phalanx.launch.forkserver import client

JOIN = """
import os, sys, time
import torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
"""


PACKAGE = Path(phalanx.__file__).parent


def _assert_nothing_runs():
    left = [child for child in psutil.Process().children(recursive=True) if child.pid not in kept_pids()]
    assert left == []


def test_exit_code_three_is_passed_on(launch_script):
    run = launch_script(JOIN + "if rank == 1:\n    print('bye')\n    sys.exit(3)\ndist.barrier()\n", ranks_per_node=4)
    assert run.result.exit_code == 3
    first, *rest = run.report.splitlines()
    assert first.startswith("rank 1 on ")
    assert "exited with code 3" in first
    assert "  bye" in rest
    assert "3 other ranks stopped because of it." in rest
    assert rest[-1] == f"Logs: {run.log_dir / 'rank-1.log'}"
    _assert_nothing_runs()


def test_an_exception_is_reported_with_the_users_frames_only(launch_script):
    source = JOIN + "def step():\n    raise ValueError('bad batch')\nif rank == 1:\n    step()\ndist.barrier()\n"
    run = launch_script(source)
    assert run.result.exit_code == 1
    lines = run.report.splitlines()
    assert "raised ValueError: bad batch" in lines[0]
    assert lines[1] == "  Traceback (most recent call last):"
    assert 'train.py", line' in lines[2]
    assert "1 other rank stopped because of it." in lines
    assert str(PACKAGE) not in run.report
    # The rank that lost its peer has its traceback in its log, not on the console.
    assert "Traceback" not in run.console.text


def test_a_trainers_frames_do_not_stand_before_the_models(tmp_path, fork_server):
    class Broken(torch.nn.Linear):
        def forward(self, batch):
            raise ValueError("bad batch")

    data = torch.utils.data.TensorDataset(torch.zeros(8, 4), torch.zeros(8, dtype=torch.long))
    trainer = PyTorchDDPTrainer(model=Broken(4, 2), num_workers=2, epochs=1, batch_size=2, run_dir=str(tmp_path))
    with pytest.raises(RankFailedError) as caught:
        trainer.fit(torch.utils.data.DataLoader(data))
    ours = {str(PACKAGE / "run" / name) for name in ("trainer.py", "start.py")}
    assert {str(entry.path) for entry in caught.traceback} == {__file__, *ours}
    head, trace, first, *_ = str(caught.value).splitlines()
    assert "raised ValueError: bad batch" in head
    assert trace == "  Traceback (most recent call last):"
    assert str(PACKAGE) not in first
    log = max(tmp_path.rglob("rank-*.log"), key=lambda path: path.stat().st_size).read_text()
    assert str(PACKAGE / "loop") in log


def test_the_record_of_an_exception_has_rank_step_and_traceback(launch_script):
    source = """
    import os
    from phalanx.observe import heartbeat
    heartbeat.current().beat(17)
    if os.environ["RANK"] == "1":
        raise RuntimeError("boom")
    """
    run = launch_script(source)
    record = json.loads((run.log_dir / "rank-1.error.json").read_text())
    assert (record["rank"], record["step"], record["type"], record["message"]) == (1, 17, "RuntimeError", "boom")
    assert record["traceback"][-1] == "RuntimeError: boom"
    assert "at step 17 raised RuntimeError: boom" in run.report


def test_a_lost_connection_yields_to_the_real_cause(launch_script):
    source = """
    import os, time
    if os.environ["RANK"] == "0":
        raise RuntimeError("Connection closed by peer [127.0.0.1]:1234")
    error = os.path.join(os.environ["PHALANX_LOG_DIR"], "rank-0.error.json")
    while not os.path.exists(error):
        time.sleep(0.01)
    raise KeyError("the real cause")
    """
    run = launch_script(source)
    assert run.report.startswith("rank 1")
    assert "the real cause" in run.report


def test_a_mistake_of_the_users_has_no_traceback_and_its_own_exit_code(launch_script):
    source = """
    from phalanx.errors import UsageError
    raise UsageError("no such recipe.", hint="Write 'digits'.")
    """
    run = launch_script(source, ranks_per_node=1, max_restarts=3)
    assert run.result.exit_code == 2
    assert run.result.attempts == 1
    assert run.report.splitlines()[0].endswith("stopped: no such recipe.")
    assert "Write 'digits'." in run.report
    assert "Traceback" not in run.report + run.log(0)


def test_a_segmentation_fault_shows_the_python_stack(launch_script):
    source = JOIN + "import ctypes\ndef touch():\n    ctypes.string_at(0)\nif rank == 1:\n    touch()\ndist.barrier()\n"
    run = launch_script(source)
    assert run.result.exit_code == 139
    assert "segmentation fault (SIGSEGV)" in run.report.splitlines()[0]
    assert "in touch" in run.report
    assert "zygote" not in run.report


def test_a_killed_rank_is_reported_as_killed(launch_script):
    run = launch_script(JOIN + "if rank == 1:\n    os.kill(os.getpid(), 9)\ndist.barrier()\n")
    assert run.result.exit_code == 137
    assert run.report.startswith("rank 1 ")
    assert "SIGKILL" in run.report
    assert "memory" in run.report


def test_a_signal_from_elsewhere_is_named(launch_script):
    run = launch_script("import os, signal\nos.kill(os.getpid(), signal.SIGXCPU)\n", ranks_per_node=1)
    assert run.result.exit_code == 128 + 24
    assert "killed by SIGXCPU, which another process sent" in run.report


def test_a_script_that_does_not_exist_names_the_nearest(tmp_path):
    (tmp_path / "train.py").write_text("")
    with pytest.raises(UsageError, match=r"tran\.py' does not exist") as caught:
        launch(LaunchSpec(target=ScriptTarget(tmp_path / "tran.py"), ranks_per_node=1, log_dir=tmp_path / "logs"))
    assert "train.py" in caught.value.hint
    assert not (tmp_path / "logs").exists()


def test_a_function_that_does_not_exist_fails_in_the_rank(tmp_path, fork_server):
    spec = LaunchSpec(target=CallTarget("json:no_such"), ranks_per_node=1, log_dir=tmp_path / "logs")
    result = launch(spec, RecordingConsole())
    assert result.exit_code == 1
    assert "has no attribute 'no_such'" in str(result.failure)


def test_restarts_are_counted_and_passed_to_the_ranks(launch_script):
    source = """
    import os, sys
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    print("attempt", attempt, os.environ["MASTER_PORT"])
    sys.exit(0 if attempt == 2 else 7)
    """
    run = launch_script(source, ranks_per_node=1, max_restarts=2)
    assert (run.result.exit_code, run.result.attempts, run.result.failure) == (0, 3, None)
    assert [line.split()[1] for _, line in run.console.lines] == ["0", "1", "2"]
    assert "exited with code 7" in run.console.notices[0]
    assert "restart 2 of 2" in run.console.notices[1]
    assert "--- restart 2 ---" in run.log(0)


def test_restarts_run_out(launch_script):
    run = launch_script("raise SystemExit(7)", max_restarts=1)
    assert (run.result.exit_code, run.result.attempts) == (7, 2)


def test_each_attempt_has_a_fresh_store(launch_script):
    source = JOIN + "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n    sys.exit(1)\ndist.barrier()\n"
    run = launch_script(source, max_restarts=1)
    assert (run.result.exit_code, run.result.attempts) == (0, 2)


def test_a_rank_that_never_joins_is_named_with_the_line_it_is_at(launch_script):
    source = """
    import os, time
    import torch.distributed as dist
    def load_data():
        time.sleep(60)
    if os.environ["RANK"] == "1":
        load_data()
    dist.init_process_group("gloo")
    """
    run = launch_script(source, join_timeout=0.4)
    assert run.result.exit_code == 1
    assert "rank 1 never joined: waited 0.4 s; it is at train.py:5 in load_data" in run.report
    _assert_nothing_runs()


def test_a_rank_that_ends_without_joining_is_named(launch_script):
    source = """
    import os
    import torch.distributed as dist
    if os.environ["RANK"] == "0":
        dist.init_process_group("gloo")
    """
    run = launch_script(source, join_timeout=2.0)
    assert "rank 1 never joined: it ended with code 0" in run.report


def test_the_start_timeout_ends_a_run_that_no_rank_joins(launch_script):
    run = launch_script("import time\ntime.sleep(60)\n", start_timeout=3.0)
    assert run.result.exit_code == 1
    assert "rank 0 never joined: nothing happened for 3 s; it is at train.py:2" in run.report


def test_the_import_of_the_fork_server_counts_towards_no_timeout(launch_script):
    client.shutdown()
    run = launch_script("import torch.distributed as dist\ndist.init_process_group('gloo')\n", start_timeout=3.0)
    assert run.result.exit_code == 0, run.report


def test_a_slow_start_is_reported_with_the_line_and_the_way_to_limit_it(launch_script, monkeypatch):
    class Patient(RecordingConsole):
        def notice(self, text):
            super().notice(text)
            if len(self.notices) == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    # Only the watch of joining ranks uses the default moments.
    soon = (2.0, 2.5, 30.0)
    monkeypatch.setattr(watches, "Reminder", lambda now, moments=soon: launcher_loop.Reminder(now, moments))
    run = launch_script("import time\ntime.sleep(60)\n", Patient())
    words = r"no rank has joined the group after \d+ s: rank 0 is at train\.py:2 in <module>; --start-timeout SECONDS"
    first, second, *_ = run.console.notices
    assert re.match(words, first)
    assert re.match(words, second)


def test_data_loader_workers_and_their_files_die_with_their_rank(launch_script):
    source = """
    import os, time, torch
    from torch.utils.data import DataLoader
    class Slow(torch.utils.data.Dataset):
        def __len__(self): return 100
        def __getitem__(self, index): return index
    workers = iter(DataLoader(Slow(), num_workers=2))
    next(workers)
    os._exit(5)
    """
    run = launch_script(source, ranks_per_node=1)
    assert run.result.exit_code == 5
    _assert_nothing_runs()


KILLS_WARM_PROCESS = """
import os, signal, time
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)
"""


def test_the_death_of_the_fork_server_is_a_failure_like_others(launch_script):
    run = launch_script(KILLS_WARM_PROCESS, max_restarts=1)
    assert (run.result.exit_code, run.result.attempts) == (0, 2)
    assert "was killed by SIGKILL (signal 9)" in run.console.notices[0]
    run = launch_script(KILLS_WARM_PROCESS)
    assert run.result.exit_code == 1
    assert run.report == "the fork server that starts the ranks was killed by SIGKILL (signal 9)."
    assert launch_script("pass").result.exit_code == 0


def test_the_death_of_the_store_is_reported_with_its_signal(launch_script):
    source = """
    import os, psutil, time
    [store] = [each for each in psutil.Process(os.getppid()).children() if each.name().startswith("phalanx-store")]
    store.kill()
    time.sleep(60)
    """
    run = launch_script(source, ranks_per_node=1)
    assert run.report == "the process that hosts the ranks' store was killed by SIGKILL (signal 9)."


def test_a_dead_fork_server_is_replaced(launch_script):
    launch_script("pass")
    os.kill(warm_pid(), 9)
    psutil.Process(warm_pid()).wait(LIMIT_SECONDS)
    assert launch_script("pass").result.exit_code == 0


STUCK = """
import os, signal, time
from datetime import timedelta
import torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=timedelta(seconds=6))
def stuck():
    while True:
        time.sleep(0.01)
dist.barrier()
if dist.get_rank() == 1:
    {what}
dist.all_reduce(torch.ones(1))
"""


@pytest.mark.parametrize(
    ("what", "where"),
    [
        (
            "stuck()",
            "never entered all_reduce #2 of (1,) float32 that rank 0 entered at train.py:12; it is at train.py:",
        ),
        ("os.kill(os.getpid(), signal.SIGSTOP)", "does not answer; it is stopped (SIGSTOP"),
    ],
)
def test_a_rank_that_hangs_is_named_not_the_one_that_waited(launch_script, what, where):
    run = launch_script(STUCK.replace("{what}", what), ranks_per_node=2)
    first, second, *_ = run.report.splitlines()
    assert first.startswith("rank 1 on ")
    assert where in first
    assert second.startswith("  rank 0 gave up waiting: ")
    _assert_nothing_runs()


def test_a_rank_that_ends_while_its_stack_is_taken_leaves_no_success(launch_script):
    """The rank that was waited for ends between the request for its stack and the report."""
    source = STUCK.replace("{what}", "time.sleep(6.75); os._exit(0)")
    for delay in ("6.55", "6.7"):
        run = launch_script(source.replace("6.75", delay), ranks_per_node=2)
        assert run.result.exit_code != 0
        assert run.report


def test_a_rank_that_hangs_in_a_loop_of_the_package_is_named(launch_script):
    source = """
    import time
    import torch
    from phalanx import Formation
    with Formation(device="cpu", timeout=8.0) as formation:
        model = torch.nn.Linear(2, 1)
        model, optimizer = formation.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        for step in range(3):
            if step == 2 and formation.rank == 1:
                time.sleep(60)
            formation.backward(model(torch.ones(1, 2)).sum())
            optimizer.step()
    """
    run = launch_script(source, ranks_per_node=2)
    assert run.report.startswith("rank 1 on ")
    assert "that rank 0 entered at train.py:11; it is at train.py:10 in <module>" in run.report
    assert re.search(r"waited \d+ s in shared memory for rank 1", run.report)


def test_a_node_that_is_lost_is_named(tmp_path):
    script = write_script(tmp_path / "train.py", STUCK.replace("{what}", "time.sleep(60)"))
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    words = ["train", "--script", script, "--num-nodes", 2, "--num-workers", 2, "--rdzv-endpoint", endpoint]
    nodes = [
        start(*words, "--node-rank", rank, cwd=tmp_path, TMPDIR=str(tmp_path), PHALANX_RUN_DIR=f"run{rank}")
        for rank in range(2)
    ]
    try:
        deadline = time.monotonic() + LIMIT_SECONDS
        while not list(tmp_path.glob("run1/logs/rank-1.log")) and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.5)
        nodes[1].kill()
        answer = finish(nodes[0])
    finally:
        for node in nodes:
            end(node)
            node.communicate()
    assert re.search(r"node 1 \(.*\) sent no heartbeat", answer.err), answer.text
    assert "rank 0 here gave up waiting" in answer.err
