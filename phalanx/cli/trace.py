"""`phalanx trace RUN`: where the time of the recorded steps went, what limits the speed, and what to change."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from phalanx.cli.flags import FlagParser
from phalanx.cli.json_output import add_json_flag, print_json
from phalanx.errors import UsageError
from phalanx.runs.stored import RUNS, StoredRun, find_run
from phalanx.tools.profile.merge import MERGED, merge
from phalanx.tools.profile.split import Analysis, analyse
from phalanx.tools.profile.svg import draw
from phalanx.tools.profile.text import document, lines

_HELP = "Show where the time of the steps went that --profile has recorded, on each rank, and what limits the speed."


def parser() -> FlagParser:
    """Return the parser of the verb."""
    parser = FlagParser(
        prog="phalanx trace", usage="phalanx trace RUN [--rank N] [--svg FILE] [--json]", description=_HELP
    )
    parser.add_argument("run", metavar="RUN", help="a name, the beginning of one, a tag, a folder, or last")
    parser.add_argument("--rank", type=int, metavar="N", help="show the steps of this rank one by one")
    parser.add_argument("--svg", metavar="FILE", help="draw the first steps of all ranks into this file")
    add_json_flag(parser, "the analysis")
    parser.add_argument("--runs-dir", default=str(RUNS), metavar="DIR", help="the folder that holds the runs [runs]")
    return parser


def run(arguments: Sequence[str]) -> int:
    """Run the verb."""
    namespace = parser().parse_all(arguments)
    stored = find_run(namespace.run, Path(namespace.runs_dir))
    folder = _folder(stored)
    found = analyse(folder)
    if namespace.rank is not None:
        _check_rank(found, namespace.rank)
    traces = folder.glob("rank-*.json.gz")
    merged = folder / MERGED
    if not merged.exists() or merged.stat().st_mtime < max(path.stat().st_mtime for path in traces):
        merge(folder, found)
    if namespace.svg:
        Path(namespace.svg).write_text(draw(found), encoding="utf-8")
    if namespace.json:
        print_json({"run": stored.name, "trace": str(merged), **document(found, folder)})
        return 0
    print(f"{stored.name}: {stored.status}, profile of", end=" ")
    print("\n".join(lines(found, namespace.rank, folder)))
    print(f"\nall ranks on one timeline: {merged} (open it at https://ui.perfetto.dev)")
    return 0


def _folder(stored: StoredRun) -> Path:
    """Return the folder of a run's traces; an error says why there are none."""
    folder = stored.path / "profile"
    if any(folder.glob("rank-*.json.gz")):
        return folder
    given = stored.record.settings.get("profile") if stored.record is not None else None
    if not given:
        raise UsageError(
            f"{stored.name} was not profiled", hint="Record some steps: phalanx train ... --profile steps=10:15"
        )
    step = stored.steps[0]
    if stored.status == "running":
        raise UsageError(
            f"{stored.name} has not recorded its profile yet ({given}): it is at step {step}",
            hint="The traces are there when the last of these steps is done; see: phalanx runs",
        )
    raise UsageError(
        f"{stored.name} was to record a profile ({given}), but ended before it was complete, at step {step}",
        hint="Record earlier steps, such as --profile steps=3:5; a script must train with a trainer of Phalanx.",
    )


def _check_rank(found: Analysis, rank: int) -> None:
    known = [timeline.rank for timeline in found.timelines]
    if rank not in known:
        names = ", ".join(map(str, known[:20])) + (", ..." if len(known) > 20 else "")
        raise UsageError(f"rank {rank} was not recorded", hint=f"Recorded ranks: {names}")
