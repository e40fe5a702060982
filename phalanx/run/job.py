"""A job as it is sent to the ranks, and how a rank runs it: join, run the loop, return a result."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from phalanx.config import DistributedConfig
from phalanx.engine import engines_here
from phalanx.errors import PhalanxError, PreemptedError
from phalanx.features import feature
from phalanx.loop.evaluate import evaluate, kept_in_eval, predict, user_modes
from phalanx.loop.formation import Formation
from phalanx.loop.hooks import Callback
from phalanx.loop.optimizer_binding import OwnSchedule, scheduler_state
from phalanx.loop.recorders import agree_run_dir, open_events, save_config
from phalanx.loop.stopping import BY_CTRL_C, preempted_error
from phalanx.loop.task import TrainTask, add_objects
from phalanx.loop.train_loop import TrainLoop
from phalanx.observe.guard import say_to_user
from phalanx.observe.history import History
from phalanx.observe.run_folder import make_run_dir
from phalanx.observe.sinks import EventStream
from phalanx.run.auto_strategy import settle_here
from phalanx.run.conductor import recorded_run
from phalanx.run.record import FILE as RECORD
from phalanx.run.record import RunRecord, keep_recipe
from phalanx.run.result import JobResult
from phalanx.run.weights import whole_state, whole_weights
from phalanx.strategies.base import is_laid_out
from phalanx.strategies.optimizer_state import named_groups
from phalanx.strategies.registry import load_for
from phalanx.world.world import World, start_device

if TYPE_CHECKING:
    from phalanx.loop.faults import FaultPlan
    from phalanx.loop.survival import Survival


@dataclass
class Job:
    """A task, and what the ranks do with it."""

    action: Literal["fit", "evaluate", "predict"]
    task: TrainTask
    config: DistributedConfig
    run_dir: Path | None = None
    checked: bool = False
    """Whether the process that started the ranks has run `check_before_start`."""
    renew: Callable[[], Job] | None = None
    """Builds the job again, with a new model: one that was sharded over ranks cannot be sharded over others."""
    note: str = ""
    """A message for the user when the run starts."""
    gives_back: bool = False
    """Whether a fit that a signal stops has a result, with `stopped`: its caller goes on with the model."""
    sends_back: bool = False
    """Whether the result goes to another process, with the trained weights: that one holds the caller's model."""
    recipe: dict[str, Any] | None = None
    """What is trained, with the sizes that the data have told, for the run's record."""

    def run(self) -> JobResult:
        """Run it on this rank, and after lost or added ranks again with those present."""
        run: Callable[..., JobResult] = partial(_run_formed, self)
        if self.action == "fit" and "PHALANX_CONTROL_FD" in os.environ:  # the launcher replaces lost ranks
            result: JobResult = feature("recovery").run_recovering(run, partial(_get_ready, self.config))
            return result
        for engine in engines_here() if self.action == "fit" else ():
            run = engine.wrap_run(run)
        return run()


def _get_ready(config: DistributedConfig) -> None:
    """Import and start what a rank needs, before it knows the others."""
    load_for(config)
    start_device(config)


def _run_formed(job: Job, survivor: Survival | None = None) -> JobResult:
    """Form the group of ranks, and run a job in it; a survivor of an earlier group brings the state of its run."""
    if survivor is not None and survivor.run_dir is not None and job.renew is not None:
        renews = survivor.is_stale or is_laid_out(job.task.model)
        survivor.is_stale = survivor.is_stale and not renews
        job = job.renew() if renews else job
    if job.action == "fit":
        config, note = settle_here(job.config, job.task.model, job.task.train)
        job = replace(job, config=config, note=job.note or note)
    with Formation(job.config) as formation, nullcontext() if survivor is None else survivor.returning(formation):
        if isinstance(job.task.loss_fn, nn.Module):  # such as the class weights of CrossEntropyLoss
            job.task.loss_fn.to(formation.device)
        if job.action == "fit":
            result = _fit_in_folder(formation, job, survivor)
        else:
            result = {"evaluate": _evaluate, "predict": _predict}[job.action](formation, job)
        return_weights = job.action == "fit" and job.sends_back
        by_engine = formation.strategy.owns_step
        keep = formation.world.env.local_rank == 0
        if return_weights and not by_engine:
            _put_trained(result, formation, job.task, keep=keep)
    if return_weights and by_engine:  # an engine gives the model its weights back when the formation closes
        result.weights = whole_weights(job.task.model, keep=keep)
        if not formation.strategy.owns_gradients and isinstance(job.task.optimizer, torch.optim.Optimizer):
            state = whole_state(job.task.optimizer.state_dict(), keep=keep)
            result.optimizers.append({"state": state, "groups": []})
    return result


def _put_trained(result: JobResult, formation: Formation, task: TrainTask, *, keep: bool) -> None:
    """Put the weights and the states of the user's optimizers into the result.

    All ranks call this, for sharded tensors are gathered from all of them; `keep`: whether this one keeps them.
    """
    result.weights = whole_weights(task.model, keep=keep)
    result.trained = {name: p.requires_grad for name, p in task.model.named_parameters()}
    # A stage's optimizer cannot be loaded into a whole one; one made from the config is not returned.
    if formation.world.mesh.pp == 1 and isinstance(task.optimizer, (torch.optim.Optimizer, Mapping)):
        names = list(task.optimizer) if isinstance(task.optimizer, Mapping) else [""]
        for name, optimizer in zip(names, formation.optimizers, strict=True):
            groups = named_groups(getattr(task.model, name) if name else task.model, optimizer)
            state = whole_state(optimizer.state_dict(), keep=keep)
            result.optimizers.append({"state": state, "groups": groups})


def _trained_until(error: BaseException, formation: Formation, job: Job, loop: TrainLoop) -> None:
    """Attach the trained state to an error, if this rank alone holds all of it: other ranks may have ended."""
    config, mesh = job.config, formation.world.mesh
    apart = config.facts.shards or config.facts.has_servers or config.zero_stage or config.expert_parallel > 1
    if apart or formation.strategy.owns_step or mesh.dp_size < mesh.world_size or formation.world.env.local_rank != 0:
        return
    loop.history.status = "failed"
    partial = JobResult(history=loop.history, ended=f"after step {loop.step}, {came_back(job.task)}")
    try:
        _put_trained(partial, formation, job.task, keep=True)
    except (RuntimeError, MemoryError) as second:  # of a GPU after its first error, or a full memory: not the cause
        error.add_note(f"the trained state can no longer be read: {second}")
        return
    error.partial_result = partial  # type: ignore[attr-defined]  # the worker sends it


def _fit_in_folder(formation: Formation, job: Job, survivor: Survival | None) -> JobResult:
    """Train in the run's folder. The main rank keeps its record, unless the process that started the ranks does."""
    formation.notes += [note for note in (job.note, kept_in_eval(job.task.model)) if note]
    if not job.checked:
        _check_per_node(formation.world, job.config)
    before = None if survivor is None else survivor.run_dir
    folder = before or job.run_dir
    config_here = job.config if folder is None else job.config.with_trusted(run_dir=str(folder))
    run_dir = agree_run_dir(
        formation.world, lambda: make_run_dir(config_here, job.task.name), resumes=before is not None
    )
    if formation.is_main:
        save_config(job.config, run_dir)
    if not formation.is_main or (_is_given(job) and (run_dir / RECORD).exists()):
        if formation.is_main and job.recipe is not None:
            keep_recipe(run_dir, job.recipe)
        return _train(formation, job, run_dir, survivor)
    # A folder that another process made is that one's to remove.
    config = job.config.with_trusted(run_dir=str(run_dir)) if _is_given(job) else job.config
    record = RunRecord.of_this_process(job.config.given(), recipe=job.recipe)
    with recorded_run(run_dir, config, record, in_place=not _is_given(job)) as run:
        result = _train(formation, job, run_dir, survivor)
        run.outcome = result.outcome
    return result


def _check_per_node(world: World, config: DistributedConfig) -> None:
    """Run the checks before a start on the first rank of each node; raise on all ranks what one of them found."""
    failure: PhalanxError | None = None
    if world.env.local_rank == 0:
        from phalanx.run.preflight import check_before_start  # the other ranks do not load it

        try:
            check_before_start(config)
        except PhalanxError as error:
            failure = error
    errors = [failure]
    if world.world_size > 1:
        errors *= world.world_size
        dist.all_gather_object(errors, failure)
    for error_of_node in filter(None, errors):
        raise error_of_node


def _train(formation: Formation, job: Job, run_dir: Path, survivor: Survival | None) -> JobResult:
    events = open_events(job.config, formation.world, run_dir)
    memory = feature("diagnosis").MemoryWatch()
    profile = stopped = loop = None
    plan = _fault_plan(job, formation)
    try:
        if survivor is not None:
            survivor.match(formation, job.task.model)
        loop = TrainLoop(formation, job.task, events, run_dir)
        loop.saving.gives_back = job.gives_back and formation.world_size == 1
        profile = _step_profile(formation, run_dir)
        of_engines = [callback for engine in engines_here() for callback in engine.callbacks()]
        for callback in filter(None, (*_watches(job.config, events), memory, plan, profile, *of_engines)):
            loop.hooks.add(callback)
        with user_modes(job.task.model):
            try:
                history = loop.run() if survivor is None else survivor.run(loop, run_dir)
            except PreemptedError as stop:
                if not job.gives_back:
                    raise
                history, stopped = loop.history, stop
            except KeyboardInterrupt:  # a second Ctrl-C, or a handler of the user's own
                if formation.world_size == 1 and not loop.control.ending.reported:
                    loop.report.ended("interrupted", BY_CTRL_C, loop.step, loop.saving.last_path)
                raise
        if plan is not None and plan.weights_path is not None:
            weights = whole_weights(job.task.model, keep=formation.is_main)
            if formation.is_main:
                torch.save(weights, plan.weights_path)
    except Exception as original:
        error = memory.explained(original)
        if job.gives_back and formation.world_size == 1 and loop is not None and loop.step:
            last = loop.saving.last_path
            last_checkpoint = f"the last checkpoint is {last}" if last else "no checkpoint was saved"
            error.add_note(
                f"after step {loop.step}, {loop.saving.weights_left or came_back(job.task)}, and {last_checkpoint}"
            )
        elif job.gives_back and loop is not None and loop.step:
            _trained_until(error, formation, job, loop)
        if error is not original:
            raise error from original
        raise
    finally:
        if profile is not None:
            profile.close()
        events.close()
    scheduler = loop.schedule.scheduler if isinstance(loop.schedule, OwnSchedule) else None
    if job.gives_back and stopped is None and loop.stop.from_outside == "SIGINT":  # in the last step, or after it
        stopped = preempted_error(BY_CTRL_C, loop.step, loop.saving.last_path)
    ending = loop.control.ending
    ended = preempted_error(ending.reason, loop.step, loop.saving.last_path).message if ending.early else ""
    state = None if scheduler is None else scheduler_state(scheduler)
    return JobResult(history=history, scheduler_state=state, stopped=stopped, ended=ended)


def came_back(task: TrainTask, history: History | None = None) -> str:
    """Say what the caller of a fit that ended early has."""
    has_optimizer, several = isinstance(task.optimizer, torch.optim.Optimizer), isinstance(task.optimizer, Mapping)
    where = "the model" + (" and the optimizers" if several else " and the optimizer" * has_optimizer)
    if history is not None and history.loaded_best:
        return f"the state of step {history.best_step}, the best, is in {where}"
    return f"the trained state is in {where}"


def _watches(config: DistributedConfig, events: EventStream) -> Iterator[Callback]:
    """Yield the callbacks that settings ask for."""
    if config.tensorboard_histograms:
        yield from feature("histograms")(events, config.tensorboard_histograms)
    if config.debug == "nan":
        yield feature("diagnosis").NumberWatch()


def _fault_plan(job: Job, formation: Formation) -> FaultPlan | None:
    """Return the faults that the environment asks for, if any."""
    if not any(name.startswith("PHALANX_FAULTS") for name in os.environ):
        return None
    from phalanx.loop.faults import OBJECTS, FaultPlan  # only tests of recovery ask for faults

    if os.environ.get(OBJECTS):
        add_objects(job.task, job.config, formation.device)
    return FaultPlan.from_environment()


def _step_profile(formation: Formation, run_dir: Path) -> Any:
    """Return the profile of a run that asks for one, or runs on a GPU, perhaps under nsys."""
    if formation.config.profiling is None and formation.device.type != "cuda":
        return None
    return feature("step-profile").wanted(formation, run_dir)


def _is_given(job: Job) -> bool:
    """Whether the process that started the ranks has made the run's folder."""
    return job.run_dir is not None or "PHALANX_RUN_DIR" in os.environ


def _evaluate(formation: Formation, job: Job) -> JobResult:
    model = formation.prepare(job.task.model)
    loader = formation.prepare_loader(job.task.val, training=False).augmented(job.task.augment)
    for note in formation.notes if formation.is_main else ():
        if note.startswith("warning: "):  # about the data; a run that trains reports all notes
            say_to_user(note)
    return JobResult(metrics=evaluate(formation, model, loader, job.task.loss_fn, job.task.metrics))


def _predict(formation: Formation, job: Job) -> JobResult:
    model = formation.prepare(job.task.model)
    loader = formation.prepare_loader(job.task.val, training=False, in_order=True).augmented(job.task.augment)
    outputs = predict(formation, model, loader)
    outputs_here = outputs if formation.world.leads_samples else []  # ranks that share samples all have their outputs
    parts: list[Any] = [None] * formation.world_size
    if formation.world_size > 1:
        dist.gather_object(outputs_here, parts if formation.is_main else None, dst=0)
    else:
        parts = [outputs_here]
    if not formation.is_main:
        return JobResult()
    ordered = sorted((piece for part in parts for piece in part), key=lambda piece: piece[0])
    return JobResult(predictions=_joined([output for _, output in ordered]))


def _joined(outputs: list[Any]) -> Any:
    """Concatenate the batches' outputs, also inside mappings, tuples and lists.

    Outputs that differ in length become a list with one tensor per sample; of a number there is one per batch.
    """
    first = outputs[0]
    if isinstance(first, torch.Tensor):
        if first.ndim == 0:
            return torch.stack(outputs)
        same = all(output.shape[1:] == first.shape[1:] for output in outputs)
        return torch.cat(outputs) if same else [row for output in outputs for row in output]
    if isinstance(first, Mapping):
        return {key: _joined([output[key] for output in outputs]) for key in first}
    if isinstance(first, (tuple, list)):
        parts = [_joined([output[position] for output in outputs]) for position in range(len(first))]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    return outputs
