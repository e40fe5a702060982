"""`phalanx report RUN --profile`: where the time of the recorded steps went, what limits the speed, what to change."""

from __future__ import annotations

from pathlib import Path

from phalanx.cli.json_output import print_json
from phalanx.errors import UsageError
from phalanx.runs.stored import StoredRun
from phalanx.tools.profile.merge import MERGED, merge
from phalanx.tools.profile.split import Analysis, analyse
from phalanx.tools.profile.svg import draw
from phalanx.tools.profile.text import document, lines


def report_profile(stored: StoredRun, rank: int | None, svg: str | None, *, as_json: bool) -> None:
    """Analyse a run's traces, merge them into one, and print the result."""
    folder = _folder(stored)
    found = analyse(folder)
    if rank is not None:
        _check_rank(found, rank)
    traces = folder.glob("rank-*.json.gz")
    merged = folder / MERGED
    if not merged.exists() or merged.stat().st_mtime < max(path.stat().st_mtime for path in traces):
        merge(folder, found)
    if svg:
        Path(svg).write_text(draw(found), encoding="utf-8")
    if as_json:
        print_json({"run": stored.name, "trace": str(merged), **document(found, folder)})
        return
    print(f"{stored.name}: {stored.status}, profile of", end=" ")
    print("\n".join(lines(found, rank, folder)))
    print(f"\nall ranks on one timeline: {merged} (open it at https://ui.perfetto.dev)")


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
