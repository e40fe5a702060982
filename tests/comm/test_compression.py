"""Compression under torch's DDP on real ranks: equal weights, bytes, resume by bits, other rank counts, errors."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from phalanx.config import DistributedConfig, fields
from phalanx.errors import ModelError
from phalanx.loop.formation import Formation
from phalanx.loop.task import TrainTask
from phalanx.run.job import Job
from phalanx.strategies.ddp import RANK_STATE

COMPRESSORS = [name for name in fields.COMPRESSORS if name != "none"]
SHARES = {"fp16": 0.501, "bf16": 0.501, "int8": 0.30, "sign": 0.06, "topk": 0.03, "randomk": 0.02, "powersgd": 0.35}


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(20, 96), nn.Tanh(), nn.Linear(96, 64), nn.Tanh(), nn.Linear(64, 3))


def train(folder, model=None, bad_step=None, **settings):
    """Train on this rank; return weights, history, and what the strategy kept for its ranks."""
    model = model or net()
    randomness = torch.Generator().manual_seed(1)
    inputs = torch.randn(64, 20, generator=randomness)
    if bad_step is not None:
        inputs[bad_step] = math.nan
    data = DataLoader(TensorDataset(inputs, inputs[:, :3].argmax(1)), batch_size=4)
    defaults = {
        "device": "cpu",
        "progress": False,
        "learning_rate": 1e-2,
        "log_every_n_steps": 1,
        "bucket_cap_mb": 0.02,
    }
    config = DistributedConfig(**{**defaults, **settings})
    task = TrainTask(model, data, loss_fn=nn.functional.cross_entropy)
    history = Job("fit", task, config, folder).run().history
    return {name: value.clone() for name, value in model.state_dict().items()}, history


def assert_equal_bits(ours, theirs):
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name


@pytest.mark.parametrize("strategy", ["ddp", "ring"])
@pytest.mark.parametrize("name", COMPRESSORS)
def test_ranks_stay_equal_and_send_less(ranks, tmp_path, name, strategy):
    settings = {"compression": name, "strategy": strategy, "max_steps": 6}
    first, second = ranks(lambda: train(tmp_path / "run", **settings), world_size=2)
    assert_equal_bits(first[0], second[0])
    history = first[1]
    assert history.plain_bytes == 6 * 4 * sum(parameter.numel() for parameter in net().parameters())
    assert history.sent_bytes <= SHARES[name] * history.plain_bytes
    assert history.steps[-1]["loss"] < history.steps[0]["loss"]
    ended = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()][-1]
    assert (ended["event"], ended["sent_bytes"]) == ("run_ended", history.sent_bytes)


def test_warm_up_equals_no_compression(ranks, tmp_path):
    settings = {"compression": "topk", "compression_warmup": 4, "max_steps": 4, "optimizer": "sgd"}
    warm = ranks(lambda: train(tmp_path / "a", **settings), world_size=2)[0][0]
    plain = ranks(lambda: train(tmp_path / "b", max_steps=4, optimizer="sgd"), world_size=2)[0][0]
    for name, value in plain.items():
        assert torch.allclose(warm[name], value, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "strategy"),
    [("int8", "ddp"), ("sign", "ddp"), ("topk", "ddp"), ("randomk", "ring"), ("powersgd", "ddp"), ("topk", "ring")],
)
def test_stop_and_resume_gives_the_same_bits(ranks, tmp_path, name, strategy):
    """Residuals, factors and random draws go on; so do the buckets, which torch alone would lay out anew."""
    common = {"compression": name, "compression_warmup": 1, "strategy": strategy}
    place = {**common, "checkpoint_dir": str(tmp_path / "ckpt")}
    whole = ranks(lambda: train(tmp_path / "a", max_steps=6, **common), world_size=2)
    ranks(lambda: train(tmp_path / "b", max_steps=3, **place), world_size=2)
    rest = ranks(lambda: train(tmp_path / "c", max_steps=6, resume_from_checkpoint=True, **place), world_size=2)
    for ours, theirs in zip(rest, whole, strict=True):
        assert_equal_bits(ours[0], theirs[0])


def _residuals_after_resume(folder, place):
    """Prepare, load, and return this rank's residuals, without a step."""
    with Formation(device="cpu", compression="topk", bucket_cap_mb=0.02) as formation:
        model = net()
        formation.prepare(model, torch.optim.AdamW(model.parameters()))
        formation.load(place)
        return [state["residuals"] for state in formation.strategy.rank_state()[RANK_STATE]]


@pytest.mark.parametrize("now", [1, 2, 3])
def test_the_average_residual_is_kept_at_other_numbers_of_ranks(ranks, tmp_path, now):
    then = 2
    place = str(tmp_path / "ckpt")
    ranks(lambda: train(tmp_path / "a", max_steps=3, compression="topk", checkpoint_dir=place), world_size=then)
    newest = max((tmp_path / "ckpt").glob("step-*"))
    saved = [torch.load(newest / f"rank-{rank:05d}.pt")["state"][RANK_STATE][0]["residuals"] for rank in range(then)]
    found = ranks(lambda: _residuals_after_resume(str(tmp_path / "b"), place), world_size=now)
    if now == 1:  # one rank averages nothing, and has no compressor
        assert found == [[]]
        return
    for name in saved[0]:
        before = sum(state[name] for state in saved) / then
        after = sum(state[0].get(name, torch.zeros(1)) for state in found) / now
        assert before.abs().max() > 0
        assert torch.allclose(after, before, atol=1e-6)


@pytest.mark.parametrize("name", ["sign", "topk", "powersgd"])
def test_a_skipped_step_leaves_finite_residuals(ranks, tmp_path, name):
    settings = {"compression": name, "on_nonfinite": "skip", "max_steps": 6}
    first, second = ranks(lambda: train(tmp_path / "run", bad_step=9, **settings), world_size=2)
    assert_equal_bits(first[0], second[0])
    assert all(torch.isfinite(value).all() for value in first[0].values())
    assert any("skipped" in line for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines())


def test_accumulation_compresses_whole_gradients_only(ranks, tmp_path):
    settings = {"compression": "topk", "gradient_accumulation_steps": 2, "max_steps": 3, "batch_size": 2}
    (first, history), (second, _) = ranks(lambda: train(tmp_path / "run", **settings), world_size=2)
    assert_equal_bits(first, second)
    assert history.plain_bytes == 3 * 4 * sum(parameter.numel() for parameter in net().parameters())


def test_a_rank_larger_than_every_gradient_is_refused(ranks, tmp_path):
    with pytest.raises(ModelError, match=r"powersgd_rank = 60: .* largest possible is 38 \(2.weight, 64 x 96\)"):
        ranks(lambda: train(tmp_path / "run", compression="powersgd", powersgd_rank=60, max_steps=1), world_size=2)


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4, sparse=True)


def test_sparse_gradients_are_refused(ranks, tmp_path):
    with pytest.raises(ModelError, match=r"table \(Embedding\) has sparse gradients"):
        ranks(lambda: train(tmp_path / "run", Sparse(), compression="topk", max_steps=1), world_size=2)


def _fail_in_the_communication_thread():
    from phalanx.comm.exchange import TorchExchange

    def broken(self, tensor):
        raise ConnectionError("the link is down")

    TorchExchange.all_gather = broken
    with Formation(device="cpu", compression="topk") as formation:
        model = net()
        wrapped, _ = formation.prepare(model, torch.optim.AdamW(model.parameters()))
        formation.backward(wrapped(torch.zeros(2, 20)).sum())


def test_an_error_of_the_communication_thread_is_raised_by_backward(ranks):
    with pytest.raises(ConnectionError, match="the link is down"):
        ranks(_fail_in_the_communication_thread, world_size=2)
