"""The output and loss of a language model, without ever holding the logits of all tokens, or of the whole vocabulary.

In training `LMHead` computes loss and gradients for a chunk of the tokens at a time. Over logits that tensor
parallelism splits by vocabulary, `split_token_loss` adds up what each rank has.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeGuard

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from phalanx.config.fields import IGNORED_LABEL
from phalanx.torch_compat import has_triton, scaled_product


class LMOutput(NamedTuple):
    """Loss and logits; None for logits in training. A named tuple, because DDP, FSDP and pytrees can traverse it."""

    loss: Tensor
    logits: Tensor | None


class LMHead(nn.Linear):
    """The output matrix: a score for every token of the vocabulary, or with targets the mean cross-entropy alone."""

    fp8: bool = False
    """Whether the products of training are in 8 bits."""

    def forward(self, hidden: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return logits [batch, time, vocabulary] of [batch, time, hidden], or the loss; targets of -100 do not count.

        With targets the gradients are computed here, so that no logits wait for the backward pass.
        """
        dtype = _compute_dtype(hidden)
        if targets is None or dtype is torch.float16:  # whose unscaled gradients would vanish
            logits = super().forward(hidden)
            return logits if targets is None else token_loss(logits, targets)
        rows, labels = hidden.flatten(0, 1).to(dtype), targets.flatten()
        loss: Tensor = _HeadLoss.apply(rows, self.weight, labels, self.fp8)  # type: ignore[no-untyped-call]
        return loss


def scored(
    head: nn.Module, hidden: Tensor, targets: Tensor | None, *, trains: bool, is_split: bool
) -> Tensor | LMOutput:
    """Return the logits of hidden states, with targets the loss as well; in training the loss alone.

    `is_split`: the hidden states are slices of the sequence, so the head cannot compute a loss by chunks.
    """
    trains = trains and targets is not None and torch.is_grad_enabled()
    is_whole = isinstance(head, LMHead) and not hasattr(head, "lora")  # one matrix, without adapters
    if trains and not is_split and is_whole:
        return LMOutput(head(hidden, targets=targets), None)
    logits: Tensor = head(hidden)
    if targets is None:
        return whole_logits(logits)
    return LMOutput(token_loss(logits, targets), None if trains else whole_logits(logits))


def _compute_dtype(hidden: Tensor) -> torch.dtype:
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype


_CHUNK_LOGITS = 2**29
"""Logits that exist at once: a gigabyte in bf16, and large enough for matrix products at full speed."""
_CHUNK_MULTIPLE = 1024
"""Of which the tokens of a chunk are a multiple: products of other sizes have incomplete blocks."""
_MULTIPLE = 64
"""To which a GPU's vocabulary is padded: matrix products of other widths miss the fast kernels (50,257: 0.83x)."""


class _HeadLoss(torch.autograd.Function):
    """Mean cross-entropy of hidden states [tokens, hidden] under a matrix [vocabulary, hidden]; gradients in forward.

    A chunk's logits are turned into their gradient, softmax - one-hot, and that into the gradients of both factors,
    before the next chunk: as many products as usual, none repeated. The scale, 1 / labels that count, comes last.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, fp8: bool) -> Tensor:
        vocabulary = weight.shape[0]
        padding = -vocabulary % _MULTIPLE if hidden.is_cuda else 0
        matrix = F.pad(weight.to(hidden.dtype), (0, 0, 0, padding))
        trains_matrix = ctx.needs_input_grad[1]  # that of adapters is frozen
        factors = (_EightBits if fp8 and len(hidden) % 16 == 0 else _Factors)(matrix, hidden, trains_matrix)
        losses, for_hidden, chunk = [], torch.empty_like(hidden), _tokens(_CHUNK_LOGITS, matrix)
        for rows, labels, rows_of_gradient in zip(
            *(torch.split(tensor, chunk) for tensor in (hidden, targets, for_hidden)), strict=True
        ):
            losses.append(factors.loss(rows, labels, vocabulary, rows_of_gradient))
        for_weight = factors.for_matrix()
        count = (targets != IGNORED_LABEL).sum()
        ctx.save_for_backward(for_hidden, None if for_weight is None else for_weight[:vocabulary], count)
        return torch.stack(losses).sum() / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        for_hidden, for_weight, count = ctx.saved_tensors
        scale = gradient / count.clamp_min(1)  # without a label that counts the gradients are zero, the loss is NaN
        return for_hidden * scale, None if for_weight is None else for_weight * scale, None, None


def _tokens(logits: int, matrix: Tensor) -> int:
    return max(1, logits // len(matrix) // _CHUNK_MULTIPLE) * _CHUNK_MULTIPLE


class _Factors:
    """The matrix of a head, by which the chunks of hidden states are multiplied, and the gradients of both."""

    def __init__(self, matrix: Tensor, hidden: Tensor, trains_matrix: bool) -> None:
        self._matrix, self._trains_matrix = matrix, trains_matrix
        self._total: Tensor | None = None

    def loss(self, rows: Tensor, targets: Tensor, vocabulary: int, for_rows: Tensor) -> Tensor:
        """Return the sum of the losses of the next rows; write their gradient to `for_rows`, add up the matrix's."""
        logits = rows @ self._matrix.t()
        losses, gradient = _cross_entropy(logits, targets, vocabulary)
        torch.mm(gradient, self._matrix, out=for_rows)
        if self._trains_matrix:
            self._total = _add_product(self._total, gradient, rows)
        return losses.sum()

    def for_matrix(self) -> Tensor | None:
        """Return the gradient of the matrix, if it is trained."""
        return self._total


_HELD_LOGITS = 2**31
"""Gradients of logits in 8 bits that wait for the product with their hidden states: sums of products cost time."""


class _EightBits(_Factors):
    """The same with all products in 8 bits."""

    def __init__(self, matrix: Tensor, hidden: Tensor, trains_matrix: bool) -> None:
        from phalanx.speed import kernels  # imports Triton

        super().__init__(matrix, hidden, trains_matrix)
        self._kernels, self._hidden = kernels, hidden
        self._rows, self._scales = kernels.round_rows(matrix)
        self._scale = self._scales.amax()
        self._columns = kernels.round_transposed(matrix, self._scale, False)
        self._one = torch.full((), 1 / kernels.GRADIENT_SCALE, device=matrix.device)
        rows = min(len(hidden), _tokens(_HELD_LOGITS if trains_matrix else _CHUNK_LOGITS, matrix))
        self._gradients = torch.empty(len(matrix), rows, dtype=kernels.E5M2, device=matrix.device)
        self._first = self._end = 0
        """Of the hidden states whose gradients wait."""

    def loss(self, rows: Tensor, targets: Tensor, vocabulary: int, for_rows: Tensor) -> Tensor:
        kernels = self._kernels
        rounded, scales = kernels.round_rows(rows)
        logits = scaled_product(rounded, self._rows, (scales, self._scales), rows.dtype)
        if self._end + len(rows) - self._first > self._gradients.shape[1]:
            self._total = self.for_matrix()
        begin, self._end = self._end - self._first, self._end + len(rows)
        gradient = torch.empty_like(logits, dtype=kernels.E5M2)
        columns = self._gradients[:, begin : self._end - self._first]
        losses: Tensor = kernels.cross_entropy_gradient(logits, targets, vocabulary, gradient, columns)
        for_rows.copy_(scaled_product(gradient, self._columns, (self._one, self._scale), rows.dtype))
        return losses.sum()

    def for_matrix(self) -> Tensor | None:
        rows, self._first = self._hidden[self._first : self._end], self._end
        if not self._trains_matrix:
            return None
        scale = rows.abs().amax().float().clamp_min(1e-12) / self._kernels.E4M3_LARGEST
        turned = self._kernels.round_transposed(rows, scale, False)
        share = scaled_product(self._gradients[:, : len(rows)], turned, (self._one, scale), torch.float32)
        return share if self._total is None else self._total.add_(share)


def _cross_entropy(logits: Tensor, targets: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Return each token's loss, and the gradient of the logits; those may be overwritten."""
    if logits.is_cuda and logits.dtype is not torch.float64 and has_triton():  # the kernel computes in float32
        from phalanx.speed import kernels

        return kernels.cross_entropy_(logits, targets, vocabulary), logits
    counted = targets != IGNORED_LABEL
    places = targets.where(counted, 0)[:, None]
    precise = logits[:, :vocabulary].to(torch.promote_types(logits.dtype, torch.float32))  # sums lose digits in half
    # Not by exp: MKL's is less precise in the first call of a process now and then (1e-11 in float64).
    losses = -precise.log_softmax(-1).gather(1, places)[:, 0] * counted
    one = torch.ones_like(places, dtype=precise.dtype)
    shares = precise.softmax(-1).scatter_add_(1, places, -one).mul_(counted[:, None])
    return losses, F.pad(shares.to(logits.dtype), (0, logits.shape[1] - vocabulary))


def _add_product(total: Tensor | None, gradient: Tensor, rows: Tensor) -> Tensor:
    """Return total + gradient.t() @ rows; sums over chunks are in float32, inside the product where CUDA can."""
    if rows.is_cuda and rows.dtype is torch.bfloat16:
        if total is None:
            return torch.mm(gradient.t(), rows, out_dtype=torch.float32)
        return torch.addmm(total, gradient.t(), rows, out_dtype=torch.float32, out=total)
    share = (gradient.t() @ rows).to(torch.promote_types(rows.dtype, torch.float32))
    return share if total is None else total.add_(share)


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of [batch, time, vocabulary] logits; targets of -100 do not count.

    The logits may be split by vocabulary over tensor-parallel ranks: then they are not gathered.
    """
    if type(logits) is not Tensor:
        if is_split(logits):
            return split_token_loss(logits, targets)
        logits = whole_logits(logits)
    precise = torch.promote_types(logits.dtype, torch.float32)  # half precision loses digits in the sum
    if torch.is_grad_enabled():
        return F.cross_entropy(logits.to(precise).flatten(0, 1), targets.flatten())
    rows, labels = logits.flatten(0, 1), targets.flatten()
    chunk = max(1, _CHUNK_LOGITS // logits.shape[-1])  # in evaluation no more than a chunk is held in both types
    pairs = zip(torch.split(rows, chunk), torch.split(labels, chunk), strict=True)
    total = torch.stack([F.cross_entropy(row.to(precise), label, reduction="sum") for row, label in pairs]).sum()
    return total / (labels != IGNORED_LABEL).sum()


def is_split(logits: Tensor) -> TypeGuard[DTensor]:
    """Whether a rank holds a part of the vocabulary only, and every rank some of it."""
    if not isinstance(logits, DTensor) or not logits.placements[0].is_shard(logits.ndim - 1):
        return False
    ranks, vocabulary = logits.device_mesh.size(), logits.shape[-1]
    return (ranks - 1) * _share(vocabulary, ranks) < vocabulary


def whole_logits(logits: Tensor) -> Tensor:
    """Gather logits that are split; any others are returned as they are."""
    return logits.full_tensor() if isinstance(logits, DTensor) else logits


def split_token_loss(logits: DTensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of [batch, time, vocabulary] logits, equal on all ranks; -100 does not count."""
    mesh = logits.device_mesh
    first = mesh.get_local_rank() * _share(logits.shape[-1], mesh.size())
    here = logits.to_local().flatten(0, 1)
    loss: Tensor = _SplitCrossEntropy.apply(here, targets.flatten(), first, mesh.get_group())  # type: ignore[no-untyped-call]
    return loss


def _share(vocabulary: int, ranks: int) -> int:
    """Return the number of tokens on all ranks but the last: DTensor splits like `torch.chunk`."""
    return -(-vocabulary // ranks)


class _SplitCrossEntropy(torch.autograd.Function):
    """Two small all-reduces, of one or two numbers per token: the highest logits, then sums and the targets' logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, first: int, group: dist.ProcessGroup) -> Tensor:
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # half precision loses digits in the sum
        highest = logits.amax(-1)
        dist.all_reduce(highest, dist.ReduceOp.MAX, group)
        logits = logits - highest[:, None]
        here = (targets >= first) & (targets < first + logits.shape[-1])
        places = torch.where(here, targets - first, 0)[:, None]
        chosen = torch.where(here, logits.gather(1, places)[:, 0], 0.0)
        shares = logits.exp_()
        sums = torch.stack([shares.sum(-1), chosen])
        dist.all_reduce(sums, group=group)
        counted = targets != IGNORED_LABEL
        count = counted.sum()
        ctx.save_for_backward(shares, sums[0], places, here, counted, count)
        return torch.where(counted, sums[0].log() - sums[1], 0.0).sum() / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        shares, total, places, here, counted, count = ctx.saved_tensors
        weight = torch.where(counted, gradient / count, 0.0)
        logits_gradient = shares * (weight / total)[:, None]
        logits_gradient.scatter_add_(1, places, torch.where(here, -weight, 0.0)[:, None])
        return logits_gradient, None, None, None
