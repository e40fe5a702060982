"""The adviser: fast links make compressors lose, slow ones make them pay, and the reasons say why."""

from __future__ import annotations

import pytest

from phalanx.errors import UsageError
from phalanx.tools.bench.compression.advise import Cost, LinkSpeed, advise, measure_costs

MB = 1_000_000
COSTS = [Cost("topk", 0.02, 500 * MB), Cost("bf16", 0.5, 2000 * MB, messages=2), Cost("sign", 0.03, 1 * MB)]


def verdicts(rate, **changes):
    numbers = {"model_bytes": 100 * MB, "compute_s": 0.3, "ranks": 2, "costs": COSTS, **changes}
    return {item.name: item for item in advise(LinkSpeed(rate), **numbers)}


def test_compression_is_worth_it_on_a_slow_link():
    found = verdicts(12.5 * MB)  # 100 Mb/s: 8 s for 100 MB
    assert found["none"].send_s == pytest.approx(8.0)
    assert found["none"].step_s == pytest.approx(0.3 + 8.0 - 0.2)
    assert found["topk"].verdict == "pays"
    assert found["topk"].send_s == pytest.approx(0.16)
    assert found["topk"].step_s == pytest.approx(0.3 + 0.2)  # sending hides behind backward, compressing does not
    assert found["bf16"].verdict == "pays"
    assert found["sign"].verdict == "loses"  # 100 s of its own
    assert list(found) == ["topk", "bf16", "none", "sign"]


def test_compression_is_not_worth_it_on_a_fast_link():
    found = verdicts(12500 * MB)
    assert found["none"].exposed_s == 0
    assert found["topk"].verdict == "loses"
    assert "hidden already" in found["topk"].reason
    assert next(iter(found)) == "none"


def test_latency_counts_messages():
    quick, slow = (
        advise(LinkSpeed(1e9, late), model_bytes=MB, compute_s=1e-3, ranks=4, costs=COSTS) for late in (0, 0.01)
    )
    quick, slow = ({item.name: item.send_s for item in found} for found in (quick, slow))
    assert slow["bf16"] - quick["bf16"] == pytest.approx(2 * 3 * 0.01)
    assert slow["none"] - quick["none"] == pytest.approx(2 * 3 * 0.01)
    assert slow["topk"] - quick["topk"] == pytest.approx(3 * 0.01)


@pytest.mark.parametrize("wrong", [{"ranks": 1}, {"model_bytes": 0}, {"compute_s": 0.0}])
def test_impossible_questions_are_refused(wrong):
    with pytest.raises(UsageError, match=next(iter(wrong))):
        verdicts(1e9, **wrong)


@pytest.mark.parametrize("ranks", [2, 4])
def test_measured_costs_agree_with_theory(ranks):
    shapes = [(128, 128), (128,)]
    names = ["none", "bf16", "topk", "randomk", "powersgd", "int8"]
    found = {cost.name: cost for cost in measure_costs(names, shapes, ranks, compression_ratio=0.25, powersgd_rank=4)}
    assert set(found) == set(names) - {"none"}
    plain = 2 * (ranks - 1) / ranks
    assert found["bf16"].sent_share == pytest.approx(plain / 2, rel=0.01)
    assert found["topk"].sent_share == pytest.approx((ranks - 1) * 0.5, rel=0.01)
    assert found["randomk"].sent_share == pytest.approx(plain / 4, rel=0.01)
    assert found["powersgd"].sent_share == pytest.approx(plain * (4 * 256 + 128) / (128 * 129), rel=0.01)
    assert (found["bf16"].messages, found["topk"].messages) == (2, 1)
    assert all(cost.bytes_per_second > 0 for cost in found.values())
