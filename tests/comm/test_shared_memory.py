"""Shared memory: every collective on real ranks, ranks that disagree, are late or fail, and a full /dev/shm."""

from __future__ import annotations

import gc
import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import programs
import pytest
import torch
import torch.distributed as dist
from command import clean_environment, finish
from waiting import LIMIT_SECONDS

from phalanx.comm import register_backend
from phalanx.comm.shm import SharedGroup, SharedNumbers
from phalanx.comm.shm.pages import group_text_gatherer
from phalanx.config import DistributedConfig
from phalanx.errors import CommunicationError
from phalanx.world.world import join_world

SIZES = (0, 1, 7, 1000, 20_000, 33_333)
"""Elements: nothing, odd ones, one shot, and more than one round of the staging area that the tests use."""


def make_group(*, half: int = 8 << 10, timeout: float = LIMIT_SECONDS) -> SharedGroup:
    return SharedGroup(group_text_gatherer(None), dist.get_rank(), dist.get_world_size(), timeout=timeout, half=half)


def values(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(1, 4, (count,), generator=generator).to(dtype)


def reduce_everything() -> None:
    group, rank, size = make_group(), dist.get_rank(), dist.get_world_size()
    expected = {"sum": lambda x: x.sum(0), "min": lambda x: x.amin(0), "max": lambda x: x.amax(0)}
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8):
        for count in SIZES:
            everyone = torch.stack([values(peer, count, dtype) for peer in range(size)])
            for op, reference in expected.items():
                want = reference(everyone).to(dtype)
                for tensor in (values(rank, count, dtype), group.empty(count, dtype).copy_(values(rank, count, dtype))):
                    group.all_reduce(tensor, op)
                    assert torch.equal(tensor, want), (dtype, count, op)
    half = torch.full((5000,), float(rank))
    group.all_reduce(half, "mean")
    assert torch.equal(half, torch.full((5000,), (size - 1) / 2))
    strided = torch.zeros(100, 60)[:, ::2].add_(rank)
    group.all_reduce(strided)
    assert torch.equal(strided, torch.full((100, 30), float(sum(range(size)))))
    paged = group.empty(20_000).zero_()
    paged[::2].add_(rank)
    group.all_reduce(paged[::2])
    assert torch.equal(paged, torch.tensor([float(sum(range(size))), 0.0]).repeat(10_000))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_all_reduce_equals_one_process(ranks, size):
    ranks(reduce_everything, world_size=size)


def move_everything() -> None:
    group, rank, size = make_group(), dist.get_rank(), dist.get_world_size()
    for count in SIZES:
        mine = values(rank, count, torch.float32)
        gathered = torch.empty(size, count)
        group.all_gather(gathered, mine)
        everyone = torch.stack([values(peer, count, torch.float32) for peer in range(size)])
        assert torch.equal(gathered, everyone)
        root = size - 1
        group.broadcast(mine, root)
        assert torch.equal(mine, everyone[root])
        rows = everyone[rank].repeat(size, 1) * torch.arange(1, size + 1).unsqueeze(1)
        received = torch.empty(size, count)
        group.all_to_all(received, rows)
        assert torch.equal(received, everyone * (rank + 1))
        part = torch.empty(count)
        group.reduce_scatter(part, rows)
        assert torch.equal(part, everyone.sum(0) * (rank + 1))


@pytest.mark.parametrize("size", [2, 3])
def test_moved_tensors_arrive(ranks, size):
    ranks(move_everything, world_size=size)


def add_numbers() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    numbers = SharedNumbers(group_text_gatherer(None), rank, size, timeout=LIMIT_SECONDS)
    for step in range(200):
        if step % 50 == rank:
            time.sleep(0.01)  # the others have shown their next number before this one has read the last
        numbers.put(step + rank / 10)
        assert numbers.total() == sum(step + peer / 10 for peer in range(size))


@pytest.mark.parametrize("size", [2, 3])
def test_numbers_are_added_up_also_where_a_rank_is_ahead(ranks, size):
    ranks(add_numbers, world_size=size)


def leave_out_sums() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    numbers = SharedNumbers(group_text_gatherer(None), rank, size, timeout=LIMIT_SECONDS)
    barrier = numbers._barrier
    for step in range(0, 40, 4):
        numbers.put(step + rank / 10)
        if rank == 1:  # what the other one has shown meanwhile must not replace what this one has yet to read
            barrier.await_others()
            time.sleep(0.02)
        assert numbers.total() == sum(step + peer / 10 for peer in range(size))
        for left_out in range(1, 3):
            numbers.put(1000.0 * left_out)
        numbers.put(step + 3.0)
        assert numbers.total() == size * (step + 3.0)


def test_a_sum_that_no_rank_asks_for_changes_none_that_is_read_late(ranks):
    ranks(leave_out_sums, world_size=2)


def wait_for_a_number() -> None:
    numbers = SharedNumbers(group_text_gatherer(None), dist.get_rank(), dist.get_world_size(), timeout=0.2)
    if dist.get_rank() == 0:
        numbers.put(1.0)
        with pytest.raises(CommunicationError, match="in shared memory for rank 1"):
            numbers.total()
    dist.barrier()


def test_a_rank_without_a_number_is_named(ranks):
    ranks(wait_for_a_number, world_size=2)


def disagree(kind: str) -> str:
    group, rank = make_group(), dist.get_rank()
    calls = {
        "shape": lambda: group.all_reduce(torch.zeros(10 + rank)),
        "layout": lambda: group.all_reduce(torch.zeros((3, 4) if rank else (4, 3))),
        "dtype": lambda: group.all_reduce(torch.zeros(10, dtype=torch.float64 if rank else torch.float32)),
        "op": lambda: group.all_reduce(torch.zeros(10), "sum" if rank else "max"),
        "collective": lambda: group.broadcast(torch.zeros(10)) if rank else group.all_reduce(torch.zeros(10)),
    }
    with pytest.raises(CommunicationError) as caught:
        calls[kind]()
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("shape", "rank 0: all_reduce sum of (10,) float32; rank 1: all_reduce sum of (11,) float32"),
        ("layout", "rank 0: all_reduce sum of (4, 3) float32; rank 1: all_reduce sum of (3, 4) float32"),
        ("dtype", "rank 0: all_reduce sum of (10,) float32; rank 1: all_reduce sum of (10,) float64"),
        ("op", "rank 0: all_reduce max of (10,) float32; rank 1: all_reduce sum of (10,) float32"),
        ("collective", "rank 0: all_reduce sum of (10,) float32; rank 1: broadcast from 0 of (10,) float32"),
    ],
)
def test_ranks_that_disagree_are_named(ranks, kind, words):
    for message in ranks(disagree, kind, world_size=2):
        assert words in message


def disagree_on_the_way(kind: str) -> str:
    """One rank's collective goes through shared memory, the other's through gloo."""
    register_backend()
    group, rank = dist.new_group(backend="phalanx", timeout=timedelta(seconds=LIMIT_SECONDS)), dist.get_rank()
    dist.barrier(group)
    calls = {
        "plain": lambda: dist.all_reduce(torch.zeros(4), group=group),
        "mean of integers": lambda: dist.all_reduce(
            torch.zeros(4, dtype=torch.int64), op=dist.ReduceOp.AVG, group=group
        ),
        "reduce": lambda: dist.reduce(torch.zeros(4), 0, group=group),
    }
    with pytest.raises(CommunicationError) as caught:
        calls[kind if rank else "plain"]()
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "words"),
    [("mean of integers", "all_reduce mean of (4,) int64 (by gloo)"), ("reduce", "reduce sum to 0 of (4,) float32")],
)
def test_ranks_that_disagree_on_the_backend_are_named(ranks, kind, words):
    for message in ranks(disagree_on_the_way, kind, world_size=2):  # at the timeout it would say that a rank waited
        assert f"rank 0: all_reduce sum of (4,) float32; rank 1: {words}" in message


LOST_EARLY = """
import os, pathlib, signal, sys, time
import torch
import torch.distributed as dist
from phalanx.comm import register_backend

register_backend()
dist.init_process_group("phalanx")
ready = pathlib.Path("ready")
if dist.get_rank() == 0:
    ready.touch()
else:
    while not ready.exists():  # torch aborts a rank that loses another while it connects
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
begin = time.perf_counter()
try:
    dist.all_reduce(torch.zeros(4))
except Exception as error:
    print(type(error).__name__, error, time.perf_counter() - begin < 200)  # the timeout is half an hour
"""


def test_a_rank_that_is_lost_before_the_first_collective(tmp_path):
    """Without a launcher that would end the other rank: the ranks do not share memory yet."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    processes = [
        programs.Popen(
            [sys.executable, "-c", LOST_EARLY],
            env=clean_environment(RANK=str(rank), **shared),
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    answers = [finish(process) for process in processes]
    assert "CommunicationError a rank was lost before the ranks could share memory" in answers[0].out
    assert answers[0].out.strip().endswith("True")


def let_go() -> list[int]:
    """Return whether the pages of a closed and dropped group are freed without a garbage collection."""
    gc.disable()
    found = []
    for _ in range(3):
        group = make_group()
        group.all_reduce(group.empty(5000))
        group.close()
        del group
        found.append(Path("/proc/self/maps").read_text().count("/dev/shm"))
    gc.enable()
    return found


def test_closed_pages_are_freed(ranks):
    assert ranks(let_go, world_size=2) == [[0, 0, 0], [0, 0, 0]]


def overflow() -> tuple[float, float]:
    group = make_group()
    large = torch.full((4000,), 40000.0, dtype=torch.float16)
    group.all_reduce(large, "mean")
    return float(large.min()), float(large.max())


def test_the_mean_of_large_halves_is_finite(ranks):
    assert ranks(overflow, world_size=2) == [(40000.0, 40000.0)] * 2


def lose_a_rank() -> str:
    group, store = make_group(), dist.distributed_c10d._get_default_store()
    group.all_reduce(torch.zeros(10))
    if dist.get_rank() == 1:
        child = os.fork()  # one that outlives the rank, as a DataLoader's worker may, must not hide its death
        if child == 0:
            time.sleep(2 * LIMIT_SECONDS)
            os._exit(0)
        store.set("child", str(child))
        group.close()
        return ""
    with pytest.raises(CommunicationError) as caught:
        group.all_reduce(torch.zeros(10))
    os.kill(int(store.get("child")), signal.SIGKILL)
    return str(caught.value)


def test_a_lost_rank_is_named_although_its_child_lives(ranks):
    assert "rank 1 has died" in ranks(lose_a_rank, world_size=2)[0]


def be_late() -> str:
    group = make_group(timeout=0.6)
    if dist.get_rank() == 1:
        dist.barrier()
        return ""
    with pytest.raises(CommunicationError) as caught:
        group.barrier()
    dist.barrier()
    return str(caught.value)


def test_a_rank_that_is_late_is_named(ranks):
    assert re.search(r"rank 0 waited \d+ s in shared memory for rank 1", ranks(be_late, world_size=2)[0])


KILLED = """
import os, signal, sys
import torch
import torch.distributed as dist
from phalanx.comm import register_backend

register_backend()  # torch does so by itself where Phalanx is installed
dist.init_process_group("phalanx")
tensor = torch.ones(1000)
for step in range(1000):
    if step == 5 and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(tensor.fill_(1.0))
"""


def test_a_killed_rank_ends_the_job_and_leaves_nothing(launch_script):
    begin = time.perf_counter()
    run = launch_script(KILLED, ranks_per_node=2)
    assert run.result.failure is not None
    assert run.result.failure.rank == 1
    assert "SIGKILL" in str(run.result.failure) or str(int(signal.SIGKILL)) in str(run.result.failure)
    assert time.perf_counter() - begin < 200, "the timeout is half an hour"


def fall_back() -> tuple[list[str], list[float]]:
    from phalanx.comm.shm import shared_group

    register_backend()
    shared_group.HALF = 1 << 44  # more than any /dev/shm has
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        group = dist.new_group(backend="phalanx")
        results = []
        for _ in range(2):
            tensor = torch.ones(3)
            dist.all_reduce(tensor, group=group)
            results.append(float(tensor.sum()))
    return [str(warning.message) for warning in caught if "shared memory" in str(warning.message)], results


def test_a_small_shm_falls_back_to_gloo_with_one_warning(ranks):
    (warned, results), (silent, _) = ranks(fall_back, world_size=2)
    assert results == [6.0, 6.0]
    assert silent == []
    assert len(warned) == 1
    assert re.search(r"/dev/shm has [\d.]+ MB free and 67108864.0 MB are needed", warned[0]), warned


def train_on(backend: str) -> tuple[list[Any], list[Any]]:
    from torch.distributed.fsdp import fully_shard

    register_backend()
    group = dist.new_group(backend=backend)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 300), torch.nn.Tanh(), torch.nn.Linear(300, 5))
    twin = torch.nn.Sequential(torch.nn.Linear(20, 300), torch.nn.Tanh(), torch.nn.Linear(300, 5))
    twin.load_state_dict(model.state_dict())
    inputs = torch.randn(8, 20, generator=torch.Generator().manual_seed(dist.get_rank()))
    wrapped = torch.nn.parallel.DistributedDataParallel(model, process_group=group)
    mesh = dist.device_mesh.DeviceMesh.from_group(group, "cpu")
    fully_shard(twin[0], mesh=mesh)
    fully_shard(twin, mesh=mesh)
    for trained in (wrapped, twin):
        optimizer = torch.optim.SGD(trained.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            trained(inputs).square().mean().backward()
            optimizer.step()
    sharded = [parameter.full_tensor().tolist() for parameter in twin.parameters()]  # type: ignore[attr-defined]
    return [parameter.tolist() for parameter in model.parameters()], sharded


def contrast(backend: str) -> tuple[list[float], bool]:
    """A contrastive loss over features gathered from all ranks, and collectives on parameters themselves."""
    register_backend()
    group = dist.new_group(backend=backend)
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(6, 6))
    seen = []
    for step in range(4):
        inputs = torch.randn(5, 6, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        features = inputs @ weight
        parts = [torch.empty_like(features) for _ in range(2)]
        dist.all_gather(parts, features, group=group)
        (features @ torch.cat(parts).T).square().sum().backward()
        seen.append(float(weight.grad.norm()))
        dist.all_reduce(weight.grad, group=group)
        dist.all_reduce(weight, group=group)
        dist.broadcast(weight, 0, group=group)
        assert not any(part.requires_grad for part in parts)
        weight.grad = None
    free = torch.ones(3)
    dist.all_reduce(free, group=group)
    return [*seen, float(weight.detach().norm())], free.requires_grad


def test_collectives_take_no_part_in_autograd(ranks):
    found = ranks(contrast, "phalanx", world_size=2)
    assert found == ranks(contrast, "gloo", world_size=2)
    assert not found[0][1]


def share_while_pinned() -> tuple[list[str], float]:
    os.sched_setaffinity(0, {0} if dist.get_rank() == 0 else os.sched_getaffinity(0))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        register_backend()
        group = dist.new_group(backend="phalanx")
        tensor = torch.ones(3)
        dist.all_reduce(tensor, group=group)
    return [str(warning.message) for warning in caught if "shared memory" in str(warning.message)], float(tensor.sum())


def test_ranks_pinned_to_unequal_numbers_of_cores_share_memory(ranks):
    assert ranks(share_while_pinned, world_size=2) == [([], 6.0)] * 2


def break_backend(*, registered: bool) -> None:
    """Let forming the backend fail as torch 2.15 did, before or after torch has noted the group."""
    register_backend()
    create = dist.Backend._plugins["PHALANX"].creator_fn

    def fail(*arguments: Any) -> None:
        create(*arguments)
        raise RuntimeError("Could not find the default backend type 0\nwith more words")

    if registered:
        dist.distributed_c10d._update_default_pg = fail_once(dist.distributed_c10d._update_default_pg)
    else:
        dist.Backend._plugins["PHALANX"] = dist.Backend._BackendPlugin(fail, False)


def fail_once(update: Callable[[Any], None]) -> Callable[[Any], None]:
    calls = itertools.count()

    def call(group: Any) -> None:
        update(group)
        if next(calls) == 0:
            raise RuntimeError("Could not find the default backend type 0\nwith more words")

    return call


def join_where_the_backend_fails(
    broken_ranks: tuple[int, ...], registered: bool, chosen: str | None = None
) -> tuple[str | None, float, list[str]]:
    rank = dist.get_rank()
    dist.all_reduce(torch.zeros(1))  # both have joined: one that leaves earlier breaks the other's connections
    dist.destroy_process_group()
    if rank in broken_ranks:
        break_backend(registered=registered)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        world = join_world(DistributedConfig(timeout=60, communication_backend=chosen))
    total = torch.ones(2)
    dist.all_reduce(total)
    # The ranks' harness leaves the group.
    return world.comm_backend, float(total.sum()), [str(each.message) for each in caught if "gloo" in str(each.message)]


@pytest.mark.parametrize("registered", [False, True])
@pytest.mark.parametrize("broken_ranks", [(0, 1), (1,)])
def test_gloo_takes_over_if_the_backend_cannot_be_formed_on_any_rank(ranks, broken_ranks, registered):
    first, second = ranks(join_where_the_backend_fails, broken_ranks, registered, world_size=2)
    assert first[:2] == second[:2] == ("gloo", 4.0)
    why = f"rank {broken_ranks[0]}: RuntimeError: Could not find the default backend type 0"
    assert first[2] == [
        f"the backend 'phalanx' cannot be formed with torch {torch.__version__}: the ranks use gloo, which is slower "
        f"({why}). communication_backend = 'phalanx' raises the whole error"
    ]
    assert second[2] == []


def test_a_backend_that_the_user_chose_is_not_replaced(ranks):
    with pytest.raises(RuntimeError, match="Could not find the default backend type 0"):
        ranks(join_where_the_backend_fails, (0, 1), False, "phalanx", world_size=2)


def test_plain_ddp_and_fsdp_give_the_same_bits_on_the_backend(ranks):
    assert ranks(train_on, "phalanx", world_size=2) == ranks(train_on, "gloo", world_size=2)


def test_plain_fsdp_runs_on_four_ranks(ranks):
    replicated, sharded = ranks(train_on, "phalanx", world_size=4)[0]
    for left, right in zip(replicated, sharded, strict=True):
        torch.testing.assert_close(torch.tensor(left), torch.tensor(right))
