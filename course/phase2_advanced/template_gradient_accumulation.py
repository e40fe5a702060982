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
    #   Hint 1: backward() adds to .grad. By which factor is the loss of a micro-batch of 2 samples to be multiplied
    #   if the whole batch has 10?
    #   Hint 2: count all samples first. Clear the gradients once, before the loop. Call backward() inside the loop:
    #   it frees the activations of this micro-batch.
    #   Hint 3: total = samples of all micro-batches. For each: loss times its samples / total, backward, and add
    #   loss.item() of the scaled loss to a float. Return the float.
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
    #   Hint 1: dividing by a number that you know only at the end is possible at the end. Which number is it?
    #   Hint 2: go backward from the sums, without any division. Count the targets that are not IGNORED. Reduce the
    #   loss sum and the count together, then each gradient once, and divide by the count of all ranks.
    #   Hint 3: clear the gradients; in the loop: summed_token_loss, backward, add loss and tokens to a tensor of two
    #   numbers. After the loop: all-reduce that tensor; for each parameter make a missing gradient zeros, all-reduce
    #   it, divide it by the tokens; step; return loss sum / tokens.
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
    #   Hint 1: inside forward() of an autograd.Function nothing is recorded. What must backward() do to get the
    #   gradients of the block?
    #   Hint 2: in forward save the inputs (ctx.save_for_backward) and torch.get_rng_state(). In backward:
    #   torch.enable_grad(), inputs.detach().requires_grad_(), set the random state inside
    #   torch.random.fork_rng(devices=[]), run the block, torch.autograd.grad.
    #   Hint 3: autograd calls backward only if an argument of apply requires a gradient: pass params, the parameters
    #   of the block that require one, to apply, too; torch.autograd.grad refuses frozen ones. Return one value per
    #   argument of forward: None for the block, then the gradients of the inputs and of params, from one call of
    #   torch.autograd.grad(outputs, [inputs, *params], grads, allow_unused=True).
    raise NotImplementedError("recompute")


class LossScaler:
    """Scale the loss so that small float16 gradients do not become 0, and adapt the scale to overflows.

    Use: scaler.scale(loss).backward(), then scaler.step(optimizer, parameters, max_norm=...). `current` is the scale
    of now. Every rank has its own gradients here and decides together with the others.
    """

    def __init__(self, scale: float = 2.0**16, *, growth_interval: int = 2000) -> None:
        # TODO loss-scaling: scale the loss, and unscale, check, clip, update and adapt the scale in step().
        #   Hint 1: one rank has an inf, the others do not. If only that rank skips its update, what about the weights
        #   afterwards?
        #   Hint 2: divide the gradients first: max_norm is a limit for true gradients. isfinite() finds inf and nan.
        #   Agree with dist.all_reduce(flag, op=ReduceOp.MAX): every rank calls it in every step.
        #   nn.utils.clip_grad_norm_ clips.
        #   Hint 3: divide each gradient in place by the scale; flag = 1.0 if one is not finite; all-reduce the flag
        #   with MAX; if it is set: halve the scale, count = 0, return False. Otherwise clip, optimizer.step(), count
        #   up; at growth_interval double the scale and set the count to 0; return True.
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
        #   Hint 1: which of the two copies may be rounded after a step, and which must never be?
        #   Hint 2: masters: detach().clone().float() of each parameter with requires_grad; the optimizer gets the
        #   masters. In step() give each master the gradient of its parameter in float32, or None if there is none. A
        #   checkpoint needs the masters: the model holds rounded values only.
        #   Hint 3: step(): set the masters' grads, optimizer.step(), copy_ each master into its parameter under
        #   torch.no_grad(). state_dict(): copies of the masters, and copy.deepcopy of the optimizer's state.
        #   load_state_dict(): copy_ into the existing masters (the optimizer refers to them), load the optimizer, copy
        #   the masters into the model.
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
