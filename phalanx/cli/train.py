"""`phalanx train`: a recipe, a script or a module on N ranks."""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from phalanx.cli import command_began
from phalanx.cli.dry_run import print_plan
from phalanx.cli.flags import FlagParser, read_target, resolve_flags, split_own
from phalanx.cli.json_output import json_at_end, run_summary
from phalanx.cli.parsers import train_parser
from phalanx.config import DistributedConfig, ResolvedConfig
from phalanx.engine import engine_of
from phalanx.errors import NonFiniteLossError, PreemptedError, RankFailedError, UsageError
from phalanx.host.files import scratch_folder
from phalanx.host.gpus import count_gpus
from phalanx.launch import CallTarget, ModuleTarget, ScriptTarget
from phalanx.launch.nccl import nccl_environment
from phalanx.launch.rank import run_target
from phalanx.launch.spec import Target
from phalanx.observe.goodput import EVENTS
from phalanx.observe.guard import say_to_user
from phalanx.observe.run_folder import make_run_dir
from phalanx.recipes import Recipe, find_recipe, recipe_names
from phalanx.run.conductor import recorded_run
from phalanx.run.preflight import check_before_start, check_packages, check_script_starter
from phalanx.run.record import RunRecord
from phalanx.run.resume import check_run_dir, check_tag, how_to_resume, last_run_of, resume_command, resume_settings
from phalanx.run.script_settings import check_script_settings
from phalanx.run.spec import RUN_JOB, given_settings, launch_spec, recipe_target, settings_environment
from phalanx.run.stored import RUNS, StoredRun, find_run
from phalanx.world.env import RankEnv, export_rank_env, read_rank_env
from phalanx.world.mesh import JobLayout, plan_layout

_HINT = "Write: phalanx train digits, phalanx train --script train.py, or phalanx train -m package.train"


def run(arguments: Sequence[str]) -> int:
    """Run the verb."""
    words, script_arguments = split_own(arguments)
    parser = train_parser()
    namespace, unknown = parser.parse_known_args(words)
    _check_own_arguments(parser, namespace, unknown, words, script_arguments)
    parser.check(namespace, unknown)
    _settle_resume(namespace)
    if namespace.resume and not _names_target(namespace):
        return resume_run(namespace.resume, namespace)
    named = read_target(namespace, script_arguments, "train", _HINT)
    recipe, target = (named, None) if isinstance(named, Recipe) else (None, named)
    resolved = resolve_flags(namespace, recipe, _resume_settings(namespace, recipe, target))
    resolved = ResolvedConfig(resolved.config.settled, resolved.origins)
    config = resolved.config
    if config.hosts is not None and config.launcher == "local" and config.node_rank is None:
        return _run_on_hosts(list(arguments), dry=namespace.dry_run)
    tags = [word.strip() for word in namespace.tags.split(",")] if namespace.tags is not None else []
    for tag in tags:
        check_tag(tag)
    if namespace.dry_run:
        return show_plan(recipe, resolved, target, overwrite=namespace.overwrite, as_json=namespace.json)
    labels = {"tags": tags, "note": namespace.note}
    return start_run(recipe, resolved, target, overwrite=namespace.overwrite, as_json=namespace.json, labels=labels)


def start_run(
    recipe: Recipe | None,
    resolved: ResolvedConfig,
    target: ScriptTarget | ModuleTarget | None,
    *,
    overwrite: bool = False,
    as_json: bool = False,
    labels: Mapping[str, Any] | None = None,
) -> int:
    """Train here where this process is a rank already, else on ranks that are started; return the exit code.

    `labels`: tags and note of the run.
    """
    _check_target(recipe, resolved, target)
    started = read_rank_env()
    if isinstance(target, ScriptTarget):
        _check_starter(Path(target.path), resolved.config, started)
    if as_json and started is not None and not _is_node_of(started, resolved.config):
        raise UsageError("--json is for ranks that Phalanx starts", hint=f"Leave it out under {started.started_by}.")
    join = None if started is not None else engine_of(resolved.config).run_as_task(resolved.config, resolved.given)
    if join is not None:
        return _run_as_task(join, resolved, target)
    if started is not None and not _is_node_of(started, resolved.config):
        return _run_as_rank(started, recipe, resolved, target)  # torchrun, srun or mpirun started this rank
    if started is not None:
        resolved = _as_node(started, resolved)
    layout = plan_layout(resolved.config, count_gpus())
    check_run_dir(resolved.config, overwrite=overwrite, settled=recipe is not None)

    def replace_run() -> None:
        """Check again what the folder holds, now that no other process can start a run in it."""
        replaced = check_run_dir(resolved.config, overwrite=overwrite, settled=recipe is not None)
        if replaced is not None:
            replaced.clear()

    return _launch(recipe, resolved, target, layout, replace_run, as_json=as_json, labels=labels or {})


def resume_run(name: str, namespace: argparse.Namespace) -> int:
    """Continue a run with the flags of a command; return the exit code."""
    stored = StoredRun(find_run(name).path.resolve())
    stored.require_trust("names the program that would run")
    recipe, target = _started(stored)
    assert stored.record is not None, "checked with the target"
    if Path(stored.record.directory).is_dir():
        os.chdir(stored.record.directory)  # paths in its settings and arguments are relative to that folder
    shorter = os.path.relpath(stored.path)
    settings = resume_settings(stored if shorter.startswith("..") else StoredRun(Path(shorter)))
    # The settings of the run take the place of a recipe's, so that files, variables and flags win over them.
    base, settings_of_run = recipe or Recipe(stored.name, "", {}, {}), stored.record.settings
    resolved = resolve_flags(namespace, dataclasses.replace(base, settings=settings_of_run), settings)
    return start_run(recipe, resolved, target, as_json=namespace.json)


def _started(run: StoredRun) -> tuple[Recipe | None, ScriptTarget | ModuleTarget | None]:
    """Return what a run trains; refuse one that the command line did not start."""
    recipe, record = run.recipe, run.record
    if recipe is not None:
        recipe.check()
        return recipe, None
    if record is not None and record.script:
        return None, ScriptTarget(record.script, tuple(record.arguments))
    if record is not None and record.module:
        return None, ModuleTarget(record.module, tuple(record.arguments))
    if run.damage:
        raise UsageError(run.damage, hint=f"Start it again with resume_from_checkpoint='{run.checkpoint_dir}'.")
    again = f"Run your program again with resume_from_checkpoint='{run.checkpoint_dir}'."
    raise UsageError(
        f"{run.path} was not started by phalanx train, so the command cannot be repeated",
        hint=again if run.checkpoints else "It has saved no checkpoint: give checkpoint_dir= in your program.",
    )


def _run_on_hosts(words: list[str], *, dry: bool) -> int:
    """Start one launcher per host over ssh, and forward their output; the options of ssh are those of submit."""
    from phalanx.cli.submit import describe_job
    from phalanx.tools.submit.ssh import Ssh, SshOptions
    from phalanx.tools.submit.target import read_options

    job, files, _ = describe_job([word for word in words if word != "--dry-run"], None, continues=False)
    options = read_options("ssh", {}, files, os.environ)
    assert isinstance(options, SshOptions)
    if dry:
        print("\n".join(Ssh(options).render(job).values()), end="")
        return 0
    return Ssh(options).run(job, lambda line: print(line, flush=True))


def _check_target(recipe: Recipe | None, resolved: ResolvedConfig, target: ScriptTarget | ModuleTarget | None) -> None:
    if recipe is not None:
        source = recipe.data.get("root") or recipe.data["name"]
        if recipe.needs_data and "root" not in recipe.data:
            raise UsageError(f"the recipe '{recipe.name}' needs your files", hint="Add: --data path/to/them")
        if (isinstance(source, list) or Path(source).is_absolute()) and resolved.config.launcher == "local":
            from phalanx.zoo.data import OF_FOLDERS
            from phalanx.zoo.data.places import find_places, one_folder

            # Before the ranks start, which takes seconds.
            name = str(recipe.data["name"])
            _ = one_folder(source, name) if name in OF_FOLDERS else find_places(source)
    if target is not None:
        target.check()
        check_script_settings(target, resolved)


def show_plan(
    recipe: Recipe | None,
    resolved: ResolvedConfig,
    target: ScriptTarget | ModuleTarget | None,
    *,
    overwrite: bool = False,
    as_json: bool = False,
) -> int:
    """Check what is checked before a start, and print the plan; GPUs that are not here are planned for."""
    _check_target(recipe, resolved, target)
    started = read_rank_env()
    if isinstance(target, ScriptTarget):
        _check_starter(Path(target.path), resolved.config, started)
    if started is not None and _is_node_of(started, resolved.config):
        resolved = _as_node(started, resolved)
    config, gpus = resolved.config, count_gpus()
    gpus_needed = (
        (config.total_ranks or 1) // config.num_nodes if config.device == "cuda" and not config.share_gpus else 0
    )
    layout = plan_layout(config, max(gpus, gpus_needed))
    if not overwrite:
        check_run_dir(config, overwrite=False, settled=recipe is not None)
    check_before_start(config.with_trusted(device=layout.device))
    launch_spec(config, layout, target or CallTarget(RUN_JOB), Path("logs"))  # its checks
    return print_plan(
        recipe, resolved, layout, target_name(recipe, target), missing=gpus_needed - gpus, as_json=as_json
    )


def _names_target(namespace: argparse.Namespace) -> bool:
    return bool(namespace.recipe or namespace.script or namespace.module or namespace.model)


def _settle_resume(namespace: argparse.Namespace) -> None:
    """Let `train --resume digits` mean the last run of that recipe, where no run has that name."""
    if namespace.resume is None or _names_target(namespace):
        return
    if namespace.resume == "":
        raise UsageError("--resume needs to know which run", hint="Write: phalanx resume RUN; see phalanx runs")
    if find_recipe(namespace.resume) is not None and not (RUNS / namespace.resume).is_dir():
        namespace.recipe, namespace.resume = namespace.resume, ""


def _resume_settings(
    namespace: argparse.Namespace, recipe: Recipe | None, target: ScriptTarget | ModuleTarget | None
) -> dict[str, Any]:
    """Return the settings with which the run of --resume continues in its folder."""
    if namespace.resume is None:
        return {}
    if namespace.resume:
        return resume_settings(find_run(namespace.resume))
    return resume_settings(last_run_of(getattr(namespace, "name", None) or target_name(recipe, target)))


def target_name(recipe: Recipe | None, target: ScriptTarget | ModuleTarget | None) -> str:
    """Return the name of a run: that of its recipe, script or module."""
    if recipe is not None:
        return recipe.name
    return Path(target.path).stem if isinstance(target, ScriptTarget) else target.name if target else "run"


def _check_starter(script: Path, config: DistributedConfig, started: RankEnv | None) -> None:
    """Refuse a script for Horovod on several ranks unless horovodrun starts them."""
    ranks = started.world_size if started is not None else config.total_ranks or 1
    if ranks > 1:
        launcher = "phalanx" if config.launcher == "local" else config.launcher
        check_script_starter(script, launcher if started is None else started.started_by)


def _check_own_arguments(
    parser: FlagParser, namespace: argparse.Namespace, unknown: list[str], words: list[str], script_arguments: list[str]
) -> None:
    """Refuse arguments of a script before --, and show the correct command line."""
    named = namespace.recipe if namespace.recipe not in recipe_names() else None
    if not (namespace.script or namespace.module) or not (unknown or named):
        return
    ours, scripts = _part(words, [*unknown, *([named] if named else [])])
    flags = parser.describe_unknown([word for word in unknown if word.startswith("-")])
    problems = flags or [f"unexpected argument{'s' * (len(scripts) > 1)} {shlex.join(scripts)}."]
    raise UsageError(
        "\n  ".join([*problems, "A script's own arguments go after --:"]),
        hint=shlex.join(["phalanx", "train", *ours, "--", *scripts, *script_arguments]),
    )


def _part(words: list[str], chosen: list[str]) -> tuple[list[str], list[str]]:
    """Separate the chosen words from the others; both keep their order."""
    remaining, rest, chosen_words = list(chosen), [], []
    for word in words:
        if word in remaining:
            remaining.remove(word)
            chosen_words.append(word)
        else:
            rest.append(word)
    return rest, chosen_words


def _launch(
    recipe: Recipe | None,
    resolved: ResolvedConfig,
    script: ScriptTarget | ModuleTarget | None,
    layout: JobLayout,
    replace_run: Callable[[], None],
    *,
    as_json: bool,
    labels: Mapping[str, Any],
) -> int:
    """Start the ranks, and return the exit code."""
    config = resolved.config.with_trusted(device=layout.device)
    if recipe is None:  # a script may have other settings inside
        check_packages(config)
    else:
        check_before_start(config)
    run_dir = make_run_dir(config, target_name(recipe, script))
    events = run_dir / EVENTS
    before: int | None = None
    """The size of the events of earlier commands; None before this one has the folder."""
    summary: dict[str, Any] = {}
    record, advise = _record(resolved, recipe, script, labels), partial(_advise, run_dir, config)
    with (
        json_at_end(lambda: summary or ({} if before is None else run_summary(run_dir, before)), enabled=as_json),
        recorded_run(run_dir, config, record, of_script=recipe is None, advise=advise, prepare=replace_run) as run,
        scratch_folder("run") as folder,
    ):  # the console of a script shows its output only
        before = events.stat().st_size if events.exists() else 0
        target: Target | None = script if recipe is None else recipe_target(recipe, config, run_dir, folder)
        assert target is not None, "either a recipe or a script was named"
        env = _rank_environment(resolved, config, run_dir)
        spec = launch_spec(config, layout, target, run_dir / "logs", env=env, launched=command_began())
        run.on_ranks(spec, waiting="" if recipe is None else layout.starting)
        if config.profiling and config.profiling.last and not any((run_dir / "profile").glob("rank-*.json.gz")):
            say_to_user("no profile was recorded: a script must train with a trainer of Phalanx for --profile.")
        if as_json:
            summary |= run_summary(run_dir, before)  # a fast_dev_run leaves no folder
    return 0


def _advise(run_dir: Path, config: DistributedConfig, error: BaseException, _is_kept: bool) -> None:
    """Name the command that continues a run which did not end well."""
    run = StoredRun(run_dir)
    if isinstance(error, KeyboardInterrupt) and (hint := how_to_resume(run)):
        say_to_user(hint)
    if isinstance(error, (PreemptedError, RankFailedError)) and run.checkpoints:
        advice = f"{error.hint}\n  " if isinstance(error, RankFailedError) and error.hint else ""
        error.hint = f"{advice}To resume: {resume_command(run)}"
    if isinstance(error, NonFiniteLossError) and config.debug is None:
        error.hint += f"\n  next: {_with_debug(run, compiled=bool(config.compile))}"


def _with_debug(run: StoredRun, *, compiled: bool) -> str:
    """Return the command of a run, with the flag that names the module which first gives a NaN."""
    words = run.record.command if run.record is not None else ["phalanx", "train", "..."]
    end = words.index("--") if "--" in words else len(words)
    return shlex.join([*words[:end], "--debug", "nan", *(["--no-compile"] if compiled else []), *words[end:]])


def _record(
    resolved: ResolvedConfig,
    recipe: Recipe | None,
    target: ScriptTarget | ModuleTarget | None,
    labels: Mapping[str, Any],
) -> RunRecord:
    """Describe the run for `run.json`."""
    settings_given = given_settings(resolved, resolved.config)
    settings = {
        name: value for name, value in settings_given.items() if name not in ("run_dir", "resume_from_checkpoint")
    }
    named: dict[str, Any] = {"recipe": None if recipe is None else dataclasses.asdict(recipe)}
    if target is not None:
        key, value = ("script", str(target.path)) if isinstance(target, ScriptTarget) else ("module", target.name)
        named |= {key: value, "arguments": list(target.args)}
    return RunRecord.of_this_process(settings, **named, **labels)


def _rank_environment(
    resolved: ResolvedConfig, config: DistributedConfig, run_dir: Path | None = None
) -> dict[str, str]:
    """Return the given settings as variables for a trainer inside the script."""
    settings_given = given_settings(resolved, config)
    if run_dir is not None:
        settings_given |= {"run_dir": str(run_dir), "device": config.device}
    return settings_environment(settings_given)


def _is_node_of(started: RankEnv, config: DistributedConfig) -> bool:
    """Whether a scheduler started one process per node, which starts the ranks of that node."""
    one_per_node = started.started_by in {"srun", "mpirun"} and started.local_world_size == 1
    # A rank by itself on each node needs no launcher, unless one has to replace it.
    starts_others = config.num_nodes < (config.total_ranks or 0) or config.max_restarts or config.min_workers
    return one_per_node and started.world_size == config.num_nodes and bool(starts_others)


def _as_node(started: RankEnv, resolved: ResolvedConfig) -> ResolvedConfig:
    """Fill in node_rank and rdzv_endpoint from the scheduler, where flags did not set them."""
    config = resolved.config
    endpoint = config.rdzv_endpoint or f"{started.master_addr}:{started.master_port}"
    node_rank = started.rank if config.node_rank is None else config.node_rank
    return ResolvedConfig(config.with_trusted(node_rank=node_rank, rdzv_endpoint=endpoint), resolved.origins)


def _run_as_task(join: Callable[[], None], resolved: ResolvedConfig, target: ScriptTarget | ModuleTarget | None) -> int:
    assert target is not None, "recipes are torch models, and were refused"
    check_packages(resolved.config)
    os.environ.update(_rank_environment(resolved, resolved.config))
    join()
    run_target(target, sys.path)
    return 0


def _run_as_rank(
    started: RankEnv, recipe: Recipe | None, resolved: ResolvedConfig, target: ScriptTarget | ModuleTarget | None
) -> int:
    if recipe is None:
        export_rank_env(started)  # a plain torch script reads torchrun's variables only
        assert target is not None, "either a recipe or a script was named"
        os.environ.update(nccl_environment(resolved.config.nccl_env, os.environ))
        os.environ.update(_rank_environment(resolved, resolved.config))
        run_target(target, sys.path)
        return 0
    from phalanx.zoo.recipe import recipe_job

    recipe_job(recipe, resolved.config, checked=False).run()
    return 0
