"""The task of a run (model, data, optimizer, ...) as plain data that is sent to the ranks."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from phalanx.config import DistributedConfig
from phalanx.data.source import read_source
from phalanx.errors import UsageError, a_type
from phalanx.loop.best import check_metrics
from phalanx.loop.formation import Formation
from phalanx.loop.hooks import Hooks
from phalanx.loop.loader import Augmentation, PreparedLoader
from phalanx.loop.metrics import LossFn, Metric
from phalanx.loop.optim import LRSchedule, build_optimizer, rate_factor, rate_scale
from phalanx.loop.optimizer_binding import OwnSchedule, check_scheduler, make_scheduler

if TYPE_CHECKING:
    from phalanx.loop.training_step import TrainingStep


@dataclass
class TrainTask:
    """Model, data and the optional rest of one training run."""

    model: nn.Module
    train: Any = None
    val: Any = None
    loss_fn: LossFn | None = None
    optimizer: Any = None
    metrics: Mapping[str, Metric] | None = None
    callbacks: list[Any] = field(default_factory=list)
    name: str = "model"
    scheduler: Any = None
    scheduler_interval: str = "epoch"
    augment: Augmentation | None = None
    training_step: Any = None
    """The user's own step, `function(TrainingStep, batch) -> loss`; `optimizer` is then a dict by parts."""
    classes: list[str] = field(default_factory=list)
    """The names of the labels, where the training data have some: checkpoints keep them."""
    columns: dict[str, Any] = field(default_factory=dict)
    """The names of a table's inputs and target, where the training data are one: kept likewise."""
    given: frozenset[str] = frozenset()
    """The settings that the user gave, also to their defaults."""

    def __post_init__(self) -> None:
        self.classes = self.classes or class_names(self.train)
        data = self.train
        while data is not None and not self.columns:  # of a loader or subset: that of the data set inside
            columns, data = getattr(data, "columns", None), getattr(data, "dataset", None)
            named = {"inputs", "target", "target_type"}
            self.columns = columns if isinstance(columns, dict) and columns.keys() <= named else {}


def prepare_task(formation: Formation, task: TrainTask) -> tuple[nn.Module, Any, TrainingStep | None]:
    """Prepare a task's model and optimizer, or the parts of the model for a step that the user wrote."""
    if task.training_step is None:
        model = formation.prepare(task.model)
        return model, formation.prepare(make_optimizer(task, formation.config, formation.device)), None
    # Few runs bring a training step. `optional` cannot have its class, which needs the type of a formation.
    from phalanx.loop.training_step import TrainingStep

    user_step = TrainingStep(formation, task.training_step, task.model, task.optimizer)
    return task.model, user_step.groups, user_step


def class_names(data: Any) -> list[str]:
    """Return the attribute `classes` of a data set, or of the one inside a loader or subset; empty without names."""
    classes = getattr(data, "classes", None)
    if isinstance(classes, list | tuple) and all(isinstance(name, str) for name in classes):
        return list(classes)
    inner = getattr(data, "dataset", None)
    return [] if inner is None else class_names(inner)


def make_optimizer(task: TrainTask, config: DistributedConfig, device: torch.device) -> torch.optim.Optimizer:
    """Return the task's optimizer: the user's instance, what the user's factory makes, or the config's choice."""
    optimizer = task.optimizer
    if optimizer is not None and config.optimizer == "adamw8bit":  # which the mode `memory` has chosen
        warnings.warn("the optimizer that was given is used, and not adamw8bit of memory=True", stacklevel=2)
    if optimizer is None:
        return build_optimizer(config, task.model.parameters(), device, sparse=bool(_sparse_embeddings(task.model)))
    if isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    if callable(optimizer):
        trained = [p for p in task.model.parameters() if p.requires_grad]
        instance: Any = optimizer(trained, **_options_for(task, config))
        if isinstance(instance, torch.optim.Optimizer):
            _refuse_closures(type(instance))
            return instance
        raise UsageError(f"the optimizer factory returned {a_type(instance)}, not a torch.optim.Optimizer")
    raise UsageError(
        f"optimizer = {optimizer!r}: expected a torch.optim.Optimizer, a factory, or a name",
        hint="Write optimizer=torch.optim.SGD(model.parameters(), lr=0.1), or lambda params: SGD(params, lr=0.1).",
    )


_RATES = ("learning_rate", "weight_decay", "momentum")


def _given_rates(task: TrainTask, config: DistributedConfig) -> list[str]:
    return [name for name in _RATES if name in task.given or name in config.given()]


def _options_for(task: TrainTask, config: DistributedConfig) -> dict[str, Any]:
    """Return what an optimizer's class is called with: the rate, and the other settings that were given.

    UsageError if the class does not take one of them. A function that makes an optimizer gets none.
    """
    optimizer = task.optimizer
    if not inspect.isclass(optimizer):
        return {}
    options = {"lr": config.learning_rate}
    for name in _given_rates(task, config):
        if name == "learning_rate":
            continue
        if name not in inspect.signature(optimizer).parameters:
            raise UsageError(
                f"{name} = {getattr(config, name)!r} is not an argument of {optimizer.__name__}",
                hint="Leave it out, or write a function: "
                f"optimizer=lambda parameters: {optimizer.__name__}(parameters, lr={config.learning_rate:g}, ...)",
            )
        options[name] = getattr(config, name)
    return options


def add_objects(task: TrainTask, config: DistributedConfig, device: torch.device) -> None:
    """Give a task that has none an optimizer object and, unless the config schedules the rate, a scheduler object.

    For proofs: such objects have their own state, which a rank that replaces another does not have.
    """
    if task.optimizer is not None:
        return
    task.optimizer = optimizer = build_optimizer(config, task.model.parameters(), device)
    if (config.lr_schedule, config.warmup, config.lr_scaling) == ("constant", 0, "none"):
        task.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.95)
        task.scheduler_interval = "step"


def check_task(task: TrainTask, config: DistributedConfig) -> None:
    """Raise for a task that cannot be trained, before any process starts."""
    if task.train is None:
        raise UsageError("fit() needs training data", hint="Pass a DataLoader, a data set or an iterable of batches.")
    for data in (task.train, task.val):
        if data is not None:
            check_data(data, "fit", has_training_step=task.training_step is not None)
    check_metrics(config, has_val=task.val is not None)
    Hooks(task.callbacks)
    if task.training_step is not None:
        from phalanx.loop.training_step import check_training_step

        check_training_step(task.training_step, task.model, task.optimizer, task.scheduler, config)
        if task.val is not None and type(task.model).forward is nn.Module.forward:
            raise UsageError(
                f"{type(task.model).__name__} has no forward, by which validation data are evaluated",
                hint="Write a forward in it, with loss_fn= or metrics=, or leave the validation data out.",
            )
    elif isinstance(task.optimizer, torch.optim.Optimizer):
        check_owns(task.model, task.optimizer)
    _check_optimizer(task, config)
    _check_loss(task.loss_fn)
    if task.loss_fn is None and getattr(task.augment, "mixes", False):
        raise UsageError(
            "mixup and cutmix make labels shares of classes, and no loss_fn is given for these",
            hint="Write loss_fn='cross_entropy', which takes both.",
        )
    check_scheduler(task.scheduler, task.optimizer, task.scheduler_interval, config)
    for name, metric in task.metrics.items() if isinstance(task.metrics, Mapping) else ():
        if not callable(metric):
            raise UsageError(f"metrics['{name}'] is {a_type(metric)}", hint="Give a function(output, target).")
        _check_called(f"metrics['{name}']", metric)
    if task.metrics is not None and not isinstance(task.metrics, Mapping):
        raise UsageError(
            f"metrics is {a_type(task.metrics)}",
            hint="Write metrics={'name': function}, where function(output, target) gives a value.",
        )
    if not any(p.requires_grad for p in task.model.parameters()):
        raise UsageError(f"{type(task.model).__name__} has no trainable parameters")


def _check_called(name: str, function: Any) -> None:
    """Raise for a function of the user's that does not take an output and a target."""
    if not inspect.isfunction(function):
        return  # callable objects and functions in C say less about their arguments
    try:
        inspect.signature(function).bind(None, None)
    except TypeError as error:
        raise UsageError(
            f"{name} cannot be called as function(output, target): {error}", hint="Give it these two arguments."
        ) from None


def _check_loss(loss_fn: Any) -> None:
    """Raise for a loss with its own weights: the optimizer and the checkpoints are the model's."""
    _check_called("loss_fn", loss_fn)
    reduction = _reduction(loss_fn)
    if reduction in ("sum", "none"):
        problem = {
            "sum": "a sum grows with the batch, so that its gradient would depend on the split over ranks and steps",
            "none": "training needs one number per batch",
        }[reduction]
        raise UsageError(
            f"loss_fn has reduction='{reduction}': {problem}",
            hint="Leave it out, for the mean over the batch; for a factor, scale the mean: "
            "loss_fn=lambda output, target: 64 * F.mse_loss(output, target).",
        )
    trained = [n for n, p in loss_fn.named_parameters() if p.requires_grad] if isinstance(loss_fn, nn.Module) else []
    if trained:
        name = type(loss_fn).__name__
        raise UsageError(
            f"loss_fn = {name} has parameters ({', '.join(trained[:3])}), and only those of the model are trained",
            hint=f"Make it a part of the model, self.loss = {name}(...), whose forward(inputs, targets) returns "
            "self.loss(output, targets), and leave loss_fn out; or freeze it: loss_fn.requires_grad_(False)",
        )


def _reduction(loss_fn: Any) -> Any:
    """Return the argument `reduction` of a loss of torch's, as a module or with its arguments given by partial."""
    if isinstance(loss_fn, functools.partial):
        return loss_fn.keywords.get("reduction")
    return getattr(loss_fn, "reduction", None) if isinstance(loss_fn, nn.Module) else None


def _warn_unused(task: TrainTask, config: DistributedConfig) -> None:
    """Name the settings that an optimizer object, or a function that makes one, does not see."""
    optimizer, unused = task.optimizer, [f"{name} = {getattr(config, name)!r}" for name in _given_rates(task, config)]
    if not unused:
        return
    verb = "has" if len(unused) == 1 else "have"
    if isinstance(optimizer, torch.optim.Optimizer):
        name = type(optimizer).__name__
        advice = f"on the {name} that was given: set it there, or name the optimizer: optimizer='{name.lower()}'"
    else:
        advice = "on the optimizer that the given function makes: set it there"
    warnings.warn(f"{', '.join(unused)} {verb} no effect {advice}", stacklevel=5)


_TAKE_SPARSE = {"sgd", "adagrad"}


def _check_optimizer(task: TrainTask, config: DistributedConfig) -> None:
    """Raise for an optimizer that wants another kind of loop, or other gradients than the model has."""
    optimizer = task.optimizer
    if isinstance(optimizer, Mapping) and task.training_step is None:
        raise UsageError(
            f"optimizer = a dict of {len(optimizer)} optimizers, and no training_step(step, batch) that steps them",
            hint="Write training_step=..., or give one optimizer with several groups of parameters.",
        )
    if inspect.isclass(optimizer):
        _options_for(task, config)
    elif optimizer is not None and not isinstance(optimizer, Mapping):
        _warn_unused(task, config)
    kind = optimizer if inspect.isclass(optimizer) else type(optimizer)
    if hasattr(kind, "step"):
        _refuse_closures(kind)
    if not (sparse := _sparse_embeddings(task.model)) or not (
        optimizer is None or kind.__module__.startswith("torch.")
    ):
        return
    name = config.optimizer if optimizer is None else kind.__name__
    if name.lower() not in {*_TAKE_SPARSE, "sparseadam"}:
        raise UsageError(
            f"{name} does not take the sparse gradients of {sparse[0]} (sparse=True)",
            hint="Write optimizer='sgd', momentum=0 (or 'adagrad'), or build the embedding with sparse=False.",
        )
    groups = [{"weight_decay": config.weight_decay, "momentum": config.momentum if name == "sgd" else 0.0}]
    groups = (
        optimizer.param_groups if isinstance(optimizer, torch.optim.Optimizer) else groups if optimizer is None else []
    )
    # torch cannot decay sparse gradients, and checkpoints do not hold the sparse states of momentum.
    for option in ("weight_decay", "momentum"):
        value = max((group.get(option, 0.0) for group in groups), default=0.0)
        if value and name.lower() in _TAKE_SPARSE:
            raise UsageError(
                f"{option} = {value} does not go with the sparse gradients of {sparse[0]} (sparse=True)",
                hint=f"Write {option}=0, or build the embedding with sparse=False.",
            )


def _refuse_closures(kind: Any) -> None:
    """Raise for an optimizer that wants to call the model itself, such as LBFGS."""
    closure = inspect.signature(kind.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise UsageError(
            f"{kind.__name__} calls the model several times in a step (its step needs a closure), which fit() does not",
            hint="Give another optimizer, such as optimizer='adamw', or train in a loop of torch alone.",
        )


def _sparse_embeddings(model: nn.Module) -> list[str]:
    """Return the names of the embeddings whose gradients are sparse."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    return [n or type(m).__name__ for n, m in model.named_modules() if isinstance(m, kinds) and m.sparse]


def check_data(data: Any, method: str, *, has_training_step: bool = False) -> None:
    """Raise for data that a method cannot read, before any process starts; a user's own step takes any batch."""
    if data is None or isinstance(data, (int, float, str)):
        raise UsageError(
            f"{method}({data!r}): data is {a_type(data)}",
            hint="Give a torch DataLoader, a Dataset (map-style or iterable), or a list of batches.",
        )
    source = read_source(data, pin_memory=False, notes=[])
    first = data[0] if isinstance(data, (list, tuple)) and data else None
    if source.ready_batches and isinstance(first, (int, float, complex)) and not has_training_step:
        raise UsageError(
            f"{method}() got {a_type(data)} of numbers, and {a_type(data)} holds batches",
            hint="Give tensors: (inputs, targets), a data set, or a list of batches [(inputs, targets), ...].",
        )


def as_list(name: str, items: Any) -> list[Any]:
    """Return a list that a user gave, empty for None; raise for one item without brackets."""
    if items is not None and not isinstance(items, (list, tuple)):
        kind = items.__name__ if isinstance(items, type) else type(items).__name__
        raise UsageError(f"{name} = {kind}: expected a list", hint=f"Write: {name}=[{kind}(...)]")
    return list(items or ())


def check_owns(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise for an optimizer of another model's parameters."""
    ids = {id(parameter) for parameter in model.parameters()}
    foreign = sum(id(p) not in ids for group in optimizer.param_groups for p in group["params"])
    if foreign:
        raise UsageError(
            f"{foreign} of the optimizer's parameters do not belong to the model that is to be trained",
            hint="Build the optimizer from model.parameters() of the same model object.",
        )


def make_schedule(
    formation: Formation,
    task: TrainTask,
    optimizer: torch.optim.Optimizer,
    loader: PreparedLoader,
    total_steps: int | None,
) -> LRSchedule | OwnSchedule:
    """Return the schedule of the learning rate: that of the user's scheduler, or the config's."""
    if task.scheduler is None:
        layout = loader.sharded.layout
        scale = rate_scale(formation.config, layout.global_batch, layout.batch_size)
        config = formation.config
        varies = config.lr_schedule != "constant" or config.warmup > 0
        rounded = varies and formation.device.type == "cuda"
        return LRSchedule(optimizer, rate_factor(config, total_steps), scale, rounded=rounded)
    scheduler = make_scheduler(task.scheduler, optimizer)
    formation.schedulers.append(scheduler)  # into checkpoints; the loop steps it, not the user
    by_step = task.scheduler_interval == "step"
    return OwnSchedule(scheduler, lambda step: step if by_step else loader.epoch)
