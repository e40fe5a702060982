"""`phalanx runs`: list, show, compare, name, tag, scale and remove runs."""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from phalanx.cli.flags import FlagParser
from phalanx.cli.json_output import add_json_flag, print_json
from phalanx.cli.verbs import run_verb
from phalanx.errors import UsageError, unknown_name
from phalanx.observe.events import RunEnded, RunStarted, from_dict
from phalanx.observe.format import duration, of_total, rate, size, summary_rows, table
from phalanx.observe.guard import say_to_user
from phalanx.recovery import request_ranks
from phalanx.run.facts import differences, facts, surroundings
from phalanx.run.record import CHANGES, PACKAGES
from phalanx.run.resume import name_run, note_end, note_run, refuse_running, remove_run, tag_run
from phalanx.run.stored import RUNS, StoredRun, find_run, list_runs, list_studies

ACTIONS = {
    "list": "list the runs, the newest first",
    "show": "show one run: how it was started, how it went, its checkpoints",
    "diff": "compare two runs: settings, model, data and results",
    "name": "name a run; every command takes the name",
    "tag": "label a run; any number of runs can share a tag",
    "logs": "show what the ranks of a run print",
    "stop": "stop a run after its current step, with a checkpoint, as SIGTERM does",
    "note": "write a note about a run; an empty text removes it",
    "scale": "change the number of ranks of a run in progress, at the next step's boundary",
    "rm": "remove runs with their files",
}


_SCALING = """

The run must have been started elastic, such as with --num-workers 2:8, which sets the numbers that are possible. The
global batch and the order of the samples stay the same: each rank accumulates more or fewer micro-batches."""


def run(arguments: Sequence[str]) -> int:
    """Run the verb."""
    words = list(arguments)
    if words and words[0] in ("-h", "--help"):
        parser("list").print_help()
        return 0
    action = words.pop(0) if words and not words[0].startswith("-") else "list"
    if action not in ACTIONS:
        hint = f"To see one run: phalanx runs show {action}" if (RUNS / action).is_dir() else ""
        raise UsageError(unknown_name("action", action, ACTIONS, of="phalanx runs"), hint=hint)
    namespace = parser(action).parse_all(words)
    ended = action == "stop" and namespace.ended
    if action in OF_JOBS and not ended and (job := _job_of(namespace.run, Path(namespace.runs_dir), action)):
        return run_verb("jobs", [OF_JOBS[action], *(job if word == namespace.run else word for word in words)])
    acts = {"list": _list, "show": _show, "diff": _diff, "name": _name, "tag": _tag, "note": _note, "logs": _logs}
    {**acts, "stop": _stop, "scale": _scale, "rm": _remove}[action](namespace)
    return 0


OF_JOBS = {"show": "show", "logs": "logs", "stop": "cancel"}
"""What `phalanx jobs` calls an action that both have."""


def _job_of(name: str, folder: Path, action: str) -> str:
    """Return the submitted job that a name means, where it is not that of a run here; empty where it means none.

    The job of a run in progress is what to stop: its scheduler would start the run again.
    """
    from phalanx.tools.submit.job import ENDED, find_record, records  # few commands need it

    with suppress(UsageError):
        path = find_run(name, folder).path.resolve()
        folders = {Path(job.directory, job.run_dir).resolve(): job.name for job in records() if job.state not in ENDED}
        return folders.get(path, "") if action == "stop" else ""
    with suppress(UsageError):
        return find_record(name).name
    return ""


def parser(action: str) -> FlagParser:
    """Return the parser of one action."""
    actions = "\n".join(f"  {name:<6} {text}" for name, text in ACTIONS.items())
    meanings = "RUN is a name, the beginning of one, a tag that only one run has, a folder, or last."
    forms = {
        "list": "",
        "diff": " RUN RUN",
        "name": " RUN NAME",
        "tag": " RUN TAG",
        "note": " RUN TEXT",
        "scale": " RUN N",
        "rm": " RUN ...",
    }
    usage = {**forms, "rm": " RUN ..."}.get(action, " RUN")
    parser = FlagParser(
        prog=f"phalanx runs {action}",
        usage=f"phalanx runs {action}{usage} [options]",
        description=ACTIONS[action] + "." + (_SCALING if action == "scale" else ""),
        epilog=f"actions:\n{actions}\n\n{meanings}",
    )
    if action in ("show", "name", "tag", "note", "logs", "stop", "scale"):
        parser.add_argument("run", metavar="RUN")
    if action == "logs":
        parser.add_argument("-f", "--follow", action="store_true", help="go on until the run ends")
        parser.add_argument("--rank", type=int, metavar="N", help="of one rank only")
    if action == "stop":
        help = "mark a run on another host as ended without a report, if its node was lost"
        parser.add_argument("--ended", action="store_true", help=help)
    if action in ("diff", "rm"):
        parser.add_argument("runs", nargs=2 if action == "diff" else "+", metavar="RUN")
    if action == "name":
        parser.add_argument("name", metavar="NAME", nargs="?", help="a name that no other run has")
        parser.add_argument("--remove", action="store_true", help="remove the run's name")
    if action == "tag":
        parser.add_argument("tag", metavar="TAG")
        parser.add_argument("--remove", action="store_true", help="remove the tag from the run")
    if action == "note":
        parser.add_argument("note", metavar="TEXT")
    if action == "scale":
        parser.add_argument("ranks", metavar="N", type=int, help="how many ranks the run shall have")
    if action == "rm":
        parser.add_argument("-y", "--yes", action="store_true", help="do not ask")
    if action == "list":
        help = "list the trials of searches too, each as a run; with a name, only those of one search"
        parser.add_argument("--trials", nargs="?", const="", metavar="STUDY", help=help)
        parser.add_argument("--tag", action="append", default=[], metavar="TAG", help="only the runs with this tag")
        parser.add_argument("--group-by-tag", action="store_true", help="list the runs of each tag under its name")
    if action in ("list", "show", "diff"):
        add_json_flag(parser, "it")
    parser.add_argument("--runs-dir", default=str(RUNS), metavar="DIR", help="the folder that holds the runs [runs]")
    return parser


def summary(run: StoredRun) -> dict[str, Any]:
    """Return what the list shows of a run, as plain data."""
    steps, total = run.steps
    best = run.best
    return {
        "name": run.name,
        "alias": run.alias,
        "path": str(run.path),
        "started": run.started,
        "status": run.status,
        "reason": run.ended.get("reason", ""),
        "steps": steps,
        "total_steps": total,
        "best_metric": best[0] if best else None,
        "best_value": best[1] if best else None,
        "best_checkpoint": run.best_checkpoint,
        "checkpoints": [str(path) for path in run.checkpoints],
        "bytes": run.size,
        "tags": run.tags,
    }


def _listed(folder: Path, search: str | None) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the runs to list, and a line for each search whose trials are left out; `search`: of --trials."""
    studies = list_studies(folder)
    if search:
        named = [study for study in studies if study.name.startswith(Path(search).name)]
        if not named:
            raise UsageError(unknown_name("search", search, [study.name for study in studies]))
        return [summary(run) for study in named for run in list_runs(study / "trials")], []
    runs = list_runs(folder)
    if search is not None:
        runs += [run for study in studies for run in list_runs(study / "trials")]
        runs.sort(key=lambda run: run.started, reverse=True)
        return [summary(run) for run in runs], []
    counts = {study.name: len(list_runs(study / "trials")) for study in studies}
    return [summary(run) for run in runs], [
        f"search {name}: {count} trials; see: phalanx runs --trials {name}" for name, count in counts.items()
    ]


def _list(namespace: argparse.Namespace) -> None:
    runs, notes = _listed(Path(namespace.runs_dir), namespace.trials)
    tags = sorted({tag for run in runs for tag in run["tags"]})
    for tag in namespace.tag:
        if tag not in tags:
            raise UsageError(unknown_name("tag", tag, tags, of=str(Path(namespace.runs_dir))))
        runs, notes = [run for run in runs if tag in run["tags"]], []
    if namespace.json:
        print_json(runs)
        return
    if not runs and not notes:
        print(f"no runs in {Path(namespace.runs_dir).resolve()} yet; start one with: phalanx train digits")
        return
    groups = {"": runs}
    if namespace.group_by_tag:  # a run with two tags is listed under both
        groups = {tag: [run for run in runs if tag in run["tags"]] for tag in tags}
        groups["no tag"] = [run for run in runs if not run["tags"]]
    head, *rows = table([_TITLES, *(_row(run) for group in groups.values() for run in group)]).splitlines()
    lines, rest = [head] if runs else [], iter(rows)
    for title, group in groups.items():
        lines += [f"{title} ({len(group)})"] if title and group else []
        lines += [next(rest) for _ in group]
    print("\n".join([*lines, *notes]))


_TITLES = ("name", "started", "status", "steps", "best", "size", "tags")


def _row(run: dict[str, Any]) -> tuple[str, ...]:
    best = "-" if run["best_metric"] is None else f"{run['best_metric']} {run['best_value']:.4g}"
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(run["started"]))
    name = f"{run['name']} ({run['alias']})" if run["alias"] else run["name"]
    steps = of_total(run["steps"], run["total_steps"])
    return name, when, run["status"], steps, best, size(run["bytes"]), " ".join(run["tags"])


def _show(namespace: argparse.Namespace) -> None:
    run = find_run(namespace.run, Path(namespace.runs_dir))
    record, facts = run.record, summary(run)
    if namespace.json:
        print_json({**facts, "record": dataclasses.asdict(record) if record else None})
        return
    error = run.failure if facts["status"] == "failed" else {}
    raised = f"{error['type']}: {error['message']}" if error else ""
    # The report names the guilty rank; the last record may be that of a rank which only waited for it.
    cause = record.cause if record is not None and facts["status"] == "failed" else ""
    rows = [
        ("folder", str(run.path)),
        ("command", run.command),
        ("started", time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.started))),
        ("status", f"{facts['status']} ({facts['reason']})" if facts["reason"] else facts["status"]),
        ("damage", run.damage),
        ("error", cause or raised),
        ("steps", of_total(facts["steps"], facts["total_steps"])),
        ("best", f"{facts['best_metric']} {facts['best_value']:.6g}" if facts["best_metric"] else ""),
        ("best checkpoint", str(facts["best_checkpoint"] or "")),
        ("checkpoints", ", ".join(path.name for path in run.checkpoints)),
        ("size", size(facts["bytes"])),
        ("name", run.alias),
        ("tags", ", ".join(run.tags)),
        ("note", record.note if record else ""),
    ]
    rows += [row for row in _ended_rows(run) if row[0] not in dict(rows)]
    if record is not None:
        changed = run.path / CHANGES
        rows.append(("in", record.directory))
        rows.append(("git commit", f"{record.commit or ''}{f', with {changed}' if changed.is_file() else ''}"))
        rows.append(("versions", f"phalanx {record.phalanx}, Python {record.python}"))
        rows += record.environment.items()
        rows.append(("packages", str(run.path / PACKAGES) if (run.path / PACKAGES).is_file() else ""))
    print(table([row for row in rows if row[1]]))
    verbs = ["resume"] if facts["status"] not in ("finished", "running") else []
    if run.checkpoints:
        lines = [f"  phalanx {verb} {shlex.quote(run.name)}" for verb in (*verbs, "evaluate", "export")]
        print("next:", *lines, sep="\n")


def _ended_rows(run: StoredRun) -> list[tuple[str, str]]:
    """Return all rows of the summary of a run that has ended; of one that goes on, its layout and size."""
    begun = run.begun
    if "strategy" not in begun:
        return [("time", duration(run.ended["total_time"]))] if "total_time" in run.ended else []
    layout = begun.get("layout") or begun["strategy"]
    resources = f"{begun['world_size']} x {begun['device']}, {begun['precision']}"
    rows = [("layout", f"{layout}, {resources}"), ("parameters", f"{begun['parameters']:,}")]
    with suppress(TypeError, ValueError):  # it goes on, or another version wrote its events
        started, ended = from_dict(begun), from_dict(run.ended)
        if isinstance(started, RunStarted) and isinstance(ended, RunEnded):
            rows += [row for row in summary_rows(ended, started) if row[0] not in dict(rows)]
    return rows


_UNITS: dict[str, Callable[[float], str]] = {
    "total_time": duration,
    "throughput": lambda value: f"{rate(value)} samples/s",
}
"""How results are written in a comparison."""
_POLL_SECONDS = 0.2


def _shown(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, int | float) and name in _UNITS:
        return _UNITS[name](value)
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if type(value) is int else str(value)


def _diff(namespace: argparse.Namespace) -> None:
    both = [find_run(name, Path(namespace.runs_dir)) for name in namespace.runs]
    differs = differences([facts(run) for run in both])
    if all(run.path.joinpath(PACKAGES).is_file() for run in both):
        differs |= differences([surroundings(run) for run in both])
    if namespace.json:
        print_json(differs)
        return
    rows: list[tuple[str, ...]] = [("", both[0].name, both[1].name)]
    for name, pair in differs.items():
        rows.append((name, *(_shown(name, value) for value in pair)))
    print(table(rows))


def _name(namespace: argparse.Namespace) -> None:
    if namespace.remove == (namespace.name is not None):
        raise UsageError(
            "a name, or --remove", hint="Write: phalanx runs name RUN NAME, or phalanx runs name RUN --remove"
        )
    run = find_run(namespace.run, Path(namespace.runs_dir))
    name_run(run, namespace.name or "")
    print(f"name of {run.name}: {namespace.name or '(removed)'}")


def _tag(namespace: argparse.Namespace) -> None:
    run = find_run(namespace.run, Path(namespace.runs_dir))
    tags = tag_run(run, namespace.tag, remove=namespace.remove)
    print(f"tags of {run.name}: {', '.join(tags) or '(none)'}")


def _note(namespace: argparse.Namespace) -> None:
    run = find_run(namespace.run, Path(namespace.runs_dir))
    note_run(run, namespace.note)
    print(f"note of {run.name}: {namespace.note.strip() or '(removed)'}")


def _logs(namespace: argparse.Namespace) -> None:
    from phalanx.tools.submit.job_files import follow_files, rank_log  # behind the other actions, which are quick

    run = find_run(namespace.run, Path(namespace.runs_dir))
    one = None if namespace.rank is None else [rank_log(run.path, namespace.rank)]
    follow = (lambda: StoredRun(run.path).status != "running") if namespace.follow else None
    printed = False
    for line in follow_files(lambda: one or sorted(run.path.glob("logs/**/rank-*.log")), follow):
        print(line, flush=namespace.follow)
        printed = True
    if not printed:
        say_to_user(f"the ranks of {run.name} printed nothing; its curves and events: phalanx ui")


def _stop(namespace: argparse.Namespace) -> None:
    run = find_run(namespace.run, Path(namespace.runs_dir))
    if namespace.ended:
        note_end(run)
        print(f"{run.name} has ended: {StoredRun(run.path).status}")
        return
    if run.status != "running":
        raise UsageError(f"{run.path} is not in progress: its status is {run.status}.")
    if run.record is None or not run.record.is_alive:
        host = f" on {run.record.host}" if run.record is not None else ""
        raise UsageError(f"the process of {run.name} is not one of this machine{host}", hint="Stop it there.")
    run.require_trust("names the process that would get a signal")
    os.kill(run.record.pid, signal.SIGTERM)
    print(f"{run.name} stops after its current step", flush=True)
    while (ended := StoredRun(run.path)).status == "running":
        time.sleep(_POLL_SECONDS)
    print(
        f"{run.name} is {ended.status}" + (f"; to continue it: phalanx resume {run.name}" if ended.checkpoints else "")
    )


def _scale(namespace: argparse.Namespace) -> None:
    stored = find_run(namespace.run, Path(namespace.runs_dir))
    if stored.status != "running":
        raise UsageError(f"{stored.path} is not in progress: its status is {stored.status}.")
    stored.require_trust("its launcher takes requests of its user alone")
    request_ranks(stored.path / "logs", namespace.ranks)
    print(f"{stored.name} goes on with {namespace.ranks} ranks at the next step")


def _remove(namespace: argparse.Namespace) -> None:
    runs = list({run.path: run for run in (find_run(n, Path(namespace.runs_dir)) for n in namespace.runs)}.values())
    for run in runs:
        refuse_running(run)
    total = size(sum(run.size for run in runs))
    names = ", ".join(run.name for run in runs)
    if not namespace.yes:
        if not sys.stdin.isatty():
            raise UsageError(f"this would remove {names} ({total})", hint="Add --yes to do it.")
        if input(f"Remove {names} ({total})? [y/N] ").strip().lower() not in ("y", "yes"):
            print("nothing was removed")
            return
    for run in runs:
        if not remove_run(run, Path(namespace.runs_dir)):
            print(f"other files stay in {run.path}")
    print(f"removed {names} ({total})")
