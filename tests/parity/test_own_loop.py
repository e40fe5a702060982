"""A loop of the user's own against plain torch, over every strategy: what "as in torch" in docs/own-loop.md means.

The ranks note which samples they saw; one process replays them. It averages the ranks' gradients by their share of the
global batch, and keeps rank 0's buffers, which is what torch's DDP does with batch norm.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from phalanx import Formation
from phalanx.errors import UsageError
from phalanx.run.weights import whole_weights
from phalanx.world.seed import derive_seed

SEED = 5
SAMPLES = 2 * 16 + 12  # three steps, the last of them ragged
DATA = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class Tied(nn.Module):
    """Batch norm, a buffer, dropout, a matrix with two uses, and a layer that may be frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.late = nn.Linear(8, 8)
        self.decode = nn.Linear(6, 8, bias=False)
        self.decode.weight = self.first.weight
        self.register_buffer("scale", torch.full((8,), 0.5))
        self.drop = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.first(x)).tanh() * self.scale
        return self.drop(self.late(hidden)).tanh() @ self.decode.weight


def models() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(3)
    return Tied().double(), nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1)).double()


Backward = Callable[[torch.Tensor], None]


def losses_of_both(backward: Backward, x: torch.Tensor, model: nn.Module, critic: nn.Module | None) -> None:
    """Two forward passes, then their two backward passes; two more of the critic."""
    once, twice = model(x), model(2 * x)
    backward((once - x).square().mean())
    backward(twice.square().mean())
    if critic is not None:
        backward(critic(once.detach()).square().mean())
        backward(critic(x).sub(1).square().mean())


def loss_through_both(backward: Backward, x: torch.Tensor, model: nn.Module, critic: nn.Module) -> None:
    """A loss of the model, which leaves a gradient in the critic, too."""
    backward(critic(model(x)).abs().mean())


def optimizers(model: nn.Module, critic: nn.Module | None) -> list[torch.optim.Optimizer]:
    made: list[torch.optim.Optimizer] = [torch.optim.SGD(model.parameters(), lr=0.1)]
    return made if critic is None else [*made, torch.optim.SGD(critic.parameters(), lr=0.05)]


def freeze(model: nn.Module, epoch: int) -> None:
    """The last layer joins in the second epoch, when the norm is left as it is."""
    model.late.requires_grad_(epoch > 0)
    model.norm.requires_grad_(epoch == 0)


def on_ranks(accumulation: int, freezes: bool, two: bool, **settings: Any) -> tuple[dict[str, Any], list[Any]]:
    """Train two epochs; return whole weights, and the samples of each micro-batch with its place and boundary."""
    model, critic = models()
    if freezes:
        freeze(model, 0)
    given = {"batch_size": 8 // accumulation, "gradient_accumulation_steps": accumulation, **settings}
    with Formation(device="cpu", timeout=30, seed=SEED, **given) as f:
        bare = [model, critic] if two else [model]
        made = optimizers(model, critic if two else None)
        numbered = TensorDataset(DATA, torch.arange(SAMPLES))
        prepared = f.prepare(*bare, *made, numbered)
        *wrapped, loader = prepared[: len(bare)] + prepared[-1:]
        made = list(prepared[len(bare) : -1])
        seen = []
        for epoch in range(2):
            for x, numbers in loader:
                if freezes:
                    freeze(model, epoch)
                micro = loader.current
                seen.append((numbers.tolist(), micro.samples, micro.offset, micro.boundary))
                f.reseed(epoch, micro.offset)
                losses_of_both(f.backward, x, wrapped[0], wrapped[1] if two else None)
                if two:
                    made[1].step()
                    made[1].zero_grad()
                    f.reseed(epoch, micro.offset)
                    loss_through_both(f.backward, x, *wrapped)
                made[0].step()
                for optimizer in made:
                    optimizer.zero_grad()
        f.strategy.consolidate(wrapped[0])
        state = {f"{n}.{k}": v.clone() for n, m in enumerate(bare) for k, v in whole_weights(m).items()}
        del wrapped, prepared
    return state, seen


def in_torch(by_rank: list[list[Any]], freezes: bool, two: bool) -> dict[str, torch.Tensor]:
    """Replay what the ranks saw: every rank's gradients, by its share of each global batch."""
    model, critic = models()
    if freezes:
        freeze(model, 0)
    bare = [model, critic] if two else [model]
    made, step, half = optimizers(model, critic if two else None), [], len(by_rank[0]) // 2
    for number in range(len(by_rank[0])):
        step.append(number)
        if by_rank[0][number][3]:
            if freezes:
                freeze(model, number // half)
            take(bare, made, step, by_rank, half)
            step = []
    return {f"{n}.{k}": v.clone() for n, m in enumerate(bare) for k, v in m.state_dict().items()}


def take(bare: list[nn.Module], made: list[Any], step: list[int], by_rank: list[list[Any]], half: int) -> None:
    """Take one step of each optimizer; the critic's comes before the last micro-batch's loss through both models."""
    total = sum(rank[number][1] for rank in by_rank for number in step)
    sums: list[dict[Any, torch.Tensor]] = [{} for _ in made]

    def replay(number: int, losses: Callable[..., None], counts: int) -> None:
        """Add every rank's gradients of some losses to those of the first `counts` optimizers."""
        for rank, seen in enumerate(by_rank):
            kept = [{name: buffer.clone() for name, buffer in m.named_buffers()} for m in bare]
            numbers, samples, offset, _ = seen[number]
            torch.manual_seed(derive_seed(SEED, number // half, offset))
            if samples:
                share = samples / total
                losses(
                    lambda loss, share=share: (loss * share).backward(), DATA[numbers], *bare, *[None][len(bare) - 1 :]
                )
            if rank:
                for m, buffers in zip(bare, kept, strict=True):
                    m.load_state_dict(buffers, strict=False)
            for m, gradients in zip(bare[:counts], sums, strict=False):
                for p in m.parameters():
                    if p.grad is not None:
                        gradients[p] = gradients.get(p, 0) + p.grad
            for m in bare:
                m.zero_grad()

    def apply(which: int) -> None:
        for parameter, gradient in sums[which].items():
            parameter.grad = gradient
        made[which].step()
        made[which].zero_grad()

    for number in step:
        replay(number, losses_of_both, 2)
        if len(bare) > 1:
            if number == step[-1]:
                apply(1)
            replay(number, loss_through_both, 1)
    apply(0)


STRATEGIES = {
    "auto": {},
    "ddp": {"strategy": "ddp"},
    "ring": {"strategy": "ring"},
    "fsdp": {"strategy": "fsdp"},
    "fsdp grad-op": {"strategy": "fsdp", "sharding": "grad-op"},
    "zero 2": {"zero_stage": 2},
    "local-sgd": {"strategy": "local-sgd", "sync_every": 1},
    "diloco": {"strategy": "diloco", "sync_every": 1, "outer_learning_rate": 1.0, "outer_momentum": 0.0},
    "parameter-server": {"strategy": "parameter-server"},
}
ALONE = ("local-sgd", "diloco", "parameter-server")
"""One model: ranks of the first two average weights, not gradients, and the last takes one."""


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_loop_trains_what_torch_trains(ranks, name):
    """Two models and optimizers, several backward calls, a layer unfrozen and one frozen half-way, a ragged end."""
    freezes, two = name != "parameter-server", name not in ALONE

    def run() -> list[Any]:
        return [on_ranks(accumulation, freezes, two, **STRATEGIES[name]) for accumulation in (1, 2)]

    by_rank = ranks(run, world_size=2)
    for number in (0, 1):
        expected = in_torch([results[number][1] for results in by_rank], freezes, two)
        for results in by_rank:
            torch.testing.assert_close(results[number][0], expected, rtol=0, atol=1e-10)


def left_early(**settings: Any) -> list[float]:
    """Leave an epoch between two micro-batches, then train a whole one; return the weights."""
    model = nn.Linear(6, 1, bias=False, dtype=torch.float64)
    nn.init.ones_(model.weight)
    with Formation(device="cpu", batch_size=2, gradient_accumulation_steps=2, **settings) as f:
        wrapped, optimizer, loader = f.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1), TensorDataset(DATA[:8])
        )
        for passes in (1, 2):
            for (x,) in loader:
                f.backward(wrapped(x).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                if passes == 1:
                    break
        f.strategy.consolidate(wrapped)
        return whole_weights(model)["weight"].flatten().tolist()


def test_an_epoch_that_is_left_between_micro_batches_leaves_no_gradient(ranks):
    """The micro-batches before are dropped, wherever the strategy keeps them."""
    kinds = ("ddp", "ring", "fsdp", "parameter-server")
    found = ranks(
        lambda: [left_early(strategy=kind) for kind in kinds] + [left_early(strategy="ring", fixed_order=True)],
        world_size=2,
    )
    model = nn.Linear(6, 1, bias=False, dtype=torch.float64)
    nn.init.ones_(model.weight)
    model(DATA[:8]).square().mean().backward()
    expected = (model.weight - 0.1 * model.weight.grad).flatten().tolist()
    for rank in found:
        for weights in rank:
            assert weights == pytest.approx(expected, abs=1e-12)


def test_servers_refuse_a_layer_that_they_do_not_have(ranks):
    def run() -> None:
        with pytest.raises(UsageError, match=r"late.weight, late.bias: frozen or unfrozen during training.*\n.*lr"):
            on_ranks(1, True, False, strategy="parameter-server")

    ranks(run, world_size=1)


def test_a_fixed_order_refuses_a_second_backward_pass_of_a_micro_batch(ranks):
    def run() -> None:
        with pytest.raises(UsageError, match=r"twice for one micro-batch.*\n.*f.backward\(first \+ second\)"):
            on_ranks(2, False, False, strategy="ring", fixed_order=True)

    ranks(run, world_size=1)
