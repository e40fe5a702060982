"""strategy="ring" gives what torch's DDP gives: to the last bit on two ranks, to rounding on others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from layouts import assert_same, train


def both(folder: str, **settings: Any) -> list[tuple[Any, ...]]:
    return [train(f"{folder}/{name}", strategy=name, **settings) for name in ("ddp", "ring")]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"gradient_accumulation_steps": 2, "gradient_clipping": 0.1, "bucket_cap_mb": 0.01},
        {"bucket_cap_mb": 0.001, "loss_weighting": "tokens", "samples": 30},
    ],
    ids=["plain", "accumulated", "tokens"],
)
def test_two_ranks_give_the_same_bits_as_ddp(ranks, tmp_path, settings):
    for ddp, ring in ranks(run_both, str(tmp_path), settings, world_size=2):
        assert ddp == ring


def run_both(folder: str, settings: dict[str, Any]) -> list[Any]:
    results = both(folder, batch_size=4, epochs=2, dtype="float32", **settings)
    return [({name: value.tolist() for name, value in weights.items()}, val, norms) for weights, val, norms in results]


def run_on_three(folder: str) -> None:
    (expected, *_), (found, *_) = both(folder, batch_size=3, epochs=1, samples=24, bucket_cap_mb=0.01)
    assert_same(expected, found, 1e-10)


def test_three_ranks_agree_to_rounding(ranks, tmp_path):
    ranks(run_on_three, str(tmp_path), world_size=3)


class Forgetful(torch.nn.Module):
    """Uses one of its two layers: the second only where asked to."""

    def __init__(self, *, second_on: int | None) -> None:
        super().__init__()
        self.first, self.second, self.third = (torch.nn.Linear(4, 4) for _ in range(3))
        self.second_on = second_on

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.second(x) if self.second_on == torch.distributed.get_rank() else x


def one_backward(strategy: str, *, allowed: bool) -> Any:
    from phalanx import Formation

    torch.manual_seed(0)
    formation = Formation(strategy=strategy, find_unused_parameters=allowed, device="cpu")
    model = formation.prepare(Forgetful(second_on=1))
    formation.backward(model(torch.ones(2, 4) * (formation.rank + 1)).square().mean())
    gradients = {
        name: None if p.grad is None else p.grad.tolist() for name, p in formation.unwrap(model).named_parameters()
    }
    formation.close()
    return gradients


def compare_unused() -> None:
    assert one_backward("ring", allowed=True) == one_backward("ddp", allowed=True)


def test_parameters_that_only_some_ranks_use(ranks):
    ranks(compare_unused, world_size=2)


def name_unused() -> str:
    from phalanx.errors import ModelError

    with pytest.raises(ModelError) as caught:
        one_backward("ring", allowed=False)
    return str(caught.value)


def test_unused_parameters_are_named(ranks):
    first, second = ranks(name_unused, world_size=2)
    assert "4 parameters got no gradient in the first step: second.weight, second.bias, third.weight" in first
    assert "2 parameters got no gradient in the first step: third.weight, third.bias" in second


def train_in_fixed_order(folder: str, accumulation: int) -> Any:
    # 29 samples: the last global batch is ragged, and its last shards are missing on some splits only.
    weights, _, norms = train(
        folder,
        strategy="ring",
        fixed_order=True,
        batch_size=2,
        gradient_accumulation_steps=accumulation,
        gradient_clipping=0.5,
        samples=29,
        epochs=2,
        dtype="float32",
        bucket_cap_mb=0.02,
        threads_per_rank=1,  # a matrix product on two threads adds up in another order than on one
    )
    return {name: value.tolist() for name, value in weights.items()}, norms


def test_a_fixed_order_gives_equal_bits_at_1_2_4_and_8_ranks(ranks, tmp_path):
    one, *others = [
        ranks(train_in_fixed_order, str(tmp_path / str(size)), 8 // size, world_size=size)[0] for size in (1, 2, 4, 8)
    ]
    for other in others:
        assert other == one


def test_without_it_bits_differ(ranks, tmp_path):
    """The test above can fail: a plain sum over eight ranks is another one than over one."""
    plain = ranks(train_plainly, str(tmp_path / "8"), 1, world_size=8)[0]
    assert plain != ranks(train_plainly, str(tmp_path / "1"), 8, world_size=1)[0]


def train_plainly(folder: str, accumulation: int) -> Any:
    weights, *_ = train(
        folder, strategy="ring", batch_size=2, gradient_accumulation_steps=accumulation, samples=29, dtype="float32"
    )
    return {name: value.tolist() for name, value in weights.items()}


def test_a_fixed_order_needs_a_power_of_two(ranks, tmp_path):
    from phalanx.errors import UsageError

    with pytest.raises(UsageError, match=r"needs 1, 2, 4, 8, \.\.\. ranks, and there are 3"):
        ranks(train_in_fixed_order, str(tmp_path), 2, world_size=3)
