"""`phalanx runs`: list, show, compare, tag, scale and remove runs."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from phalanx.cli.flags import FlagParser
from phalanx.cli.json_output import add_json_flag, print_json
from phalanx.errors import UsageError, unknown_name
from phalanx.launch.elastic import request_ranks
from phalanx.observe.format import duration, of_total, size, table
from phalanx.runs.facts import differences, facts
from phalanx.runs.resume import note_run, refuse_running, remove_run, tag_run
from phalanx.runs.stored import RUNS, StoredRun, find_run, list_runs

ACTIONS = {
    "list": "list the runs, the newest first",
    "show": "show one run: how it was started, how it went, its checkpoints",
    "diff": "compare two runs: settings, model, data and results",
    "tag": "give a run a name of your own, which every command takes",
    "note": "write a note about a run, or with an empty text remove it",
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
        raise UsageError(unknown_name("action of phalanx runs", action, ACTIONS), hint=hint)
    namespace = parser(action).parse_all(words)
    acts = {"list": _list, "show": _show, "diff": _diff, "tag": _tag, "note": _note, "scale": _scale, "rm": _remove}
    acts[action](namespace)
    return 0


def parser(action: str) -> FlagParser:
    """Return the parser of one action."""
    actions = "\n".join(f"  {name:<6} {text}" for name, text in ACTIONS.items())
    words = {"show": "RUN", "diff": "RUN RUN", "tag": "RUN TAG", "note": "RUN TEXT", "scale": "RUN N", "rm": "RUN ..."}
    usage = f" {words[action]}" if action in words else ""
    parser = FlagParser(
        prog=f"phalanx runs {action}",
        usage=f"phalanx runs {action}{usage} [options]",
        description=ACTIONS[action] + "." + (_SCALING if action == "scale" else ""),
        epilog=f"actions:\n{actions}\n\nRUN is a name, the beginning of one, a tag, a folder, or last.",
    )
    if action in ("show", "tag", "note", "scale"):
        parser.add_argument("run", metavar="RUN")
    if action in ("diff", "rm"):
        parser.add_argument("runs", nargs=2 if action == "diff" else "+", metavar="RUN")
    if action == "tag":
        parser.add_argument("tag", metavar="TAG")
        parser.add_argument("--remove", action="store_true", help="take the tag away")
    if action == "note":
        parser.add_argument("note", metavar="TEXT")
    if action == "scale":
        parser.add_argument("ranks", metavar="N", type=int, help="how many ranks the run shall have")
    if action == "rm":
        parser.add_argument("-y", "--yes", action="store_true", help="do not ask")
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


def _list(namespace: argparse.Namespace) -> None:
    runs = [summary(run) for run in list_runs(Path(namespace.runs_dir))]
    if namespace.json:
        print_json(runs)
        return
    if not runs:
        print(f"no runs in {Path(namespace.runs_dir).resolve()} yet; start one with: phalanx train digits")
        return
    rows = [("name", "started", "status", "steps", "best", "size", "tags")]
    for each in runs:
        best = "-" if each["best_metric"] is None else f"{each['best_metric']} {each['best_value']:.4g}"
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(each["started"]))
        steps = of_total(each["steps"], each["total_steps"])
        rows.append((each["name"], when, each["status"], steps, best, size(each["bytes"]), " ".join(each["tags"])))
    print(table(rows))


def _show(namespace: argparse.Namespace) -> None:
    run = find_run(namespace.run, Path(namespace.runs_dir))
    record, found = run.record, summary(run)
    if namespace.json:
        print_json({**found, "record": dataclasses.asdict(record) if record else None})
        return
    error = run.failure if found["status"] == "failed" else {}
    rows = [
        ("folder", str(run.path)),
        ("command", run.command),
        ("started", time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.started))),
        ("status", f"{found['status']} ({found['reason']})" if found["reason"] else found["status"]),
        ("damage", run.damage),
        ("error", f"{error['type']}: {error['message']}" if error else ""),
        ("steps", of_total(found["steps"], found["total_steps"])),
        ("best", f"{found['best_metric']} {found['best_value']:.6g}" if found["best_metric"] else ""),
        ("best checkpoint", str(found["best_checkpoint"] or "")),
        ("checkpoints", ", ".join(path.name for path in run.checkpoints)),
        ("size", size(found["bytes"])),
        ("tags", ", ".join(run.tags)),
        ("note", record.note if record else ""),
    ]
    if "total_time" in run.ended:
        rows.append(("time", duration(run.ended["total_time"])))
    if "strategy" in (begun := run.begun):
        layout = begun.get("layout") or begun["strategy"]
        rows.append(("layout", f"{layout}, {begun['world_size']} x {begun['device']}, {begun['precision']}"))
        rows.append(("parameters", f"{begun['parameters']:,}"))
    if record is not None:
        rows.append(("in", record.directory))
        rows.append(("git commit", record.commit or ""))
        rows.append(("versions", f"phalanx {record.phalanx}, Python {record.python}"))
    print(table([row for row in rows if row[1]]))
    verbs = ["resume"] if found["status"] not in ("finished", "running") else []
    if run.checkpoints:
        lines = [f"  phalanx {verb} {shlex.quote(run.name)}" for verb in (*verbs, "evaluate", "export")]
        print("next:", *lines, sep="\n")


def _diff(namespace: argparse.Namespace) -> None:
    both = [find_run(name, Path(namespace.runs_dir)) for name in namespace.runs]
    differs = differences([facts(run) for run in both])
    if namespace.json:
        print_json(differs)
        return
    rows: list[tuple[str, ...]] = [("", both[0].name, both[1].name)]
    for name, pair in differs.items():
        rows.append((name, *("-" if v is None else f"{v:.6g}" if isinstance(v, float) else str(v) for v in pair)))
    print(table(rows))


def _tag(namespace: argparse.Namespace) -> None:
    tag_run(find_run(namespace.run, Path(namespace.runs_dir)), namespace.tag, remove=namespace.remove)


def _note(namespace: argparse.Namespace) -> None:
    note_run(find_run(namespace.run, Path(namespace.runs_dir)), namespace.note)


def _scale(namespace: argparse.Namespace) -> None:
    stored = find_run(namespace.run, Path(namespace.runs_dir))
    if stored.status != "running":
        raise UsageError(f"{stored.path} is not in progress: its status is {stored.status}.")
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
