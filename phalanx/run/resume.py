"""Continue, mark and remove a run in its folder, and refuse a folder that holds another one."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

from phalanx.config import DistributedConfig
from phalanx.errors import UsageError
from phalanx.host.remote import as_path
from phalanx.run.record import release_claim, took_step
from phalanx.run.stored import RUNS, StoredRun, is_run, list_runs


def last_run_of(name: str) -> StoredRun:
    """Return the newest run in ./runs that was started under a name."""
    runs = list_runs()
    named = [run for run in runs if re.fullmatch(rf"{re.escape(name)}-\d+-\d+(-\d+)?", run.path.name)]
    trusted = next((run for run in named if run.is_trusted), None)
    if trusted is None:
        others = f"; the latest: {', '.join(run.name for run in runs[:3])}" if runs else ""
        hint = f"Write: {resume_command(runs[0])}. Or leave --resume out." if runs else "Leave --resume out."
        raise UsageError(f"--resume: there is no run of '{name}' in {RUNS.resolve()}{others}", hint=hint)
    return trusted


def resume_settings(run: StoredRun) -> dict[str, Any]:
    """Return the settings with which a run continues from its last checkpoint."""
    run.require_trust("names what a resumed run does")
    if why := run.in_use:
        raise UsageError(f"{run.name} {why}", hint=run.how_to_free)
    if not run.checkpoints:
        hint = "Start it again, with checkpoints: --checkpoint-frequency 1, or '500 steps'."
        if run.record is not None and (run.record.script or run.record.module):
            hint = (
                "Only a trainer or Formation of Phalanx saves checkpoints there. A script that saves its own is "
                "started again, and loads them itself."
            )
        raise UsageError(f"{run.name} has no checkpoint in {run.checkpoint_dir}, so it cannot be resumed", hint=hint)
    # In a folder that runs share, the newest checkpoint may be that of another run.
    newest = run.checkpoint_dir if run.owns_checkpoint_dir else run.checkpoints[-1]
    return {"run_dir": str(run.path), "resume_from_checkpoint": str(newest)}


def check_not_in_use(config: DistributedConfig, *, again: bool = False) -> StoredRun | None:
    """Refuse a folder that a run in progress writes to, on any host; return the run that it holds, if any.

    Of several nodes, the first one checks the folder that all of them share. `again`: a fit, after others of this
    process, which count as in progress while the process lives where they were broken off.
    """
    if config.run_dir is None or config.node_rank or not is_run(Path(config.run_dir)):
        return None
    run = StoredRun(Path(config.run_dir))
    is_own = again and run.record is not None and run.record.is_of_this_process
    if (why := run.in_use) and not is_own:
        raise UsageError(f"the run in run_dir = '{config.run_dir}' {why}", hint=run.how_to_free)
    return run


def check_run_dir(config: DistributedConfig, *, overwrite: bool, settled: bool = False) -> StoredRun | None:
    """Refuse a folder that holds a run which is not to be continued; return the run to remove, if any.

    That is one that `overwrite` replaces, or one that failed before its first step: there is nothing to lose.
    `settled`: the config says how long training takes, as for a recipe; a script may have its own settings.
    """
    run = check_not_in_use(config)
    if run is None:
        return None
    if config.resume_from_checkpoint:
        # `true` is for scripts that are started again after any end, also after that of a finished run.
        if settled and str(config.resume_from_checkpoint).lower() != "true":
            check_left(config, run)
        return None
    if not (overwrite or _has_nothing_to_lose(run)):
        steps, total = run.steps
        raise UsageError(
            f"run_dir = '{config.run_dir}' already holds a run ({run.status}, {steps} of {total or '?'} steps)",
            hint=f"Continue it: {resume_command(run)}. Replace it: add --overwrite. Or give another --run-dir.",
        )
    refuse_whole_project(run)
    return run


def _has_nothing_to_lose(run: StoredRun) -> bool:
    """Whether a run of a recipe has ended before its first report, without a checkpoint: its folder can be used again.

    A script may have trained for hours without reporting a step, and its logs are all that is left of it.
    """
    if run.record is None or run.record.recipe is None or not run.is_trusted or run.checkpoints:
        return False
    return run.status in ("failed", "interrupted", "killed") and not took_step(run.path)


def check_left(config: DistributedConfig, run: StoredRun | None = None) -> None:
    """Refuse to resume where all the steps that are asked for were taken: a run's record would change for nothing.

    `run`: the one that continues in its folder; None for a fit that only begins with a checkpoint.
    """
    checkpoint_path = as_path(str(config.resume_from_checkpoint))
    try:
        saved = sorted(checkpoint_path.glob("step-*")) if run is None else run.checkpoints
        places = (checkpoint_path, *saved[:-2:-1])
        file = next((path / "manifest.json" for path in places if (path / "manifest.json").is_file()), None)
        last = {} if file is None else json.loads(file.read_text(encoding="utf-8"))
        step, epoch = int(last["step"]), int(last["epoch"])
    except (OSError, ValueError, KeyError):  # the ranks say what is wrong with it
        return
    epochs = config.epochs or (None if config.max_steps is not None else 1)
    limits = {"max_steps": (step, config.max_steps), "epochs": (epoch, epochs)}
    reached = {name: (have, most) for name, (have, most) in limits.items() if most is not None and have >= most}
    if not reached:
        return
    text = " and ".join(f"{name} = {most}" for name, (_, most) in reached.items())
    if run is None:
        more = " and ".join(f"{name}={2 * have}" for name, (have, _) in reached.items())
        hint = f"Train on with {more}. Or begin a new run with its weights: trainer.load(path)."
    else:
        more = " ".join(f"--{name.replace('_', '-')} {2 * have}" for name, (have, _) in reached.items())
        hint = f"Train on: {resume_command(run)} {more}. Or measure it: phalanx evaluate {shlex.quote(run.name)}"
    raise UsageError(
        f"{checkpoint_path if run is None else run.name} has nothing left to train: {text}, and its checkpoint is at "
        f"step {step}, after {epoch} whole epochs. Nothing was changed",
        hint=hint,
    )


def refuse_whole_project(run: StoredRun) -> None:
    """Refuse to remove the files of a run whose folder is the current one or contains it."""
    if Path.cwd().is_relative_to(run.path.resolve()):
        raise UsageError(
            f"{run.path} contains the current folder, so not only the run's files may be in it; nothing was removed",
            hint="Remove the files that you do not need yourself.",
        )


def tag_run(run: StoredRun, tag: str, *, remove: bool = False) -> list[str]:
    """Give a run a label, which other runs may have too, or remove it; return its tags."""
    tags = run.tags
    if remove:
        if tag not in tags:
            raise UsageError(f"{run.name} has no tag '{tag}'; its tags: {', '.join(tags) or '(none)'}")
        tags = [label for label in tags if label != tag]
    elif tag not in tags:
        check_tag(tag)
        tags = [*tags, tag]
    _rewrite(run, tags=tags)
    return tags


def check_tag(tag: str) -> None:
    """Refuse a tag that is empty, a path, several tags, or the word `last`."""
    if why := _no_word(tag) or ("a comma separates tags" if "," in tag else ""):
        hint = "A tag has any characters but '/' and ',', and any number of runs have it: phalanx runs tag RUN sweep1"
        raise UsageError(f"'{tag}' cannot be a tag: {why}", hint=hint)


def name_run(run: StoredRun, name: str) -> None:
    """Give a run a name that no other run in its folder has; an empty one removes it."""
    others = {other.alias: other for other in list_runs(run.path.parent) if other.path != run.path}
    why = _no_word(name) if name else ""
    if name and not why and name in others:
        why = f"{others[name].path.name} has it"
    elif name and not why and is_run(run.path.parent / name):
        why = "that is the folder of a run"
    if why:
        hint = "A name has any characters but '/', and one run alone has it: phalanx runs name RUN baseline"
        if name in others:
            hint = f"Remove it there: phalanx runs name {shlex.quote(others[name].name)} --remove"
        raise UsageError(f"'{name}' cannot be the name of {run.name}: {why}", hint=hint)
    _rewrite(run, alias=name)


def _no_word(word: str) -> str:
    """Return why a word cannot stand for runs; empty if it can."""
    if not word.strip():
        return "it is empty"
    return "'last' is the last run" if word == "last" else "that is a path" if "/" in word else ""


def note_run(run: StoredRun, note: str) -> None:
    """Write what the user has to say about a run; an empty text removes it."""
    _rewrite(run, note=note.strip())


def _rewrite(run: StoredRun, **changes: Any) -> None:
    if run.record is None:
        raise UsageError(run.damage or f"{run.path} has no run.json, so it cannot have a name, tags and notes")
    run.require_trust("would be yours once it is changed")
    dataclasses.replace(run.record, **changes).write(run.path)


def note_end(run: StoredRun) -> None:
    """Note that a run has ended without a report, as the user or a scheduler knows: its node was lost."""
    if run.status == "running":
        raise UsageError(f"{run.name} is running", hint=f"End it: phalanx runs stop {shlex.quote(run.name)}")
    if run.status in ("unknown", "damaged"):
        _rewrite(run, outcome="killed")
        release_claim(run.path)


def refuse_running(run: StoredRun) -> None:
    """Refuse to remove a run that runs, or may."""
    refuse_whole_project(run)
    if why := run.in_use:
        raise UsageError(f"{run.name} {why}; nothing was removed", hint=run.how_to_free)


def remove_run(run: StoredRun, folder: Path) -> bool:
    """Remove a run's folder; of one elsewhere (`--run-dir`), the run's files alone. Return whether no others stay."""
    if run.path.parent.resolve() == folder.resolve() and not run.path.is_symlink():
        shutil.rmtree(run.path)
        return True
    run.clear()
    try:
        run.path.rmdir()
    except OSError:
        return False
    return True


def how_to_resume(run: StoredRun) -> str:
    """Return the hint after Ctrl-C: the command that continues the run, where it has a checkpoint."""
    if run.checkpoints:
        last = int(run.checkpoints[-1].name.split("-")[1])  # step-00000100, with the run's id where a name was taken
        return f"interrupted; the last checkpoint is that of step {last}.\n  To resume: {resume_command(run)}"
    return "interrupted; no checkpoint was saved yet." if is_run(run.path) else ""


def resume_command(run: StoredRun) -> str:
    """Return the command that continues a run."""
    return f"phalanx resume {shlex.quote(run.name)}"
