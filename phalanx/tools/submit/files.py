"""What targets on machines share: the program to call, logs as files that grow, and code that was shipped."""

from __future__ import annotations

import re
import shlex
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from phalanx.config.settings import parse_duration
from phalanx.errors import UsageError
from phalanx.tools.submit.job import ClusterJob
from phalanx.tools.submit.target import CommonOptions

_POLL_SECONDS = 0.5


def program_of(options: CommonOptions) -> str:
    """Return how `phalanx` is called on the nodes: of the image, of uv, of a given environment, or of this one."""
    if options.image is not None or options.uv:
        return "phalanx"
    folder = Path(options.venv) / "bin" if options.venv is not None else Path(sys.executable).parent
    return str(folder / "phalanx")


def shell_join(words: Sequence[str], expressions: Mapping[str, str]) -> str:
    """Quote words for a shell; `expressions`: marks in them to the shell's own text that takes their place.

    A mark begins with a NUL character, which no argument of a command can hold.
    """
    marks = re.compile("|".join(f"({re.escape(mark)})" for mark in expressions))
    split = ([part for part in marks.split(word) if part] or [""] for word in words)
    return " ".join("".join(expressions.get(part) or shlex.quote(part) for part in parts) for parts in split)


def split_words(flag: str, text: str | None) -> list[str]:
    """Return the words of an option that holds options of another program."""
    try:
        return shlex.split(text or "")
    except ValueError as error:
        raise UsageError(f"{flag} {text}: {error}", hint="Close every quotation mark.") from None


def own_limit(job: ClusterJob, options: CommonOptions) -> tuple[str, ...]:
    """Return the flags by which a run ends itself, for targets without a time limit of their own."""
    seconds = limit_seconds(job, options, 0)
    return () if seconds is None else ("--max-time", str(seconds))


def limit_seconds(job: ClusterJob, options: CommonOptions, save_seconds: int) -> int | None:
    """Return the time limit; refuse one that leaves no time to train, or that ends a run without checkpoints."""
    if (given := options.time_limit) is None:
        return None
    try:
        limit = parse_duration(given)
    except ValueError:
        raise UsageError(f"--time-limit {given}: expected a duration such as 30m, 12h or 2d.") from None
    if limit <= save_seconds + 60:
        saves = f": a run is asked to save {save_seconds} s before the limit, so it would hardly train"
        raise UsageError(
            f"--time-limit {given}{saves if save_seconds else ' leaves hardly any time to train'}",
            hint="Give 10m or more.",
        )
    if job.config.checkpoint_every is None:
        raise UsageError(
            f"--time-limit {given} ends the run, and it saves no checkpoints",
            hint="Add --checkpoint-frequency auto, or a number of steps: --checkpoint-frequency '500 steps'.",
        )
    return round(limit)


def unpack_lines(work: str, each_node: str) -> Iterator[str]:
    """Return the lines of a script that unpack shipped code on every node and enter it."""
    yield f'work="{work}"'
    # Complete at once, since nodes may share the folder. Other users can write to /tmp: a folder of theirs is refused.
    script = (
        'umask 077; new=$(mktemp -d "$0.XXXXXX") && tar -xzf "$1"/code-*.tar.gz -C "$new" || exit 1; '
        'mv -T "$new" "$0" 2>/dev/null || rm -rf "$new"; [ -d "$0" ] && [ -O "$0" ] && [ ! -L "$0" ]'
    )
    yield f'{each_node}bash -c {shlex.quote(script)} "$work" "$PHALANX_JOB_FOLDER" || exit 1'
    yield 'cd "$work" || exit 1'


def rank_log(run_dir: Path, rank: int) -> Path:
    """Return the log of one rank."""
    found = sorted((run_dir / "logs").rglob(f"rank-{rank}.log"))
    if not found:
        raise UsageError(
            f"{run_dir / 'logs'} has no log of rank {rank}", hint="See the ranks there are: ls that folder."
        )
    return found[-1]


def follow_files(find: Callable[[], Sequence[Path]], has_ended: Callable[[], bool] | None) -> Iterator[str]:
    """Return lines of the files that `find` returns; with `has_ended`, wait for more of both until it is true."""
    at = defaultdict[Path, int](int)
    asked = 0.0
    while True:
        ended = has_ended is None
        if has_ended is not None and time.monotonic() - asked > 4 * _POLL_SECONDS:
            asked, ended = time.monotonic(), has_ended()
        for path in find():
            if path.is_file():
                with path.open("rb") as file:
                    file.seek(at[path])
                    for line in file:
                        if line.endswith(b"\n") or ended:
                            at[path] += len(line)
                            yield line.decode(errors="replace").rstrip("\r\n")
        if ended:
            return
        time.sleep(_POLL_SECONDS)
