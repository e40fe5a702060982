"""pipeline: the model is cut into stages on different ranks; parts of a batch pass through them one by one.

The schedules are torch's (`torch.distributed.pipelining`). This module adds batches of any size in microbatches of one
size, the loss of the whole batch, tied weights, and evaluation through all stages.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from phalanx import torch_compat
from phalanx.errors import ModelError, UsageError
from phalanx.model import LossFromOutput, implements
from phalanx.strategies.base import BatchPass, local
from phalanx.strategies.context_parallel import TARGET_NAMES, SequenceSlices
from phalanx.strategies.pipeline.loss import LossShare, MicrobatchLoss, cut_rows, fill_rows
from phalanx.strategies.tensors import count_rows
from phalanx.torch_compat import pytree
from phalanx.world.splits import PipelineSchedule, choose_microbatches

_KEPT_RUNNERS = 8


class Row(NamedTuple):
    """The ranks that hold the stages of one copy of the model."""

    group: dist.ProcessGroup
    position: int
    size: int
    schedule: PipelineSchedule

    @property
    def num_stages(self) -> int:
        """Stages of the whole model."""
        return self.schedule.num_stages(self.size)

    def owner(self, stage: int) -> int:
        """Return the position of the rank that holds a stage; -1 is the last stage."""
        return self.schedule.owner(stage % self.num_stages, self.size)


class Tie(NamedTuple):
    """A matrix with several names, of which this rank's stages have one, and those of other ranks have the rest."""

    name: str
    first: str
    """The name that it has in checkpoints: the first in the whole model."""
    copies: int
    group: dist.ProcessGroup


def refuse_documents(batch: Mapping[str, Any]) -> None:
    """Refuse packed documents, in training and in the evaluation that comes before it."""
    if "documents" in batch:
        raise UsageError(
            "pipeline_parallel cannot keep documents apart: only hidden states pass from stage to stage",
            hint="Use windows (--set data.packing=windows), or strategy='fsdp' or tensor_parallel.",
        )


class Pipeline(nn.Module):
    """This rank's stages as one model: trained by `train_batch`, called like any other for evaluation."""

    def __init__(
        self,
        model: nn.Module,
        stages: Mapping[int, nn.Module],
        row: Row,
        device: torch.device,
        microbatches: int | None,
        smallest: int = 1,
    ) -> None:
        super().__init__()
        self.module = model
        self.stages = dict(stages)  # a dict is not registered: the parameters are those of `module`
        self.row = row
        self.sync = True
        self.tied: list[TiedParameter] = []
        self.finishing: list[Callable[[], None]] = []
        """Called after the last batch of a step, to complete the gradients."""
        self.aliases: dict[str, str] = {}
        self.slices: SequenceSlices | None = None
        """How sequences are cut over ranks of a context-parallel axis, if they are."""
        self._positions: dict[str, torch.Tensor] = {}
        self._device = device
        self._microbatches_set = microbatches
        self._smallest = smallest
        self._largest = 0
        self._runners: dict[Any, _Runner] = {}
        self._unshaped: set[nn.Module] = set()
        """Stages whose next forward pass is torch's own, to find the shapes of outputs: buffers must not count it."""
        self._autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
        for stage in self.stages.values():
            stage.forward = partial(self._call, stage)

    def _call(self, stage: nn.Module, *inputs: Any) -> Any:
        """Run a stage's forward pass with autocast, which must not apply to the schedule's backward passes."""
        if isinstance(stage, nn.Sequential) and type(stage).forward is nn.Sequential.forward and len(inputs) > 1:
            raise ModelError(
                f"a stage of an nn.Sequential got {len(inputs)} tensors, and it takes one",
                hint="Let every unit return one tensor, and the batches be (inputs, targets).",
            )
        copied = _copied_buffers(stage) if stage in self._unshaped else nullcontext()
        self._unshaped.discard(stage)
        with self._autocast(), copied:
            output = type(stage).forward(stage, *inputs, **self._positions)
        return pytree.tree_map_only(torch.Tensor, self._sendable, output)

    def _sendable(self, output: torch.Tensor) -> torch.Tensor:
        """Return an output with the strides that torch expects: a vocabulary cut unevenly leaves gaps between rows."""
        output = output.contiguous()
        # Such a schedule detaches outputs in place, which views (of a reshape, of a DTensor's local part) do not allow.
        return output.clone() if self.row.schedule.splits_backward and torch_compat.is_view(output) else output

    def train(self, mode: bool = True) -> Pipeline:
        """Set the mode of the stages too: the modules around their units are copies."""
        for stage in self.stages.values():
            stage.train(mode)
        super().train(mode)
        return self

    def tie(self, ties: Sequence[Tie]) -> None:
        """Keep copies of one matrix equal from now on."""
        self.tied = [TiedParameter(self.module.get_parameter(tie.name), tie) for tie in ties]
        self.aliases = {tie.name: tie.first for tie in ties if tie.name != tie.first}
        self.finishing += [tied.add_up for tied in self.tied if tied.parameter.requires_grad]

    def expect(self, batch_size: int) -> str:
        """Prepare for batches of up to `batch_size` samples, a multiple of the microbatches; describe the layout."""
        row = self.row
        self._largest = batch_size
        count = self._microbatches(batch_size)
        share = row.schedule.bubble(row.size, count)
        return (
            f"pipeline: {row.num_stages} stages on {row.size} ranks, {row.schedule.name}, {count} microbatches of "
            f"{batch_size // count}: ranks are idle for {share:.0%} of a step when all stages take equally long"
        )

    def train_batch(self, batch: Any, passes: BatchPass, factor: float | torch.Tensor) -> torch.Tensor:
        """Run forward and backward for a batch (inputs..., targets); return its mean loss, on every rank of the row.

        The gradients are those of `factor` times this loss.
        """
        if not isinstance(batch, (tuple, list)) or len(batch) < 2:
            raise ModelError("a pipeline takes batches of (inputs, ..., targets)", hint="Let the loader yield tuples.")
        rows = count_rows(batch)
        self._largest = max(rows, self._largest)
        # Shorter batches are filled up, so that shapes stay the same; but batch norms would count what fills them.
        rows_needed = rows if self._has_batch_norm else self._largest
        count = self._microbatches(rows_needed)
        size = rows_needed // count
        padded = self._cut(tuple(batch) if rows == rows_needed else fill_rows(batch, rows, rows_needed))
        weight = passes.weigh(cut_rows(padded, 0, rows))
        if self.slices is not None:
            weight = self.slices.mean(weight, self._device)
        microbatch_loss = MicrobatchLoss(passes, padded, rows, size, factor, weight)
        self._autocast = passes.autocast
        try:
            self._runner(padded, size, count).run(padded, microbatch_loss)
        finally:
            self._autocast = nullcontext
        total = microbatch_loss.total(self._device)
        dist.broadcast(total, group=self.row.group, group_src=self.row.owner(-1))
        if self.slices is not None:
            total = self.slices.mean(total, self._device)
        if self.sync:
            for finish in self.finishing:
                finish()
        return total

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Send inputs through all stages, one after the other; every rank of the row gets the output (no gradients)."""
        refuse_documents(named)
        if named:
            raise UsageError(
                f"a pipeline takes its inputs by position, and the batch names them: {', '.join(named)}",
                hint="Give batches of (inputs, targets).",
            )
        if torch.is_grad_enabled():
            raise UsageError(
                "a pipeline cannot be called like a model in training: its stages are on different ranks",
                hint="Write loss = f.train_batch(model, batch, loss_fn) in place of model(...) and f.backward(loss).",
            )
        model_loss = self.module.loss_from_output if implements(self.module, LossFromOutput) else None
        targets = inputs[-1] if model_loss is not None and self._takes_targets(len(inputs)) else None
        hidden: Any = self._cut(inputs if targets is None else inputs[:-1])
        for stage in range(self.row.num_stages):
            if stage in self.stages:
                hidden = self.stages[stage](*(hidden if isinstance(hidden, tuple) else (hidden,)))
            hidden = self._passed_on(hidden, self.row.owner(stage))
        if self.slices is not None:
            hidden = self.slices.gather(hidden)
        return hidden if model_loss is None or targets is None else LossShare(model_loss(hidden, targets), hidden)

    def _takes_targets(self, count: int) -> bool:
        """Whether the last arguments are targets, by the name that the model's forward gives them."""
        names = list(inspect.signature(self.module.forward).parameters)
        return count > 1 and names[min(count, len(names)) - 1] in TARGET_NAMES

    def _cut(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return this rank's slice of every sequence, where sequences are cut; stages get its positions."""
        if self.slices is None:
            return inputs
        cut, self._positions["positions"] = self.slices.cut_all(inputs, self.module)
        return tuple(cut)

    def _passed_on(self, hidden: Any, source: int) -> Any:
        """Broadcast a stage's output, a tensor or several, to all ranks of the row."""
        mine = self.row.position == source
        shapes: list[Any] = [None]
        if mine:
            shapes[0] = pytree.tree_map(lambda leaf: leaf.new_empty(leaf.shape, device="meta"), hidden)
        dist.broadcast_object_list(shapes, group=self.row.group, group_src=source)
        if not mine:
            hidden = pytree.tree_map(lambda leaf: torch.empty_like(leaf, device=self._device), shapes[0])
        for leaf in pytree.tree_leaves(hidden := pytree.tree_map(torch.Tensor.contiguous, hidden)):
            dist.broadcast(leaf, group=self.row.group, group_src=source)
        return hidden

    def _microbatches(self, batch_size: int) -> int:
        row = self.row
        number = self._microbatches_set if batch_size == self._largest else None  # a short batch is cut as it can be
        return choose_microbatches(number, batch_size, row.size, row.schedule, smallest=self._smallest)

    @property
    def _has_batch_norm(self) -> bool:
        return self._smallest > 1

    def _runner(self, batch: Any, size: int, count: int) -> _Runner:
        """Return the runner for inputs of this shape: torch fixes the shapes between stages when it first runs."""
        key = (size, count, *((leaf.shape[1:], leaf.dtype) for leaf in pytree.tree_leaves(batch[:-1])))
        if key not in self._runners:
            if len(self._runners) == _KEPT_RUNNERS:  # drop the oldest, with its buffers
                del self._runners[next(iter(self._runners))]
            self._runners[key] = _Runner(self.stages, self.row, self._device, count)
            self._unshaped = set(self.stages.values())
        return self._runners[key]


@contextmanager
def _copied_buffers(stage: nn.Module) -> Iterator[None]:
    """Let a forward pass change copies. Writing the values back would change what its backward pass has saved."""
    copies = [
        (module_buffers, dict(module_buffers)) for module_buffers in map(torch_compat.direct_buffers, stage.modules())
    ]
    try:
        for module_buffers, buffers in copies:
            module_buffers.update({name: buffer.clone() for name, buffer in buffers.items() if buffer is not None})
        yield
    finally:
        for module_buffers, buffers in copies:
            module_buffers.update(buffers)


class _Runner:
    """torch's stages and schedule for inputs of one shape."""

    def __init__(self, stages: Mapping[int, nn.Module], row: Row, device: torch.device, count: int) -> None:
        self._stages = stages
        self._count = count
        self._microbatch_loss: MicrobatchLoss | None = None
        schedule_stages = [
            PipelineStage(module, number, row.num_stages, device, group=row.group) for number, module in stages.items()
        ]
        kind = get_schedule_class(row.schedule.torch_name)
        several: Any = schedule_stages if row.schedule.stages_per_rank > 1 else schedule_stages[0]
        self._schedule = kind(several, n_microbatches=count, loss_fn=self._loss, scale_grads=False)

    def run(self, batch: tuple[Any, ...], microbatch_loss: MicrobatchLoss) -> None:
        """Run one schedule: all microbatches forward and backward."""
        self._microbatch_loss = microbatch_loss
        inputs = batch[:-1] if 0 in self._stages else ()
        try:
            # The numbers of the microbatches as targets: torch can cut tensors only.
            self._schedule.step(*inputs, target=torch.arange(self._count), return_outputs=False)
        finally:
            self._microbatch_loss = None

    def _loss(self, output: Any, number: torch.Tensor) -> torch.Tensor:
        assert self._microbatch_loss is not None, "only while a schedule runs"
        return self._microbatch_loss(output, int(number))


class TiedParameter:
    """A parameter that stages on several ranks use: each has a copy, and the gradients are added up."""

    def __init__(self, parameter: nn.Parameter, tie: Tie) -> None:
        self.parameter = parameter
        self.copies = tie.copies
        self._group = tie.group
        with torch.no_grad():  # stages initialised different weights
            dist.broadcast(local(parameter), group=tie.group, group_src=0)

    def add_up(self) -> None:
        """Add up the gradients of all copies."""
        if self.parameter.grad is None:
            self.parameter.grad = torch.zeros_like(self.parameter)
        dist.all_reduce(local(self.parameter.grad), group=self._group)
