"""`phalanx report RUN`: where the wall time of a run went, or (--profile) the time of its recorded steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.cli.flags import FlagParser
from phalanx.cli.json_output import add_json_flag, add_output_flag, print_json
from phalanx.errors import UsageError
from phalanx.observe.format import duration, rate, speed_note, table
from phalanx.observe.goodput import CATEGORIES, Account, account
from phalanx.run.stored import RUNS, StoredRun, find_run
from phalanx.tools.profile.findings import document, lines
from phalanx.tools.profile.pictures import MERGED, draw, merge
from phalanx.tools.profile.split import Analysis, analyse

if TYPE_CHECKING:
    from phalanx.tools.plan.learning import RunComparison


_HELP = """Show where the wall time of a run went, whether it is running, has ended, failed or was restarted.

With --profile, show where each rank spent the steps that `train --profile` recorded, and what limits the speed."""
_BAR = 40


def parser() -> FlagParser:
    """Return the parser of the verb."""
    usage = "phalanx report RUN [--profile [--rank N] [--svg FILE]] [--json]"
    parser = FlagParser(prog="phalanx report", usage=usage, description=_HELP)
    parser.add_argument("run", metavar="RUN", help="a name, the beginning of one, a tag, a folder, or last")
    parser.add_argument("--profile", action="store_true", help="show the recorded steps instead of the whole run")
    parser.add_argument("--rank", type=int, metavar="N", help="--profile: show the steps of this rank one by one")
    text = "--profile: draw the first steps of all ranks into this file"
    add_output_flag(parser, "--svg", endings=(".svg",), help=text)
    add_json_flag(parser, "the report")
    parser.add_argument("--runs-dir", default=str(RUNS), metavar="DIR", help="the folder that holds the runs [runs]")
    return parser


def run(arguments: Sequence[str]) -> int:
    """Run the verb."""
    namespace = parser().parse_all(arguments)
    stored = find_run(namespace.run, Path(namespace.runs_dir))
    if namespace.profile or namespace.svg is not None or namespace.rank is not None:
        report_profile(stored, namespace.rank, namespace.svg, as_json=namespace.json)
        return 0
    ledger = account((*stored.events(), *stored.last_beat()))
    comparison, problem = _comparison(stored, ledger)
    if ledger is None:
        raise UsageError(
            f"the events of {stored.name} do not say where its time went",
            hint="It has not begun to train yet, or was trained by an older version, by TensorFlow or by your own "
            "loop.",
        )
    if namespace.json:
        predicted = [] if comparison is None else [component._asdict() for component in comparison.components]
        print_json({**_document(stored, ledger), "predicted": predicted})
    else:
        print("\n".join([*_lines(stored, ledger), *_comparison_lines(comparison), *problem]))
    return 0


def _comparison(stored: StoredRun, ledger: Account | None) -> tuple[RunComparison | None, list[str]]:
    """Return the comparison, or why there is none: a report is shown all the same."""
    try:
        comparison = compare_stored(stored, ledger)
    except UsageError as error:
        return None, ["", f"not predicted: {error}"]
    if comparison is not None and not comparison.is_measured:
        return None, ["", "not predicted: CPUs differ, and this one was not measured. Run: phalanx bench machine"]
    return comparison, []


def compare_stored(stored: StoredRun, ledger: Account | None) -> RunComparison | None:
    """Return what the planner predicts of a run, beside what was measured; None where its events do not describe it."""
    if ledger is None or not stored.begun.get("job"):
        return None
    from phalanx.tools.plan.learning import compare

    steps = [event for event in stored.events() if event["event"] == "step"]
    return compare(stored.begun, steps, ledger)


def _comparison_lines(comparison: RunComparison | None) -> list[str]:
    if comparison is None:
        return []
    rows = [("", "predicted", "measured", "measured / predicted")]
    for component in comparison.components:
        predicted, measured = (
            f"{value:.4g} {component.unit}".rstrip() for value in (component.predicted, component.measured)
        )
        rows.append((component.name, predicted, measured, f"{component.factor:.2f}" if component.predicted else "-"))
    note = "To plan with these measurements: phalanx plan --calibrate-from RUN"
    return ["", f"predicted by `phalanx plan` for {comparison.gpu}", table(rows), note]


def _document(stored: StoredRun, ledger: Account) -> dict[str, Any]:
    return {
        "run": stored.name,
        "status": stored.status,
        "ranks_per_gpu": stored.ranks_per_gpu,
        "steps": ledger.steps,
        "attempts": ledger.attempts,
        "redone_steps": ledger.redone_steps,
        "total_seconds": ledger.total,
        "seconds": ledger.seconds,
        "shares": ledger.shares,
        "throughput": {"steady": ledger.steady_throughput, "whole": ledger.throughput},
        "mfu": {"steady": ledger.steady_mfu, "whole": ledger.mfu},
        "communication_is_counted": ledger.communication_is_counted,
        "until": ledger.until,
    }


def _lines(stored: StoredRun, ledger: Account) -> list[str]:
    redone = ledger.redone_steps
    again = f", {redone:,} step{'s' * (redone != 1)} done again" if redone else ""
    tries = f"{ledger.attempts} attempts" if ledger.attempts > 1 else "1 attempt"
    shares = ledger.shares
    largest = max(shares.values(), default=1.0) or 1.0
    rows = [("", "time", "share", "")]
    for name, seconds in ledger.seconds.items():
        bar = "#" * round(_BAR * shares[name] / largest)
        rows.append((CATEGORIES[name], _time(seconds), f"{shares[name]:6.1%}", bar))
    rows.append(("total", _time(ledger.total), f"{1:6.1%}", ""))
    speeds = [("", "steady state", "whole run")]
    speeds.append(("samples/s", rate(ledger.steady_throughput), rate(ledger.throughput)))
    if ledger.steady_mfu is not None and ledger.mfu is not None:
        speeds.append(("MFU", f"{ledger.steady_mfu:.1%}", f"{ledger.mfu:.1%}"))
    note = speed_note(stored.ranks_per_gpu)
    lines = [
        f"{stored.name}: {stored.status}, {ledger.steps:,} steps, {tries}{again}",
        *([note] if note else []),
        "",
        table(rows),
        "",
        table(speeds),
    ]
    if not ledger.communication_is_counted:
        lines += ["", "Exposed communication is part of productive: this strategy does not count it."]
    return lines


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds < 10 else duration(seconds)


def report_profile(stored: StoredRun, rank: int | None, svg: str | None, *, as_json: bool) -> None:
    """Analyse a run's traces, merge them into one, and print the result."""
    folder = _folder(stored)
    analysis = analyse(folder)
    if rank is not None:
        _check_rank(analysis, rank)
    traces = folder.glob("rank-*.json.gz")
    merged = folder / MERGED
    if not merged.exists() or merged.stat().st_mtime < max(path.stat().st_mtime for path in traces):
        merge(folder, analysis)
    if svg:
        Path(svg).write_text(draw(analysis), encoding="utf-8")
    if as_json:
        print_json({"run": stored.name, "trace": str(merged), **document(analysis, folder)})
        return
    print(f"{stored.name}: {stored.status}, profile of", end=" ")
    print("\n".join(lines(analysis, rank, folder)))
    print(f"\nall ranks on one timeline: {merged} (open it at https://ui.perfetto.dev)")


def _folder(stored: StoredRun) -> Path:
    """Return the folder of a run's traces; an error says why there are none."""
    folder = stored.path / "profile"
    if any(folder.glob("rank-*.json.gz")):
        return folder
    setting = stored.record.settings.get("profile") if stored.record is not None else None
    if not setting:
        raise UsageError(
            f"{stored.name} was not profiled", hint="Record some steps: phalanx train ... --profile steps=10:15"
        )
    step = stored.steps[0]
    if stored.status == "running":
        raise UsageError(
            f"{stored.name} has not recorded its profile yet ({setting}): it is at step {step}",
            hint="The traces are there when the last of these steps is done; see: phalanx runs",
        )
    raise UsageError(
        f"{stored.name} was to record a profile ({setting}), but ended before it was complete, at step {step}",
        hint="Record earlier steps, such as --profile steps=3:5; a script must train with a trainer of Phalanx.",
    )


def _check_rank(analysis: Analysis, rank: int) -> None:
    ranks = [timeline.rank for timeline in analysis.timelines]
    if rank not in ranks:
        names = ", ".join(map(str, ranks[:20])) + (", ..." if len(ranks) > 20 else "")
        raise UsageError(f"rank {rank} was not recorded", hint=f"Recorded ranks: {names}")
