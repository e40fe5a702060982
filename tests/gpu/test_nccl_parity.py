"""On a GPU: every layout, over several nccl ranks that share it, trains what one process trains.

One command runs all cases of `nccl_cases`, in one start of the ranks for each number of ranks:

    python -m pytest tests/gpu/test_nccl_parity.py

float32 (without TF32) to 1e-5, float64 to 1e-10, bf16 to 5% of the distance that the weights have moved.
With CASES_DEVICE=cpu the same cases run over gloo on the CPU. With OUT=FOLDER each is logged there as it ends.
"""

from __future__ import annotations

import pytest
import torch
from layouts import difference
from nccl_cases import all_cases
from nccl_launch import DEVICE, Outcome, is_here, run_all

import phalanx

CASES = {name: case for _, cases in all_cases() for name, case in cases.items()}
pytestmark = [
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(1500),  # the first test runs all cases
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, fork_server: None) -> dict[str, Outcome]:
    """What the ranks of all launches have measured."""
    return run_all(tmp_path_factory.mktemp("cases"))


@pytest.mark.parametrize("name", CASES)
def test_ranks_that_share_the_gpu_equal_one_process(outcomes, name):
    case = CASES[name]
    if not is_here(case):
        pytest.skip(f"{case.needs} is not installed: pip install 'phalanx[{case.needs}]'")
    if failure := outcomes[name].failure(case.bound):
        pytest.fail(failure, pytrace=False)


def test_horovod_over_nccl_equals_ddp(tmp_path, fork_server):
    """horovodrun starts the ranks, so they do not share a GPU; each needs one."""
    hvd = pytest.importorskip("horovod.torch", reason="Horovod is not built: run make horovod")
    if not hvd.nccl_built():
        pytest.skip("this Horovod was built without NCCL: HOROVOD_GPU_OPERATIONS=NCCL make horovod")
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    import horovod_cases  # it needs Horovod

    settings = {"num_gpus": 2, "device": "cuda"}
    by_ddp, found = (
        horovod_cases.train(trainer, "accumulated and clipped", tmp_path / trainer.__name__, **settings)
        for trainer in (phalanx.PyTorchDDPTrainer, phalanx.HorovodTrainer)
    )
    for name, value in by_ddp.items():
        assert difference(found[name], value) < 1e-5, name
