"""`phalanx jobs`: the jobs that were submitted from here: what their schedulers say, their output, and their end."""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from phalanx.cli.flags import FlagParser
from phalanx.cli.json_output import add_json_flag, print_json
from phalanx.cli.runs import OF_JOBS
from phalanx.cli.submit import target_of
from phalanx.cli.verbs import run_verb
from phalanx.errors import PhalanxError, UsageError, unknown_name
from phalanx.observe.format import of_total, table
from phalanx.run.stored import StoredRun, find_run, is_run, list_runs
from phalanx.tools.submit.job import ENDED, JobRecord, find_record, records, write_record
from phalanx.tools.submit.target import Status

ACTIONS = {
    "list": "list submitted jobs",
    "show": "show one job: its scheduler's state and its training progress",
    "logs": "show the output of a job",
    "cancel": "end a job",
}


def parser(action: str = "list") -> FlagParser:
    """Return the parser of one action."""
    actions = "\n".join(f"  {name:<7} {text}" for name, text in ACTIONS.items())
    job = "" if action == "list" else " JOB"
    parser = FlagParser(
        prog=f"phalanx jobs {action}",
        usage=f"phalanx jobs {action}{job} [options]",
        description=ACTIONS[action] + ".",
        epilog=f"actions:\n{actions}\n\nJOB is a name, the beginning of one, the scheduler's id, or last.",
    )
    if job:
        parser.add_argument("job", metavar="JOB")
    if action == "logs":
        parser.add_argument("-f", "--follow", action="store_true", help="go on until the job ends")
        parser.add_argument("--rank", type=int, metavar="N", help="of one rank only")
    if action in ("list", "show"):
        add_json_flag(parser, "it")
    return parser


def run(arguments: Sequence[str]) -> int:
    """Run the verb."""
    words = list(arguments)
    if words and words[0] in ("-h", "--help"):
        parser().print_help()
        return 0
    action = words.pop(0) if words and not words[0].startswith("-") else "list"
    if action not in ACTIONS:
        hint = f"To see one job: phalanx jobs show {action}"
        raise UsageError(unknown_name("action", action, ACTIONS, of="phalanx jobs"), hint=hint)
    namespace = parser(action).parse_all(words)
    if action != "list" and _is_run(namespace.job):
        return run_verb("runs", [next(name for name, job_action in OF_JOBS.items() if job_action == action), *words])
    {"list": _list, "show": _show, "logs": _logs, "cancel": _cancel}[action](namespace)
    return 0


def _is_run(name: str) -> bool:
    """Whether a name is that of a run here, or may be meant as one, and not that of a submitted job."""
    for find in (find_record, find_run):
        with suppress(UsageError):
            return isinstance(find(name), StoredRun)
    return not records() and bool(list_runs())


def _list(namespace: argparse.Namespace) -> None:
    jobs = [(record, refresh(record)) for record in records()]
    if namespace.json:
        print_json([{**dataclasses.asdict(record), **dataclasses.asdict(status)} for record, status in jobs])
        return
    if not jobs:
        print("no jobs were submitted from here yet; submit one with: phalanx submit slurm digits")
        return
    rows = [("name", "target", "id", "submitted", "state", "")]
    for record, status in jobs:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(record.submitted))
        rows.append((record.name, record.target, record.id, when, status.state, status.detail))
    print(table(rows))


def _show(namespace: argparse.Namespace) -> None:
    record = find_record(namespace.job)
    status = refresh(record)
    folder = Path(record.directory) / record.run_dir
    stored = StoredRun(folder) if is_run(folder) else None
    if namespace.json:
        print_json({**dataclasses.asdict(record), **dataclasses.asdict(status)})
        return
    progress = f"{stored.status}, step {of_total(*stored.steps)}" if stored else ""
    rows = [
        ("job", f"{record.name} ({record.target} job {record.id})"),
        ("state", f"{status.state}{f' ({status.detail})' if status.detail else ''}"),
        ("nodes", ", ".join(status.nodes)),
        ("submitted", time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.submitted))),
        ("command", record.command),
        ("run", f"{folder}: {progress}" if progress else f"{folder} (not begun here)"),
        ("files", record.folder),
    ]
    print(table([row for row in rows if row[1]]))


def _logs(namespace: argparse.Namespace) -> None:
    record = find_record(namespace.job)
    for line in target_of(record).logs(record, follow=namespace.follow, rank=namespace.rank):
        print(line, flush=namespace.follow)


def _cancel(namespace: argparse.Namespace) -> None:
    record = find_record(namespace.job)
    status = refresh(record)
    if status.state in ENDED:
        print(f"{record.name} has ended already: {status.state}")
        return
    target_of(record).cancel(record)
    write_record(dataclasses.replace(record, state="cancelled"))
    print(f"cancelled {record.name} ({record.target} job {record.id})")


def refresh(record: JobRecord) -> Status:
    """Ask the scheduler about a job that has not ended, and keep its state; report a scheduler that is silent."""
    if record.state in ENDED and record.state != "lost":  # a scheduler that was away may know it again
        return Status(record.state)
    try:
        status = target_of(record).status(record)
    except PhalanxError as error:
        return Status(record.state, f"not known now: {error.message}")
    if status.state != record.state:
        write_record(dataclasses.replace(record, state=status.state))
    return status
