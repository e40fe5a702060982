"""Prepare loaders and models: the share of each micro-batch, products in 8 bits, LoRA adapters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from phalanx.config import DistributedConfig
from phalanx.data.device import to_device
from phalanx.data.loader import ShardedLoader
from phalanx.data.order import MicroInfo, SampleKey
from phalanx.errors import UsageError
from phalanx.features import feature
from phalanx.loop.gradients import Gradients
from phalanx.loop.precision import Precision
from phalanx.loop.sync_norm import NormRanks, synchronise
from phalanx.loop.values import reduce_op
from phalanx.model import AdapterLayer, WrapsModel, implements
from phalanx.observe.heartbeat import current as current_heartbeat
from phalanx.observe.step_clock import StepClock
from phalanx.strategies.base import Strategy, local
from phalanx.strategies.tensors import find_blocks
from phalanx.world.abort import raise_if_aborted
from phalanx.world.groups import build_axis_group
from phalanx.world.seed import rng_state, set_rng_state
from phalanx.world.world import World

if TYPE_CHECKING:
    from phalanx.loop.compiling import CompiledCalls
    from phalanx.loop.ema import WeightAverage
    from phalanx.loop.forward import Forward


Augmentation = Callable[[Any, SampleKey | None], Any]
"""augment(batch, key) -> batch, on the device; `key` is where its samples are in training, None in evaluation."""


class Prepared:
    """What was prepared for a run on this rank, and what can be asked of it over all ranks."""

    def __init__(self, strategy: Strategy, world: World, run_id: str) -> None:
        self.strategy = strategy
        self.config = strategy.config
        self.world = world
        self.device = world.device
        self.run_id = run_id
        """The name of the run in its checkpoints and locks, equal on all ranks."""
        self.clock = StepClock()
        self._undo: list[Callable[[], object]] = []
        self.state_of = ""
        """The run that has saved or kept the state which was restored last; empty: none was."""
        self.lineage: list[dict[str, Any]] = []
        """The runs that this one continues, as a checkpoint's manifest holds them."""
        self.precision = Precision(self.config, self.device, by_engine=strategy.owns_precision)
        self.notes: list[str] = [self.precision.note] if self.precision.note else []
        """Messages for the user when the run starts."""
        self.clear()

    def clear(self) -> None:
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

    def start_average(self, model: nn.Module) -> None:
        """Average the weights of a model that was prepared, whole or by its parts, where `ema_decay` is set."""
        if self.config.ema_decay is not None:
            from phalanx.loop.ema import WeightAverage

            self.average = WeightAverage(self.strategy.unwrap(model), self.config.ema_decay)

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
        tensor = torch.as_tensor(value, device=self.device).detach().clone()
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

    def require_weight(self, weight: float | torch.Tensor | None, of: str) -> None:
        """Raise for a backward call without a weight if micro-batches are to be weighed by labels, which it has."""
        if weight is None and self.config.loss_weighting == "tokens":
            raise UsageError(
                "loss_weighting = 'tokens' weighs losses by their labels, and backward gets a loss without them",
                hint=f"Write {of}.backward(loss, weight=number_of_labels), or leave loss_weighting out.",
            )


_END = object()
_MEASURED_BATCHES = 128
_MUCH_WAITING = 0.2
"""The share of the time in which the device may wait for data before batches are fetched ahead."""


def _work_left(device: torch.device) -> Callable[[], bool]:
    """Return whether the device still computes, without waiting for it: then nothing has waited for the host."""
    if device.type != "cuda":
        return lambda: False
    stream = torch.cuda.current_stream(device)
    return lambda: not stream.query()


class LastRead:
    """Which prepared loader has yielded the last batch."""

    loader: PreparedLoader | None = None


class PreparedLoader:
    """This rank's share of a loader; one pass is one epoch.

    Reports each micro-batch's share of the global batch to `Gradients` before yielding it.
    """

    def __init__(
        self,
        sharded: ShardedLoader,
        gradients: Gradients | None = None,
        calls: CompiledCalls | None = None,
        reading: LastRead | None = None,
    ) -> None:
        """`gradients`: None for evaluation; `calls`: runs a compiled model as written on batches not worth a graph.

        `reading`: notes which loader has yielded last.
        """
        self.sharded = sharded
        self._reading = LastRead() if reading is None else reading
        self._gradients, self._calls = gradients, calls
        self._augment: Augmentation | None = None
        self._seed = 0
        self._most_samples = 0
        self.waited_s = 0.0
        """Seconds that training has waited for batches; on CUDA only those in which the device ran out of work."""
        self.ranks_fetching_ahead = 0
        """How many ranks of this machine may fetch batches in worker processes; 0: that would make a difference."""

    def __iter__(self) -> Iterator[Any]:
        board = current_heartbeat()
        if self._gradients is None:
            for number, batch in enumerate(self.sharded):
                raise_if_aborted()
                board.count(number)
                if self._calls is not None:
                    self._calls.use(compiled=False)
                self._reading.loader = self
                yield self._augmented(batch, None)
            return
        sharded, begin = self.sharded, self._gradients.begin
        batches, device_has_work = iter(sharded), _work_left(sharded.device)
        measured, waited, since = 0, self.waited_s, perf_counter()
        try:
            while True:
                began = perf_counter()
                batch = next(batches, _END)
                if not device_has_work():
                    self.waited_s += perf_counter() - began
                raise_if_aborted()
                if batch is _END:
                    break
                board.alive()
                begin(sharded.current, sharded)
                self._reading.loader = self
                if self._calls is not None:
                    self._calls.use(compiled=self._is_whole)
                yield self._augmented(batch, SampleKey(self._seed, sharded.epoch, sharded.current.offset))
                measured += 1
                if measured == _MEASURED_BATCHES:
                    now = perf_counter()
                    if self.ranks_fetching_ahead and self.waited_s - waited > _MUCH_WAITING * (now - since):
                        sharded.fetch_ahead(self.ranks_fetching_ahead)
                        self.ranks_fetching_ahead = 0
                    measured, waited, since = 0, self.waited_s, now
        except GeneratorExit:
            if not sharded.current.boundary:
                self._gradients.abandon()
            raise
        sharded.set_epoch(sharded.epoch + 1)

    def augmented(self, augment: Augmentation | None, seed: int = 0) -> PreparedLoader:
        """Change each batch on the device from here on; in training, random numbers follow from the seed."""
        self._augment, self._seed = augment, seed
        return self

    def _augmented(self, batch: Any, key: SampleKey | None) -> Any:
        if self._augment is None:
            return batch
        return self._augment(to_device(batch, self.sharded.device, non_blocking=True), key)

    @property
    def _is_whole(self) -> bool:
        """Whether the current batch is as large as others of this rank, so that its graph serves these as well.

        In batches of 32 the last one of 100 samples has 4. Of 20 samples on two ranks all have 10. The size of batches
        that the data makes itself (`batch_size` is then 1) may always vary.
        """
        layout, samples = self.sharded.layout, self.sharded.current.samples
        self._most_samples = max(self._most_samples, samples)
        return samples >= min(self._most_samples, layout.batch_size)

    def steps_left(self, epochs: int | None) -> int | None:
        """Return the optimizer steps up to the end of the last epoch; None where that is not known beforehand."""
        sharded, per_epoch = self.sharded, self.sharded.steps_per_epoch
        if per_epoch is None or epochs is None:
            return None
        left = max(0, epochs - sharded.epoch)
        if not sharded.samples_done or not left:
            return per_epoch * left
        unseen = (sharded.num_samples or 0) - sharded.samples_done  # resumed within an epoch
        return per_epoch * (left - 1) + -(-unseen // sharded.layout.global_batch)

    def roll_over(self) -> None:
        """Begin the next epoch where all samples of this one were read, but the iteration stopped before its end."""
        if self.is_consumed:
            self.sharded.set_epoch(self.sharded.epoch + 1)

    @property
    def is_consumed(self) -> bool:
        """Whether every sample of this epoch was yielded; False for a stream of unknown size that has not ended."""
        total = self.sharded.num_samples
        return total is not None and self.sharded.samples_done >= total

    def __len__(self) -> int:
        return len(self.sharded)

    @property
    def current(self) -> MicroInfo:
        """The description of the batch yielded last."""
        return self.sharded.current

    @property
    def epoch(self) -> int:
        """The epoch that the next pass (or the one under way) belongs to, from 0."""
        return self.sharded.epoch


def convert_layers(model: nn.Module, prepared: Prepared) -> list[Callable[[], None]]:
    """Let a model's layers compute in other ways, where the config asks for it; return what undoes it.

    The layout of weights stays: an optimizer that the user made has its states in it.
    """
    if prepared.config.channels_last:
        _store_channels_last(model, prepared.notes)
    undo = [_multiply_in_fp8(model, prepared.notes)] if prepared.precision.fp8 else []
    if prepared.config.sync_batch_norm and prepared.world_size > 1:
        undo.append(_synchronise_norms(model, prepared))
    return undo


def _multiply_in_fp8(model: nn.Module, notes: list[str]) -> Callable[[], None]:
    """Let the linear layers of the model's blocks multiply in 8 bits, and say so; return what undoes it."""
    layers, undo = feature("fp8").use_fp8(model, list(find_blocks(model).values()))
    notes.append(f"mixed_precision = 'fp8': {layers} layers multiply in 8 bits where that is faster")
    return undo  # type: ignore[no-any-return]


def _synchronise_norms(model: nn.Module, prepared: Prepared) -> Callable[[], None]:
    """Let batch norms use the statistics of all ranks, or say that there are none; return what undoes it."""

    def is_placeholder() -> bool:
        micro = prepared.gradients.micro
        return micro is not None and micro.samples == 0

    # On GPUs the group of the gradients: two groups at once on one device may wait for each other. Only there it is
    # certain that no thread of a strategy uses it meanwhile.
    group = None
    if prepared.device.type != "cuda":
        group = build_axis_group(prepared.world.mesh, ("dp_replicate", "dp_shard"), prepared.rank, "gloo")
    layers, undo = synchronise(model, NormRanks(group, prepared.world_size, is_placeholder))
    if not layers:
        prepared.notes.append("sync_batch_norm: the model has no BatchNorm layer, so it changes nothing")
    return undo


_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def _store_channels_last(model: nn.Module, notes: list[str]) -> None:
    """Lay out the weights of convolutions with the channels last, in place; an optimizer keeps its parameters.

    Batches stay as they are: a convolution whose weight is channels last computes so, and what follows keeps the layout
    (torch documents this at nn.utils.convert_conv2d_weight_memory_format). `to`, not `contiguous`, which leaves a 1x1
    kernel's strides as they are.
    """
    weights = [parameter for parameter in model.parameters() if parameter.ndim in _CHANNELS_LAST]
    for weight in weights:
        if not isinstance(weight, DTensor):  # one that an earlier call has sharded
            weight.data = weight.data.to(memory_format=_CHANNELS_LAST[weight.ndim])
    if not weights:
        notes.append("channels_last: no weight of the model has 4 or 5 dimensions, so it changes nothing")


def adapt(model: nn.Module, config: DistributedConfig) -> None:
    """Add the adapters that the config asks for, unless the model has them; the seed makes them equal on all ranks."""
    if config.lora_rank is not None:
        _add_lora(model, config, config.lora_rank)
    if implements(model, WrapsModel):
        model.begin()


def _add_lora(model: nn.Module, config: DistributedConfig, rank: int) -> None:
    lora = feature("lora")
    present = lora.adapters(model)
    if not present:
        lora.lora(
            model,
            rank,
            alpha=config.lora_alpha,
            dropout=config.options.lora_dropout,
            targets=config.lora_targets,
            seed=config.seed,
        )
    elif other := [adapter.rank for adapter in present.values() if adapter.rank != rank]:
        raise UsageError(
            f"lora_rank = {rank}, but the model has adapters of rank {other[0]} already",
            hint="Leave lora_rank out to train those, or take them off with phalanx.remove_lora(model).",
        )
    if config.options.lora_base is not None:
        feature("nf4").quantise_base(model, find_blocks(model).values())


def check_trains_adapters(models: list[nn.Module], optimizer: torch.optim.Optimizer, config: DistributedConfig) -> None:
    """Raise for an optimizer that would train nothing: made before the adapters, or for merged ones."""
    modules = (module for model in models for module in model.modules() if implements(module, AdapterLayer))
    if any(getattr(module, "merged", False) for module in modules):
        raise UsageError("merged adapters take no part in training", hint="Call phalanx.unmerge_lora(model) first.")
    if config.lora_rank is None:
        return
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    trained = [parameter for model in models for parameter in model.parameters() if parameter.requires_grad]
    if not trained or any(id(parameter) in held for parameter in trained):  # a pipeline stage may have no adapter
        return
    raise UsageError(
        "the optimizer was made before the adapters, and holds frozen parameters only",
        hint=f"Call phalanx.lora(model, rank={config.lora_rank}) before you make it, or give the trainer a factory: "
        "optimizer=lambda parameters: AdamW(parameters).",
    )


def remember_process() -> Callable[[], None]:
    """Save the process-wide settings that a run changes; return what restores them."""
    random, threads = rng_state(), torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()

    def restore() -> None:
        set_rng_state(random)
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)

    return restore
