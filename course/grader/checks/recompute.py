"""Grade recompute() of template_gradient_accumulation.py: gradients, memory, random state."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from grader.checks.talk import run_explained
from grader.exercise import LIMIT_SECONDS, Attempt, Mistake

RECOMPUTE = "Recompute activations instead of saving them"
ERRORS = {
    "element 0 of tensors does not require grad": "Nothing is recorded inside backward() unless torch.enable_grad() is "
    "used: run the block again under it.",
    "does not require grad": "A parameter of the block may be frozen (requires_grad=False): torch.autograd.grad takes "
    "only tensors that require a gradient, so leave frozen parameters out of apply() and of grad().",
}
"""What to add to errors of torch."""


class Block(nn.Module):
    """Layers with dropout and a frozen bias; counts its calls and remembers where its activations were."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 9), nn.Tanh(), nn.Dropout(dropout), nn.Linear(9, 6)]).double()
        self.layers[3].bias.requires_grad_(False)
        self.calls = 0
        self.activations: list[StorageWeakRef] = []

    def forward(self, inputs: Tensor) -> Tensor:
        """Apply the layers."""
        self.calls += 1
        for layer in self.layers[:-1]:
            inputs = layer(inputs)
            self.activations.append(StorageWeakRef(inputs.untyped_storage()))  # type: ignore[no-untyped-call]
        outputs: Tensor = self.layers[-1](inputs)
        return outputs

    def alive(self) -> int:
        """Return the number of inner activations that are still in memory."""
        return sum(not activation.expired() for activation in self.activations)  # type: ignore[no-untyped-call]


def run_block(seed: int, dropout: float, needs_grad: bool, module: ModuleType | None) -> dict[str, Any]:
    """Run a block forward and backward, by `recompute` of the module or, without one, directly."""
    torch.manual_seed(seed)
    block = Block(dropout)
    inputs = torch.randn(4, 6, dtype=torch.float64, requires_grad=needs_grad)
    upstream = torch.randn(4, 6, dtype=torch.float64)
    outputs = block(inputs) if module is None else module.recompute(block, inputs)
    seen: dict[str, Any] = {
        "outputs": outputs.detach().clone(),
        "alive": block.alive(),
        "recorded": outputs.requires_grad,
    }
    torch.rand(3)  # the random state moves on between forward and backward
    before = torch.get_rng_state()
    if outputs.requires_grad:
        outputs.backward(upstream)
    seen["state"] = torch.equal(before, torch.get_rng_state())
    seen["calls"] = block.calls
    seen["input"] = inputs.grad
    seen["grads"] = {name: param.grad for name, param in block.named_parameters()}
    seen["upstream"] = upstream
    return seen


def call_recompute(module: ModuleType, seed: int) -> list[dict[str, Any]]:
    """Run the three cases: plain, an input without gradient, dropout."""
    return [run_block(seed, *case, module) for case in CASES]


CASES = ((0.0, True), (0.0, False), (0.5, True))


def grade_recompute(attempt: Attempt) -> None:
    """Compare outputs, gradients, calls, memory and random state with those of the plain call."""
    seed = attempt.seed()
    (answer,) = run_explained(
        attempt, call_recompute, 0, (seed,), waits="", errors=ERRORS, timeout=LIMIT_SECONDS, see=RECOMPUTE
    )
    for case, seen in zip(CASES, answer.value, strict=True):
        check_block(case, seen, run_block(seed, *case, None))


def check_block(case: tuple[float, bool], seen: dict[str, Any], right: dict[str, Any]) -> None:
    """Raise a Mistake unless a block behaves as the plain call but keeps no activation."""
    dropout, needs_grad = case
    if not torch.equal(seen["outputs"], right["outputs"]):
        raise Mistake("The outputs differ from block(inputs): the forward pass must be the plain one.", see=RECOMPUTE)
    if not seen["recorded"]:
        what = "the parameters get no gradient. Pass them to apply()" if not needs_grad else "no gradient can flow back"
        why = "the inputs need no gradient, as in the first block of a model, and so " if not needs_grad else ""
        raise Mistake(f"The outputs have requires_grad=False: {why}{what}.", see=RECOMPUTE)
    if seen["alive"]:
        raise Mistake(
            f"After the forward pass {seen['alive']} inner activations of the block are still in memory: they are "
            "saved, or held by a graph. Keep the inputs only, and compute the block again in backward().",
            see=RECOMPUTE,
        )
    if seen["calls"] != 2:
        raise Mistake(
            f"The block ran {seen['calls']} times; it should run once forward and once in backward.", see=RECOMPUTE
        )
    check_block_gradients(dropout, needs_grad, seen, right)
    if not seen["state"]:
        raise Mistake(
            "The backward pass leaves another random state behind: later dropout masks and shuffles depend on it. Put "
            "the state of before back (torch.random.fork_rng).",
            see=RECOMPUTE,
        )


def check_block_gradients(dropout: float, needs_grad: bool, seen: dict[str, Any], right: dict[str, Any]) -> None:
    """Raise a Mistake unless all gradients of a block are those of the plain call."""
    if needs_grad:
        check_gradient("the inputs", dropout, seen["input"], right["input"])
    for name, expected in right["grads"].items():
        found = seen["grads"][name]
        if expected is None and found is not None:
            raise Mistake(f"{name} has requires_grad=False and got a gradient: leave it alone.", see=RECOMPUTE)
        if expected is not None:
            check_gradient(name, dropout, found, expected)


def check_gradient(name: str, dropout: float, found: Tensor | None, expected: Tensor) -> None:
    """Raise a Mistake unless one gradient is right."""
    if found is None:
        raise Mistake(
            f"{name}: no gradient arrives (None). backward() returns one per argument of forward().", see=RECOMPUTE
        )
    if torch.allclose(found, expected, rtol=1e-10, atol=1e-12):
        return
    if torch.allclose(found, 2 * expected, rtol=1e-9, atol=1e-12):
        text = "it is counted twice: use torch.autograd.grad or backward(), not both"
    elif not found.any():
        text = "it is zero"
    elif dropout:
        text = (
            "without dropout it is right: the second run draws other random numbers than the first. Keep the random "
            "state of before the forward pass and set it again"
        )
    else:
        text = "backward() has to multiply with the gradient that it is given"
    raise Mistake(f"The gradient of {name} differs from the one of the plain call: {text}.", see=RECOMPUTE)
