"""Recordings: a callback that makes one (first step in detail, weights), and the comparison of two."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from phalanx import torch_compat
from phalanx.loop.formation import Formation
from phalanx.loop.hooks import Callback
from phalanx.loop.step_info import StepInfo
from phalanx.run.weights import whole_tensors
from phalanx.strategies.base import whole
from phalanx.strategies.pipeline.placement import join_stages
from phalanx.strategies.pipeline.strategy import Pipeline
from phalanx.tools.verify.verdict import MEASURES, Comparison, ModuleRow, StepRow
from phalanx.torch_compat import pytree

if TYPE_CHECKING:
    from phalanx.loop.running_trainer import RunningTrainer

Tensors = dict[str, torch.Tensor]


@dataclass
class Recording:
    """What is compared of a run. Tensors are whole and on the CPU of the main rank."""

    steps: list[dict[str, Any]] = field(default_factory=list)
    modules: dict[str, str] = field(default_factory=dict)
    """Class by name, in the order in which their forward passes ended: what a module calls ends before itself."""
    activations: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Mean and mean square of each module's projected outputs, over the first global batch."""
    gradients: Tensors = field(default_factory=dict)
    before: Tensors = field(default_factory=dict)
    after: Tensors = field(default_factory=dict)
    global_batch: int = 0
    parameters: int = 0


class Probe(Callback):
    """Records a run; `stop_after` ends it early, as if it were complete, so that it leaves a checkpoint."""

    def __init__(self, *, stop_after: int | None = None, first_step: bool = True) -> None:
        """`first_step`: whether its activations and gradients are recorded."""
        self.recording = Recording()
        self._stop_after = stop_after
        self._first_step = first_step
        self._sums: dict[str, torch.Tensor] = {}
        self._order: list[str] = []
        self._remove: list[Callable[[], None]] = []
        self._formation: Formation
        self._model: nn.Module
        self._aliases: dict[str, str] = {}
        self._has_hooks = True

    def on_fit_start(self, trainer: RunningTrainer) -> None:
        """Register the hooks on the model and the optimizer."""
        self._formation = trainer.formation
        self._model = self._formation.unwrap(trainer.model)
        self._aliases = trainer.model.aliases if isinstance(trainer.model, Pipeline) else {}
        self.recording.before = self._gathered(self._model.state_dict())
        self.recording.global_batch = trainer.global_batch
        self.recording.parameters = self._count_parameters()
        if not self._first_step:
            return
        mesh = self._formation.world.mesh
        self._has_hooks = not trainer.config.compile and mesh.pp == mesh.tp == 1
        if self._has_hooks:  # hooks would break a compiled graph into pieces
            for name, module in self._model.named_modules():
                self._remove.append(module.register_forward_hook(self._watcher(name)).remove)
        self._remove.append(trainer.optimizer.register_step_pre_hook(self._before_first_update).remove)

    def on_step_end(self, trainer: RunningTrainer, info: StepInfo) -> None:
        """End the run after `stop_after` steps."""
        if info.step == self._stop_after:
            trainer.request_stop()

    def on_fit_end(self, trainer: RunningTrainer) -> None:
        """Record the final weights."""
        self.recording.after = self._gathered(self._model.state_dict())

    def _watcher(self, name: str) -> Callable[..., None]:
        def watch(module: nn.Module, inputs: Any, output: Any) -> None:
            micro = self._formation.gradients.micro
            recomputing = torch_compat.backward_pass_id() != -1  # activation checkpointing calls forward twice
            if recomputing or (micro is not None and micro.samples == 0):
                return
            if name not in self._sums:
                self._order.append(name)
                self._sums[name] = torch.zeros(3, dtype=torch.float64, device=self._formation.device)
            self._sums[name] += _fingerprint(output).to(self._formation.device)

        return watch

    def _before_first_update(self, *_: Any) -> None:
        """Record the first global batch's gradient, after clipping, and its activations; then remove the hooks."""
        for remove in self._remove:
            remove()
        self._remove.clear()
        gradients = {name: p.grad for name, p in self._model.named_parameters() if p.grad is not None}
        self.recording.gradients = self._gathered(gradients)
        if self._has_hooks:
            self._keep_activations()

    def _keep_activations(self) -> None:
        """Add up over the ranks, in the order of the model's names: ranks may call modules differently."""
        kinds = {name: _class_of(module) for name, module in self._model.named_modules()}
        nothing = torch.zeros(3, dtype=torch.float64, device=self._formation.device)
        table = torch.stack([self._sums.get(name, nothing) for name in kinds])
        if self._formation.world_size > 1:
            dist.all_reduce(table)
        sums = dict(zip(kinds, table.tolist(), strict=True))
        order = _with_uncalled(self._order, kinds)
        self.recording.modules = {name: kinds[name] for name in order}
        self.recording.activations = {
            name: (sums[name][0] / sums[name][2], sums[name][1] / sums[name][2]) for name in order if sums[name][2]
        }

    def _gathered(self, tensors: dict[str, Any]) -> Tensors:
        """Gather on all ranks; keep on the main one."""
        compared = {
            name: tensor
            for name, tensor in tensors.items()
            if isinstance(tensor, torch.Tensor) and (tensor.is_floating_point() or tensor.is_complex())
        }
        gathered = whole_tensors(self._model, compared, keep=self._formation.is_main) or {}
        return {name: tensor.clone() for name, tensor in gathered.items()}

    def _count_parameters(self) -> int:
        """Count those of all pipeline stages; a matrix that two stages share counts once, as in the whole model."""
        here = {name: p.numel() for name, p in self._model.named_parameters() if name not in self._aliases}
        return sum(join_stages(self._model, here).values())


def _with_uncalled(order: list[str], names: Iterable[str]) -> list[str]:
    """Insert modules that were never called (a parent uses their weights) just before their nearest parent."""
    complete = list(order)
    for name in names:
        parent = name
        while name not in complete and parent:
            parent = parent.rpartition(".")[0]
            if parent in complete:
                complete.insert(complete.index(parent), name)
        if name not in complete:
            complete.append(name)
    return complete


def _class_of(module: nn.Module) -> str:
    """Return the name of the user's class: sharding makes a subclass of it."""
    kind = type(module)
    return (kind.__bases__[-1] if isinstance(module, FSDPModule) else kind).__name__


def _fingerprint(output: Any) -> torch.Tensor:
    """Return (sum, sum of squares, count) of all rows of an output, each projected on one fixed direction.

    Means of these are the same however the rows were split over ranks and micro-batches. Scalars are left out: they
    are losses, which are weighted and compared elsewhere.
    """
    total = torch.zeros(3, dtype=torch.float64)
    for leaf in pytree.tree_leaves(output):
        if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point() or leaf.ndim == 0 or leaf.numel() == 0:
            continue
        rows = whole(leaf.detach()).double().reshape(-1, leaf.shape[-1])
        direction = torch.arange(rows.shape[1], dtype=torch.float64, device=rows.device).cos()
        projected = rows @ direction
        count = torch.tensor(float(len(projected)), dtype=torch.float64, device=rows.device)
        total = total.to(rows.device) + torch.stack([projected.sum(), projected.square().sum(), count])
    return total


_FLOOR = 1e-2
"""A tensor whose largest value is below this share of the largest of all is measured by that share instead.

Some gradients are zero in exact arithmetic (a bias before a softmax or a normalisation): the rest is
rounding, whose relative difference is always large.
"""

FLOAT64 = 1e-10
FLOAT32 = 1e-5
_ROUNDINGS = 10
"""A layout may be this many times as far from one process as rounding alone takes one process from itself."""
_FINER = 2.0**-29
"""Float64 has 29 bits more than float32: the effect of rounding in one is known from the other."""


def compare(
    title: str,
    reference: Recording,
    other: Recording,
    limits: Mapping[str, float] | float,
    *,
    labels: tuple[str, str] = ("one process", "layout"),
) -> Comparison:
    """Return how far `other` is from `reference`, by step and by module, and how far it may be."""
    allowed = dict.fromkeys(MEASURES, limits) if isinstance(limits, float) else dict(limits)
    return Comparison(title, labels, _steps(reference, other), _modules(reference, other), allowed)


def limits_of(exact: Recording, rounded: Recording) -> tuple[dict[str, float], dict[str, float]]:
    """Return how far two float64 and two float32 runs may be apart, from one run in both precisions.

    Where a gradient is zero but for rounding, Adam divides rounding by rounding: such weights differ more than 1e-10
    between any two runs, and float32 shows it.
    """
    rounding = compare("rounding", exact, rounded, 0.0).worst
    fine = {measure: max(FLOAT64, _ROUNDINGS * rounding[measure] * _FINER) for measure in MEASURES}
    return fine, {measure: max(FLOAT32, _ROUNDINGS * rounding[measure]) for measure in MEASURES}


def same_bits(first: Tensors, second: Tensors) -> str | None:
    """Return the first tensor that is not equal to the last bit, or None."""
    for name, tensor in first.items():
        other = second.get(name)
        if other is None or other.dtype != tensor.dtype or not bool(tensor.eq(other).all()):
            return name
    return next((name for name in second if name not in first), None)


def largest_difference(first: Tensors, second: Tensors) -> float:
    """Return the largest difference of any tensor, relative to its largest value."""
    return max(_differences(first, second).values(), default=0.0)


def _steps(reference: Recording, other: Recording) -> list[StepRow]:
    second = {row["step"]: row for row in other.steps}
    nothing = {"loss": math.nan, "grad_norm": math.nan}
    return [
        StepRow(
            row["step"],
            (row["loss"], second.get(row["step"], nothing)["loss"]),
            (row["grad_norm"], second.get(row["step"], nothing)["grad_norm"]),
        )
        for row in reference.steps
    ]


def _modules(reference: Recording, other: Recording) -> list[ModuleRow]:
    # A layout that cuts layers or batches further than over data ranks has no outputs that could be compared.
    comparable = reference.activations if other.activations else {}
    activations = {
        name: _fingerprint_difference(first, other.activations.get(name)) for name, first in comparable.items()
    }
    gradients = _by_module(_differences(reference.gradients, other.gradients))
    weights = _by_module(_differences(reference.after, other.after))
    return [
        ModuleRow(name, kind, activations.get(name), gradients.get(name), weights.get(name))
        for name, kind in reference.modules.items()
    ]


def _fingerprint_difference(first: tuple[float, float], second: tuple[float, float] | None) -> float:
    if second is None:
        return math.inf
    size = max(first[1], second[1])
    if size == 0:
        return 0.0
    return _or_infinite(max(abs(first[0] - second[0]) / math.sqrt(size), abs(first[1] - second[1]) / size))


def _differences(first: Tensors, second: Tensors) -> dict[str, float]:
    """Return each tensor's largest difference, relative to its largest value."""
    largest = max((float(tensor.abs().max()) for tensor in first.values() if tensor.numel()), default=0.0)
    return {name: _difference(tensor, second.get(name), largest * _FLOOR) for name, tensor in first.items()}


def _difference(first: torch.Tensor, second: torch.Tensor | None, floor: float) -> float:
    if second is None or second.shape != first.shape:
        return math.inf
    if first.numel() == 0:
        return 0.0
    apart = float((first.double() - second.double()).abs().max())
    return 0.0 if apart == 0 else _or_infinite(apart / max(float(first.abs().max()), floor, math.ulp(0.0)))


def _or_infinite(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _by_module(differences: Mapping[str, float]) -> dict[str, float]:
    largest: dict[str, float] = {}
    for name, difference in differences.items():
        module = name.rpartition(".")[0]
        largest[module] = max(difference, largest.get(module, 0.0))
    return largest
