"""Horovod under the one loop: the same weights as DDP, and ranks that horovodrun or Phalanx starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("horovod.torch", reason="Horovod is not built: run make horovod")

import horovod_cases as cases
from command import ROOT, clean_environment, finish, start, write_script
from ranks import run_on_ranks

from phalanx import HorovodTrainer, PyTorchDDPTrainer
from phalanx.engines.horovod.engine import installed_library, speaks_mpi
from phalanx.engines.horovod.launch import HorovodRun, starter
from phalanx.errors import ConfigError, UsageError
from phalanx.run.preflight import check_script_starter
from phalanx.world.env import read_rank_env

HOROVODRUN = str(Path(sys.executable).with_name("horovodrun"))


def horovodrun(*words: object, cwd: Path) -> str:
    """Run a command on two ranks of horovodrun's, and return what they printed."""
    done = subprocess.run(
        [HOROVODRUN, "--gloo", "-np", "2", sys.executable, *map(str, words)],
        cwd=cwd,
        env=clean_environment(PYTHONPATH=f"{ROOT}:{ROOT / 'tests/helpers'}", OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What all cases gave on each of two ranks of one horovodrun."""
    folder = tmp_path_factory.mktemp("horovod")
    horovodrun(ROOT / "tests/helpers/horovod_cases.py", folder, cwd=folder)
    return [torch.load(folder / f"found-{rank}.pt") for rank in range(2)]


@pytest.fixture(scope="module")
def by_ddp(tmp_path_factory: pytest.TempPathFactory, fork_server: None) -> dict[str, dict[str, torch.Tensor]]:
    """What the same cases give by torch's DDP."""
    folder = tmp_path_factory.mktemp("ddp")

    def train() -> dict[str, dict[str, torch.Tensor]]:
        weights = {name: cases.train(PyTorchDDPTrainer, name, folder) for name in cases.CASES}
        return {**weights, "past": cases.train_with_a_past(PyTorchDDPTrainer, folder, steps=3)}

    weights: dict[str, dict[str, torch.Tensor]] = run_on_ranks(folder, train, (), world_size=2)[0]
    return weights


def difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max((ours[name].double() - theirs[name].double()).abs().max().item() for name in theirs)


@pytest.mark.parametrize("name", cases.CASES)
def test_weights_equal_those_of_ddp(name, found, by_ddp):
    assert difference(found[0][name], by_ddp[name]) < 1e-6
    assert difference(found[0][name], found[1][name]) == 0


def test_fp16_compression_gives_nearly_the_same_weights(found):
    assert 0 < difference(found[0]["fp16"], found[0]["sgd"]) < 2e-3
    assert difference(found[0]["fp16"], found[1]["fp16"]) == 0


def test_moments_start_from_rank_0s_and_nothing_moves_meanwhile(found, by_ddp):
    assert difference(found[0]["past"], found[1]["past"]) == 0
    assert difference(found[0]["past"], by_ddp["past"]) < 1e-6


def test_a_rank_that_waits_leaves_its_core_to_others(found):
    seconds, computed = found[0]["late"]
    assert seconds > 0.4
    assert computed < seconds / 2


def test_horovods_own_names(found):
    assert [part["average"] for part in found] == [1.5, 1.5]
    assert found[0]["accumulation"] == 3


def test_a_plain_script_starts_horovodrun_itself(tmp_path, by_ddp):
    weights = cases.train(HorovodTrainer, "accumulated and clipped", tmp_path, num_workers=2)
    assert difference(weights, by_ddp["accumulated and clipped"]) < 1e-6


def test_horovodrun_starts_the_command_line(tmp_path):
    script = write_script(
        tmp_path / "train.py",
        """
        import horovod.torch as hvd
        import phalanx

        hvd.init()
        with phalanx.Formation() as formation:
            print("rank", formation.rank, "of", formation.world_size, formation.strategy.name, flush=True)
            print("sum", int(formation.reduce(hvd.rank() + 1, "sum")), flush=True)
        """,
    )
    said = horovodrun("-m", "phalanx.cli", "train", "--script", script, "--backend", "horovod", cwd=tmp_path)
    assert "rank 0 of 2 horovod" in said
    assert "rank 1 of 2 horovod" in said
    assert said.count("sum 3") == 2


def test_ranks_of_another_starter_are_refused(ranks):
    """HorovodTrainer there, and a script that has called hvd.init() by itself, in which each rank is alone."""

    def refusal(trainer: type) -> str:
        try:
            cases.train(trainer, "plain", Path("unused"))
        except UsageError as error:
            return str(error)
        return ""

    def train() -> tuple[str, str]:
        first = refusal(HorovodTrainer)
        import horovod.torch as hvd

        # With MPI each rank would start a daemon of Open MPI for its world of one, which does not always succeed.
        os.environ["HOROVOD_CONTROLLER"] = os.environ["HOROVOD_CPU_OPERATIONS"] = "gloo"
        hvd.init()
        second = refusal(PyTorchDDPTrainer)
        hvd.shutdown()
        return first, second

    first, second = ranks(train, world_size=2)[1]
    assert "phalanx started these 2 ranks" in first
    assert "--backend horovod" in first
    assert "hvd.init() found a world of 1" in second


def test_adasum_with_gloo_is_refused_with_what_it_needs(found):
    import horovod.torch as hvd

    said = "horovodrun --mpi" if hvd.mpi_built() else "libopenmpi-dev"
    assert said in found[0]["adasum"]


def test_a_script_made_for_horovod_needs_horovodrun(tmp_path):
    script = write_script(tmp_path / "train.py", "import horovod.torch as hvd\nhvd.init()")
    for other in ("phalanx", "torchrun"):
        with pytest.raises(UsageError, match="each rank would train alone"):
            check_script_starter(script, other)
    check_script_starter(script, "horovodrun")
    maybe = write_script(tmp_path / "maybe.py", "try:\n    import horovod\nexcept ImportError:\n    pass")
    check_script_starter(maybe, "phalanx")
    answer = finish(start("train", "--script", script, "--num-workers", 2, "--device", "cpu", cwd=tmp_path))
    assert answer.code == 2
    assert "--backend horovod" in answer.err


def test_mpirun_may_start_a_script_only_where_horovod_has_mpi(tmp_path, monkeypatch):
    import horovod.torch as hvd

    library = installed_library()
    assert library is not None
    assert speaks_mpi(library) == hvd.mpi_built()
    script = write_script(tmp_path / "train.py", "import horovod.torch as hvd\nhvd.init()")
    compiled = tmp_path / "mpi_lib.so"
    monkeypatch.setattr("phalanx.engines.horovod.engine.installed_library", lambda: compiled)
    compiled.write_bytes(b"\0MPI_Init_thread\0")
    check_script_starter(script, "mpirun")
    compiled.write_bytes(b"\0gloo\0")
    with pytest.raises(UsageError, match=r"built without MPI, .*each rank would train alone"):
        check_script_starter(script, "mpirun")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"num_workers": 4, "hosts": "a:1,b:x"}, "'b:x' has no number of slots"),
        ({"num_workers": 4, "hosts": "a:1,,b:3"}, "is not the name of a host"),
        ({"num_workers": 4, "hosts": "a:1,a:3"}, "a is listed twice"),
        ({"num_workers": 4, "hosts": "a:1,b:2"}, "has 3 slots, but 4 ranks were asked for"),
        ({"num_workers": 2, "min_workers": 1}, "host_discovery_script"),
        ({"num_workers": 2, "min_workers": 1, "hosts": "localhost:2"}, "there must be two"),
        ({"num_workers": 2, "num_nodes": 2}, "hosts = 'node1:8,node2:8'"),
        ({"num_workers": 3, "adasum": True}, "adasum = True with 3 ranks"),
        ({"hosts": "a:2,b:4", "adasum": True}, "adasum = True with 6 ranks"),
        ({"num_workers": 2, "tensor_parallel": 2}, "write backend = 'pytorch-ddp'"),
        ({"num_workers": 2, "zero_stage": 2}, "zero_stage = 2"),
        ({"num_workers": 2, "compression": "topk"}, "which has 'fp16' only"),
    ],
)
def test_settings_that_cannot_be_followed_are_refused(settings, said):
    with pytest.raises(ConfigError, match=said):
        HorovodTrainer(cases.make_model(), **settings)


def test_two_names_of_one_setting_that_disagree():
    with pytest.raises(UsageError, match="two names of one setting"):
        HorovodTrainer(cases.make_model(), backward_passes_per_step=2, gradient_accumulation_steps=3)


def test_ranks_come_from_the_slots_of_the_hosts():
    from phalanx.config import DistributedConfig
    from phalanx.world.mesh import plan_layout

    config = DistributedConfig(backend="horovod", hosts="node1:8,node2:4", device="cpu")
    layout = plan_layout(config, gpus_here=0)
    assert starter(config, layout) == HorovodRun(ranks=12, hosts="node1:8,node2:4")


def test_a_rank_reads_horovodruns_variables():
    told = {"HOROVOD_RANK": "3", "HOROVOD_SIZE": "4", "HOROVOD_LOCAL_RANK": "1", "HOROVOD_LOCAL_SIZE": "2"}
    env = read_rank_env({**told, "HOROVOD_CROSS_RANK": "1", "SLURM_PROCID": "0", "RANK": "0", "WORLD_SIZE": "9"})
    assert env is not None
    assert (env.rank, env.world_size, env.local_rank, env.local_world_size, env.node_rank) == (3, 4, 1, 2, 1)
    assert (env.started_by, env.supervised) == ("horovodrun", False)
