"""A job: what `phalanx train` would run, for a cluster; and the record by which later commands find it."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import secrets
import shlex
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from phalanx.config import DistributedConfig
from phalanx.errors import UsageError, unknown_name
from phalanx.host.files import make_private, replace_file
from phalanx.host.remote import is_url

STATES = ("queued", "running", "finished", "failed", "cancelled", "preempted", "lost")
"""States of a job, the same for every target; `lost`: the scheduler no longer knows it."""
ENDED = ("finished", "failed", "cancelled", "lost")
LONGEST_NAME = 50
"""Kubernetes adds suffixes to names of at most 63 characters."""


@dataclass(frozen=True, kw_only=True)
class ClusterJob:
    """What is submitted."""

    name: str
    """Lower case letters, digits and hyphens: the name of the job everywhere."""
    arguments: tuple[str, ...]
    """The words after `phalanx train` (or `tune`)."""
    config: DistributedConfig
    nodes: int
    ranks_per_node: int
    device: str
    directory: str
    """The folder in which the command was given; it is where the ranks run, unless code is shipped."""
    run_dir: str
    environment: dict[str, str] = field(default_factory=dict)
    """Variables of every rank: NCCL's, and those that were given."""
    verb: str = "train"
    """train, or tune: a search whose trials are spread over the tasks of an array."""
    files: tuple[str, ...] = ()
    """Files and modules of the submitting machine that the command names: the recipe, the script, settings."""
    data_workers: int | None = None
    """Processes per rank that the recipe names for its data; None: it names none."""

    @property
    def cores(self) -> tuple[int, str]:
        """CPU cores that a rank asks for where none are given, and how they are counted."""
        train, usual = (2, 2) if self.device == "cuda" else (1, 0)
        workers = usual if self.data_workers is None else self.data_workers
        return train + workers, f"{self.ranks_per_node} ranks x ({train} to train + {workers} for data workers)"

    def train_command(self, program: str = "phalanx", *more: str) -> list[str]:
        """Return the command of one launcher; flags in `more` take the place of the same flags of the job."""
        before, after = self.arguments, tuple[str, ...]()
        if "--" in before:
            at = before.index("--")
            before, after = before[:at], before[at:]
        return [program, self.verb, *_without(before, more), *more, *after]

    def origin(self, target: str, options: Any) -> str:
        """Return the command in one line, for a comment: a line break in an argument must not end the comment."""
        tune = ["--tune"] if self.verb == "tune" else []
        words = self.train_command(f"phalanx submit {target}", *_flags(self.name, options))
        return " ".join(f"Written by: {words[0]} {shlex.join([*tune, *words[2:]])}".splitlines())

    def kept_flags(self, folder: str) -> list[str]:
        """Return the flags that keep the run and its checkpoints below a folder: a copy of the code is removed."""
        run = str(PurePosixPath(folder, self.run_dir))
        directory = self.config.checkpoint_dir or (
            f"{self.run_dir}/checkpoints" if "--checkpoint-dir" in self.arguments else ""
        )
        checkpoints = directory if is_url(directory) else str(PurePosixPath(folder, directory))
        return ["--run-dir", run, *(["--checkpoint-dir", checkpoints] if directory else [])]

    @property
    def ranks(self) -> int:
        """Ranks of the whole job."""
        return self.nodes * self.ranks_per_node


def _flags(name: str, options: Any) -> Iterator[str]:
    """Return the flags that give a job its name and options; those with their default values are left out."""
    yield from ("--job-name", name)
    for option in dataclasses.fields(options):
        value, flag = getattr(options, option.name), option.name.replace("_", "-")
        if value == option.default or option.name == "name":
            continue
        if isinstance(value, bool):
            yield f"--{flag}" if value else f"--no-{flag}"
        else:
            yield from (f"--{flag}={value}",) if str(value).startswith("-") else (f"--{flag}", str(value))


def _without(words: tuple[str, ...], replaced: tuple[str, ...]) -> Iterator[str]:
    """Return words less the flags that are given anew, each with its value."""
    rest = iter(words)
    for word in rest:
        flag, equals, _ = word.partition("=")
        if flag.startswith("--") and flag in replaced:
            if not equals:
                next(rest, None)
        else:
            yield word


@dataclass(frozen=True)
class JobRecord:
    """What is kept of a job on the machine that submitted it."""

    name: str
    target: str
    id: str
    """The scheduler's own name of the job."""
    submitted: float
    directory: str
    run_dir: str
    arguments: list[str]
    options: dict[str, Any]
    folder: str = ""
    """Where the files that were submitted are kept."""
    state: str = "queued"
    resumes: str = ""
    """The job that this one continues."""
    verb: str = "train"

    @property
    def command(self) -> str:
        """The command that submitted it."""
        return shlex.join(["phalanx", "submit", self.target, *(["--tune"] * (self.verb == "tune")), *self.arguments])


def jobs_folder() -> Path:
    """Return the folder with the records of this user's jobs."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "phalanx" / "jobs"


def job_name(name: str | None, subject: str) -> str:
    """Return a name that every target accepts: the wanted one, or the subject's with a short random end."""
    if name is not None:
        if not re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", name) or len(name) > LONGEST_NAME:
            raise UsageError(
                f"--job-name {name}: expected lower case letters, digits and hyphens, at most {LONGEST_NAME}, "
                "beginning with a letter",
                hint=f"For example: --job-name {_plain(name)}",
            )
        return name
    return f"{_plain(subject)[:40]}-{secrets.token_hex(2)}"


def _plain(text: str) -> str:
    plain = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    return (plain if plain[:1].isalpha() else f"job-{plain}".rstrip("-"))[:LONGEST_NAME].rstrip("-")


def write_record(record: JobRecord) -> None:
    """Write or replace the record of a job."""
    folder = jobs_folder()
    make_private(folder)  # options may hold secrets: --env WANDB_API_KEY=...
    replace_file(folder / f"{record.name}.json", json.dumps(dataclasses.asdict(record), indent=1) + "\n")


def records() -> list[JobRecord]:
    """Return all records, the newest first; a damaged file is an error that names it."""
    return sorted(_read_all(), key=lambda record: -record.submitted)


def _read_all() -> Iterator[JobRecord]:
    names = {field.name for field in dataclasses.fields(JobRecord)}
    for path in sorted(jobs_folder().glob("*.json")):
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            yield JobRecord(**{key: value for key, value in document.items() if key in names})
        except (ValueError, TypeError, AttributeError) as error:
            raise UsageError(f"{path} cannot be read: {error}", hint="Remove it; the job itself goes on.") from None


def find_record(name: str) -> JobRecord:
    """Return the record of a job by name, the beginning of one, the scheduler's id, or `last`."""
    listed = records()
    if not listed:
        raise UsageError("no jobs have been submitted from here", hint="Submit one: phalanx submit slurm digits")
    if name == "last":
        return listed[0]
    exact = [record for record in listed if name in (record.name, record.id)]
    begun = [record for record in listed if record.name.startswith(name)]
    for matching in (exact, begun):
        if len(matching) == 1:
            return matching[0]
    if len(begun) > 1:
        raise UsageError(f"{name} is the beginning of {', '.join(record.name for record in begun)}")
    raise UsageError(unknown_name("job", name, [record.name for record in listed]), hint="See: phalanx jobs")


def new_record(job: ClusterJob, target: str, scheduler_id: str, options: dict[str, Any], folder: Path) -> JobRecord:
    """Return the record of a job that was just submitted."""
    return JobRecord(
        name=job.name,
        target=target,
        id=scheduler_id,
        submitted=time.time(),
        directory=job.directory,
        run_dir=job.run_dir,
        arguments=list(job.arguments),
        options=options,
        folder=str(folder),
        verb=job.verb,
    )
