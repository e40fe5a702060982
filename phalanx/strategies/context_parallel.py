"""context: every sequence is cut over the ranks of an axis, for sequences whose activations do not fit on one device.

The model is changed in place: its inner attention becomes ring attention, and hooks around its forward pass cut the
inputs and join the outputs. A caller gives whole sequences and gets whole ones.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx import torch_compat
from phalanx.config.fields import IGNORED_LABEL
from phalanx.errors import ModelError, UsageError
from phalanx.model import ChecksLength, ExpertModules, RingReady, implements
from phalanx.strategies.ring_attention import Ring, RingAttention
from phalanx.torch_compat import pytree
from phalanx.world.splits import uneven_context

TARGET_NAMES = ("targets", "target", "labels", "label", "y")
"""Names of the argument of a model's forward that holds the targets."""


class SequenceSlices:
    """Dim 1 of tensors in 2N chunks over N ranks: rank i holds the chunks i and 2N-1-i (see `ring_attention`)."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def positions(self, time: int, device: torch.device | None = None) -> Tensor:
        """Return the positions of this rank's slice in the sequence; ModelError where it cannot be cut."""
        if (wrong := uneven_context(time, self.size)) is not None:
            raise wrong
        chunk = time // (2 * self.size)
        return torch.cat([torch.arange(i * chunk, (i + 1) * chunk, device=device) for i in self._chunks(self.rank)])

    def cut(self, whole: Tensor) -> Tensor:
        """Return this rank's slice of dim 1."""
        chunks = whole.chunk(2 * self.size, dim=1)
        return torch.cat([chunks[number] for number in self._chunks(self.rank)], dim=1)

    def cut_all(self, inputs: Any, model: nn.Module) -> tuple[Any, Tensor]:
        """Return inputs with every tensor cut that is as long as the first, and the positions of this rank's slice."""
        first = next(leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor))
        if implements(model, ChecksLength):
            model.check_length(first.shape[1])
        positions = self.positions(first.shape[1], first.device)

        def cut(tensor: Tensor) -> Tensor:
            return self.cut(tensor) if tensor.shape[:2] == first.shape[:2] else tensor

        return pytree.tree_map_only(Tensor, cut, inputs), positions

    def join(self, part: Tensor) -> Tensor:
        """Return the whole sequence from all slices; all ranks must compute the same from it up to the loss."""
        whole: Tensor = _SliceJoin.apply(part, self)  # type: ignore[no-untyped-call]
        return whole

    def gather(self, part: Tensor) -> Tensor:
        """Return the slices of all ranks in the sequence's order."""
        gathered = part.new_empty(self.size * part.shape[0], *part.shape[1:])
        torch_compat.all_gather_flat(gathered, part.contiguous(), group=self.group)
        firsts, seconds = zip(*(piece.chunk(2, dim=1) for piece in gathered.chunk(self.size)), strict=True)
        return torch.cat([*firsts, *reversed(seconds)], dim=1)

    def mean(self, value: float | Tensor, device: torch.device) -> Tensor:
        """Return the mean of a number over the ranks of the group, without gradient."""
        total = torch.as_tensor(value, dtype=torch.float64, device=device).clone()
        dist.all_reduce(total, group=self.group)
        return total / self.size

    def _chunks(self, rank: int) -> tuple[int, int]:
        return rank, 2 * self.size - 1 - rank


class _SliceJoin(torch.autograd.Function):
    """Joins slices; the gradient of a rank's slice counts N times, since gradients are averaged over the ranks."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, slices: SequenceSlices) -> Tensor:
        ctx.slices = slices
        return slices.gather(part)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        slices: SequenceSlices = ctx.slices
        return slices.cut(gradient) * slices.size, None


def whole_mean(mean: Tensor, count: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the mean over all ranks' counts from each rank's mean; its gradient, averaged, is that of the whole."""
    mean_of_all: Tensor = _WholeMean.apply(mean, count, group)  # type: ignore[no-untyped-call]
    return mean_of_all


class _WholeMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mean: Tensor, count: Tensor, group: dist.ProcessGroup) -> Tensor:
        # A slice without a label that counts has no mean: its NaN must not spread to all ranks.
        weighted = torch.where(count > 0, mean.double() * count, 0.0)
        sums = torch.stack([weighted, count.double()])
        dist.all_reduce(sums, group=group)
        ctx.share = dist.get_world_size(group) * count / sums[1]
        return (sums[0] / sums[1]).to(mean.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return (gradient * ctx.share).to(gradient.dtype), None, None


_USAGE = (
    "The built-in gpt and llama can. In your own model, use phalanx.zoo.models.InnerAttention, and let forward take "
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
    paths = [path for path, module in model.named_modules() if implements(module, RingReady) and module.ring_ready]
    if not paths:
        raise UsageError(
            f"context_parallel replaces the attention of {name} by ring attention, and found none that it knows",
            hint=_USAGE,
        )
    ring = Ring(slices.group)
    for path in paths:
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
        arguments = bound.arguments
        if arguments.get("documents") is not None:
            raise UsageError(
                "context_parallel cannot keep documents apart: ring attention knows no mask",
                hint="Use windows (--set data.packing=windows), or strategy='fsdp' or tensor_parallel.",
            )
        positions = arguments.pop("positions", None)
        cut, own_positions = self._slices.cut_all(dict(arguments), model)
        arguments.update(cut)
        arguments["positions"] = own_positions if positions is None else positions[own_positions]
        self._shape = (next(iter(cut.values())).shape[0], len(own_positions))
        self._targets = next(
            (arguments[name] for name in TARGET_NAMES if isinstance(arguments.get(name), Tensor)), None
        )
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
