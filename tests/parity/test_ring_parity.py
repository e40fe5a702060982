"""strategy="ring" gives what torch's DDP gives: to the last bit on two ranks, to rounding on others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from layouts import assert_same, train

from phalanx import Formation
from phalanx.errors import CommunicationError, ModelError


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
    with pytest.raises(ModelError) as caught:
        one_backward("ring", allowed=False)
    return str(caught.value)


def test_unused_parameters_are_named(ranks):
    first, second = ranks(name_unused, world_size=2)
    assert (
        "4 parameters got no gradient on rank 0, in backward pass 1: second.weight, second.bias, third.weight" in first
    )
    assert "2 parameters got no gradient on rank 1, in backward pass 1: third.weight, third.bias" in second


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


def gradients_of(strategy: str, model: torch.nn.Module, losses: Any, **settings: Any) -> dict[str, Any]:
    """Backward one loss after the other, the last at the step's boundary; return what the parameters got."""
    formation = Formation(strategy=strategy, device="cpu", **settings)
    prepared = formation.prepare(model)
    for loss in losses:
        formation.backward(loss(prepared, formation.rank))
    found = {
        name: None if p.grad is None else (p.grad.tolist(), p.grad.stride())
        for name, p in formation.unwrap(model).named_parameters()
    }
    del prepared
    formation.close()
    return found


def used_in_the_first_micro_batch(strategy: str, **settings: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 2), "c": torch.nn.Linear(2, 2)})
    model.forward = lambda names: sum(model[name](torch.ones(3, 2)).square().sum() for name in names)
    losses = [lambda m, rank: m("ab") * (rank + 1), lambda m, rank: m("a")]
    settings = {"gradient_accumulation_steps": 2, "find_unused_parameters": True, **settings}
    return gradients_of(strategy, model, losses, **settings)


def compare_accumulated_use() -> None:
    ddp = used_in_the_first_micro_batch("ddp")
    assert used_in_the_first_micro_batch("ring") == ddp
    fixed = used_in_the_first_micro_batch("ring", fixed_order=True)
    assert fixed["c.weight"] is None, "no rank used it"
    assert fixed == ddp


def test_a_parameter_that_only_an_earlier_micro_batch_used(ranks):
    ranks(compare_accumulated_use, world_size=2)


class Fails(torch.autograd.Function):
    """Breaks off the first backward pass that comes through."""

    armed = True

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        if Fails.armed:
            Fails.armed = False
            raise ArithmeticError("once")
        return gradient


def go_on_after_an_error(cap: float) -> Any:
    torch.manual_seed(0)
    first, second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    model = torch.nn.Sequential(first, second)
    model.forward = lambda x: second(Fails.apply(first(x)))
    formation = Formation(strategy="ring", device="cpu", bucket_cap_mb=cap)
    prepared = formation.prepare(model)
    inputs = torch.full((2, 4), float(formation.rank + 1))
    with pytest.raises(ArithmeticError):
        formation.backward(prepared(inputs).sum())
    for parameter in model.parameters():
        parameter.grad = None
    try:
        formation.backward(prepared(inputs).sum())
    except CommunicationError as error:
        return str(error)
    return [parameter.grad.tolist() for parameter in model.parameters()]


def test_a_pass_interrupted_before_anything_was_sent_is_dropped(ranks):
    first, second = ranks(go_on_after_an_error, 25.0, world_size=2)
    assert first == second, "the pass after it averages again"


def test_a_pass_interrupted_after_gradients_were_sent_is_reported(ranks):
    for message in ranks(go_on_after_an_error, 1e-6, world_size=2):
        assert "broke off after some of its gradients were sent" in message


def compare_layouts() -> None:
    def convolution(strategy: str) -> dict[str, Any]:
        torch.manual_seed(0)
        model = torch.nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        images = torch.ones(1, 3, 5, 5)
        return gradients_of(strategy, model, [lambda m, rank: m(images * (rank + 1)).square().sum()])

    assert convolution("ring") == convolution("ddp")


def test_gradients_have_the_memory_layout_of_their_parameters(ranks):
    ranks(compare_layouts, world_size=2)


def keep_the_graph() -> str:
    formation = Formation(strategy="ring", device="cpu")
    prepared = formation.prepare(torch.nn.Linear(2, 2))
    with pytest.raises(ModelError) as caught:
        prepared(torch.ones(1, 2)).square().sum().backward(create_graph=True)
    return str(caught.value)


def test_a_graph_of_gradients_is_refused_by_name(ranks):
    assert "create_graph=True" in ranks(keep_the_graph, world_size=2)[0]


def large_halves(strategy: str) -> list[float]:
    formation = Formation(strategy=strategy, device="cpu")
    model = torch.nn.Linear(1, 1, bias=False).half()
    prepared = formation.prepare(model)
    formation.backward((prepared(torch.ones(1, 1).half()) * 40000.0).sum())
    found = model.weight.grad.flatten().tolist()  # type: ignore[union-attr]
    del prepared
    formation.close()
    return found


def test_large_gradients_in_half_precision_stay_finite(ranks):
    for strategy in ("ddp", "ring"):
        assert ranks(large_halves, strategy, world_size=2) == [[40000.0]] * 2
