"""What a rank knows: starters' variables, the mesh's arithmetic, the layout on a machine."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest
import torch

from phalanx.config import DistributedConfig
from phalanx.errors import UsageError
from phalanx.world import seed as seeds
from phalanx.world.env import expand_hostlist, read_rank_env
from phalanx.world.mesh import Mesh, plan_layout, plan_mesh
from phalanx.world.seed import rng_scope, rng_state, seed_everything, seed_process, set_rng_state


def test_one_machine_is_assumed_only_where_the_starter_says_so():
    """Kubeflow, and people, set RANK and WORLD_SIZE alone: the ranks may be anywhere."""
    given = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "192.0.2.7", "MASTER_PORT": "29511"}
    assert not read_rank_env(given).on_one_node
    assert read_rank_env({**given, "LOCAL_WORLD_SIZE": "2"}).on_one_node
    assert not read_rank_env({**given, "LOCAL_WORLD_SIZE": "1"}).on_one_node


def test_jobs_of_torchrun_on_several_nodes_do_not_share_an_id():
    given = {"RANK": "0", "WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}
    assert str(os.getppid()) in read_rank_env(given).launch_id
    assert read_rank_env({**given, "TORCHELASTIC_RUN_ID": "job7"}).launch_id == "job7"


def test_without_a_starter_there_is_no_rank_environment():
    assert read_rank_env({}) is None


def test_torchrun():
    env = read_rank_env({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1"})
    assert (env.rank, env.local_rank, env.node_rank, env.world_size) == (5, 1, 1, 8)
    assert env.max_restarts == 0
    again = read_rank_env({"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_MAX_RESTARTS": "3"})
    assert again.max_restarts == 3


def test_bad_variables_are_named():
    with pytest.raises(UsageError, match="WORLD_SIZE is 'two'"):
        read_rank_env({"RANK": "0", "WORLD_SIZE": "two"})
    with pytest.raises(UsageError, match="RANK=2 of WORLD_SIZE=2"):
        read_rank_env({"RANK": "2", "WORLD_SIZE": "2"})


def slurm(**changes: str) -> dict[str, str]:
    step = {
        "SLURM_PROCID": "3",
        "SLURM_NTASKS": "4",
        "SLURM_LOCALID": "1",
        "SLURM_NODEID": "1",
        "SLURM_STEP_ID": "0",
        "SLURM_SRUN_COMM_PORT": "40000",
        "SLURM_STEP_NODELIST": "gpu[07-08]",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
        "SLURM_JOB_ID": "1234",
    }
    return {**step, **changes}


def test_srun():
    env = read_rank_env(slurm())
    assert (env.rank, env.local_rank, env.node_rank, env.local_world_size) == (3, 1, 1, 2)
    assert env.master_addr == "gpu07"
    assert env.started_by == "srun"
    assert env.master_port == read_rank_env(slurm(SLURM_PROCID="0")).master_port
    assert 10000 <= env.master_port < 32768, "the kernel gives the ports above to connections"
    assert env.master_port != read_rank_env(slurm(SLURM_JOB_ID="1235")).master_port


def test_srun_with_uneven_nodes():
    uneven = slurm(SLURM_STEP_TASKS_PER_NODE="4(x2),1", SLURM_NTASKS="9", SLURM_NODEID="2", SLURM_PROCID="8")
    assert read_rank_env(uneven).local_world_size == 1
    assert read_rank_env({**uneven, "SLURM_NODEID": "1"}).local_world_size == 4


def test_a_batch_script_is_not_a_rank():
    batch = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "1", "SLURM_LOCALID": "0"}
    assert read_rank_env(batch) is None


def test_mpirun_on_one_host_and_on_several():
    one = {
        "OMPI_COMM_WORLD_RANK": "1",
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    }
    assert read_rank_env(one).master_addr == "127.0.0.1"
    assert read_rank_env(one).node_rank == 0
    several = {**one, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    with pytest.raises(UsageError, match="MASTER_ADDR"):
        read_rank_env(several)
    assert read_rank_env({**several, "MASTER_ADDR": "head"}).master_addr == "head"


def test_torchruns_variables_in_a_rank_of_mpirun():
    """We write them there ourselves, for the user's script; torchrun within mpirun's job says something else."""
    mpi = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "RANK": "1", "WORLD_SIZE": "2"}
    assert read_rank_env(mpi).started_by == "mpirun"
    assert read_rank_env({**mpi, "PHALANX_LOG_DIR": "logs"}).supervised
    assert read_rank_env({**mpi, "RANK": "5", "WORLD_SIZE": "8"}).started_by == "torchrun"


def test_torchrun_wins_inside_slurm():
    assert read_rank_env({**slurm(), "RANK": "0", "WORLD_SIZE": "2"}).started_by == "torchrun"


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node1", ["node1"]),
        ("gpu[01-03,7],login", ["gpu01", "gpu02", "gpu03", "gpu7", "login"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("a,b-[09-10]-x", ["a", "b-09-x", "b-10-x"]),
    ],
)
def test_slurm_host_lists(text, hosts):
    assert expand_hostlist(text) == hosts


def test_mesh_positions_and_labels():
    mesh = Mesh(pp=2, dp_replicate=1, dp_shard=2, tp=2)
    assert mesh.world_size == 8
    assert [mesh.coordinates(5)[axis] for axis in ("pp", "dp_shard", "tp")] == [1, 0, 1]
    assert mesh.label(5) == "r5 pp1 dp0 tp1"
    assert Mesh(dp_replicate=4).label(3) == "r3 dp3"
    assert Mesh().label(0) == "r0"
    assert Mesh(dp_replicate=2, dp_shard=2).label(3) == "r3 dp_replicate1 dp_shard1"
    assert sorted(mesh.dp_rank(rank) for rank in range(8)) == [0, 0, 0, 0, 1, 1, 1, 1]


def test_tensor_parallel_takes_neighbouring_ranks():
    for strategy in ("ddp", "fsdp"):
        mesh = plan_mesh(DistributedConfig(strategy=strategy, tensor_parallel=2), 4, 4)
        assert mesh == Mesh(dp_shard=2, tp=2)
    assert mesh.label(3) == "r3 dp1 tp1"
    assert mesh.groups("dp_replicate", "dp_shard") == [[0, 2], [1, 3]]
    assert [mesh.dp_rank(rank) for rank in range(4)] == [0, 0, 1, 1]
    assert [mesh.leads_samples(rank) for rank in range(4)] == [True, False, True, False]
    assert plan_mesh(DistributedConfig(tensor_parallel=2), 2, 2) == Mesh(tp=2)
    every = DistributedConfig(pipeline_parallel=2, context_parallel=2, tensor_parallel=2)
    assert plan_mesh(every, 16, 16) == Mesh(pp=2, dp_shard=2, cp=2, tp=2)
    assert plan_mesh(DistributedConfig(expert_parallel=2), 4, 4) == Mesh(dp_replicate=2, dp_shard=2)
    for strategy in ("ddp", "fsdp"):
        hybrid = DistributedConfig(strategy=strategy, sharding="hybrid", tensor_parallel=2)
        assert plan_mesh(hybrid, 8, 4) == Mesh(dp_replicate=2, dp_shard=2, tp=2)


@pytest.mark.parametrize(
    ("settings", "ranks", "words"),
    [
        ({"tensor_parallel": 3}, 4, "4 ranks cannot be divided by tensor_parallel = 3\n.*with 4: tensor_parallel = 4;"),
        (
            {"tensor_parallel": 3, "pipeline_parallel": 2},
            8,
            "= 6 ranks for one copy.*\n.*pipeline_parallel = 2 x tensor_parallel = 4; .*--num-workers 12",
        ),
        ({"expert_parallel": 3}, 4, "expert_parallel can be: 1, 2, 4"),
        ({"tensor_parallel": 2}, 1, "1 rank cannot .*\n.*--num-workers 2"),
        (
            {"tensor_parallel": 2, "strategy": "fsdp", "sharding": "hybrid", "shard_size": 4},
            4,
            "each a copy of 2 ranks",
        ),
        ({"tensor_parallel": 2, "offload": "cpu"}, 2, "takes all 2"),
        ({"expert_parallel": 2, "tensor_parallel": 2}, 4, "axes only, not with tensor_parallel = 2\n"),
        (
            {"expert_parallel": 2, "tensor_parallel": 2, "pipeline_parallel": 2},
            8,
            "not with pipeline_parallel = 2 and tensor_parallel = 2\n",
        ),
        (
            {"pipeline_parallel": 2, "pipeline_schedule": "zero-bubble", "strategy": "fsdp"},
            4,
            "'zero-bubble' cannot run with strategy = 'fsdp'.*\n.*strategy = 'ddp'",
        ),
    ],
)
def test_impossible_meshes_are_refused_by_arithmetic(settings, ranks, words):
    with pytest.raises(UsageError, match=words):
        plan_layout(DistributedConfig(num_workers=ranks, device="cpu", **settings), 0)


def test_zero_bubble_with_fsdp_is_allowed_where_there_is_nothing_to_shard():
    config = DistributedConfig(pipeline_parallel=2, pipeline_schedule="zero-bubble", strategy="fsdp")
    assert plan_mesh(config, 2, 2) == Mesh(pp=2)


def test_layout_follows_the_machine():
    assert plan_layout(DistributedConfig(), 4).world_size == 4
    assert plan_layout(DistributedConfig(), 0).world_size == 1
    assert plan_layout(DistributedConfig(num_gpus=4, device="cpu"), 0).device == "cpu"
    assert plan_layout(DistributedConfig(num_workers=2), 0).labels == ("r0 dp0", "r1 dp1")
    assert plan_layout(DistributedConfig(num_workers=2, device="cuda", communication_backend="gloo"), 1).world_size == 2


@pytest.mark.parametrize(("gpus", "found"), [(0, "no GPU was found"), (2, "2 GPUs were found")])
def test_more_gpus_than_there_are(gpus, found):
    with pytest.raises(UsageError, match=found) as caught:
        plan_layout(DistributedConfig(num_gpus=4), gpus)
    assert "--device cpu" in caught.value.hint


def test_rng_states_come_back():
    seed_everything(3, rank=1)
    state = rng_state()
    drawn = (random.random(), np.random.rand(), torch.rand(2).tolist())
    set_rng_state(state)
    assert (random.random(), np.random.rand(), torch.rand(2).tolist()) == drawn


def drawn() -> list[float]:
    """Draw from all generators; Python and NumPy draw two normal numbers at once, and keep the second."""
    ours = [random.random(), random.gauss(0, 1), *random.sample(range(1000), 700)]
    return [*ours, float(np.random.rand()), float(np.random.randn()), float(torch.rand(()))]


@pytest.mark.parametrize("as_memory", [True, False])
def test_numbers_that_data_draw_depend_on_their_seed_and_leave_those_of_the_process(monkeypatch, as_memory):
    assert seeds._PYTHON._is_known, "CPython's generator has another layout than it had"
    monkeypatch.setattr(seeds._PYTHON, "_is_known", as_memory)
    seed_process(5)
    expected = drawn()
    seed_everything(3)
    follow = [drawn() for _ in range(2)]
    seed_everything(3)
    assert drawn() == follow[0]
    with rng_scope(5):
        first = drawn()
        with rng_scope(5):
            nested = drawn()
        drawn()
    assert first == nested == expected
    assert drawn() == follow[1]


def test_ranks_draw_different_numbers():
    seed_everything(3, rank=0)
    first = torch.rand(4)
    seed_everything(3, rank=1)
    assert not torch.equal(first, torch.rand(4))
