"""`phalanx submit`: hand a run to a cluster; what `phalanx train` takes, and the options of the target."""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from phalanx.cli.flags import FlagParser, read_target, resolve_flags, split_own
from phalanx.cli.json_output import add_json_flag, print_json
from phalanx.cli.parsers import train_parser, tune_parser
from phalanx.config import DistributedConfig
from phalanx.config.option import kinds
from phalanx.config.settings import parse_hosts
from phalanx.errors import PhalanxError, UsageError
from phalanx.host.files import make_private
from phalanx.launch.nccl import nccl_variables
from phalanx.observe.guard import say_to_user
from phalanx.recipes import Recipe
from phalanx.tools.plan import Cluster, Goal, estimate, presets
from phalanx.tools.plan.presets import of_recipe
from phalanx.tools.plan.rules import layout_of
from phalanx.tools.submit.job import (
    ENDED,
    ClusterJob,
    JobRecord,
    job_name,
    jobs_folder,
    new_record,
    records,
    write_record,
)
from phalanx.tools.submit.job_files import archive, archive_line, check_ship, check_uv, local_files
from phalanx.tools.submit.target import CANCEL, TARGETS, CommonOptions, Target, read_options, target_class
from phalanx.world.mesh import plan_mesh

_TUNE = "Write: phalanx submit slurm --tune digits --space space.toml --array 0-7"
_HELP = "Submit a run to a cluster. Takes the arguments of `phalanx train`, and the options of the target."


def run(arguments: Sequence[str]) -> int:
    """Run the verb."""
    words = list(arguments)
    if not words:
        raise UsageError("submit needs a target", hint=_examples())
    if words[0] in ("-h", "--help"):
        print(_overview())
        return 0
    name, (ours, script_arguments) = words[0], split_own(words[1:])
    kind = target_class(name)
    parser = submit_parser(name, kind.options_class)
    if {"-h", "--help"} & set(ours):
        parser.print_help()
        return 0
    namespace, rest = parser.parse_known_args(list(_joined(ours)))
    _check_flags(parser, rest, tune_parser() if namespace.tune else train_parser())
    trained = [*rest, *(["--", *script_arguments] if script_arguments else [])]
    options_given = {key: value for key, value in vars(namespace).items() if key not in _OWN}
    if namespace.tune and not kind.has_arrays:
        raise UsageError(f"--tune splits a search over an array of jobs, which {name} does not have", hint=_TUNE)
    describe = describe_search if namespace.tune else describe_job
    job, config_files, planned = describe(trained, namespace.job_name)
    options = read_options(name, {**options_given, "name": job.name}, config_files, os.environ)
    if job.config.share_gpus and name != "ssh":
        raise UsageError(
            f"share_gpus = True: a job of {name} asks for a GPU per rank, so none would be shared",
            hint="Leave share_gpus out; or take one GPU and start it there: phalanx train ... --share-gpus",
        )
    if options.gpu is not None:
        say_to_user(check_fits(job, planned, options.gpu))
    job = dataclasses.replace(
        job,
        environment={**job.environment, **variables(options.env)},
        directory=job.directory if kind.is_contained else options.directory or job.directory,
    )
    return hand_over(name, kind(options), job, namespace)


def _joined(words: list[str]) -> Iterator[str]:
    """Join flags with values that argparse would take for flags: --sbatch --reservation=x."""
    rest = iter(words)
    for word in rest:
        value = next(rest, None) if word in ("--sbatch", "--ssh", "--uv-sync") else None
        yield word if value is None else f"{word}={value}"


def _check_flags(parser: FlagParser, words: list[str], verb: FlagParser) -> None:
    """Report flags that neither train (or tune) nor the target has, with the nearest of both."""
    if unknown := verb.parse_known_args(words)[1]:
        parser._actions += verb._actions
        raise UsageError("\n  ".join(parser.describe_unknown(unknown)), hint=f"See {parser.prog} --help")


_OWN = ("tune", "render", "dry_run", "follow", "json", "job_name")


def submit_parser(name: str, options: type[CommonOptions]) -> FlagParser:
    """Return the parser of a target's own flags; the others are those of train."""
    parser = FlagParser(
        prog=f"phalanx submit {name}",
        usage=f"phalanx submit {name} <recipe> | --script FILE | -m MODULE [train's options] [target's options]",
        description=f"Submit to {TARGETS[name][1]}. All options of `phalanx train` are accepted, too.",
    )
    parser.add_argument("--tune", action="store_true", help="submit a search of phalanx tune, split over a job array")
    parser.add_argument("--render", action="store_true", help="print exactly what would be submitted")
    parser.add_argument("--dry-run", action="store_true", help="render it and validate it; submit nothing")
    parser.add_argument("--follow", action="store_true", help="show the output after submitting, until the job ends")
    parser.add_argument(
        "--job-name", metavar="TEXT", help="name of the job (default: the recipe's, with a random ending)"
    )
    add_json_flag(parser, "the record of the job")
    section = parser.add_argument_group(f"options of {name}")
    for field in dataclasses.fields(options):
        if field.name == "name":
            continue
        flag, default = (
            "--" + field.name.replace("_", "-"),
            f" [{field.default}]" if field.default not in (None, False) else "",
        )
        plain: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS}
        text = f"{field.metadata['help']}{default}".replace("%", "%%")
        if kinds(field) == ("bool",):
            section.add_argument(flag, action=argparse.BooleanOptionalAction, help=text, **plain)
        else:
            section.add_argument(flag, metavar=_metavar(field), help=text, **plain)
    return parser


def _metavar(field: dataclasses.Field[Any]) -> str:
    if choices := field.metadata["choices"]:
        return f"{{{','.join(filter(None, choices))}}}"
    return "N" if "int" in kinds(field) else "X" if "float" in kinds(field) else "TEXT"


def check_fits(job: ClusterJob, model: str | None, gpu: str) -> str:
    """Return the predicted memory and step time of a job on a type of GPU; UsageError if it does not fit."""
    presets.gpu(gpu)
    if model is None or job.config.batch_size is None:
        return f"whether it fits on {gpu} is not known: the planner knows the recipes gpt, llama and moe with a preset"
    mesh = plan_mesh(job.config, job.ranks, job.ranks_per_node)
    layout = layout_of(job.config, mesh, job.config.batch_size)
    batch = job.config.batch_size * job.config.gradient_accumulation_steps * mesh.dp_size
    mixed = job.config.mixed_precision
    precision = "fp32" if not mixed else "fp16" if mixed is True else str(mixed)
    seq_len = presets.train_names(model).seq_len or 2048
    goal = Goal(global_batch=batch, seq_len=seq_len, precision=precision, reduce_bytes=4)
    cluster = Cluster(gpu=gpu, gpus=job.ranks, gpus_per_node=job.ranks_per_node)
    kernels = "fused" if job.config.compile else "autocast" if mixed else "eager"
    prediction = estimate(model, cluster, dataclasses.replace(layout, kernels=kernels, attention="flash"), goal)
    if not prediction.fits:
        raise UsageError(
            f"a rank needs {prediction.needed_gib:.0f} GiB, and {gpu} has {prediction.memory_limit_gib:.0f}",
            hint=f"Find a layout that fits: phalanx plan {model} --gpus {job.ranks} --gpu {gpu}",
        )
    memory = f"{prediction.needed_gib:.0f} of {prediction.memory_limit_gib:.0f} GiB per GPU"
    return f"planned: {memory}, {prediction.step_seconds:.3g} s per step"


def describe_job(
    words: list[str], name_given: str | None, *, continues: bool = True
) -> tuple[ClusterJob, list[str] | None, str | None]:
    """Return the job of train's arguments, checked as train does, its --config files, and the planner's model.

    `continues`: started again, it goes on from its last checkpoint.
    """
    ours, script_arguments = split_own(words)
    namespace = train_parser().parse_all(ours)
    named = read_target(
        namespace, script_arguments, "submit", "Write: phalanx submit slurm digits --num-nodes 2 --gpus-per-node 8"
    )
    recipe = named if isinstance(named, Recipe) else None
    if not isinstance(named, Recipe):
        named.check()
    config = resolve_flags(namespace, recipe).config
    subject = recipe.name if recipe else Path(namespace.script or namespace.module).stem
    name = job_name(name_given, config.name or subject)
    run_dir = config.run_dir or f"runs/{name}"
    extra = [] if config.run_dir or namespace.resume is not None else ["--run-dir", run_dir]
    if continues and not config.resume_from_checkpoint:
        extra += [] if config.checkpoint_dir else ["--checkpoint-dir", f"{run_dir}/checkpoints"]
        extra.append("--resume-from-checkpoint=true")
    total, nodes = config.total_ranks or 1, len(parse_hosts(config.hosts)) if config.hosts else config.num_nodes
    job = ClusterJob(
        name=name,
        arguments=(*ours, *extra, *(["--", *script_arguments] if script_arguments else [])),
        config=config,
        nodes=nodes,
        ranks_per_node=total // nodes,
        device=_device(config),
        directory=os.getcwd(),
        run_dir=run_dir,
        environment=_network(config),
        files=local_files(namespace, recipe),
        data_workers=_data_workers(recipe),
    )
    preset = None if recipe is None else recipe.model.get("preset")
    return job, namespace.config, None if recipe is None else of_recipe(recipe.name, preset)


def describe_search(words: list[str], name_given: str | None) -> tuple[ClusterJob, list[str] | None, str | None]:
    """Return the job of `phalanx tune`'s arguments, whose trials are split over the tasks of an array."""
    ours, script_arguments = split_own(words)
    namespace = tune_parser().parse_all(ours)
    named = read_target(namespace, script_arguments, "tune", _TUNE)
    recipe = named if isinstance(named, Recipe) else None
    if namespace.space is None or not Path(namespace.space).is_file():
        problem = "is not given" if namespace.space is None else f"{namespace.space} does not exist"
        raise UsageError(f"--tune needs the file of the search space, and --space {problem}", hint=_TUNE)
    config = resolve_flags(namespace, recipe).config
    name = job_name(name_given, f"tune-{recipe.name if recipe else Path(namespace.script or namespace.module).stem}")
    job = ClusterJob(
        name=name,
        arguments=tuple(words),
        config=config,
        nodes=1,
        ranks_per_node=config.total_ranks or 1,
        device=_device(config),
        directory=os.getcwd(),
        run_dir=namespace.study_dir or f"runs/{name}",
        environment=_network(config),
        verb="tune",
        files=(*local_files(namespace, recipe), namespace.space),
        data_workers=_data_workers(recipe),
    )
    return job, namespace.config, None


def _device(config: DistributedConfig) -> str:
    """Return where ranks compute: on GPUs where these were counted."""
    return "cpu" if config.device == "auto" else config.device


def _data_workers(recipe: Recipe | None) -> int | None:
    """Return the processes per rank that a recipe names for its data, or None."""
    workers = None if recipe is None else recipe.data.get("workers")
    return workers if isinstance(workers, int) else None


def _network(config: DistributedConfig) -> dict[str, str]:
    """Return NCCL's variables that do not depend on the machine; the launchers there set the others."""
    if config.nccl_env is None:
        return {}
    return {
        variable.name: variable.value
        for variable in nccl_variables(config.nccl_env)
        if not variable.advice and "IFNAME" not in variable.name
    }


def variables(text: str | None) -> dict[str, str]:
    """Read NAME=value,NAME=value."""
    pairs = [part.partition("=") for part in (text or "").split(",") if part]
    if wrong := [name for name, equals, _ in pairs if not equals or not name.isidentifier()]:
        raise UsageError(f"--env {text}: {wrong[0]!r} is not NAME=value", hint="Write: --env WANDB_MODE=offline,A=1")
    return {name: value for name, _, value in pairs}


def hand_over(
    name: str, target: Target[Any], job: ClusterJob, namespace: argparse.Namespace, *, resumes: str = ""
) -> int:
    """Render, check, submit and record a job; `resumes`: the job that it continues."""
    check_uv(target)
    check_ship(target, job)
    files = target.render(job)
    if target.options.ship == "archive":
        comment = "# " * (namespace.render or namespace.dry_run)  # beside files that someone may redirect with it
        print(comment + archive_line(Path.cwd(), job.files), file=sys.stderr)
    if namespace.render:
        print("\n".join(_with_names(files)))
        return 0
    _refuse_twice(job.name)
    checked = target.check(job, files)
    if namespace.dry_run:
        print(
            "\n".join([*_with_names(files), "", *(f"# checked: {line}" for line in checked), "# nothing was submitted"])
        )
        return 0
    record = _submit(name, target, job, files, resumes)
    if namespace.json:
        print_json(dataclasses.asdict(record))
    else:
        print(f"submitted {job.name} as {name} job {record.id}")
        print(f"  phalanx jobs show {job.name}    phalanx jobs logs {job.name} -f    phalanx jobs cancel {job.name}")
        print(f"  shipped: {_shipped(target, job)}")
    if namespace.follow:
        for line in target.logs(record, follow=True, rank=None):
            print(line, flush=True, file=sys.stderr if namespace.json else sys.stdout)
    return 0


def _submit(name: str, target: Target[Any], job: ClusterJob, files: dict[str, str], resumes: str) -> JobRecord:
    """Write the files, submit them and record the job; where a step fails, what came before it is taken back."""
    folder = jobs_folder() / job.name
    before = folder.with_name(f".{job.name}.before")  # of an ended job with this name
    make_private(jobs_folder())
    if folder.exists():
        shutil.rmtree(before, ignore_errors=True)
        folder.rename(before)
    make_private(folder)
    record = None
    try:
        for file, text in files.items():
            (folder / file).write_text(text, encoding="utf-8")
        if target.options.ship == "archive" and not target.is_contained:  # pods have it in a ConfigMap
            archived, content = archive(Path.cwd(), job.files)
            (folder / archived).write_bytes(content)
        record = new_record(job, name, target.submit(job, folder), dataclasses.asdict(target.options), folder)
        record = dataclasses.replace(record, resumes=resumes)
        write_record(record)
    except BaseException as error:
        try:
            if record is not None:
                _cancel_unrecorded(target, record, error)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            if before.exists():
                before.rename(folder)
        raise
    shutil.rmtree(before, ignore_errors=True)
    return record


def _cancel_unrecorded(target: Target[Any], record: JobRecord, error: BaseException) -> None:
    """Cancel a job whose record was not written: no later command could find it."""
    job = f"{record.target} job {record.id}"
    why = f"{job} was submitted, but its record was not written to {jobs_folder()}: {error}"
    try:
        target.cancel(record)
    except (PhalanxError, OSError) as failed:
        by_hand = CANCEL[record.target].format(id=record.id, name=record.name)
        raise UsageError(f"{why}. It runs, because it was not cancelled: {failed}", hint=f"End it: {by_hand}") from None
    if isinstance(error, OSError):
        raise UsageError(f"{why}. It was cancelled.", hint="Another folder: XDG_STATE_HOME=/path.") from None


def _refuse_twice(name: str) -> None:
    for record in records():
        if record.name == name and record.state not in ENDED and target_of(record).status(record).state not in ENDED:
            raise UsageError(
                f"a job with the name {name} is not finished ({record.target} job {record.id})",
                hint=f"Give another --job-name, or end it: phalanx jobs cancel {name}",
            )


def target_of(record: JobRecord) -> Target[Any]:
    """Return the target of a recorded job, with the options it was submitted with."""
    kind = target_class(record.target)
    fields = {field.name for field in dataclasses.fields(kind.options_class)}
    return kind(kind.options_class(**{key: value for key, value in record.options.items() if key in fields}))


def _shipped(target: Target[Any], job: ClusterJob) -> str:
    where = f"{target.options.directory or '/workspace'} in the container" if target.is_contained else job.directory
    code = "a copy of this folder" if target.options.ship == "archive" else f"nothing: the nodes read {where}"
    others = "data and environment are those of the nodes"
    if target.options.uv:
        others = "the nodes make the environment from uv.lock; data is not shipped"
    return f"{code}; {others}"


def _with_names(files: dict[str, str]) -> list[str]:
    if len(files) == 1:
        return [next(iter(files.values())).rstrip()]
    return [line for name, text in files.items() for line in (f"# ---- {name}", text.rstrip())]


def _overview() -> str:
    rows = "\n".join(f"  {name:<11} {summary}" for name, (_, summary, _) in TARGETS.items())
    return (
        f"usage: phalanx submit TARGET <recipe> | --script FILE | -m MODULE [options]\n\n{_HELP}\n\n"
        f"targets:\n{rows}\n\nexamples:\n  {_examples()}\n\n"
        "--render shows what would be submitted; options of a target: phalanx submit TARGET --help"
    )


def _examples() -> str:
    """Return a command for each target."""
    return "\n  ".join(f"phalanx submit {name} {example}" for name, (_, _, example) in TARGETS.items())
