"""Phase 2, part 1: train with less memory: accumulation, recomputation, mixed precision.

Write the five exercises, each marked with TODO. See guidelines.md. Check one: phalanx learn check accumulate.
The default process group exists when functions that talk to other ranks are called.
Run this file (python template_gradient_accumulation.py) to see 2 ranks use your functions.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

Pair = tuple[Tensor, Tensor]
IGNORED = -1
"""Target of a padding position: it is not a token and has no loss."""


def accumulate(
    model: nn.Module, loss_function: Callable[[Tensor, Tensor], Tensor], micro_batches: Sequence[Pair]
) -> float:
    """Leave in `.grad` the gradient of the mean loss over all samples of `micro_batches`, and return that loss.

    `loss_function(outputs, targets)` is the mean over the samples of what it is given. The micro-batches may have
    different lengths; none is empty. Gradients of an earlier step do not count. At any time the activations of one
    micro-batch at most are in memory: that is the purpose.
    """
    # TODO accumulate: go forward and backward for one micro-batch at a time, so that the sum of the gradients is
    # right.
    #   Hints, one at a time: phalanx learn hint accumulate
    raise NotImplementedError("accumulate")


def summed_token_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the sum of the cross entropy over all tokens; positions with target IGNORED do not count."""
    logits = model(inputs)
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")


def accumulation_step(model: nn.Module, optimizer: torch.optim.Optimizer, micro_batches: Iterable[Pair]) -> float:
    """Make one update from the micro-batches of all ranks, and return the mean loss per token, equal on all ranks.

    The gradient is that of the mean over all tokens of all micro-batches of all ranks; `summed_token_loss` gives sums.
    The ranks may have different numbers of micro-batches, and of tokens in them (also none). The gradients travel once
    per update, not once per micro-batch: all calls together carry the bytes of the gradients and at most 64 more.
    """
    # TODO accumulate-over-ranks: accumulate sums over the micro-batches, reduce once, divide by the tokens of all
    # ranks.
    #   Hints, one at a time: phalanx learn hint accumulate-over-ranks
    raise NotImplementedError("accumulation_step")


def recompute(block: nn.Module, inputs: Tensor) -> Tensor:
    """Return block(inputs), saving `inputs` for the backward pass and no activation inside the block.

    The backward pass computes the block once more. All gradients (of the inputs and of the parameters of the block) are
    those of the plain call, also if the block has dropout: the second run draws the same random numbers, and the random
    state of the process after the backward pass is the one before it. The parameters get their gradients also if the
    inputs need none, as in the first block of a model. Parameters may be frozen (requires_grad=False): they get none.
    The answer may use classes and functions beside this one; torch.utils.checkpoint is not allowed.
    """
    # TODO recompute: write a torch.autograd.Function that saves the inputs only, and call it here with apply.
    #   Hints, one at a time: phalanx learn hint recompute
    raise NotImplementedError("recompute")


class LossScaler:
    """Scale the loss so that small float16 gradients do not become 0, and adapt the scale to overflows.

    Use: scaler.scale(loss).backward(), then scaler.step(optimizer, parameters, max_norm=...). `current` is the scale
    of now. Every rank has its own gradients here and decides together with the others.
    """

    def __init__(self, scale: float = 2.0**16, *, growth_interval: int = 2000) -> None:
        # TODO loss-scaling: scale the loss, and unscale, check, clip, update and adapt the scale in step().
        #   Hints, one at a time: phalanx learn hint loss-scaling
        raise NotImplementedError("LossScaler")

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss times the current scale."""
        raise NotImplementedError("LossScaler")

    def step(self, optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor], *, max_norm: float) -> bool:
        """Update the weights if the gradients of all ranks are finite; return whether it was done.

        1. Divide the gradients (`.grad` may be None) by the scale.
        2. If any gradient on any rank has an inf or nan: no rank updates. `current` is halved, once.
        3. Otherwise clip the gradients to the norm `max_norm` and call optimizer.step(). After `growth_interval` such
           steps in a row `current` is doubled, and the count begins anew; it also begins anew after an overflow.
        """
        raise NotImplementedError("LossScaler")


class MasterWeights:
    """Train a bfloat16 model with float32 copies of its weights: small updates are not lost.

    In bfloat16 the next number after 1.0 is 1.0078: 1.0 + 0.001 is 1.0 again. The copies (the masters) sum the updates
    in float32, and the model gets them rounded. `make_optimizer(tensors)` makes the optimizer that updates the masters.
    Parameters with requires_grad=False, and those without a gradient in a step, do not move.
    """

    def __init__(
        self, parameters: Iterable[Tensor], make_optimizer: Callable[[list[Tensor]], torch.optim.Optimizer]
    ) -> None:
        # TODO master-weights: keep float32 copies, update them, and round them into the model.
        #   Hints, one at a time: phalanx learn hint master-weights
        raise NotImplementedError("MasterWeights")

    def zero_grad(self) -> None:
        """Remove the gradients of the model."""
        raise NotImplementedError("MasterWeights")

    def step(self) -> None:
        """Update the masters with the gradients of the model, then copy them into the model."""
        raise NotImplementedError("MasterWeights")

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs to continue exactly: the masters and the state of the optimizer.

        Both are copies: the steps that follow do not change them. optimizer.state_dict() alone does not copy.
        """
        raise NotImplementedError("MasterWeights")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the result of `state_dict`; the model gets its weights, too."""
        raise NotImplementedError("MasterWeights")


def show(rank: int, world: int) -> None:
    """Print what accumulation, recomputation, loss scaling and master weights do on `world` ranks."""
    model, inputs = nn.Linear(4, 1), torch.linspace(-1, 1, 40).reshape(10, 4)
    pieces = list(zip(inputs.split(4), inputs.sum(1, keepdim=True).split(4), strict=True))
    accumulate(model, nn.functional.mse_loss, pieces)
    whole = nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
    (expected,) = torch.autograd.grad(whole, [model.weight])
    same = torch.allclose(model.weight.grad, expected, atol=1e-6)
    torch.manual_seed(0)
    language, tokens = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5)), torch.arange(8).reshape(2, 4) % 5
    optimizer = torch.optim.SGD(language.parameters(), lr=0.5)
    losses = [accumulation_step(language, optimizer, [(tokens, tokens)] * (rank + 1)) for _ in range(20)]
    recompute(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), inputs).sum().backward()
    scaler = LossScaler(1024.0)
    model.weight.grad = torch.full_like(model.weight, float("inf") if rank == 1 else 1.0)
    updated = scaler.step(torch.optim.SGD(model.parameters(), lr=0.1), list(model.parameters()), max_norm=1.0)
    weight = torch.ones(1, dtype=torch.bfloat16, requires_grad=True)
    trainer = MasterWeights([weight], lambda tensors: torch.optim.SGD(tensors, lr=0.001))
    for _ in range(100):
        weight.grad = torch.ones_like(weight)
        trainer.step()
    if rank == 0:
        print("3 micro-batches of 4, 4, 2 samples give the gradient of the batch of 10:", same)
        print(f"loss per token: {losses[0]:.2f}, after 20 updates {losses[-1]:.2f}")
        print(f"rank 1 overflowed: rank 0 updated: {updated}, scale now {scaler.current}")
        print(f"bfloat16 weight after 100 updates of -0.001: {weight.item():.3f}")


def run_rank(rank: int, world: int, store: str) -> None:
    """Join the group of `world` ranks and run `show`."""
    dist.init_process_group("gloo", init_method=f"file://{store}/group", rank=rank, world_size=world)
    try:
        show(rank, world)
    except NotImplementedError as missing:
        print(f"rank {rank}: {missing} is not written yet")
    dist.destroy_process_group()


def main() -> None:
    """Start 2 ranks on this machine."""
    with tempfile.TemporaryDirectory() as store:
        torch.multiprocessing.spawn(run_rank, args=(2, store), nprocs=2)


if __name__ == "__main__":
    main()
