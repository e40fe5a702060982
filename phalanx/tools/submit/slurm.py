"""Slurm: a batch script with one launcher per node (or one task per rank), and sbatch, squeue, scancel."""

from __future__ import annotations

import os
import re
import secrets
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from phalanx.config.option import option
from phalanx.config.settings import parse_duration
from phalanx.errors import EXIT_PREEMPTED, EXIT_USAGE, UsageError, first_line
from phalanx.observe.guard import say_to_user
from phalanx.tools.submit.job import ENDED, ClusterJob, JobRecord
from phalanx.tools.submit.job_files import (
    follow_files,
    limit_seconds,
    program_of,
    rank_log,
    shell_join,
    split_words,
    unpack_lines,
    uv_lines,
)
from phalanx.tools.submit.target import CommonOptions, Status, Target

SIGNAL_SECONDS = 120
"""How long before the end of the time limit ranks get SIGUSR1: time to save."""
WAIT_SECONDS = 60
"""How long the other tasks may take to end after the first has."""
_TASK, _COUNT, _AGAIN = "\0task", "\0count", "\0again"
"""Marks of the number of an array's task, of the number of tasks, and of a flag for a task that starts again."""
_SHELL = {_TASK: '"$SLURM_ARRAY_TASK_ID"', _COUNT: '"$SLURM_ARRAY_TASK_COUNT"'}
_EACH_NODE = 'srun --nodes="$SLURM_NNODES" --ntasks="$SLURM_NNODES" --ntasks-per-node=1 '
_PLAIN = ("partition", "account", "qos", "constraint", "mem", "nodelist", "array")
"""Options that sbatch has under the same name."""
_STATES = {
    "PENDING": "queued",
    "CONFIGURING": "queued",
    "REQUEUED": "queued",
    "REQUEUE_HOLD": "queued",
    "SUSPENDED": "queued",
    "RUNNING": "running",
    "COMPLETING": "running",
    "COMPLETED": "finished",
    "CANCELLED": "cancelled",
    "PREEMPTED": "preempted",
}


@dataclass(frozen=True, kw_only=True)
class SlurmOptions(CommonOptions):
    """Options of Slurm; most are those of sbatch."""

    partition: str | None = option(None, "sbatch --partition")
    account: str | None = option(None, "sbatch --account")
    qos: str | None = option(None, "sbatch --qos")
    constraint: str | None = option(None, "sbatch --constraint, for example a100|h100")
    gres: str | None = option(None, "sbatch --gres, for example gpu:a100:8 (default: --gpus-per-node from the ranks)")
    cpus_per_rank: int | None = option(
        None, "CPU cores for each rank (default: some to train and for data workers; all with --exclusive)", minimum=1
    )
    mem: str | None = option(None, "sbatch --mem: memory per node (0: all of it)")
    exclusive: bool = option(False, "do not share the nodes")
    nodelist: str | None = option(None, "sbatch --nodelist")
    array: str | None = option(None, "sbatch --array: 0-7 runs eight times; each has its own run folder")
    start: str = option(
        "launcher",
        "what starts the ranks: one launcher per node, which restarts and watches them (launcher), or srun",
        choices=("launcher", "srun"),
    )
    container: str = option(
        "none",
        "run inside --image: pyxis (srun --container-image) or apptainer",
        choices=("none", "pyxis", "apptainer"),
    )
    mounts: str | None = option(
        None, "container: host paths that ranks see besides the folder of the command, /data:/data,/scratch"
    )
    requeue: bool = option(True, "requeue the job if it was preempted, timed out or lost a node")
    sbatch: str | None = option(None, "more options for sbatch, as they are: '--reservation=x --mail-type=END'")


class Slurm(Target[SlurmOptions]):
    """Submits by sbatch."""

    name = "slurm"
    options_class = SlurmOptions
    has_arrays = True

    def render(self, job: ClusterJob) -> dict[str, str]:
        """Return the batch script."""
        self._check(job)
        body = [*self._head(job), "", *self._body(job)]
        return {"train.sbatch": "\n".join(body) + "\n"}

    def _check(self, job: ClusterJob) -> None:
        options = self.options
        if options.array is not None and not _is_array(options.array):
            raise UsageError(
                f"--array {options.array}: expected numbers that rise, and how many run at once",
                hint="Write: --array 0-7, --array 1,3,5-9 or --array 0-99%4.",
            )
        if job.verb == "tune" and not re.fullmatch(r"0-\d+(%\d+)?", options.array or ""):
            raise UsageError(
                f"--array {options.array}: a search is split over tasks that are counted from 0",
                hint="Write: --array 0-7 (eight jobs), or 0-7%2 (two at a time).",
            )
        if options.container != "none" and not options.image:
            raise UsageError(f"--container {options.container} needs --image", hint="--image nvcr.io#org/phalanx:1")
        if options.image and options.container == "none":
            raise UsageError(
                f"--image {options.image} needs a program that runs it on the nodes",
                hint="Add --container pyxis or --container apptainer; without containers: --venv FOLDER.",
            )
        if options.uv and options.image:
            raise UsageError(f"--uv with --image {options.image}, which has an environment", hint="Leave one out.")
        if limit_seconds(job, options, SIGNAL_SECONDS) is None and "--signal" not in (options.sbatch or ""):
            say_to_user(
                "without --time-limit the limit of the partition ends the job without a signal before it: what was "
                "trained since the last checkpoint is lost. Write: --time-limit 12h"
            )

    def _head(self, job: ClusterJob) -> Iterator[str]:
        options, tasks = self.options, job.ranks_per_node if self.options.start == "srun" else 1
        yield "#!/bin/bash"
        yield f"# {job.origin(self.name, self.options)}"
        lines = [
            (f"--job-name={job.name}", "name in squeue"),
            (f"--nodes={job.nodes}", "nodes"),
            (f"--ntasks-per-node={tasks}", "ranks per node" if tasks > 1 else "one launcher per node"),
            (f"--output={self._output(job)}", "output of all ranks; %j is the number of the job"),
            ("--open-mode=append", "a job that is started again adds to it"),
        ]
        if job.device == "cuda":
            gpus = f"--gres={options.gres}" if options.gres else f"--gpus-per-node={job.ranks_per_node}"
            lines.append((gpus, "GPUs per node"))
        elif options.gres:
            lines.append((f"--gres={options.gres}", "devices per node"))
        if not self._takes_all_cores:
            cores, counted = (options.cpus_per_rank, "") if options.cpus_per_rank else job.cores
            why = f"CPU cores of each task{f': {counted}; other: --cpus-per-rank' if counted else ''}"
            lines.append((f"--cpus-per-task={cores * job.ranks_per_node // tasks}", why))
        plain = {flag: getattr(options, flag) for flag in _PLAIN}
        lines += [(f"--{flag}={value}", "") for flag, value in plain.items() if value is not None]
        if options.exclusive:
            lines.append(("--exclusive", "no other job on these nodes"))
        if options.time_limit is not None:
            lines.append((f"--time={_slurm_time(parse_duration(options.time_limit))}", "longest duration"))
            lines.append((f"--signal=USR1@{SIGNAL_SECONDS}", "then ranks save and leave, in time"))
        lost = ("--requeue", "a lost node puts the job back into the queue")
        lines.append(lost if options.requeue else ("--no-requeue", "a lost node ends the job"))
        lines += [(flag, "") for flag in split_words("--sbatch", options.sbatch)]
        quoted = [(_quoted(flag), why) for flag, why in lines]
        yield from (f"#SBATCH {flag:<44} # {why}" if why else f"#SBATCH {flag}" for flag, why in quoted)

    @property
    def _takes_all_cores(self) -> bool:
        """Whether ranks get all cores of nodes that are theirs alone."""
        return self.options.exclusive and self.options.cpus_per_rank is None

    def _output(self, job: ClusterJob) -> str:
        number = "%A_%a" if self.options.array else "%j"
        return str(Path(job.directory) / job.run_dir / f"slurm-{number}.out")

    def _body(self, job: ClusterJob) -> Iterator[str]:
        yield "set -uo pipefail"
        yield f"cd {shlex.quote(job.directory)} || exit 1"
        yield from (f"export {name}={shlex.quote(value)}" for name, value in job.environment.items())
        yield ""
        yield "# The first node hosts the rendezvous. Node lists are compressed (n[1-4]); scontrol expands them."
        yield 'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
        yield ("MASTER_ADDR=$(scontrol show node \"$head\" --oneliner | sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p')")
        yield 'export MASTER_ADDR="${MASTER_ADDR:-$head}"'
        yield "# A port for each job, below those that the kernel gives to connections (32768 and above)."
        yield "export MASTER_PORT=$((10000 + SLURM_JOB_ID % 19000))"
        yield ""
        if self.options.ship == "archive":
            yield f"trap '{_EACH_NODE}rm -rf \"$work\"' EXIT  # the copy, where it or its environment is not complete"
            yield from unpack_lines("${SLURM_TMPDIR:-/tmp}/phalanx-$SLURM_JOB_ID", _EACH_NODE)
        if self.options.uv:
            folder = '"$work"' if self.options.ship == "archive" else job.directory
            yield from uv_lines(self.options, folder, _EACH_NODE)
        yield "# Launchers end together and say why; killed at the first exit, the others could not report theirs."
        tasks = job.ranks_per_node if self.options.start == "srun" else 1
        cores = f"$((SLURM_CPUS_ON_NODE / {tasks}))" if self._takes_all_cores else "$SLURM_CPUS_PER_TASK"
        step = f'srun --kill-on-bad-exit=0 --wait={WAIT_SECONDS} --cpus-per-task="{cores}"'  # it takes none from sbatch
        yield f"{step} {self._inside(job)}{self._command(job)}"
        yield "code=$?"
        if self.options.ship == "archive":
            yield "trap - EXIT  # not at the end: a job that goes back into the queue is killed before it"
            yield f'{_EACH_NODE}rm -rf "$work"  # the copy of the code; the run is in the folder that all nodes see'
        yield ""
        if self.options.requeue:
            yield f"# {EXIT_PREEMPTED}: the ranks have saved. Back into the queue; the next start continues from there."
            yield f"# Other codes end the job, such as {EXIT_USAGE}: wrong settings, which would be wrong again."
            yield f'if [ "$code" -eq {EXIT_PREEMPTED} ]; then'
            yield '  scontrol requeue "$SLURM_JOB_ID"'
            yield "fi"
        yield 'exit "$code"'

    def _command(self, job: ClusterJob) -> str:
        """Return the command of a node; each task of an array has its own folder, or its part of a search."""
        program, ships = program_of(self.options), self.options.ship == "archive"
        # Shipped code is unpacked in a folder of each node; the run stays in the folder that all nodes see.
        run_dir = str(Path(job.directory, job.run_dir)) if ships else job.run_dir
        task = f"{run_dir}/{_TASK}" if self.options.array else run_dir
        if job.verb == "tune":
            again = f"$(test -e {shell_join([task], _SHELL)}/study.db && echo --resume)"
            words = job.train_command(program, "--part", f"{_TASK}/{_COUNT}", "--study-dir", task, _AGAIN)
            return shell_join(words, {**_SHELL, _AGAIN: again})
        flags = job.kept_flags(job.directory) if ships else []
        if self.options.array:
            flags = ["--run-dir", task, "--checkpoint-dir", f"{task}/checkpoints"]
        return shell_join(job.train_command(program, *flags), _SHELL)

    def _inside(self, job: ClusterJob) -> str:
        """Return what starts the command inside a container, which sees the code and the run."""
        options = self.options
        listed = [mount for mount in (options.mounts or "").split(",") if mount]
        targets = {mount.split(":")[1 if ":" in mount else 0] for mount in listed}
        places = [shlex.quote(mount) for mount in [*({job.directory} - targets), *listed]]
        mounts = ",".join(['"$PWD"'] * (options.ship == "archive") + places)
        image = shlex.quote(_image(options.image or "", options.container))
        if options.container == "pyxis":
            return f'--container-image={image} --container-mounts={mounts} --container-workdir="$PWD" '
        if options.container == "apptainer":
            return f'apptainer exec --nv --bind {mounts} --pwd "$PWD" {image} '
        return ""

    def check(self, job: ClusterJob, files: Mapping[str, str]) -> list[str]:
        """Let sbatch read the script without submitting it."""
        _need("sbatch")
        _ask("sbatch", "--test-only", stdin=files["train.sbatch"])
        return ["sbatch --test-only accepts it: partition, account, time and resources exist"]

    def submit(self, job: ClusterJob, folder: Path) -> str:
        """Submit the script; its number is what sbatch prints."""
        _need("sbatch")
        Path(job.directory, job.run_dir).mkdir(parents=True, exist_ok=True)  # sbatch makes no folder for the output
        # By the environment, which only this user can read: the store of the ranks is signed with the secret.
        variables = {"PHALANX_JOB_FOLDER": str(folder), "PHALANX_JOB_SECRET": secrets.token_hex(16)}
        answer = _ask(
            "sbatch", "--parsable", "--export=ALL", str(folder / "train.sbatch"), env={**os.environ, **variables}
        )
        return answer.split(";")[0].strip()

    def status(self, record: JobRecord) -> Status:
        """Ask squeue, and scontrol about a job that has left the queue."""
        _need("squeue")
        result = subprocess.run(
            ["squeue", "--noheader", "--jobs", record.id, "--format", "%T|%r|%N"], capture_output=True, text=True
        )
        lines = [line for line in result.stdout.splitlines() if line]
        if result.returncode == 0 and lines:
            tasks = [line.split("|", 2) for line in lines]
            state, reason, _ = max(tasks, key=lambda task: task[0] == "RUNNING")  # of an array, one that runs
            detail = state if reason in ("None", "") else f"{state}: {reason}"
            nodes = tuple(sorted({nodes for _, _, nodes in tasks if nodes}))
            return Status(_STATES.get(state, "running"), detail, nodes)
        if result.returncode != 0 and "Invalid job id" not in result.stderr:
            raise _refused("squeue", result)  # a controller that does not answer has not forgotten the job
        return _ended(record.id)

    def logs(self, record: JobRecord, *, follow: bool, rank: int | None) -> Iterator[str]:
        """Read the job's output file, or the log of one rank."""
        folder = Path(record.directory) / record.run_dir
        one = [rank_log(folder, rank)] if rank is not None else None

        def find() -> list[Path]:  # a job that continues another has its folder, and an array one file per task
            return one or sorted(folder.glob(f"slurm-{record.id}[._]*out"))

        return follow_files(find, (lambda: self.status(record).state in ENDED) if follow else None)

    def cancel(self, record: JobRecord) -> None:
        """End the job with all its tasks."""
        _need("scancel")
        _ask("scancel", record.id)


def _ended(number: str) -> Status:
    """Return the last state of a job that is not in the queue: scontrol remembers it for minutes, sacct for ever."""
    scontrol = subprocess.run(["scontrol", "show", "job", number, "--oneliner"], capture_output=True, text=True)
    tasks = re.findall(r"JobState=(\w+).*?ExitCode=(\d+:\d+)", scontrol.stdout)
    if scontrol.returncode == 0 and tasks:
        state, code = max(tasks, key=lambda task: task[0] != "COMPLETED")  # of an array, one that failed
        return _final(state, f"exit code {code}")
    if shutil.which("sacct"):
        sacct = subprocess.run(
            ["sacct", "--noheader", "--parsable2", "--allocations", "--jobs", number, "--format", "State,ExitCode"],
            capture_output=True,
            text=True,
        )
        if sacct.returncode == 0 and sacct.stdout.strip():
            state_text, _, code_text = first_line(sacct.stdout).partition("|")
            return _final(state_text.split()[0], f"exit code {code_text}")
    return Status("lost", "Slurm no longer knows it; see its output")


def _final(state: str, detail: str) -> Status:
    return Status(_STATES.get(state, "failed"), f"{state}, {detail}" if detail else state)


def _need(program: str) -> None:
    if shutil.which(program) is None:
        raise UsageError(
            f"{program} is not on this machine's PATH: Slurm is not installed here, or its module is not loaded",
            hint="Run this on a login node of the cluster; --render needs no Slurm.",
        )


def _ask(*command: str, stdin: str | None = None, env: Mapping[str, str] | None = None) -> str:
    """Run a command of Slurm; its own first line is the error where it fails."""
    result = subprocess.run(command, input=stdin, capture_output=True, text=True, env=env)
    if result.returncode != 0:
        raise _refused(command[0], result)
    return result.stdout


def _refused(program: str, ran: subprocess.CompletedProcess[str]) -> UsageError:
    answer = [line for line in (ran.stderr or ran.stdout).splitlines() if line.strip()] or ["failed"]
    absent = any(text in ran.stderr for text in ("res_nsearch", "Unable to contact", "slurm.conf"))
    hint = "Slurm's controller does not answer. Looked for: SLURM_CONF, /etc/slurm/slurm.conf, its DNS entry."
    return UsageError(f"{program}: {answer[0].removeprefix(f'{program}: error: ')}", hint=hint if absent else "")


def _is_array(text: str) -> bool:
    """Whether sbatch takes a text as the numbers of an array: 0-7, 1,3,5-9, 0-99:10%4."""
    numbers, _, at_once = text.partition("%")
    matches = [re.fullmatch(r"(\d+)(?:-(\d+)(?::[1-9]\d*)?)?", part) for part in numbers.split(",")]
    rises = all(match is not None and int(match[2] or match[1]) >= int(match[1]) for match in matches)
    return rises and ("%" not in text or re.fullmatch(r"[1-9]\d*", at_once) is not None)


def _image(image: str, container: str) -> str:
    """Return an image as the container program writes it: enroot nvcr.io#org/name, apptainer docker://nvcr.io/org/name.

    Files are kept as they are.
    """
    if image.startswith(("/", ".", "~")) or image.endswith((".sqsh", ".sif")):
        return image
    scheme, separator, name = image.rpartition("://")
    if container == "apptainer":
        return image if separator else f"docker://{name.replace('#', '/')}"
    registry, slash, rest = name.partition("/")
    is_registry = bool(slash) and (registry == "localhost" or re.search("[.:]", registry) is not None)
    return f"{scheme}{separator}{registry}#{rest}" if is_registry and "#" not in name else image


def _quoted(flag: str) -> str:
    """Return a flag of sbatch for a line of the script, where spaces and # would end its value."""
    name, equals, value = flag.partition("=")
    return f"{name}={shlex.quote(value)}" if equals else shlex.quote(flag)


def _slurm_time(seconds: float) -> str:
    minutes = max(1, round(seconds / 60))
    days, rest = divmod(minutes, 24 * 60)
    return f"{days}-{rest // 60:02}:{rest % 60:02}:00" if days else f"{rest // 60:02}:{rest % 60:02}:00"
