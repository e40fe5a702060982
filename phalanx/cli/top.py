"""`phalanx top [RUN]`: a live table of the ranks of a run; percentiles and the slowest where there are many."""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from phalanx.cli.flags import FlagParser
from phalanx.cli.json_output import add_json_flag, print_json
from phalanx.errors import UsageError
from phalanx.observe.format import duration, of_total, rate, size, speed_note, table
from phalanx.observe.heartbeat import Beat, Gauges, read_beats
from phalanx.observe.rank_statistics import PERCENTILES, beats_of, percentiles, slowest_first, slowest_of, slowness
from phalanx.run.stored import RUNS, StoredRun, find_run, list_runs

_HELP = "Show the ranks of a run while it trains: step, speed, waiting, memory, GPU, age of the heartbeat."
_ONE_BY_ONE = 40
"""With more ranks than these the table has percentiles, and the slowest ranks."""
_SLOWEST = 10
_OLD = 15.0
"""A heartbeat that is older than this, and than ten steps, is marked."""
_LIVE = ("running", "unknown")
"""Statuses of a run that may go on; unknown: on another node."""


def _share(value: float) -> str:
    return f"{value:.0%}"


def _time(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


_MEANINGS = """columns:
  samples/s      of this rank alone
  step           seconds per step, of which the next three are parts
  own work       waiting for data and the forward pass, which wait for no other rank: a slow rank shows here
  data wait      share of the time in which it waited for its next batch
  exposed comm.  share in which it waited for the other ranks, if the strategy counts that
  cores          CPU cores that its process keeps busy, without the processes that load its data
  memory         peak of the device, on the CPU that of the process
  GPU            its utilization; also GPU memory, power and temp., as nvidia-smi shows them
  heartbeat      the time since its last sign of life
The rest of a step is the backward pass, hidden communication, the optimizer and logging; for each of these see
phalanx report RUN --profile, after phalanx train ... --profile."""

_COLUMNS = {
    "samples_per_second": ("samples/s", rate),
    "step_seconds": ("step", _time),
    "own_seconds": ("own work", _time),
    "data_wait": ("data wait", _share),
    "communication": ("exposed comm.", _share),
    "cpu_cores": ("cores", lambda cores: f"{cores:.1f}"),
    "memory": ("memory", size),
    "gpu_utilization": ("GPU", _share),
    "gpu_memory": ("GPU memory", size),
    "gpu_power": ("power", lambda watts: f"{watts:.0f} W"),
    "gpu_temperature": ("temp.", lambda degrees: f"{degrees:.0f} C"),
}


def parser() -> FlagParser:
    """Return the parser of the verb."""
    parser = FlagParser(
        prog="phalanx top", usage="phalanx top [RUN] [--once] [--json]", description=_HELP, epilog=_MEANINGS
    )
    parser.add_argument("run", nargs="?", metavar="RUN", help="a name, a tag, a folder, or last [the one that runs]")
    parser.add_argument("--once", action="store_true", help="print the table once; also if output is not a terminal")
    parser.add_argument("--interval", type=float, default=1.0, metavar="SECONDS", help="between two updates [1]")
    add_json_flag(parser, "the ranks once")
    parser.add_argument("--runs-dir", default=str(RUNS), metavar="DIR", help="the folder that holds the runs [runs]")
    return parser


def run(arguments: Sequence[str]) -> int:
    """Run the verb."""
    namespace = parser().parse_all(arguments)
    if not namespace.interval > 0:
        raise UsageError(f"--interval {namespace.interval:g}: give seconds above 0, such as 1")
    stored = _choose(namespace)
    beats = _beats(stored)
    follows = sys.stdout.isatty() and not (namespace.once or namespace.json)
    if not beats and not (follows and stored.status in _LIVE):
        raise UsageError(
            f"no rank of {stored.name} has given a heartbeat (status: {stored.status})",
            hint="It has not begun to train, or it is your own loop, which reports none. Its log is in "
            f"{stored.path / 'logs'}.",
        )
    if namespace.json:
        print_json(_document(stored, beats))
    elif follows:
        _follow(stored.path, namespace.interval)
    else:
        print("\n".join(lines(stored, beats)))
    return 0


def _choose(namespace: argparse.Namespace) -> StoredRun:
    folder = Path(namespace.runs_dir)
    if namespace.run is not None:
        return find_run(namespace.run, folder)
    running = [run for run in list_runs(folder) if run.status == "running"]
    return running[0] if running else find_run("last", folder)


def _beats(stored: StoredRun) -> Mapping[int, Beat]:
    """Return the ranks' heartbeats; of a run without a launcher, which has no file of them, what it last reported."""
    return read_beats(stored.path / "logs") or beats_of(stored.last_report)


def _follow(path: Path, interval: float) -> None:
    """Draw the table again and again until the run has ended, or Ctrl-C."""
    from rich.live import Live
    from rich.text import Text

    with Live(auto_refresh=False, screen=True) as live:
        last: list[str] = []
        try:
            while True:
                stored = StoredRun(path)  # a new one: it keeps what it has read
                last = lines(stored, _beats(stored))
                text = "\n".join([*last, "", "Ctrl-C ends this display, not the run."])
                live.update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=True)
                if stored.status not in _LIVE:
                    break
                time.sleep(interval)
        except KeyboardInterrupt:
            pass
    print("\n".join(last))


def lines(stored: StoredRun, beats: Mapping[int, Beat], now: float | None = None) -> list[str]:
    """Return the display as lines."""
    now = time.time() if now is None else now
    if not beats:  # the ranks begin, or have been started again
        return [f"{stored.name}: {stored.status}, no rank has given a heartbeat yet"]
    steps, total = max(beat.step for beat in beats.values()), stored.steps[1]
    head = f"{stored.name}: {stored.status}, step {of_total(steps, total)}, {len(beats)} rank{'s' * (len(beats) > 1)}"
    goes_on = stored.status in _LIVE
    head += "" if goes_on else ", as in its last steps"
    slowest, ratio = slowest_of(beats), slowness(beats)
    if slowest is not None and ratio is not None:
        words = ("is", "takes") if goes_on else ("was", "took")
        head += f"; rank {slowest} {words[0]} the slowest: its own work {words[1]} {ratio:.2f} times that of the others"
    head += f"; {note}" if (note := speed_note(stored.ranks_per_gpu)) else ""
    columns = _known_columns(beats)
    marks = _marks(beats, slowest, now) if goes_on else {slowest: "slowest"}
    if len(beats) <= _ONE_BY_ONE:
        return [head, "", table([_header(columns), *(_row(rank, beats, columns, now, marks) for rank in beats)])]
    rows = [("", *(_COLUMNS[name][0] for name in columns), "heartbeat")]
    values = {name: percentiles(getattr(beat.gauges, name) for beat in beats.values()) for name in columns}
    ages = percentiles(now - beat.time for beat in beats.values())
    for at, share in enumerate(PERCENTILES):
        name = {0: "lowest", 50: "median", 100: "highest"}.get(share, f"{share}th percentile")
        rows.append((name, *(_COLUMNS[column][1](values[column][at]) for column in columns), f"{_age(ages[at])} ago"))
    last = [_row(rank, beats, columns, now, marks) for rank in slowest_first(beats, _SLOWEST)]
    return [head, "", table(rows), "", f"the {_SLOWEST} slowest:", table([_header(columns), *last])]


def _known_columns(beats: Mapping[int, Beat]) -> list[str]:
    return [name for name in _COLUMNS if any(not math.isnan(getattr(b.gauges, name)) for b in beats.values())]


def _header(columns: list[str]) -> tuple[str, ...]:
    return ("rank", "step", *(_COLUMNS[name][0] for name in columns), "heartbeat")


def _marks(beats: Mapping[int, Beat], slowest: int | None, now: float) -> dict[int | None, str]:
    """Return the remarks on single ranks: the slowest one, and those that should have given a heartbeat by now."""
    marks: dict[int | None, str] = {slowest: "slowest"}
    for rank, beat in beats.items():
        usual = beat.gauges.step_seconds
        if now - beat.time > max(_OLD, 10 * (0.0 if math.isnan(usual) else usual)):
            marks[rank] = "slowest, silent" if rank == slowest else "silent"
    return marks


def _row(
    rank: int, beats: Mapping[int, Beat], columns: list[str], now: float, marks: Mapping[int | None, str]
) -> tuple[str, ...]:
    beat = beats[rank]
    values = ((name, getattr(beat.gauges, name)) for name in columns)
    cells = ("-" if math.isnan(value) else _COLUMNS[name][1](value) for name, value in values)
    shown_rank = f"{rank} {marks.get(rank, '')}".rstrip()  # on the left: a narrow terminal has no room for all columns
    return (shown_rank, f"{beat.step:,}", *cells, f"{_age(now - beat.time)} ago")


def _age(seconds: float) -> str:
    return f"{max(0.0, seconds):.1f} s" if seconds < 60 else duration(seconds)


def _document(stored: StoredRun, beats: Mapping[int, Beat]) -> dict[str, Any]:
    now, names = time.time(), [field.name for field in dataclasses.fields(Gauges)]
    return {
        "run": stored.name,
        "status": stored.status,
        "ranks_per_gpu": stored.ranks_per_gpu,
        "slowest": slowest_of(beats),
        "percentiles": {
            name: dict(zip(map(str, PERCENTILES), quantiles, strict=True))
            for name in names
            if (quantiles := percentiles(getattr(beat.gauges, name) for beat in beats.values()))
        },
        "ranks": [
            {"rank": rank, "step": beat.step, "heartbeat_age": now - beat.time, **beat.gauges.known()}
            for rank, beat in beats.items()
        ],
    }
