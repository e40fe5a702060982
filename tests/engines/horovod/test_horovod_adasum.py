"""Adasum, done by Horovod over MPI: two ranks' gradients are combined as its formula says, however they are started."""

from __future__ import annotations

import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch
from command import clean_environment, finish, start, write_script
from long_proofs import long_proof

from phalanx.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

hvd = pytest.importorskip("horovod.torch", reason="Horovod is not built: run make horovod")
with_mpi = pytest.mark.skipif(
    not hvd.mpi_built() or shutil.which("mpirun") is None,
    reason="Horovod was built without MPI: install libopenmpi-dev and openmpi-bin, and run make horovod",
)

SCRIPT = """
    import sys
    import horovod.torch as hvd
    import torch
    import phalanx

    hvd.init()
    with phalanx.Formation() as formation:
        if sys.argv[1:] == ["raise"] and formation.rank == 1:
            raise ValueError("out of luck")
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = formation.prepare(model, optimizer)
        generator = torch.Generator().manual_seed(1 + formation.rank)
        x = torch.randn(6, 5, dtype=torch.float64, generator=generator)
        own = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
        formation.backward(model(x).square().mean())
        combined = [parameter.grad for parameter in model.parameters()]
        torch.save({"own": own, "combined": combined}, f"gradients-{formation.rank}.pt")
"""
WORDS = ("train", "--script", "train.py", "--backend", "horovod", "--adasum", "--device", "cpu")


def adasum(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Combine two gradients: what they have in common counts once, what is at right angles is added up."""
    common = (first * second).sum()
    return first * (1 - common / (2 * first.square().sum())) + second * (1 - common / (2 * second.square().sum()))


def assert_combined(folder: Path) -> None:
    found = [torch.load(folder / f"gradients-{rank}.pt") for rank in range(2)]
    for number, (first, second) in enumerate(zip(found[0]["own"], found[1]["own"], strict=True)):
        expected = adasum(first, second)
        assert not torch.allclose(expected, (first + second) / 2), "the average would pass for it"
        for rank in range(2):
            assert torch.allclose(found[rank]["combined"][number], expected, rtol=1e-12, atol=1e-12)


@long_proof
@with_mpi
def test_the_command_line_starts_ranks_with_mpi(tmp_path):
    write_script(tmp_path / "train.py", SCRIPT)
    answer = finish(start(*WORDS, "--num-workers", 2, "--run-dir", "run", cwd=tmp_path), seconds=300)
    assert answer.code == 0, answer.text
    assert_combined(tmp_path)


@long_proof
@with_mpi
def test_mpirun_starts_the_command_line(tmp_path):
    write_script(tmp_path / "train.py", SCRIPT)
    mpirun = ("mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", "2")
    done = subprocess.run(
        [*mpirun, sys.executable, "-m", "phalanx.cli", *WORDS],
        cwd=tmp_path,
        env=clean_environment(OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert_combined(tmp_path)


@with_mpi
def test_a_rank_that_raised_under_mpi_is_named(tmp_path):
    write_script(tmp_path / "train.py", SCRIPT)
    answer = finish(start(*WORDS, "--num-workers", 2, "--run-dir", "run", "--", "raise", cwd=tmp_path), seconds=300)
    assert answer.code == 1
    assert "rank 1" in answer.err
    assert "raised ValueError: out of luck" in answer.err


def test_adasum_is_refused_for_elastic_runs():
    from phalanx import HorovodTrainer

    with pytest.raises(ConfigError, match="cannot lose or add ranks"):
        HorovodTrainer(torch.nn.Linear(1, 1), num_workers=2, min_workers=1, hosts="a:1,b:1", adasum=True)
