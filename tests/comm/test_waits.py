"""Exposed communication of fsdp and of model parallelism, which `phalanx top` shows: measured in some of the steps."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from layouts import SHAPE, make_tokens

from phalanx import PyTorchDDPTrainer
from phalanx.comm import waits
from phalanx.loop.hooks import Callback
from phalanx.zoo.models.gpt import gpt

SLOW = 0.08
STEPS = 16
WRAPPED = [(dist.Work, "wait"), (dist.ProcessGroup, "allreduce"), (torch.cuda.Stream, "wait_event")]


class SlowRank(Callback):
    """Makes the last rank late for every step, and measures all of them."""

    def on_fit_start(self, trainer):
        waits._EVERY_SECONDS = 0.0

    def on_step_end(self, trainer, info):
        if dist.get_rank() == dist.get_world_size() - 1:
            time.sleep(SLOW)


@pytest.mark.parametrize("layout", [{"strategy": "fsdp"}, {"tensor_parallel": 2}, {"pipeline_parallel": 2}])
def test_a_rank_that_waits_for_a_slower_one_counts_the_time(tmp_path, layout):
    trainer = PyTorchDDPTrainer(
        gpt(**SHAPE), num_workers=2, device="cpu", communication_backend="gloo", max_steps=STEPS, batch_size=2,
        callbacks=[SlowRank()], run_dir=str(tmp_path), verbosity="quiet", progress=False, **layout,
    )  # fmt: skip
    history = trainer.fit(make_tokens(64, 8, ignoring=False))
    assert history.exchange_hidden is None
    assert SLOW * STEPS * 0.5 < history.exchange_waited < history.total_time


def test_what_was_wrapped_is_as_before_after_the_step():
    before = [vars(owner)[name] for owner, name in WRAPPED]
    sampler = waits.WaitSampler(torch.device("cpu"), compiled=False)
    assert sampler.seconds() is None
    for _ in range(3):
        sampler.begin()  # the first steps are not measured
        assert vars(dist.Work)["wait"] is before[0]
        sampler.step_done()
    sampler.begin()
    assert vars(dist.Work)["wait"] is not before[0]
    sampler.step_done()
    sampler.begin()  # not due
    assert [vars(owner)[name] for owner, name in WRAPPED] == before
