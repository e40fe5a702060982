"""The trainers for torch models: a model and a DataLoader on N ranks, from a script, a prompt or inside a rank."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Unpack

import numpy as np
import torch
from torch import nn

from phalanx import torch_compat
from phalanx.config import BACKENDS, FIELDS, DistributedConfig, resolve
from phalanx.config.backends import DEFAULT_STRATEGY
from phalanx.config.option import check_folder, local_path
from phalanx.config.settings import ENV_PREFIX
from phalanx.config.ways import late_note
from phalanx.engine import engine_of
from phalanx.errors import PreemptedError, UsageError, a_type, unknown_name
from phalanx.host.gpus import count_gpus
from phalanx.host.remote import as_path
from phalanx.loop.loader import Augmentation
from phalanx.loop.metrics import LossFn, Metric, find_loss
from phalanx.loop.model_setup import adapt, check_trains_adapters
from phalanx.loop.optimizer_binding import load_scheduler_state
from phalanx.loop.stopping import BY_CTRL_C
from phalanx.loop.task import TrainTask, as_list, check_data, check_task
from phalanx.observe.guard import say_to_user
from phalanx.observe.history import History
from phalanx.observe.run_folder import make_run_dir
from phalanx.run.auto_strategy import settle_strategy
from phalanx.run.conductor import recorded_run
from phalanx.run.export import export_model
from phalanx.run.job import Job, came_back
from phalanx.run.preflight import check_before_start
from phalanx.run.rate_finder import RateSweep, find_rate
from phalanx.run.record import RunRecord
from phalanx.run.result import JobResult
from phalanx.run.resume import check_left, check_not_in_use
from phalanx.run.start import send_job
from phalanx.run.stored import StoredRun
from phalanx.run.weights import load_weights, return_weights, save_weights
from phalanx.strategies.fsdp import check_shardable
from phalanx.strategies.optimizer_state import match_groups
from phalanx.world.env import read_rank_env
from phalanx.world.mesh import plan_layout

if TYPE_CHECKING:
    from phalanx.config.arguments import AllSettings, TrainerSettings

_SAVED_AS = (".safetensors", ".pt", ".pth", ".onnx")
_REPORTS_OFF: dict[str, Any] = {"metrics_port": None, "sinks": None, "mlflow": False, "wandb": False}
"""Evaluation and prediction report to no tracker and serve no port: a run that trains may hold it."""


class TorchTrainer:
    """A model, its task and its settings; the config decides where they run."""

    backend: ClassVar[str]
    """The backend of a config that names none."""
    foreign_models: ClassVar[str] = ""
    """What to say about models of another framework; empty: what trains these."""

    def __init__(
        self,
        model: nn.Module = None,  # type: ignore[assignment]  # a missing one gets a message of ours
        config: DistributedConfig | torch.optim.Optimizer | None = None,
        *,
        loss_fn: LossFn | str | None = None,
        optimizer: Any = None,
        scheduler: Any = None,
        scheduler_interval: str = "epoch",
        training_step: Any = None,
        metrics: Mapping[str, Metric] | None = None,
        callbacks: list[Any] | None = None,
        augment: Augmentation | None = None,
        hooks: list[Any] | None = None,
        **settings: Unpack[TrainerSettings],
    ) -> None:
        values: dict[str, Any] = dict(settings)
        _check_model(self, model, has_loss=loss_fn is not None or training_step is not None)
        if isinstance(config, torch.optim.Optimizer):
            if optimizer is not None:
                raise UsageError(
                    f"two optimizers: {type(config).__name__} as second argument, and optimizer=...",
                    hint="Give one of them.",
                )
            optimizer, config = config, None
        if isinstance(optimizer, str):  # a name is the config's field of the same name
            values["optimizer"], optimizer = optimizer, None
        self.model = model
        self.config = self._configure(config, values)
        self.loss_fn = find_loss(loss_fn)
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.scheduler_interval = scheduler_interval
        self.training_step = training_step
        self.metrics = metrics
        self.augment = augment
        self.callbacks = [*as_list("callbacks", callbacks), *as_list("hooks", hooks)]
        self.history: History | None = None
        self._last_data: Any = None
        self._tells_end = True
        """Whether an end before the last step is reported on the terminal."""

    def _configure(self, config: DistributedConfig | None, settings: dict[str, Any]) -> DistributedConfig:
        if config is not None and not isinstance(config, DistributedConfig):
            raise UsageError(
                f"the second argument of {type(self).__name__} is {a_type(config)}: expected a "
                "DistributedConfig or an optimizer",
                hint="Name it: loss_fn=..., optimizer=..., or a setting such as num_workers=2.",
            )
        if config is not None:
            chosen = config.replace(**settings) if settings else config
            self._settings_given = frozenset(settings)
            chosen.refuse_unused(settings)
        else:  # torch's own trainer has any strategy, so that a flag or variable may name another backend
            backend = {} if self.backend == FIELDS["backend"].default else {"backend": self.backend}
            resolved = resolve({**backend, **settings})
            chosen, self._settings_given = resolved.config, resolved.given
        chosen.require_torch(type(self).__name__)
        self._report_other_backend(chosen)
        return chosen

    def _report_other_backend(self, chosen: DistributedConfig) -> None:
        """Say so where `--backend` names another strategy than the script's own config or kind of trainer."""
        named, env = os.environ.get(f"{ENV_PREFIX}BACKEND", chosen.backend), read_rank_env()
        is_other = named != chosen.backend and named in BACKENDS and BACKENDS[named].strategy != DEFAULT_STRATEGY
        if is_other and (env is None or env.rank == 0):
            say_to_user(
                f"backend = {named!r} is not used by {type(self).__name__}, whose own settings in the script have "
                f"backend = {chosen.backend!r}: it trains with {chosen.resolved_strategy}."
            )

    @property
    def best_accuracy(self) -> float | None:
        """The best validation accuracy of the last fit."""
        return self.history.best_accuracy if self.history else None

    def add_hook(self, function: Any, every: int = 1) -> None:
        """Call `function(StepInfo)` on every rank after each `every`-th step."""
        self.callbacks.append((function, every))

    def fit(self, train: Any, val: Any = None, **settings: Unpack[AllSettings]) -> History:
        """Train on a DataLoader, data set or iterable of batches; settings given here win over the constructor's."""
        __tracebackhide__ = True
        config = self.config.replace(**settings) if settings else self.config
        config.refuse_unused(settings)
        config = config.settled
        _check_left(config)
        adapt(self.model, config)  # here, not in the ranks only: the trained adapters come back into this model
        if isinstance(self.optimizer, torch.optim.Optimizer):
            check_trains_adapters([self.model], self.optimizer, config)
        task = self._task(train=train, val=val)
        task.given = self._settings_given | frozenset(settings)
        check_task(task, config)
        self._last_data = train
        history = self._run("fit", task, config).history
        assert history is not None, "a fit always has a history"
        return history

    def find_lr(self, train: Any, *, low: float = 1e-6, high: float = 10.0, steps: int = 100) -> RateSweep:
        """Train a copy of the model while the learning rate grows, and return the losses and a suggested rate.

        It ends where the loss diverges. The model, the optimizer and ./runs stay as they are.
        """
        __tracebackhide__ = True
        return find_rate(self, train, low, high, steps)

    def evaluate(self, data: Any) -> dict[str, float]:
        """Return the mean loss and metrics over every sample of `data`."""
        __tracebackhide__ = True
        check_data(data, "evaluate")
        return self._run("evaluate", self._task(val=data), self.config).metrics

    def predict(self, data: Any) -> Any:
        """Return the model's outputs for `data`, in its order (on a started rank: on the main rank only).

        A tensor or an array holds the inputs.
        """
        __tracebackhide__ = True
        if isinstance(data, (torch.Tensor, np.ndarray)):
            data = torch.utils.data.TensorDataset(torch.as_tensor(data))
        check_data(data, "predict")
        return self._run("predict", self._task(val=data), self.config).predictions

    def save(self, path: str | Path, *, data: Any = None) -> Path:
        """Write the model's weights to a file: safetensors, or torch's own format for .pt and .pth; .onnx writes ONNX.

        ONNX needs an example of the inputs: the data of the last fit, or `data`.
        """
        path, env = local_path(path), read_rank_env()
        if writes := env is None or env.rank == 0:
            check_folder(f"save('{path}')", path)
        if path.suffix == ".onnx":
            return self._save_onnx(path, data)
        if path.suffix not in _SAVED_AS:
            raise UsageError(
                f"save('{path}'): {unknown_name('ending', path.suffix or '(none)', _SAVED_AS)}",
                hint="A Hugging Face folder is written by phalanx.zoo.models.save_pretrained(model, folder).",
            )
        save_weights(self.model, path, writes=writes)
        return path

    def _save_onnx(self, path: Path, data: Any) -> Path:
        if read_rank_env() is not None:
            raise UsageError(
                "save('x.onnx') on a rank that a launcher started: the model may be sharded here",
                hint="Save safetensors, or a checkpoint and then: phalanx export RUN --format onnx",
            )
        export_model(self.model, path, "onnx", self._last_data if data is None else data, self.augment)
        return path

    def load(self, path: str | Path) -> None:
        """Read weights from a file that `save` wrote, or from a checkpoint directory of a run."""
        load_weights(self.model, as_path(path))

    def _task(self, train: Any = None, val: Any = None) -> TrainTask:
        name = self.config.name or type(self.model).__name__.lower()
        parts = (self.loss_fn, self.optimizer, self.metrics, self.callbacks)
        rest = (self.scheduler, self.scheduler_interval, self.augment, self.training_step)
        return TrainTask(self.model, train, val, *parts, name, *rest)

    def _run(self, action: Any, task: TrainTask, config: DistributedConfig) -> JobResult:
        """Run the job; a run that was asked to stop ends the process with a separate exit code.

        Under `phalanx train` the launcher does that. In a plain script the scheduler must see it just as well.
        """
        __tracebackhide__ = True
        try:
            result = self._run_or_send(action, task, config)
            self.history = result.history or self.history
            if result.stopped is None:
                env = read_rank_env()
                if result.ended and self._tells_end and (env is None or env.rank == 0):
                    say_to_user(f"{result.ended}; {came_back(task, result.history)}")
                return result
            result.stopped.message += f"; {came_back(task, result.history)}"
            if result.stopped.message.startswith(BY_CTRL_C):
                raise KeyboardInterrupt(result.stopped.message)
            raise result.stopped
        except PreemptedError as error:
            env = read_rank_env()
            if env is not None and env.supervised:
                raise
            print(f"phalanx: {error}", file=sys.stderr, flush=True)
            raise SystemExit(error.exit_code) from error

    def _run_or_send(self, action: Any, task: TrainTask, config: DistributedConfig) -> JobResult:
        """Run here when this is a rank already or one rank is enough; else start the ranks."""
        __tracebackhide__ = True  # in a notebook the rank's own traceback is what matters
        if (env := read_rank_env()) is not None:
            note = late_note(config, os.environ) if action == "fit" and env.rank == 0 else ""
            if note:
                say_to_user(f"warning: {note}")
            return Job(action, task, config).run()
        if action != "fit":
            config = config.with_trusted(**_REPORTS_OFF)
        else:
            check_not_in_use(config, again=True)
        layout, note = plan_layout(config, count_gpus()), ""
        if action == "fit":
            ranks = layout.world_size, layout.ranks_per_node
            config, note = settle_strategy(config, self.model, task.train, layout.device, *ranks)
            layout = plan_layout(config, count_gpus()) if note else layout
        check_before_start(config)
        config_here = config.with_trusted(device=layout.device)
        if layout.world_size > 1 and config.facts.shards:
            check_shardable(self.model, config.wrap_class)
        if layout.world_size == 1:
            return Job(action, task, config_here, checked=True, gives_back=True).run()
        if torch_compat.is_profiling():
            warnings.warn(
                f"a torch.profiler is active in this process, but the {layout.world_size} ranks that train are other "
                "processes, which it does not see. Write fit(..., profile='steps=10:15'), and then: phalanx report "
                "last --profile",
                stacklevel=5,
            )
        job = Job(action, task, config_here, checked=True, note=note, gives_back=True, sends_back=True)
        data = engine_of(config_here).datasets(task.train, task.val)
        result: JobResult
        if action != "fit":
            result = send_job(job, layout, data=data)
        else:
            job.run_dir = make_run_dir(config, task.name)
            record, advise = RunRecord.of_this_process(config.given()), partial(_after_failure, self, job.run_dir)
            with recorded_run(job.run_dir, config, record, advise=advise) as run:
                result = send_job(job, layout, data=data)
                run.outcome = result.outcome
        _return_trained(self, result)
        return result


def _after_failure(trainer: TorchTrainer, run_dir: Path, error: BaseException, is_kept: bool) -> None:
    """Give the caller of a fit that failed what came back, and say in the error what that is."""
    result = getattr(error, "partial_result", None)
    if isinstance(result, JobResult):
        _return_trained(trainer, result)
        trainer.history = result.history
    if isinstance(error, KeyboardInterrupt):
        error.args = (f"{BY_CTRL_C}, before the ranks had a result; {_what_came(run_dir)}",)
    elif is_kept:
        error.add_note(_what_came(run_dir, result.ended if isinstance(result, JobResult) else ""))


def _return_trained(trainer: TorchTrainer, result: JobResult) -> None:
    """Give the caller's model, optimizers and scheduler what ranks of other processes have trained."""
    model, scheduler = trainer.model, trainer.scheduler
    if result.weights is not None:
        return_weights(model, result.weights)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(result.trained.get(name, parameter.requires_grad))
    optimizers = trainer.optimizer if isinstance(trainer.optimizer, Mapping) else {"": trainer.optimizer}
    for (name, optimizer), returned in zip(optimizers.items(), result.optimizers, strict=False):
        if isinstance(optimizer, torch.optim.Optimizer):
            match_groups(getattr(model, name) if name else model, optimizer, returned["groups"])
            optimizer.load_state_dict(returned["state"])
    if isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler) and result.scheduler_state is not None:
        load_scheduler_state(scheduler, result.scheduler_state)


def _check_left(config: DistributedConfig) -> None:
    """Refuse to resume a checkpoint with nothing left to train."""
    if isinstance(config.resume_from_checkpoint, str) and read_rank_env() is None:
        check_left(config)


def _what_came(run_dir: Path, trained: str = "") -> str:
    """Say what the caller has after a fit that failed; `trained`: what came back."""
    last = StoredRun(run_dir).checkpoints[-1:]
    checkpoint = f"the last checkpoint is {last[0]}: trainer.load('{last[0]}')" if last else "no checkpoint was saved"
    return f"{trained or 'the model is as it was before fit'}, and {checkpoint}"


class Trainer(TorchTrainer):
    """Trains a model on all ranks as if they were one, with torch's DistributedDataParallel or any other strategy.

    Every setting of `DistributedConfig` is an argument (`num_workers=2, batch_size=32, epochs=5, ...`); or pass a whole
    `config=`. In a plain Python process, `fit` starts the ranks itself and copies the trained weights back into
    `model`; in a rank that a launcher started, it joins the others.
    """

    backend = "pytorch-ddp"


PyTorchDDPTrainer = Trainer
"""The same by another name."""


def _check_model(trainer: TorchTrainer, model: Any, *, has_loss: bool) -> None:
    """Refuse what is not a model, and a LightningModule whose own steps would silently not be called."""
    name = type(trainer).__name__
    if model is None:
        raise UsageError(f"{name} needs a model", hint=f"Write: {name}(model, num_workers=2).fit(train_loader)")
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise UsageError(
            f"model = {model.__name__} is the class, not a model", hint=f"Write: {name}({model.__name__}(...), ...)"
        )
    if not isinstance(model, nn.Module):
        package = type(model).__module__.split(".")[0]
        row = next((row for row in BACKENDS.values() if package in row.model_packages), None)
        others = trainer.foreign_models or (f"{row.framework} models are trained by {row.trainer}." if row else "")
        hint = others if row else f"Write: {name}(model, ...), where model is your torch.nn.Module."
        raise UsageError(f"model must be a torch.nn.Module; got {type(model).__name__}", hint=hint)
    owners = {kind.__module__.partition(".")[0] for kind in type(model).__mro__ if kind.__name__ == "LightningModule"}
    if not has_loss and owners & {"lightning", "pytorch_lightning"}:
        raise UsageError(
            f"model = {type(model).__name__} is a LightningModule: its training_step, configure_optimizers and hooks "
            "are not called here, and no loss was given",
            hint="Give loss_fn= and optimizer= (its forward is then used), or training_step=function. "
            "docs/coming-from.md has both versions of a training.",
        )
