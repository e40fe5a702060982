"""`Formation`: distributed training for a loop written by the user. The trainer is built on it too.

f = phalanx.Formation(batch_size=32, gradient_accumulation_steps=2)
model, optimizer, loader = f.prepare(model, optimizer, loader)
for inputs, targets in loader:
    loss = loss_fn(model(inputs), targets)
    f.backward(loss)
    f.clip_grad_norm(1.0)
    optimizer.step()
    optimizer.zero_grad()
"""

from __future__ import annotations

import contextlib
import itertools
import math
import uuid
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Unpack

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import phalanx.config
from phalanx import checkpoint
from phalanx.checkpoint.collectives import from_rank_zero
from phalanx.comm import register_backend
from phalanx.config import DistributedConfig
from phalanx.config.ways import refuse_in_loop
from phalanx.data.loader import shard_loader
from phalanx.errors import UsageError, a_type
from phalanx.features import feature
from phalanx.host.remote import as_path
from phalanx.loop import optional
from phalanx.loop.forward import BatchPasses, Forward, decide_forward
from phalanx.loop.gradients import Gradients
from phalanx.loop.loader import ActiveLoader, CompiledSwitch, PreparedLoader
from phalanx.loop.loop_record import LoopRecord
from phalanx.loop.metrics import LossFn
from phalanx.loop.model_setup import adapt, check_trains_adapters, convert_layers
from phalanx.loop.optimizer_binding import ParameterRemap, bind_optimizer, bind_scheduler
from phalanx.loop.precision import Precision
from phalanx.loop.script import continue_at, stop_counting
from phalanx.loop.state import begin_save, restore_snapshot
from phalanx.loop.values import Values, enter_loop, leave_loop, reduce_op
from phalanx.observe.step_clock import StepClock
from phalanx.strategies.base import claim_layout, local
from phalanx.strategies.registry import build_strategy
from phalanx.world.groups import build_axis_group
from phalanx.world.seed import derive_seed, rng_state, seed_everything, set_rng_state
from phalanx.world.world import join_world, leave_world

if TYPE_CHECKING:
    from phalanx.checkpoint import RunLock, SavedCheckpoint, Saver
    from phalanx.config.arguments import AllSettings
    from phalanx.loop.ema import WeightAverage

_FORMATIONS = itertools.count(1)


def _run_id(launch_id: str) -> str:
    """Return a new name for a run; after a restart by the launcher the names are the same, in the same order.

    All ranks call this and have that of rank 0: without our launcher each would have another one.
    """
    candidate = _own_run_id(launch_id)
    return from_rank_zero(lambda: candidate)


def _own_run_id(launch_id: str) -> str:
    if not launch_id:
        return uuid.uuid4().hex
    return uuid.uuid5(uuid.NAMESPACE_OID, f"{launch_id}/{next(_FORMATIONS)}").hex


class Formation:
    """Joins the ranks and prepares models, optimizers and loaders to run on all of them as one."""

    def __init__(self, config: DistributedConfig | None = None, **settings: Unpack[AllSettings]) -> None:
        if settings:
            refuse_in_loop(phalanx.config.given_names(settings))
        if config is None:
            config = phalanx.config.resolve(settings).config
        elif settings:
            config = config.replace(**settings)
        config.require_torch(type(self).__name__)
        register_backend()
        stop_counting()
        world = join_world(config)
        undo: list[Callable[[], object]] = [] if world.is_launched else [_remember_process()]
        if config.threads_per_rank is not None:
            torch.set_num_threads(config.threads_per_rank)
        seed_everything(config.seed, rank=world.rank)
        if config.deterministic:
            torch.use_deterministic_algorithms(True)
        self.strategy = build_strategy(config, world)
        self.config = self.strategy.config
        self.world = world
        self.device = world.device
        self.run_id = _run_id(world.env.launch_id)
        """The name of the run in its checkpoints and locks, equal on all ranks."""
        self.clock = StepClock()
        self._undo = undo
        self.state_of = ""
        """The run that has saved or kept the state which was restored last; empty: none was."""
        self.lineage: list[dict[str, Any]] = []
        """The runs that this one continues, as a checkpoint's manifest holds them."""
        self.precision = Precision(self.config, self.device, by_engine=self.strategy.owns_precision)
        self.notes: list[str] = [self.precision.note] if self.precision.note else []
        """Messages for the user when the run starts."""
        self._clear()
        self._locks: dict[Path, RunLock] = {}
        self._saver: Saver | None = None
        self._compiled_calls: CompiledSwitch | None = None
        if config.compile:
            self._compiled_calls = calls = feature("compiled-calls")(self.notes)
            self._undo.append(calls.end)
        if self.precision.warning and self.is_main:
            warnings.warn(self.precision.warning, stacklevel=2)
        self._replaced = ParameterRemap()
        self._host_group: dist.ProcessGroup | None = None
        self._active = ActiveLoader()
        self._record = LoopRecord(self)
        entered = enter_loop(self)
        self._undo += [lambda: leave_loop(entered), lambda: continue_at(self.step)]

    def _clear(self) -> None:
        """Forget everything that was prepared."""
        self.models: list[nn.Module] = []
        self.part_names: list[str] = []
        """Where the models are the parts of one model: their names in it, by which a checkpoint has that one."""
        self.optimizers: list[torch.optim.Optimizer] = []
        self.schedulers: list[Any] = []
        self.loaders: list[PreparedLoader] = []
        self.average: WeightAverage | None = None
        self.best_path: Path | None = None
        self.trained_anywhere: tuple[tuple[int, ...], list[list[bool]]] | None = None
        """Which optimizers train which models on any stage of a pipeline, and what was prepared when it was asked."""
        self.gradients = Gradients(self.config, self.world, self.strategy, self.precision, self._followed)

    def undo_later(self, undo: Callable[[], object]) -> None:
        """Call a function when everything is released, before what was changed earlier is restored."""
        self._undo.append(undo)

    @property
    def saver(self) -> Saver:
        """What writes checkpoints; a loop that saves none does not load it."""
        if self._saver is None:
            self._saver = checkpoint.Saver()
        return self._saver

    def start_average(self, model: nn.Module) -> None:
        """Average the weights of a model that was prepared, whole or by its parts, where `ema_decay` is set."""
        if self.config.ema_decay is not None:
            self.average = optional.WeightAverage(self.strategy.unwrap(model), self.config.ema_decay)

    def _followed(self) -> None:
        if self.average is not None:
            self.average.follow()

    @property
    def rank(self) -> int:
        """This rank's number in the whole job."""
        return self.world.rank

    @property
    def world_size(self) -> int:
        """Ranks in the whole job."""
        return self.world.world_size

    @property
    def is_main(self) -> bool:
        """Whether this rank is the one that prints and publishes."""
        return self.world.is_main

    def averaged(self) -> AbstractContextManager[None]:
        """Return a context in which the model has its averaged weights, where ema_decay asks for them."""
        return nullcontext() if self.average is None else self.average.applied()

    @property
    def step(self) -> int:
        """Optimizer steps taken; checkpoints are named after it."""
        return self.gradients.steps

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the user's own model from a prepared one."""
        return self.strategy.unwrap(model)

    def reduce(self, value: float | torch.Tensor, op: str = "mean") -> torch.Tensor:
        """Return the mean (or sum, min, max) of a value over all ranks, equal on all of them."""
        operation = reduce_op(op)
        try:
            tensor = torch.as_tensor(value, device=self.device).detach().clone()
        except (TypeError, ValueError, RuntimeError) as error:
            if isinstance(value, torch.Tensor):  # the device's own error
                raise
            raise UsageError(f"reduce() got {a_type(value)}: {error}", hint="Give it a number or a tensor.") from error
        if op == "mean" and not tensor.is_floating_point():
            tensor = tensor.double()
        if self.world_size > 1:
            dist.all_reduce(tensor, op=operation)
        return tensor / self.world_size if op == "mean" else tensor

    def weights_are_finite(self) -> bool:
        """Whether no trained parameter holds a NaN or an infinity; waits for the device."""
        parts = [local(p).detach() for model in self.models for p in model.parameters() if p.requires_grad]
        parts = [part for part in parts if part.numel()]
        finite = torch.tensor(True)
        if parts:
            finite = torch.isfinite(nn.utils.get_total_norm(parts, norm_type=math.inf)).all()
        return bool(self.reduce(finite.int(), "min") if self.strategy.shards else finite)

    def weighs_labels(self, forward: Forward, batch: Any) -> bool:
        """Whether batches count by their labels, not by their samples: as the config says, or as the loss averages."""
        weighting = self.config.loss_weighting
        return weighting == "tokens" or (weighting == "auto" and forward.is_mean_over_labels(batch))

    def parts_count_by_labels(self, *, by_labels: bool) -> bool:
        """Whether the parts of a batch count by labels: as batches do, and slices of sequences in any case.

        The loss of a slice is a mean over its own labels, whatever the loss of a whole sequence is a mean of.
        """
        return by_labels or self.world.mesh.cp > 1

    def require_weight(self, weight: float | torch.Tensor | None, of: str) -> None:
        """Raise for a backward call without a weight if micro-batches are to be weighed by labels, which it has."""
        if weight is None and self.config.loss_weighting == "tokens":
            raise UsageError(
                "loss_weighting = 'tokens' weighs losses by their labels, and backward gets a loss without them",
                hint=f"Write {of}.backward(loss, weight=number_of_labels), or leave loss_weighting out.",
            )

    @property
    def at_boundary(self) -> bool:
        """Whether the current micro-batch completes an optimizer step."""
        return self.gradients.boundary

    def prepare(self, *objects: Any) -> Any:
        """Prepare models, optimizers, schedulers and loaders for these ranks, in the order given; one in, one out."""
        prepared = tuple(self._prepare_one(item) for item in objects)
        return prepared[0] if len(prepared) == 1 else prepared

    def _prepare_one(self, item: Any) -> Any:
        if isinstance(item, nn.Module):
            return self._prepare_model(item)
        if isinstance(item, torch.optim.Optimizer):
            self._replaced.apply(item)
            check_trains_adapters(self.models, item, self.config)
            item = self.strategy.attach(item)
            self.optimizers.append(item)
            self.gradients.adopt(item)
            self._undo.append(bind_optimizer(item, self.gradients))
            return item
        if isinstance(item, torch.optim.lr_scheduler.LRScheduler):
            self.schedulers.append(item)
            self._undo.append(bind_scheduler(item, self.gradients))
            return item
        if hasattr(item, "__iter__") or hasattr(item, "__getitem__"):
            return self.prepare_loader(item)
        named = f"the class {item.__name__}" if isinstance(item, type) else f"{item!r}, {a_type(item)}"
        raise UsageError(
            f"prepare() got {named}",
            hint="It takes models, optimizers, schedulers and data loaders: "
            "model, optimizer, data = formation.prepare(model, optimizer, data)",
        )

    def _prepare_model(self, model: nn.Module) -> nn.Module:
        claim_layout(model, self.strategy.layout)
        adapt(model, self.config)
        before = dict(model.named_parameters(remove_duplicate=False))
        # What an earlier call has sharded lies where the strategy has put it, with offload in host memory.
        if not any(parameter.is_meta or isinstance(parameter, DTensor) for parameter in before.values()):
            model.to(self.device)
        undo, notes = convert_layers(model, self.config, self.world, self.gradients, self.precision)
        self._undo += undo
        self.notes += notes
        if self.config.recompute is not None or self.config.activation_offload:
            self._undo.append(feature("spare-activations")(model, self.config))
        wrapped = self.strategy.wrap(model)
        self._replaced.note(before, dict(model.named_parameters(remove_duplicate=False)))
        for optimizer in self.optimizers:  # prepared before the model
            self._replaced.apply(optimizer)
        if self.config.compile:
            self._undo += feature("compile-parts")(self.strategy.compile_targets(wrapped), self.device, self.notes)
        self.models.append(wrapped)
        self.gradients.watch(wrapped)
        return wrapped

    def prepare_loader(self, source: Any, *, training: bool = True, in_order: bool = False) -> PreparedLoader:
        """Return this rank's share of a DataLoader, a data set or any re-iterable of batches.

        `in_order`: `current.offset` orders the batches of all ranks; a data set that shards itself is then read whole.
        """
        sharded = shard_loader(
            source,
            batch_size=self.config.batch_size,
            dp_rank=self.world.dp_rank,
            dp_size=self.world.mesh.dp_size,
            accumulation=self.world.accumulation(self.config.gradient_accumulation_steps) if training else 1,
            seed=self.config.seed,
            device=self.device,
            training=training,
            drop_last=self.config.drop_last if training else None,
            group=self._cpu_group(),
            whole_blocks=self.config.fixed_order,
            blocks_per_step=self.world.blocks(self.config.gradient_accumulation_steps),
            in_order=in_order,
        )
        self.notes += [note for note in sharded.notes if note not in self.notes]
        loader = PreparedLoader(sharded, self.gradients if training else None, self._compiled_calls, self._active)
        self._undo.append(sharded.close)
        if training:
            self.loaders.append(loader)
            expected = [self.strategy.expect_batches(model, sharded.layout.batch_size) for model in self.models]
            self.notes += [note for note in expected if note is not None]
        return loader

    def _cpu_group(self) -> dist.ProcessGroup | None:
        """Return a gloo group of the data ranks for counts that are needed on the host; None: the default suffices."""
        suffices = self.world.comm_backend in (None, "gloo", "phalanx") and self.world.mesh.dp_size == self.world_size
        if self._host_group is None and self.world.mesh.dp_size > 1 and not suffices:
            self._host_group = build_axis_group(self.world.mesh, ("dp_replicate", "dp_shard"), self.rank, "gloo")
        return self._host_group

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the mixed-precision context for a forward pass."""
        return self.precision.autocast()

    def backward(self, loss: torch.Tensor, weight: float | torch.Tensor | None = None) -> None:
        """Add the gradient of a micro-batch's mean loss; `weight`: the units (such as tokens) that it averages."""
        self.require_weight(weight, "f")
        self._record.begin()
        self.gradients.backward(loss, weight)
        self._record.add_loss(loss, weight)

    def train_batch(
        self,
        model: nn.Module,
        batch: Any,
        loss_fn: LossFn | None = None,
        *,
        weight: float | torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run forward and backward of a batch and return its mean loss; the one way to train a pipeline.

        `weight`: the units (such as tokens) that the loss averages; by default as `loss_weighting` says.
        """
        self._record.begin()
        forward = decide_forward(self.unwrap(model), loss_fn, batch)
        by_labels = self.weighs_labels(forward, batch)
        share = forward.units(batch) if weight is None and by_labels else weight
        if weight is None and self._has_shares:
            weight = share
        self.clock.enter("forward")
        in_parts = self.parts_count_by_labels(by_labels=by_labels)
        passes = BatchPasses(self.gradients, self.precision, forward, self.clock, weight, by_labels=in_parts)
        loss = self.strategy.train_batch(model, batch, passes)
        self.clock.enter("other")
        self._record.add_loss(loss, share)
        return loss

    @property
    def _has_shares(self) -> bool:
        """Whether a step has several micro-batches, over ranks that add up their labels in every step."""
        blocks = self.world.blocks(self.config.gradient_accumulation_steps)
        return blocks > 1 and self.config.resolved_server_mode == "sync"

    def clip_grad_norm(
        self, max_norm: float, model_or_optimizer: nn.Module | torch.optim.Optimizer | None = None
    ) -> torch.Tensor | None:
        """Clip all gradients, or those of one model or optimizer, to one global norm over the ranks.

        Returns the norm before, or None between step boundaries.
        """
        return self.gradients.clip(max_norm, self.optimizers, model_or_optimizer)

    def grad_norm(self) -> torch.Tensor:
        """Return the one global gradient norm, equal on all ranks; after backward, before the step."""
        return self.gradients.norm(self.optimizers)

    def reseed(self, step: int, offset: int) -> None:
        """Seed the device's random numbers for the forward pass of the samples at a position of the epoch."""
        seed = derive_seed(self.config.seed, step, offset)
        if self.device.type == "cuda":
            torch.cuda.default_generators[self.device.index or 0].manual_seed(seed)
        else:
            torch.default_generator.manual_seed(seed)

    def gather(self, values: Any) -> Any:
        """Return tensors with the rows of all ranks, equal on all of them; the number of rows may differ.

        `values`: a tensor, or tensors in tuples, lists and dicts. Ranks that read the same samples count once.
        """
        return optional.gather(self.world, values)

    def gather_for_metrics(self, values: Any) -> Any:
        """Return what `gather` does for outputs of the last batch, one row per sample, each sample once.

        At the ragged end of the data some ranks get placeholders or fewer samples: these rows are left out.
        """
        return optional.gather_samples(self.world, values, self._active.loader)

    def log(self, values: Values, value: Any = None, *, step: int | None = None, reduce: str | None = None) -> None:
        """Record your own numbers: `f.log({"critic": loss})` or `f.log("critic", loss)`.

        Names under `val/` are of the validation data. A tensor stays on its device until the losses are read. `step`:
        the last one that was taken, by default. `reduce`: "mean", "sum", "min" or "max" over the ranks, all of which
        then call this; by default the main rank's numbers count.
        """
        self._record.log(values, value, step, reduce)

    def print(self, *values: Any, **options: Any) -> None:
        """Print on the main rank only."""
        if self.is_main:
            print(*values, **{"flush": True, **options})

    def save(self, directory: str | Path, **shared: Any) -> SavedCheckpoint:
        """Publish a checkpoint of everything prepared (weights, optimizers, schedulers, data position, RNG)."""
        self.save_async(directory, **shared)
        saved = self.finish_save()
        assert saved is not None, "just begun"
        return saved

    def save_async(self, directory: str | Path, **shared: Any) -> None:
        """Start saving as `save` does, and return when the state has been copied; `finish_save` publishes it.

        One save at a time: this waits for the one before.
        """
        self.finish_save()
        path = as_path(directory)
        with contextlib.suppress(OSError):  # what is wrong with the directory is found, and raised, by the save
            if path.is_dir():
                self._lock(path)
        begin_save(self, self.saver, path, shared)

    def finish_save(self) -> SavedCheckpoint | None:
        """Wait for the save in flight, if any, and return the published checkpoint; all ranks must call this.

        An error of writing it is raised here, on all ranks.
        """
        saved = None if self._saver is None else self._saver.finish()
        if saved is not None:
            self._lock(saved.path.parent)
        return saved

    def _lock(self, directory: Path) -> None:
        """Mark the run as in progress until `close`: others then leave its checkpoints and chunks alone."""
        if self.is_main and directory not in self._locks:
            self._locks[directory] = lock = checkpoint.RunLock(directory, self.run_id)
            self._undo.append(lock.release)
        elif self.is_main:
            self._locks[directory].renew()

    def load(self, directory: str | Path, *, required: bool = True) -> dict[str, Any] | None:
        """Restore the newest complete checkpoint of a directory (or the one given).

        Returns what was passed to `save`, or None where there is no checkpoint and none is required.
        """
        return restore_snapshot(self, as_path(directory), required=required)

    def close(self) -> None:
        """Release everything and leave the process group, so that no rank waits for another for ever."""
        self.finish_save()
        self._record.end()
        self._return_weights()
        self.release()
        if not self.strategy.shards:  # a sharded model needs the group, and the user may save or train it again
            leave_world(self.world)

    def _return_weights(self) -> None:
        # In its own function: a variable of `close` would hold the last DDP module while the group is destroyed.
        for wrapped in self.models:
            self.strategy.return_weights(wrapped)

    def release(self) -> None:
        """Restore the user's objects without communication; after an error other ranks may have failed."""
        if self._saver is not None:
            self._saver.release()
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()
        self._locks.clear()
        self.strategy.close()
        self._clear()

    def __enter__(self) -> Formation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:  # a barrier in close would hide the cause
            self.release()


def _remember_process() -> Callable[[], None]:
    """Save the process-wide settings that a run changes; return what restores them."""
    random, threads = rng_state(), torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()

    def restore() -> None:
        set_rng_state(random)
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)

    return restore
