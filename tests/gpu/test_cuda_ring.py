"""On a GPU: ring and compressed gradients give what ddp gives, with ranks that share one GPU, without waits."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from phalanx.config import DistributedConfig
from phalanx.loop.task import TrainTask
from phalanx.run.job import Job

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def train(folder: str, **settings: object) -> tuple[dict[str, torch.Tensor], list[float]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 4))
    inputs = torch.randn(512, 16, generator=torch.Generator().manual_seed(1))
    data = DataLoader(TensorDataset(inputs, inputs[:, :4].argmax(1)), batch_size=16)
    config = DistributedConfig(
        device="cuda",
        communication_backend="gloo",
        progress=False,
        max_steps=8,
        log_every_n_steps=1,
        **settings,
    )
    task = TrainTask(model, data, loss_fn=nn.functional.cross_entropy)
    history = Job("fit", task, config, folder).run().history
    assert history is not None
    return {name: value.cpu() for name, value in model.state_dict().items()}, [s["loss"] for s in history.steps]


def test_ring_gives_what_ddp_gives(ranks, tmp_path):
    ddp = ranks(lambda: train(str(tmp_path / "a"), strategy="ddp", bucket_cap_mb=0.05), world_size=2)
    ring = ranks(lambda: train(str(tmp_path / "b"), strategy="ring", bucket_cap_mb=0.05), world_size=2)
    for (expected, _), (found, _) in zip(ddp, ring, strict=True):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6)


@pytest.mark.parametrize("strategy", ["ddp", "ring"])
@pytest.mark.parametrize("compression", ["fp16", "bf16", "int8", "sign", "topk", "randomk", "powersgd"])
def test_compressed_ranks_stay_equal_and_learn(ranks, tmp_path, strategy, compression):
    settings = {"strategy": strategy, "compression": compression, "learning_rate": 1e-2, "bucket_cap_mb": 0.05}
    (first, losses), (second, _) = ranks(lambda: train(str(tmp_path), **settings), world_size=2)
    for name, value in first.items():
        assert torch.equal(second[name], value), name
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("strategy", ["local-sgd", "diloco"])
def test_ranks_that_meet_now_and_then(ranks, tmp_path, strategy):
    (first, losses), (second, _) = ranks(
        lambda: train(str(tmp_path), strategy=strategy, sync_every=3, learning_rate=1e-2), world_size=2
    )
    for name, value in first.items():
        assert torch.equal(second[name], value), name
    assert losses[-1] < losses[0]


def test_a_fixed_order_on_the_gpu(ranks, tmp_path):
    """One rank: micro-batches are added up as on many; gloo sends no GPU memory point to point, so no more here."""
    settings = {"strategy": "ring", "fixed_order": True, "gradient_accumulation_steps": 4}
    weights, losses = ranks(lambda: train(str(tmp_path), **settings), world_size=1)[0]
    assert losses[-1] < losses[0]
    assert all(torch.isfinite(value).all() for value in weights.values())


@pytest.mark.parametrize("strategy", ["ddp", "ring"])
def test_loss_scaling_does_not_spoil_what_is_kept_back(ranks, tmp_path, strategy):
    """fp16's scale grows every second step; residuals must not be counted in the scale of the step before."""
    settings = {"strategy": strategy, "mixed_precision": "fp16", "scaler_growth_interval": 2, "learning_rate": 1e-2}
    plain = ranks(lambda: train(str(tmp_path / "a"), **settings), world_size=2)[0][1]
    (first, losses), (second, _) = ranks(
        lambda: train(str(tmp_path / "b"), compression="topk", compression_ratio=0.3, **settings), world_size=2
    )
    for name, value in first.items():
        assert torch.equal(second[name], value), name
    assert losses[-1] < losses[0]
    assert losses[-1] < 1.5 * plain[-1] + 0.1
