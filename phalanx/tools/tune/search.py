"""One search from its request to its files: what the command line and `DistributedTuner` share."""

from __future__ import annotations

import os
import re
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.config import FIELDS
from phalanx.config.aliases import NAMES
from phalanx.config.option import option, problems_of
from phalanx.engine import find_engine
from phalanx.errors import UsageError, unknown_name
from phalanx.host.files import make_private
from phalanx.launch import prestart
from phalanx.run.spec import engine_environment
from phalanx.run.stored import STUDY_FILE, StoredRun
from phalanx.tools.tune.engine import IndependentTrials, SearchEngine, SearchPlan
from phalanx.tools.tune.executor import Executor, LocalExecutor, plan_slots
from phalanx.tools.tune.page import PAGE_FILE, axes_and_lines, command_words, page
from phalanx.tools.tune.population import Population
from phalanx.tools.tune.record import Record, open_tracking
from phalanx.tools.tune.results import (
    LiveTable,
    PlainTable,
    Results,
    check_some_worked,
    open_table,
    point_words,
    write_best,
    write_trials,
)
from phalanx.tools.tune.schedulers import SCHEDULERS, make_scheduler
from phalanx.tools.tune.space import SEARCHES, PartOfSearch, Search, SearchSpace, make_search
from phalanx.tools.tune.trainable import OF_THE_TRIAL, Trainable
from phalanx.tools.tune.trial import Objective, Trial

ENGINES = ("auto", "local", "ray")
_DEFAULT_SAMPLES = 10


@dataclass(frozen=True, kw_only=True)
class SearchRequest:
    """The options of a search, as given."""

    metric: str | None
    mode: str | None = None
    trials: int | None = option(None, "how many points", minimum=1)
    scheduler: str = option("none", "what ends trials early", choices=tuple(SCHEDULERS))
    search: str = option("random", "what draws the points", choices=tuple(SEARCHES))
    engine: str = option("auto", "what runs the trials", choices=ENGINES)
    address: str | None = None
    """The Ray cluster to search on."""
    parallel: int | None = option(None, "trials at once", minimum=1)
    num_gpus: int | None = option(None, "GPUs for all trials", minimum=1)
    trials_per_gpu: int = option(1, "trials that share a GPU", minimum=1)
    grace: int = option(1, "evaluations before a trial may end", minimum=1)
    eta: int = option(3, "asha: one of this many goes on", minimum=2)
    interval: int = option(1, "pbt: evaluations between two exchanges", minimum=1)
    mutate: tuple[str, ...] | None = None
    study_dir: str | None = None
    resume: bool = False
    part: tuple[int, int] | None = None
    """(I, N): only every N-th trial, from number I."""

    def check(self, space: SearchSpace) -> None:
        """Raise for unknown names and numbers out of range, all at once."""
        wrong = problems_of(self)
        if self.scheduler == "pbt" and self.trials == 1:
            wrong.append("scheduler = 'pbt' with trials = 1: a population has 2 members or more, better 4.")
        if self.scheduler == "pbt" and self.search == "optuna":
            wrong.append("scheduler = 'pbt' finds new points itself: search is 'random' or 'grid' with it.")
        unknown = [name for name in self.mutate or () if name not in space.domains]
        wrong += [unknown_name("hyperparameter to mutate", name, space.domains) for name in unknown]
        if self.part is not None and (self.scheduler != "none" or self.search == "optuna" or self.engine == "ray"):
            wrong.append(
                "part: trials of other jobs are not known here, so search is 'random' or 'grid', without scheduler."
            )
        if self.address is not None and self.engine == "local":
            wrong.append(f"address = {self.address!r} with engine = 'local': leave one of them out.")
        if self.resume and self.study_dir is None:
            wrong.append("resume needs to know which search: give its folder, study_dir (--study-dir).")
        if wrong:
            raise UsageError("\n  ".join(wrong))


def read_part(text: str) -> tuple[int, int]:
    """Return the two numbers of `--part I/N`."""
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or not int(match[1]) < int(match[2]):
        raise UsageError(f"--part {text}: expected I/N with I from 0 to N-1, such as 0/4.")
    return int(match[1]), int(match[2])


def search(subject: Trainable, space: SearchSpace, request: SearchRequest) -> Results:
    """Run a search to its end, write its files and return what was found."""
    request.check(space)
    _check_draws(space, request, subject.resolved.origins)
    _check_settings(subject)
    subject.check([*space.domains, *space.fixed])
    subject.check_metric(request.metric)
    objective = Objective.of(request.metric, request.mode)
    method, total = _method(subject, space, objective, request)
    folder = _study_folder(request, subject.name)
    config = subject.resolved.config
    with _open_executor(subject, request, PlainTable(objective).notice) as executor:
        try:
            make_private(folder)
        except OSError as error:
            raise UsageError(f"the folder {folder} cannot be made: {error.strerror}") from None
        tracking = open_tracking(config, subject.name, objective, folder)
        return _run(
            SearchPlan(subject, space, objective, method, executor, folder, total, config.seed, tracking, request.mode),
            request,
        )


def _method(subject: Trainable, space: SearchSpace, objective: Objective, request: SearchRequest) -> tuple[Search, int]:
    """Return where the points come from, and how many trials were asked for."""
    method = make_search(request.search, space, subject.resolved.config.seed, objective)
    total = request.trials or method.size or _DEFAULT_SAMPLES
    if request.part is None:
        return method, total
    total = len(range(request.part[0], total, request.part[1]))
    if total == 0:
        raise UsageError(f"part {request.part[0]}/{request.part[1]} has no trials", hint="Give more --trials.")
    return PartOfSearch(method, *request.part), total


def _open_executor(
    subject: Trainable, request: SearchRequest, notice: Callable[[str], None]
) -> AbstractContextManager[Executor]:
    """Return Ray where it was asked for, or where there is a cluster to run on; else this machine's own processes."""
    if request.engine == "ray" or (request.engine == "auto" and request.address is not None):
        on_ray: AbstractContextManager[Executor] = find_engine("ray").executor(subject, request, notice)
        return on_ray
    config = subject.resolved.config
    slots = plan_slots(
        config, num_gpus=request.num_gpus, trials_per_gpu=request.trials_per_gpu, parallel=request.parallel
    )
    prestart(engine_environment(config, "cuda" if slots.slots[0].gpus else "cpu"))
    return nullcontext(LocalExecutor(subject, slots))


def _check_draws(space: SearchSpace, request: SearchRequest, origins: Mapping[str, str]) -> None:
    """Raise where nothing is drawn, and where a value is both given and searched."""
    if not space.domains and request.trials != 1:
        raise UsageError(
            "the space draws nothing: all its values are fixed, so all trials would be the same",
            hint="Give a value a range, such as { uniform = [0.1, 0.9] }, or ask for one trial: --trials 1.",
        )
    twice = [name for name in space.domains if origins.get(name) in ("flag", "argument")]
    if twice:
        raise UsageError(f"{', '.join(twice)}: searched, and given for all trials too", hint="Leave one of them out.")


def _check_settings(subject: Trainable) -> None:
    origins, config = subject.resolved.origins, subject.resolved.config
    names = [name for name in OF_THE_TRIAL if origins[name] != "default"]
    if names:
        raise UsageError(
            f"{', '.join(names)}: every trial has its own",
            hint="The folder of the whole search is --study-dir (study_dir).",
        )
    if config.launcher != "local":
        raise UsageError(
            f"backend = {config.backend!r}: trials start their ranks themselves, on one node each",
            hint="Leave backend out, or 'pytorch-fsdp' or 'deepspeed'; to search on a Ray cluster: --engine ray.",
        )
    if config.num_nodes > 1:
        raise UsageError(f"num_nodes = {config.num_nodes}: a trial runs on one node")


def _run(plan: SearchPlan, request: SearchRequest) -> Results:
    record = Record(plan.folder, plan.space, plan.objective, _common_settings(plan, request))
    table = open_table(plan.objective, progress=plan.subject.resolved.config.progress)
    results = None
    try:
        engine = _engine(plan, record, table, request)
        table.notice(f"{plan.total} trials of {plan.subject.name}, {plan.executor.summary}; {plan.folder}")
        done = sum(trial.state.is_final for trial in engine.trials)
        table.progress.begin(plan.total, done)
        if done:
            table.notice(f"{done} of them are done already")
        try:
            trials = engine.run()
        finally:
            table.close(engine.trials)
        results = _conclude(plan, trials, table)
    finally:
        plan.tracking.close(results)
        record.close()
    return results


def _engine(plan: SearchPlan, record: Record, table: PlainTable | LiveTable, request: SearchRequest) -> SearchEngine:
    if request.scheduler == "pbt":
        return Population(plan, record, table, interval=request.interval, mutate=request.mutate)
    scheduler = make_scheduler(request.scheduler, eta=request.eta, grace=request.grace)
    return IndependentTrials(plan, record, table, scheduler)


def _conclude(plan: SearchPlan, trials: Sequence[Trial], table: PlainTable | LiveTable) -> Results:
    """Write the files of a search that has ended, and show where they are."""
    subject, objective = plan.subject, plan.objective
    check_some_worked(trials)
    results = Results(tuple(trials), objective, plan.folder)
    write_trials(results)
    best = write_best(results, subject)
    table.notice(f"\nbest: trial {results.best.number}, {objective.metric} {results.best_value:.6g}")
    table.notice(f"  {point_words(results.best_params)}")
    if results.failed:
        count = len(results.failed)
        table.notice(f"{count} trial{'s' * (count > 1)} failed, the first with: {results.failed[0].cause}")
    table.notice(f"picture: {_short(_draw(plan, results))}")
    stored = StoredRun(results.best.folder)
    if (checkpoint := stored.best_checkpoint or next(reversed(stored.checkpoints), None)) is not None:
        table.notice(f"best checkpoint: {_short(checkpoint)}")
    table.notice(f"next:\n  {next_command(subject, results, _short(best))}")
    return results


def _short(path: Path) -> str:
    """Return a path as the user would write it."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def next_command(subject: Trainable, results: Results, best: str) -> str:
    """Return the command that trains with the best values."""
    config, origins = subject.resolved.config, subject.resolved.origins
    words = subject.command(best, {n: v for n, v in results.best_params.items() if n not in NAMES})
    if words is None:
        return f"use the values of {best} in your program"
    names = [n for n in FIELDS if origins[n] in ("flag", "argument") and n not in results.best_params]
    flags = [word for name in names if (word := _flag(name, getattr(config, name)))]
    end = words.index("--") if "--" in words else len(words)
    return shlex.join([*words[:end], *flags, *words[end:]])


def _flag(name: str, value: Any) -> str:
    flag = name.replace("_", "-")
    return f"--{flag}" if value is True else f"--no-{flag}" if value is False else f"--{flag}={value}"


def _draw(plan: SearchPlan, results: Results) -> Path:
    """Write the page, and return its path."""
    axes, lines = axes_and_lines(results.trials, plan.space, results.objective)
    path = results.folder / PAGE_FILE
    facts = {"command": command_words(), "seed": str(plan.seed), "folder": str(results.folder)}
    path.write_text(page(results, plan.space, axes, lines, f"Tuning {plan.subject.name}", facts), encoding="utf-8")
    return path


def _common_settings(plan: SearchPlan, request: SearchRequest) -> dict[str, Any]:
    """Return what a resumed search must have in common with the one that began."""
    return {
        "subject": plan.subject.name,
        "space": plan.space.to_plain(),
        "metric": plan.objective.metric,
        "mode": plan.objective.mode,
        "scheduler": request.scheduler,
        "search": request.search,
        "seed": plan.seed,
    }


def _study_folder(request: SearchRequest, name: str) -> Path:
    """Return the folder of the search; raise where it holds a search that is not to be resumed."""
    if request.study_dir is None:
        plain = re.sub(r"[^\w.-]+", "-", name).strip("-") or "search"
        folder = Path("runs") / f"tune-{plain}-{time.strftime('%Y%m%d-%H%M%S')}"
    else:
        folder = Path(request.study_dir)
    exists = (folder / STUDY_FILE).exists()
    if request.resume and not exists:
        raise UsageError(f"{folder} holds no search that could go on", hint="Leave --resume out to begin one there.")
    if exists and not request.resume:
        raise UsageError(
            f"{folder} holds a search already", hint="Add --resume to go on with it, or choose another --study-dir."
        )
    return folder.absolute()
