"""One rank receives a signal; all ranks stop at the same step, whenever it comes."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset

from phalanx import Callback, PyTorchDDPTrainer
from phalanx.config import DistributedConfig
from phalanx.errors import PreemptedError
from phalanx.loop import stopping
from phalanx.world.world import join_world


def stop_steps(signalled: dict[int, int], period: int | None) -> int:
    """Take steps in lock-step; rank r signals itself after step `signalled[r]`. Return the step at which we stopped."""
    world = join_world(DistributedConfig(device="cpu"))
    request = stopping.StopRequest(world)
    request.listen()
    if period is not None:
        request._period = period
    for step in range(1, 4000):  # short steps: ranks may look as rarely as every thousandth
        dist.all_reduce(torch.ones(1))
        if signalled.get(world.rank) == step:
            os.kill(os.getpid(), signal.SIGUSR1)
        if request.agreed(step):
            request.silence()
            assert request.reason == "SIGUSR1"
            return step
    raise AssertionError("never stopped")


CASES = [{1: 3}, {0: 7}, {2: 14}, {0: 5, 1: 6}, {0: 6, 1: 5, 2: 7}, {0: 13, 1: 14}, {0: 9, 1: 9, 2: 9}]


@pytest.mark.parametrize("period", [None, 1, 7])
def test_all_ranks_stop_together(ranks, period):
    by_rank = ranks(lambda: [stop_steps(case, period) for case in CASES], world_size=3)
    for case, *steps in zip(CASES, *by_rank, strict=True):
        assert len(set(steps)) == 1, f"{case}: {steps}"
        first = min(case.values())
        assert steps[0] > first
        if period is not None:
            assert steps[0] <= first + period + 1


def test_one_rank_alone_stops_at_once():
    world = join_world(DistributedConfig(device="cpu"))
    request = stopping.StopRequest(world)
    before = signal.getsignal(signal.SIGTERM)
    request.listen()
    assert not request.agreed(1)
    os.kill(os.getpid(), signal.SIGTERM)
    assert request.agreed(2)
    assert request.reason == "SIGTERM"
    request.silence()
    assert signal.getsignal(signal.SIGTERM) is before


def regroup_steps() -> tuple[int, str | None, bool]:
    """Rank 1 alone is asked to go on with other ranks, as where the messages to the others are late."""
    world = join_world(DistributedConfig(device="cpu"))
    request = stopping.StopRequest(world)
    for step in range(1, 100):
        dist.all_reduce(torch.ones(1))
        if (world.rank, step) == (1, 3):
            request.ask("a request for 2 ranks: in time", regroup=True)
        if request.agreed(step):
            return step, request.reason, request.regroups
    raise AssertionError("never stopped")


def test_all_ranks_know_that_they_go_on_with_others_though_one_was_asked(ranks):
    assert ranks(regroup_steps, world_size=3) == [(4, "a request for 2 ranks: in time", True)] * 3


class Signalled(Callback):
    """Rank 1 is slow, and receives a signal after its fifth step, when rank 0 is well ahead of it."""

    def on_step_end(self, trainer, info) -> None:
        if trainer.formation.rank == 1:
            time.sleep(0.03)
            if info.step == 5:
                os.kill(os.getpid(), signal.SIGUSR1)


def stopped_fit(folder: str, strategy: str) -> str:
    trainer = PyTorchDDPTrainer(
        torch.nn.Linear(2, 1), device="cpu", strategy=strategy, sync_every=16, log_every_n_steps=1000, epochs=1,
        batch_size=1, progress=False, checkpoint_dir=f"{folder}/kept", run_dir=f"{folder}/run", callbacks=[Signalled()],
    )  # fmt: skip
    with pytest.raises(PreemptedError) as stopped:
        trainer.fit(TensorDataset(torch.ones(2000, 2), torch.zeros(2000, 1)))
    return str(stopped.value)


@pytest.mark.parametrize("strategy", ["local-sgd", "diloco"])
def test_ranks_that_step_independently_stop_together_where_a_round_ends(ranks, tmp_path, strategy):
    words = ranks(stopped_fit, str(tmp_path), strategy, world_size=2)
    for each in words:
        assert f"stopped by SIGUSR1 after step 16: checkpoint {tmp_path}/kept/step-00000016" in each
