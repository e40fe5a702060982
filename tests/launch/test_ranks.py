"""Functions on forked ranks: results, errors, speed, and the environment of a rank."""

from __future__ import annotations

import os
import sys

import pytest
from ranks import warm_pid

from phalanx.launch.forkserver import client


def _sum_of_ranks():
    import torch
    import torch.distributed as dist

    value = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(value)
    return dist.get_rank(), value.item()


def test_results_come_back_by_rank(ranks):
    assert ranks(_sum_of_ranks) == [(0, 6.0), (1, 6.0), (2, 6.0), (3, 6.0)]


def _raise_on_rank_one():
    import torch.distributed as dist

    if dist.get_rank() == 1:
        raise LookupError("no such thing")
    dist.barrier()


def test_an_exception_of_a_rank_is_raised_in_the_test(ranks):
    with pytest.raises(LookupError, match="no such thing") as caught:
        ranks(_raise_on_rank_one)
    assert "on rank 1" in caught.value.__notes__[0]
    assert "_raise_on_rank_one" in caught.value.__notes__[0]


def _first_ddp_step():
    before = set(sys.modules)
    import torch
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    return sorted(set(sys.modules) - before)


def test_a_first_step_imports_nothing_more(ranks):
    assert ranks(_first_ddp_step, world_size=2) == [[], []]


def _random_numbers():
    import random

    import numpy

    return random.random(), float(numpy.random.rand())


def test_ranks_do_not_share_unseeded_randomness(ranks):
    numbers = [number for pair in ranks(_random_numbers, world_size=2) for number in pair]
    assert len(set(numbers)) == 4


def test_the_fork_server_has_one_thread(ranks):
    ranks(os.getpid, world_size=1)
    assert len(os.listdir(f"/proc/{warm_pid()}/task")) == 1


def test_a_fork_server_is_used_only_under_the_settings_it_imported_torch_with(ranks):
    process = client.fork_server()
    assert process.is_usable({**os.environ, "OMP_NUM_THREADS": "3", "OTHER": "1"})
    assert not process.is_usable({**os.environ, "TORCH_LOGS": "dynamo"})


def test_a_second_launch_uses_the_same_fork_server(ranks):
    ranks(os.getpid, world_size=1)
    before = warm_pid()
    ranks(os.getpid, world_size=1)
    assert warm_pid() == before


def _fork_and_report():
    """A process that a rank starts must not believe it is connected to the launcher."""
    import subprocess

    code = "import os; os.fstat(int(os.environ['PHALANX_EVENTS_FD']))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr


def test_the_event_descriptor_is_not_inherited_by_programs(ranks):
    assert "Bad file descriptor" in ranks(_fork_and_report, world_size=1)[0]


FINALIZERS = """
import weakref, torch

class Own:
    pass

own = Own()
weakref.finalize(own, print, "own")
torch.library._clear_torch_ops_cache = lambda operators: print("operators")  # a part of each finalizer of torch
"""


def test_a_rank_runs_its_finalizers_at_its_end_and_not_those_of_torchs_operators(launch_script):
    run = launch_script(FINALIZERS, ranks_per_node=1)
    assert run.console.lines == [(0, "own")], run.report
