"""Evaluation and prediction: every sample exactly once, on all ranks, in the order of the data set."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from phalanx.config import FIELDS
from phalanx.data.device import map_batch
from phalanx.errors import UsageError
from phalanx.loop.best import check_metrics
from phalanx.loop.forward import decide_forward, positional_parameters, raise_explained
from phalanx.loop.metrics import LossFn, Metric, MetricSums
from phalanx.torch_compat import pytree
from phalanx.world.seed import rng_state, set_rng_state

if TYPE_CHECKING:
    from phalanx.loop.formation import Formation
    from phalanx.loop.loader import PreparedLoader
    from phalanx.loop.task import TrainTask
    from phalanx.loop.train_state import TrainState


@contextmanager
def user_modes(model: nn.Module) -> Iterator[None]:
    """Return every module of a model to the mode (train or eval) that it was in, at the end."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def begin_training(wrapped: nn.Module, model: nn.Module) -> None:
    """Put a model that is in eval mode into train mode; in one that trains, modules in eval mode stay so."""
    if not model.training:
        wrapped.train()


def kept_in_eval(model: nn.Module) -> str:
    """Return a note about modules with parameters or buffers that stay in eval mode while the model trains."""
    if not model.training:
        return ""
    names = [name for name, module in model.named_modules() if not module.training and module.state_dict()]
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return (
        f"modules left in eval mode: {names[0]}{more}; call model.train() before fit() to train them" if names else ""
    )


@torch.no_grad()
def evaluate(
    formation: Formation,
    model: nn.Module,
    loader: PreparedLoader,
    loss_fn: LossFn | None,
    metrics: Mapping[str, Metric] | None,
    limit: float | None = None,
    unclear: list[str] | None = None,
) -> dict[str, float]:
    """Return the mean loss and metrics over all samples; equal on all ranks, which must all call this.

    `metrics`: None for those of the data set, if it has any, else the usual ones. `limit`: the first batches only,
    this many or (below 1, or 1.0) a share of them. `unclear`: gets the metrics that cannot be combined from what was
    measured, which else raise: a few batches may be all of one class.
    """
    formation.strategy.consolidate(model)
    bare = model if formation.strategy.shards else formation.unwrap(model)
    metrics = loader.sharded.dataset_metrics if metrics is None else metrics
    sums = MetricSums(metrics, formation.device, leads_samples=formation.world.leads_samples)
    forward = None
    with user_modes(bare):
        bare.eval()
        for batch in _first_batches(loader, limit):
            forward = forward or decide_forward(formation.unwrap(model), loss_fn, batch)
            with formation.autocast():
                loss, output = forward.call(bare, batch)
            target = forward.target(batch)
            current, shifts = loader.current, forward.may_shift
            weight: float | torch.Tensor = 0.0
            if loss is not None:
                weight = forward.share(batch, current.samples, by_labels=formation.weighs_labels(forward, batch))
            sums.add(loss, output, target, current.samples, weight, may_shift=shifts, offset=current.offset)
    return sums.result(unclear)


def validation_loader(formation: Formation, task: TrainTask, train_loader: PreparedLoader) -> PreparedLoader | None:
    """Return this rank's share of the validation data, if the task has any."""
    config = formation.config
    if task.val is None:
        if config.eval_every not in (0, "0", FIELDS["eval_every"].default):
            formation.notes.append(
                f"eval_every = {config.eval_every!r}: there is no validation data, so nothing is evaluated"
            )
        return None
    loader = formation.prepare_loader(task.val, training=False).augmented(task.augment)
    every = config.evaluate_every
    if every is not None and every[1] == "times" and train_loader.sharded.num_samples is None:
        raise UsageError(
            f"eval_every = {config.eval_every!r} is a share of an epoch, but the training data has no length",
            hint="Write a number of steps: eval_every='500 steps'.",
        )
    return loader


class Evaluation:
    """Evaluates the model of a training loop on its validation data, if it has any."""

    def __init__(self, state: TrainState, check_losses: Callable[[], None]) -> None:
        """`check_losses`: reads and reports the losses so far, and raises if one was not finite."""
        self._state, self._loader, self._check_losses = state, state.val_loader, check_losses
        self._last: tuple[int, dict[str, float]] = (-1, {})
        self._every = None if self._loader is None else state.config.evaluate_every
        self._done = 0
        """How many evaluations were due up to the last one: see `_due`."""
        self.within_epochs = self._every is not None and self._every[1] != "epochs"
        """Whether evaluations may be due before the end of an epoch."""

    def try_out(self) -> None:
        """Measure a few batches before the first step: what is wrong with evaluation must not show after an epoch.

        Nothing of it stays. All ranks call this, and after a loss of ranks it was done before.
        """
        state, batches = self._state, self._state.config.sanity_val_batches
        is_new = not state.continues and (state.step == 0 or state.config.resume_from_checkpoint)
        if self._every is None or not batches or not is_new:
            return
        assert self._loader is not None, "only with validation data"
        task, dataset_metrics = state.task, self._loader.sharded.dataset_metrics
        unclear: list[str] = []
        with _as_before(dataset_metrics if task.metrics is None else task.metrics):
            measured = self._measured(batches, unclear)
        names = None if unclear else ["train/loss", *(f"val/{name}" for name in measured)]
        check_metrics(state.config, has_val=True, names=names)

    def _due(self) -> int:
        """Return how many evaluations should have been made by now; in samples, so equal with any number of ranks."""
        assert self._every is not None, "asked only where something is evaluated"
        (count, unit), loader = self._every, self._state.train_loader
        if unit == "times":
            return int(count * loader.epoch + count * loader.sharded.samples_done // (loader.sharded.num_samples or 1))
        return int((self._state.step if unit == "steps" else loader.epoch) // count)

    def after_step(self) -> None:
        """Evaluate within an epoch where it is due."""
        if self._due() > self._done:
            self._check_losses()
            if self._last[0] != self._state.step:  # else a callback has measured these weights
                self.run()
            self._done = self._due()

    def complete(self) -> None:
        """Do what follows the last step, and ranks were lost in. After an epoch `after_epoch` does it."""
        state = self._state
        if self.within_epochs and state.step and not state.train_loader.is_consumed and not state.is_finished():
            self.after_step()

    def after_epoch(self, epoch: int, *, last: bool) -> dict[str, float]:
        """Evaluate where it is due; return the metrics. `last`: no other epoch follows."""
        if self._every is None or not (last or self._due() > self._done):
            return {}
        metrics = self.run(ended_epoch=epoch)
        self._done = self._due()
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint holds."""
        return {"every": None if self._every is None else list(self._every), "done": self._done}

    def load_state_dict(self, saved: Mapping[str, Any] | None) -> None:
        """Continue after a resumption; a run that evaluates at other times begins with the next of these."""
        if self._every is not None:
            same_schedule = saved is not None and saved["every"] == list(self._every)
            self._done = saved["done"] if same_schedule and saved is not None else self._due()

    def run(self, *, ended_epoch: int | None = None) -> dict[str, float]:
        """Evaluate now, and report and judge the result; all ranks call this."""
        state, step = self._state, self._state.step
        if ended_epoch is None or self._last[0] != step:  # else a callback has measured these weights
            assert self._loader is not None, "only with validation data"
            limit = state.config.limit_val_batches
            with state.report.phase("evaluate", batches_to_measure(self._loader, limit)), state.formation.averaged():
                self._last = (step, self._measured(limit))
            self.judge({f"val/{name}": value for name, value in self._last[1].items()})
        epoch = state.epoch if ended_epoch is None else ended_epoch
        state.report.evaluated(step, epoch, self._last[1], ends_epoch=ended_epoch is not None)
        return self._last[1]

    def judge(self, values: Mapping[str, float]) -> None:
        """Decide by measured or logged values whether this is the best checkpoint, and whether training goes on."""
        state = self._state
        for watched in (state.config.best_metric, state.config.stopping_metric):
            if watched is not None and not math.isfinite(value := values.get(watched.name, 0.0)):
                state.report.say(f"{watched.name} is {value}, which is no improvement", "warning")
        state.checkpoints.best.judge(values, state.step)
        state.checkpoints.best.record(state.history)
        state.control.judge(values, state.step)

    def _measured(self, limit: float | None, unclear: list[str] | None = None) -> dict[str, float]:
        """Evaluate; the random numbers of training stay what they were."""
        state, task, random = self._state, self._state.task, rng_state()
        assert self._loader is not None, "only with validation data"
        try:
            return evaluate(state.formation, state.model, self._loader, task.loss_fn, task.metrics, limit, unclear)
        finally:
            set_rng_state(random)


@contextmanager
def _as_before(metrics: Mapping[str, Metric] | None) -> Iterator[None]:
    """Return metrics that are objects with their own values to these, at the end."""
    states = [getattr(metric, "__dict__", None) for metric in (metrics or {}).values()]
    copies = [(s, pytree.tree_map_only(torch.Tensor, torch.clone, dict(s))) for s in states if isinstance(s, dict)]
    try:
        yield
    finally:
        for state, before in copies:
            state.clear()
            state.update(before)


def batches_to_measure(loader: PreparedLoader, limit: float | None) -> int | None:
    """Return how many batches per rank an evaluation takes; None where the data has no length."""
    length = loader.sharded.steps_per_epoch
    if isinstance(limit, float):
        if length is None:
            raise UsageError(
                f"limit_val_batches = {limit} is a share of the batches, but the data has no length",
                hint="Write a number of batches per rank: limit_val_batches=50.",
            )
        return max(1, round(limit * length))
    return length if limit is None else limit if length is None else min(limit, length)


def _first_batches(loader: PreparedLoader, limit: float | None) -> Iterator[Any]:
    """Yield a rank's first batches; every rank gets as many."""
    batches = iter(loader)
    try:
        yield from itertools.islice(batches, None if limit is None else batches_to_measure(loader, limit))
    finally:
        batches.close()  # type: ignore[attr-defined]


@torch.no_grad()
def predict(formation: Formation, model: nn.Module, loader: PreparedLoader) -> list[tuple[int, Any]]:
    """Return this rank's outputs as (position of the batch's first sample, output on the CPU)."""
    bare = model if formation.strategy.shards else formation.unwrap(model)
    outputs: list[tuple[int, Any]] = []
    with user_modes(bare):
        bare.eval()
        for batch in loader:
            with formation.autocast():
                try:
                    output = model_output(bare, batch)
                except (RuntimeError, ValueError, IndexError) as error:
                    raise_explained(error, bare, batch)
            samples = loader.current.samples
            if samples:
                outputs.append((loader.current.offset, _first(output, samples)))
    return outputs


def model_output(model: nn.Module, batch: Any, *, with_targets: bool = True) -> Any:
    """Call the model on a batch's inputs: of (inputs, targets) the targets are left out, unless forward needs them.

    Without targets, all parts of the batch are inputs.
    """
    if not with_targets:
        result = model(*batch) if isinstance(batch, (tuple, list)) else model(batch)
    elif isinstance(batch, Mapping):
        result = model(**{key: value for key, value in batch.items() if key != "labels"})
    elif isinstance(batch, (tuple, list)):
        required = [p for p in positional_parameters(model) if p.default is p.empty]
        result = model(*batch[: max(1, len(batch) - 1, len(required))])
    else:
        result = model(batch)
    if type(result) is tuple:  # (logits, None): a model that got no targets has no loss
        present = [part for part in result if part is not None]
        return present[0] if len(present) == 1 else result
    return getattr(result, "logits", result)


def _first(output: Any, samples: int) -> Any:
    """Return the rows of real samples (a number as it is), on the CPU and in a dtype that NumPy knows."""

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        rows = (tensor[:samples] if tensor.ndim else tensor).cpu()
        return rows.float() if rows.dtype == torch.bfloat16 else rows

    return map_batch(output, cut, lambda leaf: isinstance(leaf, torch.Tensor))
