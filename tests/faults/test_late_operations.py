"""Operations that are queued and raise no error, as over nccl: the rank reports them, the launcher names the cause.

Without a GPU, gloo's asynchronous calls are used in place of nccl's; `tests/gpu/test_nccl_hangs.py` runs nccl.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from phalanx import PyTorchDDPTrainer
from phalanx.diagnosis import overdue
from phalanx.loop.hooks import Callback

QUEUED = """
import os, sys, threading, time
import torch, torch.distributed as dist
from phalanx.diagnosis import overdue

def look():
    while True:
        time.sleep(0.2)
        watch.check()

dist.init_process_group("gloo")
watch = overdue.OverdueWatch(int(os.environ["PHALANX_SLOT"]), "gloo")
overdue._is_late = lambda record, now: now - overdue.began(record) > 4.0  # gloo itself raises at the timeout
overdue._MOST_SKIPPED = 0
threading.Thread(target=look, daemon=True).start()
group = dist.new_group([0, 1])
given = [torch.ones(4) for _ in range(4)]
dist.all_reduce(given[0])
if dist.get_rank() == 1:
    time.sleep(60)  # stuck
work = dist.all_reduce(given[1], group=group, async_op=True)  # queued
later = dist.all_reduce(given[2], async_op=True)
time.sleep(60)  # as a wait for the GPU
"""


def line_of(mark):
    return next(number for number, line in enumerate(QUEUED.splitlines(), 1) if f"# {mark}" in line)


def test_the_rank_that_others_wait_for_on_the_gpu_is_named(launch_script):
    run = launch_script(QUEUED, ranks_per_node=3)
    words = f"never entered all_reduce #1 of (4,) float32 that rank 0 entered at train.py:{line_of('queued')}"
    first, second = run.report.splitlines()[:2]
    assert first.startswith("rank 1 ")
    assert f"{words}; it is at train.py:{line_of('stuck')}" in first, run.report
    assert "gave up waiting: Timed out waiting 1800 s for an operation over gloo: all_reduce of (4,) float32" in second
    assert not run.console.text, "one cause, and nothing else"


BLOCKED = """
import sys, threading, time
from datetime import timedelta
import torch, torch.distributed as dist
from phalanx.diagnosis import overdue
from phalanx.diagnosis.overdue import OverdueWatch

dist.init_process_group("gloo")
if sys.argv[1] == "short":  # gloo itself would raise
    overdue.group_timeout = lambda backend, group: 1.0
group = dist.new_group([0, 1], timeout=timedelta(seconds=60))
watch, found = OverdueWatch(0, "gloo"), []

def look():
    while not any(found):
        time.sleep(0.2)
        found.append(watch._blocked(time.time()))

other = dist.get_rank() == 1
thread = threading.Thread(target=look, daemon=True)
thread.start()
if other:
    time.sleep(3)
if sys.argv[2] == "default":
    dist.all_reduce(torch.ones(4))  # waits
else:
    dist.all_reduce(torch.ones(4), group=group)
if not other:
    print(next(filter(None, found), "not late"), flush=True)
"""


@pytest.mark.parametrize(("timeout", "group"), [("short", "default"), ("real", "default"), ("real", "sub")])
def test_a_call_is_late_only_after_the_timeout_of_its_group(launch_script, timeout, group):
    run = launch_script(BLOCKED, ranks_per_node=2, args=(timeout, group))
    waits = next(number for number, line in enumerate(BLOCKED.splitlines(), 1) if "# waits" in line)
    late = f"Timed out waiting 1 s for an operation over gloo: all_reduce at train.py:{waits}"
    assert run.console.lines == [(0, late if timeout == "short" else "not late")], run.report


class StuckOnce(Callback):
    """Rank 1 stops in a step, the first time; all ranks look at gloo's operations as at those of nccl."""

    def __init__(self, folder: Path) -> None:
        self.mark = folder / "stuck"

    def on_fit_start(self, trainer):
        if not any(thread.name == "looks" for thread in threading.enumerate()):
            overdue._is_late = lambda record, now: now - overdue.began(record) > 4.0
            overdue._MOST_SKIPPED = 0
            watch = overdue.OverdueWatch(int(os.environ["PHALANX_SLOT"]), "gloo")
            threading.Thread(target=self.look, args=(watch,), name="looks", daemon=True).start()

    def look(self, watch):
        while True:
            time.sleep(0.2)
            watch.check()

    def on_step_end(self, trainer, info):
        if info.step == 4 and dist.get_rank() == 1 and not self.mark.exists():
            self.mark.touch()
            time.sleep(600)


def test_where_ranks_are_replaced_the_one_that_others_wait_for_is_killed_and_replaced(tmp_path):
    data = TensorDataset(torch.ones(48, 4), torch.zeros(48, 2))
    began = time.monotonic()
    history = PyTorchDDPTrainer(
        nn.Linear(4, 2), loss_fn=nn.MSELoss(), num_workers=2, device="cpu", communication_backend="gloo",
        max_restarts=1, epochs=1, batch_size=2, timeout=400, run_dir=str(tmp_path), callbacks=[StuckOnce(tmp_path)],
        verbosity="quiet", progress=False,
    ).fit(data)  # fmt: skip
    assert history.status == "finished"
    assert time.monotonic() - began < 200, "not after the timeout"
    events = (tmp_path / "events.jsonl").read_text()
    assert "never entered all_reduce #" in events, events
