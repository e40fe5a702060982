"""The folder of a run (config, logs, events and, by default, checkpoints), and `run.json`: what started the run, and
how the command that started it ended.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import platform
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.config import DistributedConfig
from phalanx.errors import PhalanxError, RankFailedError, UsageError
from phalanx.host.files import close_scratch, open_scratch, replace_file
from phalanx.host.gpus import driver_version, gpu_names
from phalanx.host.processes import began_at
from phalanx.host.versions import cuda_of_torch, installed_packages
from phalanx.observe.goodput import EVENTS, read_events
from phalanx.observe.run_folder import note_written
from phalanx.version import __version__

TEXT_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template*",
    "*processor_config.json",
)
"""Files of tokenizers and processors, as patterns; "*.model" is SentencePiece's."""

FILE = "run.json"
CHANGES = "changes.diff"
"""What `git diff HEAD` gave when the run began: with the commit, the code that it ran."""
PACKAGES = "packages.txt"
"""The installed packages, as pip freeze writes them."""
_LARGEST_DIFF = 1 << 20
MODEL_FILES = "model"
"""The folder with what a run keeps of its model's own folder: config and tokenizer."""


@dataclass(frozen=True)
class RunRecord:
    """What started a run, as `run.json` holds it."""

    command: list[str]
    directory: str
    settings: dict[str, Any]
    """The settings that were given: a resumed run has them again."""
    recipe: dict[str, Any] | None = None
    script: str | None = None
    module: str | None = None
    arguments: list[str] = field(default_factory=list)
    started: float = 0.0
    host: str = ""
    pid: int = 0
    pid_started: int = 0
    python: str = ""
    phalanx: str = ""
    commit: str | None = None
    """The git commit of the folder in which the command ran."""
    environment: dict[str, str] = field(default_factory=dict)
    """Versions of torch and CUDA, the driver and the GPUs."""
    alias: str = ""
    """A name that the user gave this run alone, which every command takes."""
    tags: list[str] = field(default_factory=list)
    """Labels, which other runs may have too."""
    note: str = ""
    """What the user wrote about the run."""
    continued: float = 0.0
    """When the run was last resumed in its folder."""
    outcome: str = ""
    """How the command ended: finished, failed, preempted or interrupted; a script may write no events."""
    cause: str = ""
    """Why it failed, as its report begins: the guilty rank and its error; empty for other ends."""
    slurm_job: str = ""
    """The job of Slurm that started it; empty without one."""
    slurm_restarts: int = 0
    """How often Slurm had put that job back into the queue."""

    @classmethod
    def of_this_process(cls, settings: Mapping[str, Any], **target: Any) -> RunRecord:
        """Describe a run that this process starts."""
        words = [Path(sys.argv[0]).name, *sys.argv[1:]] if sys.argv else []
        return cls(
            command=["phalanx", *words[1:]] if words and words[0] in ("__main__.py", "phalanx") else ["python", *words],
            directory=os.getcwd(),
            settings=dict(settings),
            started=time.time(),
            host=socket.gethostname(),
            pid=os.getpid(),
            pid_started=began_at(os.getpid()) or 0,
            python=platform.python_version(),
            phalanx=__version__,
            commit=(_git("rev-parse", "HEAD") or "").strip() or None,
            environment=_environment(),
            slurm_job=os.environ.get("SLURM_JOB_ID", ""),
            slurm_restarts=int(os.environ.get("SLURM_RESTART_COUNT") or 0),
            **target,
        )

    def begin(self, run_dir: Path, *, resumes: bool) -> None:
        """Write it for a run that begins; a resumed one keeps command and time of its start, name, tags and note."""
        old = read_record(run_dir)
        changes_of_record: dict[str, Any] = {}
        if isinstance(old, RunRecord):
            changes_of_record = {"tags": list(dict.fromkeys([*old.tags, *self.tags])), "note": self.note or old.note}
            changes_of_record["alias"] = old.alias
        if isinstance(old, RunRecord) and resumes:
            changes_of_record |= {"command": old.command, "started": old.started, "continued": time.time()}
        dataclasses.replace(self, **changes_of_record).write(run_dir)
        _keep_model_files(self.recipe or {}, run_dir / MODEL_FILES)
        lines = "".join(f"{name}=={version}\n" for name, version in installed_packages().items())
        (run_dir / PACKAGES).write_text(lines, encoding="utf-8")
        if self.commit and (changes := _git("diff", "HEAD", "--no-color", "--no-ext-diff")):
            cut = "" if len(changes) <= _LARGEST_DIFF else f"\n[cut: it has {len(changes):,} characters]\n"
            (run_dir / CHANGES).write_text(changes[:_LARGEST_DIFF] + cut, encoding="utf-8")

    @property
    def is_alive(self) -> bool:
        """Whether the process that started the run still exists; False on another host."""
        if self.host != socket.gethostname():
            return False
        if self.pid_started:
            return began_at(self.pid) == self.pid_started
        try:  # not Linux: its number alone is known
            os.kill(self.pid, 0)
        except OSError:
            return False
        return self.pid > 0

    @property
    def is_of_this_process(self) -> bool:
        """Whether this process started the run, in an earlier fit of it."""
        return self.pid == os.getpid() and self.is_alive

    @property
    def was_requeued(self) -> bool:
        """Whether this is a later start of the Slurm job that started the run: Slurm has ended the earlier one."""
        job, restarts = os.environ.get("SLURM_JOB_ID", ""), int(os.environ.get("SLURM_RESTART_COUNT") or 0)
        return self.slurm_job != "" and self.slurm_job == job and self.slurm_restarts < restarts

    def write(self, run_dir: Path) -> None:
        """Write it as a whole."""
        replace_file(run_dir / FILE, json.dumps(dataclasses.asdict(self), indent=1, default=str) + "\n")


def _keep_model_files(recipe: Mapping[str, Any], target: Path) -> None:
    """Copy the config and tokenizer of a model's folder, so that the run can be used when the folder is not there."""
    folder = Path(str(recipe.get("model", {}).get("name", "")))
    if not folder.is_absolute() or not (folder / "config.json").is_file() or target.exists():
        return
    target.mkdir()
    note_written(target.parent, target)
    for pattern in ("config.json", "generation_config.json", *TEXT_FILES):
        for file in folder.glob(pattern):
            shutil.copy(file, target / file.name)


def read_record(run_dir: Path) -> RunRecord | str | None:
    """Return the content of a run's run.json, or why it cannot be used; None without that file."""
    path = run_dir / FILE
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        names = {item.name for item in dataclasses.fields(RunRecord)}
        record = RunRecord(**{name: value for name, value in document.items() if name in names})
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, AttributeError) as error:
        return f"{path} cannot be read: {error}"
    kinds = {"command": list, "directory": str, "settings": dict, "recipe": dict | None, "tags": list, "pid": int}
    kinds["note"] = kinds["alias"] = str
    wrong = [name for name, kind in kinds.items() if not isinstance(getattr(record, name), kind)]
    return f"{path} is damaged: wrong value of {', '.join(wrong)}" if wrong else record


def keep_recipe(run_dir: Path, recipe: Mapping[str, Any]) -> None:
    """Write a run's recipe again, with what its ranks have learned about it."""
    record = read_record(run_dir)
    if isinstance(record, RunRecord) and record.recipe is not None:
        dataclasses.replace(record, recipe=dict(recipe)).write(run_dir)


def end_record(run_dir: Path, outcome: str, cause: str = "") -> None:
    """Write how the command ended, and why it failed, if the run's folder still exists."""
    record = read_record(run_dir)
    if isinstance(record, RunRecord):
        dataclasses.replace(record, outcome=outcome, cause=cause).write(run_dir)


_GIT_SECONDS = 2.0
"""How long git may take to answer, and then to end."""


def _git(*words: str) -> str | None:
    """Return what git prints; None without git or a repository, and where the file system does not answer soon."""
    try:
        process = subprocess.Popen(["git", *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    except OSError:
        return None
    with process:
        try:
            printed, _ = process.communicate(timeout=_GIT_SECONDS)
        except subprocess.TimeoutExpired:
            # Killed, it would leave the repository's index locked, and the user's next `git commit` would fail.
            process.terminate()
            try:
                process.wait(_GIT_SECONDS)
            except subprocess.TimeoutExpired:  # only SIGKILL ends what waits for a network file system
                process.kill()
            return None
    return printed.decode(errors="replace") if process.returncode == 0 else None


def _environment() -> dict[str, str]:
    """Return what the ranks compute with."""
    values = {"torch": installed_packages().get("torch", ""), "CUDA of torch": cuda_of_torch() or ""}
    names = gpu_names()
    gpus = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    driver = driver_version() if names else ""
    return {name: value for name, value in {**values, "GPUs": gpus, "driver": driver}.items() if value}


CLAIM = ".started-by"
"""A file that the process which started the run holds locked until the run ends; the kernel unlocks it."""


@contextmanager
def claim_run_dir(run_dir: Path) -> Iterator[None]:
    """Let no other process start or resume a run in a folder during the block; raise if one does already.

    What the folder holds is checked within: a process that checked before may have been overtaken since.
    """
    descriptor = _locked(run_dir / CLAIM)
    try:
        yield
    finally:
        if descriptor is not None:
            with suppress(OSError):  # the folder was removed; another run may have begun in a new one
                if os.path.samestat((run_dir / CLAIM).stat(), os.fstat(descriptor)):
                    (run_dir / CLAIM).unlink()
            os.close(descriptor)


def _locked(path: Path) -> int | None:
    """Lock a file and write this process into it; return its descriptor; None on a file system without locks."""
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise UsageError(
                f"the run's folder {path.parent} cannot be used: {path.name}: {error.strerror}",
                hint="Set run_dir to a folder you can write to.",
            ) from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with os.fdopen(descriptor) as file:
                raise _started_by_another(path.parent, file.read().strip()) from None
        except OSError:
            os.close(descriptor)
            return None
        if os.fstat(descriptor).st_nlink:
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"{os.getpid()} {socket.gethostname()}\n".encode())
            return descriptor
        os.close(descriptor)  # its holder has ended, and has removed it, since it was opened


def _started_by_another(run_dir: Path, holder: str) -> UsageError:
    pid, _, host = holder.partition(" ")
    process = f"process {pid}" + (f" on {host}" if host != socket.gethostname() else "") if pid else "another process"
    end = "Stop it first, with Ctrl-C or SIGTERM. Or give another run_dir."
    if host not in ("", socket.gethostname()):
        end += f" If it has ended there, say so: phalanx runs stop {shlex.quote(str(run_dir))} --ended"
    return UsageError(f"{process} runs in run_dir = '{run_dir}'; nothing was changed", hint=end)


def release_claim(run_dir: Path) -> None:
    """Forget the process that started a run: it is known to have ended, also if its host was lost with the lock."""
    (run_dir / CLAIM).unlink(missing_ok=True)


def is_unused(config: DistributedConfig, run_dir: Path, error: BaseException | None = None) -> bool:
    """Whether a run took no step or is a fast_dev_run, run_dir is not set, and the error names no file of the run.

    Logs do not count: `discard` keeps those that the error names.
    """
    named = f"{error} {getattr(error, 'hint', '')}".replace(str(run_dir / "logs"), "")
    if config.run_dir is not None or str(run_dir) in named:
        return False
    return bool(config.fast_dev_run) or not took_step(run_dir)


def discard(run_dir: Path, error: BaseException | None = None) -> None:
    """Remove the folder of a run; logs that the error names are moved to a temporary folder."""
    logs = run_dir / "logs"
    if isinstance(error, PhalanxError) and str(logs) in error.message and logs.is_dir():
        scratch = open_scratch("logs")
        shutil.copytree(logs, scratch, dirs_exist_ok=True)
        close_scratch(scratch, keep=True)
        error.message = error.message.replace(str(logs), str(scratch))
    shutil.rmtree(run_dir, ignore_errors=True)
    with suppress(OSError):
        run_dir.parent.rmdir()


def took_step(run_dir: Path) -> bool:
    """Whether a run has a checkpoint, or its events tell of a step."""
    first = 0
    for event in read_events(run_dir / EVENTS):
        first = event.get("first_step", first)
        if (step := event.get("step")) is not None and step > first:
            return True
    return any((run_dir / "checkpoints").glob("step-*"))


@contextmanager
def log_folder(run_dir: Path | None) -> Iterator[Path]:
    """Yield the folder for the logs of ranks: in the run's folder, or a temporary one, kept where an error needs it."""
    if run_dir is not None:
        yield run_dir / "logs"
        return
    logs, keep = open_scratch("logs"), False
    try:
        yield logs
    except PhalanxError as error:
        keep = isinstance(error, RankFailedError) or str(logs) in str(error)
        raise
    finally:
        close_scratch(logs, keep=keep)
