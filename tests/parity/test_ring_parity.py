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
