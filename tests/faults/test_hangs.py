"""Hangs: the report names the rank that the others wait for, or that called something else, and the line."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time

import programs
import pytest
import torch
import torch.distributed as dist
from command import ROOT, clean_environment
from long_proofs import long_proof
from network_hosts import network
from ranks import RecordingConsole, run_nodes
from torch import nn
from torch.utils.data import TensorDataset

from phalanx import PyTorchDDPTrainer
from phalanx.errors import PhalanxError
from phalanx.launch import LaunchSpec, ScriptTarget, launch

PROGRAM = ROOT / "benchmarks" / "hang_rank.py"
"""A training loop with one fault; `# at: name` marks the lines that a report must name."""

STUCK = """
import sys, time
from datetime import timedelta
import torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=timedelta(seconds=float(sys.argv[1])))
for step in range(int(sys.argv[2])):
    if step == 3 and dist.get_rank() == dist.get_world_size() - 1:
        time.sleep(60)  # stuck
    dist.all_reduce(torch.ones(4))  # waits
    if step == 2:
        print("under way", flush=True)
    time.sleep(0.05)
"""


def line_of(source: str, mark: str) -> int:
    return next(number for number, line in enumerate(source.splitlines(), 1) if f"# {mark}" in line)


def inject(tmp_path, monkeypatch, kind, backend, rank, *, ranks=2):
    """Run the program with a fault in a rank at the fifth step, and return the report."""
    for name, value in {"HANG": f"{kind},{rank},4", "HANG_BACKEND": backend, "HANG_TIMEOUT": "4"}.items():
        monkeypatch.setenv(name, value)
    spec = LaunchSpec(target=ScriptTarget(PROGRAM), ranks_per_node=ranks, log_dir=tmp_path / "logs")
    return str(launch(spec, RecordingConsole()).failure)


@pytest.mark.parametrize(
    ("kind", "backend", "rank", "words"),
    [
        ("missing", "gloo", 1, "rank 1 .*never entered all_reduce #.* that rank 0 entered at {metric}; it went on to"),
        ("order", "phalanx", 0, "rank 0 .*called broadcast .* where rank 1 called all_reduce .* at {metric}"),
        ("dtype", "phalanx", 1, r"rank 1 .*with \(4,\) float64 at {metric}, rank 0 called it with \(4,\) float32"),
        ("shape", "gloo", 1, r"rank 1 .*all_reduce #\d+ .*\(5,\) float32 at {metric}"),
        ("loader", "gloo", 0, "rank 0 .*never entered all_reduce .*; it is at {data}"),
        ("lock", "phalanx", 1, "rank 1 .*never entered .* that rank 0 entered at {metric}; it is at {lock}"),
        ("stopped", "gloo", 1, "rank 1 .*it is stopped .*; rank 0 waits for it in all_reduce .* at {metric}"),
    ],
)
def test_the_guilty_rank_and_its_line_are_named(tmp_path, monkeypatch, fork_server, kind, backend, rank, words):
    report = inject(tmp_path, monkeypatch, kind, backend, rank)
    source = PROGRAM.read_text()
    lines = {name: f"hang_rank.py:{line_of(source, f'at: {name}')}" for name in ("metric", "data", "lock")}
    assert re.match(words.format(**lines), report), report


def test_a_killed_loader_is_named_wherever_torch_raises(tmp_path, monkeypatch, fork_server):
    # torch's loader makes temporary files to see whether it can, and its own signal handler may leave one behind.
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    report = inject(tmp_path, monkeypatch, "killed loader", "gloo", 1)
    sample, loop = (line_of(PROGRAM.read_text(), f"at: {name}") for name in ("sample", "data"))
    words = rf"It loads Samples.__getitem__ \(hang_rank.py:{sample}\), iterated at hang_rank.py:{loop}\."
    assert re.match(rf"rank 1 .*raised RuntimeError: DataLoader worker \(pid.* {words}\n", report), report


class SleepInBackward(torch.autograd.Function):
    """Rank 1 stays in its third backward pass, between two buckets."""

    passes = 0

    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        SleepInBackward.passes += 1
        if SleepInBackward.passes == 3 and dist.get_rank() == 1:
            time.sleep(60)
        return gradient


class ThreeBuckets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256, bias=False) for _ in range(3))

    def forward(self, value):
        return self.layers[2](SleepInBackward.apply(self.layers[1](self.layers[0](value))))


@pytest.mark.parametrize("strategy", ["ddp", "ring"])
def test_the_bucket_that_ranks_wait_in_is_named(tmp_path, strategy):
    data = TensorDataset(torch.ones(16, 256), torch.zeros(16, 256))
    trainer = PyTorchDDPTrainer(
        model=ThreeBuckets(), loss_fn=nn.MSELoss(), num_workers=2, device="cpu", epochs=1, batch_size=1, timeout=10,
        strategy=strategy, bucket_cap_mb=0.25, run_dir=str(tmp_path), verbosity="quiet", progress=False,
    )  # fmt: skip
    with pytest.raises(PhalanxError) as caught:
        trainer.fit(data)
    words = r"rank 1 .*never entered all_reduce.* #\d+ \(bucket 2\) of \(65536,\) float32 that rank 0 entered at .*; "
    assert re.match(rf"{words}it is at test_hangs.py:\d+ in backward", str(caught.value)), caught.value


BUSY = """
import os, signal, threading, time
from phalanx.launch.rank_files import ASK

def descend(depth):
    a = b = c = d = e = depth
    return descend(depth - 1) if depth else None

def begin_threads():
    while True:
        thread = threading.Thread(target=descend, args=(300,))
        thread.start()
        thread.join()

def descend_often():
    while True:
        for depth in range(1, 400, 7):
            descend(depth)

if not (child := os.fork()):
    for number in range(400):
        os.kill(os.getppid(), ASK if number % 4 == 0 else signal.SIGQUIT)
        time.sleep(0.001)
    os._exit(0)
for busy in (begin_threads, descend_often):
    threading.Thread(target=busy, daemon=True).start()
os.waitpid(child, 0)
"""


def test_a_rank_survives_questions_while_its_threads_run(launch_script):
    """Frames of threads that run are freed at any time: to read them without the interpreter lock crashes."""
    run = launch_script(BUSY, ranks_per_node=1)
    assert run.result.exit_code == 0, run.report


@long_proof
@pytest.mark.timeout(1200)
def test_more_than_a_hundred_faults_are_all_explained():
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "hang_injections.py")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
    assert int(re.search(r"(\d+) of \d+ injections", done.stdout)[1]) > 100


def test_a_notice_names_the_rank_while_the_others_still_wait(launch_script):
    console = RecordingConsole()
    run = launch_script(STUCK, console, ranks_per_node=3, args=("15", "9"), stall_notice=1.5)
    waits, stuck = (line_of(STUCK, mark) for mark in ("waits", "stuck"))
    words = f"rank 2 never entered all_reduce #4 of (4,) float32 that ranks 0, 1 entered at train.py:{waits}"
    assert [f"{words}; it is at train.py:{stuck}" in notice for notice in console.notices] == [True], console.notices
    assert words.removeprefix("rank 2 ") in run.report.splitlines()[0]


RING = """
import torch, torch.distributed as dist
from datetime import timedelta
dist.init_process_group("gloo", timeout=timedelta(seconds=12))
rank, size = dist.get_rank(), dist.get_world_size()
there, back = torch.ones(4), torch.ones(4)
sent = dist.isend(there, (rank + 1) % size)  # is never waited for
dist.recv(back, (rank - 1) % size)
large = torch.ones(4_000_000)
dist.send(large, (rank + 1) % size)  # sends
dist.recv(large, (rank - 1) % size)
"""


OWN_KINDS = """
from datetime import timedelta
import torch, torch.distributed as dist

class Unfinished(dist.Work):
    pass  # torch's own wait, which asks Python first

dist.init_process_group("phalanx")  # a group that is written in Python
other = 1 - dist.get_rank()
taken = torch.zeros(4)
works = dist.batch_isend_irecv(
    [dist.P2POp(dist.isend, torch.ones(4), other), dist.P2POp(dist.irecv, taken, other)]
)
for work in works:
    work.wait()
if other:
    dist.recv(taken[:2])
else:
    dist.send(taken[:2], other)
try:
    Unfinished().wait(timedelta(milliseconds=10))
except RuntimeError as error:
    assert "recursion" not in str(error), error
print("taken", taken.tolist())
dist.destroy_process_group()
"""


def test_groups_and_works_of_other_kinds_are_recorded_like_torchs(launch_script):
    run = launch_script(OWN_KINDS, ranks_per_node=2)
    assert run.console.lines == [(0, "taken [1.0, 1.0, 1.0, 1.0]")], run.report


def test_a_ring_in_which_all_send_first_is_named_before_the_timeout_and_after(launch_script):
    console = RecordingConsole()
    run = launch_script(RING, console, ranks_per_node=2, stall_notice=1.0)
    where = f"#2 of (4000000,) float32 at train.py:{line_of(RING, 'sends')}"
    words = f"rank 0 waits in send to rank 1 {where}, rank 1 in send to rank 0 {where}: they wait for each other"
    assert [words in notice for notice in console.notices] == [True], console.notices
    assert words.removeprefix("rank 0 ") in run.report.splitlines()[0]


def test_ranks_that_make_progress_cause_no_notice(launch_script):
    console = RecordingConsole()
    source = STUCK.replace("time.sleep(60)", "pass")
    run = launch_script(source, console, args=("120", "120"), stall_notice=5.0)
    assert run.result.exit_code == 0
    assert console.notices == []


def test_the_records_of_two_machines_are_compared(tmp_path, fork_server):
    first, second = run_nodes(tmp_path, STUCK, sizes=(1, 1), args=("8", "9"))
    waits, stuck = (line_of(STUCK, mark) for mark in ("waits", "stuck"))
    never = f"never entered all_reduce #4 of (4,) float32 that rank 0 entered at train.py:{waits}"
    assert f"{never}; it is at train.py:{stuck}" in first.report + second.report


def test_a_link_that_is_cut_is_reported_with_its_ranks_and_the_line(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(STUCK.replace("time.sleep(60)", "pass"))
    with network(2) as hosts:
        launchers = []
        for number, host in enumerate(hosts):
            own = tmp_path / f"tmp{number}"
            own.mkdir()
            words = ["-m", "phalanx", "train", "--script", str(script), "--num-nodes", "2", "--num-workers", "2"]
            words += ["--node-rank", str(number), "--rdzv-endpoint", f"{hosts[0].address}:29416", "--", "8", "100000"]
            variables = {"PYTHONPATH": str(ROOT), "TMPDIR": str(own), "PHALANX_RUN_DIR": str(tmp_path / f"run{number}")}
            launchers.append(
                programs.Popen(
                    host.command(sys.executable, *words),
                    cwd=tmp_path,
                    env={**clean_environment(), **variables},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    start_new_session=True,
                )
            )
        try:
            assert any("under way" in line for line in launchers[0].stdout)
            hosts[1].cut()
            answer, _ = launchers[0].communicate(timeout=240)
        finally:
            for launcher in launchers:
                if launcher.poll() is None:
                    os.killpg(launcher.pid, signal.SIGKILL)
                launcher.communicate()
    assert re.search(r"node 1 \(.*, rank 1\) sent no heartbeat", answer), answer
    waits = line_of(script.read_text(), "waits")
    assert re.search(rf"rank 1 does not answer; rank 0 waits for it in all_reduce #\d+ .* at train.py:{waits}", answer)
