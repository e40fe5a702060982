"""context: every sequence is cut over the ranks of an axis, for sequences whose activations do not fit on one device.

The model is changed in place: its inner attention becomes ring attention, and hooks around its forward pass cut the
inputs and join the outputs. A caller gives whole sequences and gets whole ones.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.config.fields import IGNORED_LABEL
from phalanx.errors import ModelError, UsageError
from phalanx.models.contract import ExpertModules, RingReady, implements
from phalanx.strategies.context.ring_attention import Ring, RingAttention
from phalanx.strategies.context.sequence import TARGET_NAMES, SequenceSlices, whole_mean
from phalanx.torch_compat import pytree

_USAGE = (
    "The built-in gpt and llama can. In your own model, use phalanx.models.InnerAttention, and let forward take "
    "`positions`, the positions of its tokens; or train with strategy='fsdp' or tensor_parallel."
)


def split_context(model: nn.Module, slices: SequenceSlices) -> None:
    """Cut the model's sequences over the ranks of a group, in place; call it before the parameters are sharded."""
    install_ring(model, slices)
    calls = _Calls(inspect.signature(model.forward), slices)
    model.register_forward_pre_hook(calls.enter, with_kwargs=True)
    model.register_forward_hook(calls.leave)


def install_ring(model: nn.Module, slices: SequenceSlices) -> None:
    """Replace the model's inner attention; the caller cuts its inputs. UsageError where this is not possible."""
    signature = inspect.signature(model.forward)
    name = type(model).__name__
    if implements(model, ExpertModules):
        raise UsageError(
            f"context_parallel cannot cut the sequences of {name}, a mixture of experts: its balance loss is a mean "
            "over whole sequences",
            hint="Use expert_parallel, strategy='fsdp', or a dense model.",
        )
    if "positions" not in signature.parameters:
        raise UsageError(
            f"context_parallel gives each rank a slice of a sequence, and {name}.forward takes no `positions` to know "
            "which",
            hint=_USAGE,
        )
    found = [path for path, module in model.named_modules() if implements(module, RingReady) and module.ring_ready]
    if not found:
        raise UsageError(
            f"context_parallel replaces the attention of {name} by ring attention, and found none that it knows",
            hint=_USAGE,
        )
    ring = Ring(slices.group)
    for path in found:
        module = model.get_submodule(path)
        causal, dropout = bool(module.causal), float(getattr(module, "dropout", 0.0))
        attention = RingAttention(ring, causal=causal, dropout=dropout)
        model.set_submodule(path, attention.train(module.training))


class _Calls:
    """Hooks that cut sequences before a call of the model and join them after it."""

    def __init__(self, signature: inspect.Signature, slices: SequenceSlices) -> None:
        self._signature = signature
        self._slices = slices
        self._shape: tuple[int, int] = (0, 0)
        self._targets: Tensor | None = None

    def enter(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Cut all arguments as long as the first one, and add the positions of the slice."""
        bound = self._signature.bind(*args, **kwargs)
        given = bound.arguments
        positions = given.pop("positions", None)
        cut, own = self._slices.cut_all(dict(given), model)
        given.update(cut)
        given["positions"] = own if positions is None else positions[own]
        self._shape = (next(iter(cut.values())).shape[0], len(own))
        self._targets = next((given[name] for name in TARGET_NAMES if isinstance(given.get(name), Tensor)), None)
        return bound.args, bound.kwargs

    def leave(self, _: nn.Module, __: Any, output: Any) -> Any:
        """Return losses of the whole sequences, and whole outputs unless there is a loss to train with."""
        targets, self._targets = self._targets, None
        losses = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.ndim == 0]
        sliced = bool(losses) and torch.is_grad_enabled()

        def whole(leaf: Tensor) -> Tensor:
            if leaf.ndim == 0:
                return whole_mean(leaf, _count(targets, leaf), self._slices.group)
            if leaf.shape[:2] != self._shape:
                raise ModelError(
                    f"under context_parallel the model returned a tensor of shape {list(leaf.shape)}, which is neither "
                    f"one number (a loss) nor has an entry for each of {self._shape[1]} positions of {self._shape[0]} "
                    "sequences",
                    hint="A result that pools over the sequence cannot be joined: return [batch, time, ...].",
                )
            return leaf if sliced else self._slices.join(leaf)

        return pytree.tree_map_only(Tensor, whole, output)


def _count(targets: Tensor | None, loss: Tensor) -> Tensor:
    """Return how many labels a loss is the mean of; 1 where that is not known."""
    if targets is None or targets.is_floating_point():
        return torch.ones((), dtype=torch.float64, device=loss.device)
    return (targets != IGNORED_LABEL).sum().double()
