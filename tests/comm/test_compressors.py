"""Each compressor's arithmetic on ranks that are threads: averages, bytes, feedback, equal bits, spoilt gradients."""

from __future__ import annotations

import math

import pytest
import torch
from thread_ranks import make_bucket, on_threads
from torch import nn

from phalanx.comm.compress import build_compressor, merged_states
from phalanx.comm.compress.powersgd import largest_rank
from phalanx.config import DistributedConfig
from phalanx.config.strategies import COMPRESSORS
from phalanx.errors import ModelError

SHAPES = {"embed": (60, 24), "bias": (24,), "norm": (7,), "kernel": (16, 3, 5)}
WITH_FEEDBACK = ["sign", "topk", "randomk", "powersgd"]
ALL = list(COMPRESSORS)
SETTINGS = {
    "topk": {"compression_ratio": 0.1},
    "randomk": {"compression_ratio": 0.1},
    "powersgd": {"powersgd_rank": 2},
}


def build(name, shapes=SHAPES, **settings):
    config = DistributedConfig(compression=name, **{**SETTINGS.get(name, {}), **settings})
    return build_compressor(config, [(key, nn.Parameter(torch.zeros(shape))) for key, shape in shapes.items()])


def gradient(rank, step=0, dtype=torch.float32, shapes=SHAPES):
    randomness = torch.Generator().manual_seed(100 * rank + step)
    return {name: torch.randn(shape, generator=randomness).to(dtype) for name, shape in shapes.items()}


def flat(parts):
    return torch.cat([part.flatten() for part in parts.values()])


def average_of(size, step=0, dtype=torch.float64, shapes=SHAPES):
    return sum(flat(gradient(rank, step, shapes=shapes)).to(dtype) for rank in range(size)) / size


def reduce_steps(name, size, steps=1, dtype=torch.float32, **settings):
    """Reduce a few steps' gradients; return by rank the results, the compressor and the bytes."""

    def work(exchange):
        compressor = build(name, **settings)
        results = []
        for step in range(steps):
            bucket = make_bucket(gradient(exchange.rank, step, dtype))
            compressor.reduce(bucket, exchange)
            results.append(bucket.flat)
        return results, compressor, exchange.sent_bytes

    return on_threads(work, size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", ALL)
def test_all_ranks_end_with_equal_bits(name, size, dtype):
    found = reduce_steps(name, size, steps=3, dtype=dtype)
    for results, _, _ in found[1:]:
        for ours, theirs in zip(results, found[0][0], strict=True):
            assert ours.dtype == dtype
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize(("name", "tolerance"), [("none", 1e-6), ("fp16", 2e-3), ("bf16", 1.5e-2), ("int8", 5e-2)])
@pytest.mark.parametrize("size", [2, 3])
def test_rounding_is_as_coarse_as_its_bits(name, tolerance, size):
    (results, _, _), *_ = reduce_steps(name, size)
    error = (results[0].double() - average_of(size)).abs().max().item()
    assert error <= tolerance
    assert error > tolerance / 1000


def test_stochastic_rounding_is_right_on_average():
    """The mean of many roundings of one gradient comes as near as the number of draws allows."""
    shapes = {"one": (40,)}
    steps = 400

    def work(exchange):
        compressor = build("int8", shapes)
        total = torch.zeros(40)
        for _ in range(steps):
            bucket = make_bucket(gradient(exchange.rank, shapes=shapes))
            compressor.reduce(bucket, exchange)
            total += bucket.flat
        return total / steps

    error = (on_threads(work)[0].double() - average_of(2, shapes=shapes)).abs().max().item()
    step = 3.0 / 127  # about the largest of forty normal numbers over 127
    assert error < 5 * step / math.sqrt(steps)
    assert error < step / 4  # rounding to the nearest would be off by up to half a step, every time


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", WITH_FEEDBACK)
def test_residuals_are_sent_later(name, size):
    """What was applied, and what the ranks still keep back on average, is all that there was."""
    steps = 5
    found = reduce_steps(name, size, steps)
    applied = sum(result.double() for result in found[0][0])
    kept = sum(_flat_residual(compressor) for _, compressor, _ in found) / size
    assert torch.allclose(applied + kept, sum(average_of(size, step) for step in range(steps)), atol=1e-4)
    assert kept.abs().max() > 0.1


def _flat_residual(compressor):
    state = compressor.state_dict()["residuals"]
    return torch.cat([state[name] for name in SHAPES]).double()


@pytest.mark.parametrize(
    ("name", "share"),
    [("fp16", 0.5), ("bf16", 0.5), ("int8", 516 / 2048), ("sign", 68 / 2048), ("topk", 0.02), ("randomk", 0.01)],
)
def test_bytes_agree_with_theory(name, share):
    shapes = {"one": (512 * 64,)}

    def work(exchange):
        compressor = build(name, shapes, **({"compression_ratio": 0.01} if name in SETTINGS else {}))
        compressor.reduce(make_bucket(gradient(exchange.rank, shapes=shapes)), exchange)
        return exchange.sent_bytes, compressor.plain_bytes

    sent, plain = on_threads(work)[0]
    assert plain == 512 * 64 * 4
    assert sent / plain == pytest.approx(share, rel=0.01)


def test_powersgd_sends_thin_matrices_and_the_rest_uncompressed():
    (_, compressor, sent), _ = reduce_steps("powersgd", 2)
    matrices = 2 * (60 + 24) + 2 * (16 + 15)
    assert sent == 4 * (matrices + 24 + 7)
    assert compressor.plain_bytes == 4 * average_of(2).numel()


def test_powersgd_finds_a_gradient_of_low_rank_exactly():
    """With the warm start, a constant matrix of the compressor's rank is exact after a few steps."""
    left, right = torch.randn(30, 2), torch.randn(2, 20)

    def work(exchange):
        compressor = build("powersgd", {"m": (30, 20)})
        for _ in range(4):
            bucket = make_bucket({"m": left @ right})
            compressor.reduce(bucket, exchange)
        return bucket.flat

    assert torch.allclose(on_threads(work)[0].view(30, 20), left @ right, atol=1e-4)


def test_topk_sends_the_largest_and_keeps_the_rest():
    values = {0: torch.tensor([5.0, 1.0, 0.0, -2.0]), 1: torch.tensor([0.0, 1.0, -8.0, 3.0])}

    def work(exchange):
        compressor = build("topk", {"one": (4,)}, compression_ratio=0.25)
        bucket = make_bucket({"one": values[exchange.rank]})
        compressor.reduce(bucket, exchange)
        return bucket.flat.tolist(), compressor.state_dict()["residuals"]["one"].tolist()

    first, second = on_threads(work)
    assert first[0] == second[0] == [2.5, 0.0, -4.0, 0.0]
    assert first[1] == [0.0, 1.0, 0.0, -2.0]
    assert second[1] == [0.0, 1.0, 0.0, 3.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("name", ALL)
def test_a_gradient_that_is_not_finite_is_seen_by_all_ranks_and_not_kept(name, bad):
    """Every rank sees the step as spoilt, so that all skip it; the next one is as if it had not been."""

    def work(exchange, spoil):
        compressor = build(name)
        for step in range(3):
            parts = gradient(exchange.rank, step)
            if step == 1:
                if not spoil:
                    compressor.steps += 1  # only the clock goes on
                    continue
                if exchange.rank == 1:
                    parts["embed"][3, 4:9] = bad
            bucket = make_bucket(parts)
            compressor.reduce(bucket, exchange)
            if step == 1:
                assert not torch.isfinite(bucket.flat).all()
        return bucket.flat

    spoilt = on_threads(lambda exchange: work(exchange, True))
    clean = on_threads(lambda exchange: work(exchange, False))
    assert torch.isfinite(spoilt[0]).all()
    assert torch.equal(spoilt[0], clean[0])
    assert torch.equal(spoilt[0], spoilt[1])


@pytest.mark.parametrize("name", ["topk", "sign"])
def test_residuals_follow_their_parameters_into_other_buckets(name):
    """Torch lays its buckets out anew after the first step."""

    def work(exchange):
        compressor = build(name)
        compressor.reduce(make_bucket(gradient(exchange.rank)), exchange)
        before = compressor.state_dict()["residuals"]
        zeros = {key: torch.zeros(shape) for key, shape in SHAPES.items()}
        first = make_bucket({key: zeros[key] for key in ("norm", "embed")}, 0)
        second = make_bucket({key: zeros[key] for key in ("kernel", "bias")}, 1)
        laid = {**_by_name(compressor, first), **_by_name(compressor, second)}
        return before, laid, compressor.state_dict()["residuals"]

    for before, laid, after in on_threads(work):
        for key in SHAPES:
            assert torch.equal(laid[key], before[key])
            assert torch.equal(after[key], before[key])


def _by_name(compressor, bucket):
    residual = compressor.residuals.of(bucket)
    sizes = [part.numel() for part in bucket.parts]
    return dict(zip(bucket.names, residual.split(sizes), strict=True))


@pytest.mark.parametrize("name", ALL)
def test_a_saved_state_continues_with_the_same_bits(name):
    def work(exchange):
        straight, stopped = build(name), build(name)
        for step in range(4):
            if step == 2:
                state = stopped.state_dict()
                stopped = build(name)
                stopped.load_state_dict(state)
            ours, theirs = (make_bucket(gradient(exchange.rank, step)) for _ in range(2))
            straight.reduce(ours, exchange)
            stopped.reduce(theirs, exchange)
        return ours.flat, theirs.flat

    for straight, stopped in on_threads(work):
        assert torch.equal(straight, stopped)


def test_other_numbers_of_ranks_keep_the_average_of_the_residuals():
    states = [{"steps": 7, "residuals": {"w": torch.full((3,), float(rank))}} for rank in range(4)]
    two = [merged_states(states[rank::2], 2 / 4) for rank in range(2)]
    assert [state["residuals"]["w"][0].item() for state in two] == [1.0, 2.0]
    assert sum(state["residuals"]["w"] for state in two).tolist() == [3.0] * 3  # twice 1.5, the average of 0 to 3
    assert two[0]["steps"] == 7


@pytest.mark.parametrize("name", ["topk", "powersgd"])
def test_warm_up_steps_are_plain(name):
    (results, _, _), _ = reduce_steps(name, 2, steps=3, compression_warmup=2)
    for step in range(2):
        assert torch.allclose(results[step].double(), average_of(2, step), atol=1e-6)
    assert (results[2].double() - average_of(2, 2)).abs().max() > 0.1


def test_a_rank_larger_than_every_matrix_is_refused():
    with pytest.raises(ModelError, match=r"powersgd_rank = 40: .* largest possible is 17 \(embed, 60 x 24\)"):
        build("powersgd", powersgd_rank=40)
    with pytest.raises(ModelError, match="no matrix"):
        build("powersgd", {"bias": (7,)})


@pytest.mark.parametrize(("rows", "columns"), [(60, 24), (2, 2), (3, 1), (100, 100)])
def test_the_largest_rank_is_the_last_that_saves(rows, columns):
    best = largest_rank(rows, columns)
    assert best * (rows + columns) < rows * columns
    assert (best + 1) * (rows + columns) >= rows * columns
