"""Several nccl ranks on one GPU: hangs, `stacks`, `bench comm`, `doctor`, exposed communication. Under two minutes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from command import ROOT, clean_environment, end, finish, phalanx, start, write_script
from layouts import SHAPE, make_tokens

from phalanx import PyTorchDDPTrainer
from phalanx.comm import waits
from phalanx.loop.hooks import Callback
from phalanx.zoo.models.gpt import gpt

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SLOW = 0.08
STEPS = 16


@pytest.mark.parametrize(
    ("mode", "kinds"), [("script", "missing,stopped,subgroup,message"), ("trainer", "loader,shape")]
)
def test_faults_over_nccl_are_named_with_rank_and_line(tmp_path, mode, kinds):
    words = ["--backends", "nccl", "--repeat", "1", "--jobs", "4", "--json", str(tmp_path / "rows.json")]
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "hang_injections.py"), "--modes", mode, "--kinds", kinds, *words],
        capture_output=True, text=True, env=clean_environment(TMPDIR=str(tmp_path)),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert max(row["seconds"] for row in rows) < 7, rows  # with the end of the ranks
    assert not re.search(r"frame #\d|ProcessGroupNCCL.cpp", done.stdout + done.stderr)


WAITING = """
import time
from datetime import timedelta
import torch, torch.distributed as dist
torch.cuda.set_device(0)
dist.init_process_group("nccl", timeout=timedelta(seconds=120))
given = torch.ones(4, device="cuda")
dist.all_reduce(given)
torch.cuda.synchronize()
print("ready", flush=True)
if dist.get_rank() == 1:
    time.sleep(120)  # asleep
dist.all_reduce(given)
torch.cuda.synchronize()  # waits
"""


def line_of(mark):
    return next(number for number, line in enumerate(WAITING.splitlines(), 1) if f"# {mark}" in line)


def test_stacks_are_shown_while_a_kernel_hangs(tmp_path):
    script = write_script(tmp_path / "hang.py", WAITING)
    words = ("train", "--script", script, "--num-gpus", 2, "--share-gpus")
    run = start(*words, cwd=tmp_path, TMPDIR=str(tmp_path))
    try:
        while "ready" not in (line := run.stdout.readline()):
            assert line or run.poll() is None, run.stderr.read()
        time.sleep(2)
        shown = finish(start("stacks", "last", cwd=tmp_path, TMPDIR=str(tmp_path)))
    finally:
        end(run)
        run.communicate()
    assert re.search(rf"rank 0:\n  .*in synchronize\n  .*hang.py:{line_of('waits')} in <module>", shown.out), shown.text
    assert re.search(rf"rank 1:\n  .*hang.py:{line_of('asleep')} in <module>", shown.out), shown.text


@pytest.mark.parametrize("op", ["all_reduce", "all_to_all"])
@pytest.mark.usefixtures("fork_server")
def test_collectives_over_nccl_are_correct_and_timed(op):
    words = ("--op", op, "--num-workers", 2, "--sizes", "1K,1M", "--iters", 3, "--json")
    answer = phalanx("bench", "comm", "--device", "cuda", "--share-gpus", *words)
    assert answer.code == 0, answer.text
    rows = json.loads(answer.out)
    assert [(row["algo"], row["wrong"]) for row in rows] == [("nccl", 0), ("nccl", 0)], answer.text


@pytest.mark.usefixtures("fork_server")
def test_more_ranks_than_gpus_are_left_out_without_the_flag():
    answer = phalanx("bench", "comm", "--device", "cuda", "--num-workers", torch.cuda.device_count() + 1)
    assert "nccl             left out: nccl needs a GPU for each rank" in answer.out, answer.text


@pytest.mark.usefixtures("fork_server")
def test_doctor_names_the_transport_of_a_real_communicator():
    answer = phalanx("doctor", "--measure", "--json")
    found = [each for group in json.loads(answer.out).values() for each in group if each["topic"] == "NCCL"]
    chosen = [each for each in found if re.match(r"\d+\.\d+(\.\d+)?, (NET|P2P|SHM)/", each["text"])]
    assert chosen, (found, answer.text)
    if torch.cuda.device_count() == 1:
        assert re.search(r"NET/Socket.*: each rank has its own host id.*TCP", chosen[0]["text"]), chosen


class SlowRank(Callback):
    """Makes the last rank late for every step, and measures all of them."""

    def on_fit_start(self, trainer):
        waits._EVERY_SECONDS = 0.0

    def on_step_end(self, trainer, info):
        if dist.get_rank() == dist.get_world_size() - 1:
            torch.cuda.synchronize()
            time.sleep(SLOW)


@pytest.mark.parametrize("layout", [{"strategy": "fsdp"}, {"tensor_parallel": 2}, {"pipeline_parallel": 2}])
def test_exposed_communication_of_sharded_and_split_models_is_measured(tmp_path, layout):
    trainer = PyTorchDDPTrainer(
        gpt(**SHAPE), num_gpus=2, share_gpus=True, max_steps=STEPS, batch_size=2, callbacks=[SlowRank()],
        run_dir=str(tmp_path), verbosity="quiet", progress=False, **layout,
    )  # fmt: skip
    history = trainer.fit(make_tokens(64, 8, ignoring=False))
    assert history.exchange_waited is not None
    assert SLOW * STEPS * 0.4 < history.exchange_waited < history.total_time, history
