"""Inject faults that make ranks hang, and check that the report names the right rank and line.

    python benchmarks/hang_injections.py [--kinds missing,order] [--repeat 3]
    python benchmarks/hang_injections.py --backends nccl --jobs 4 --repeat 1 --json hangs.json

Each fault is injected into a plain torch script that only uses the launcher, and into a run of the trainer, over gloo
and over shared memory, in different ranks and steps; over nccl several ranks share a GPU. The seconds are those from
the timeout, counted from the fault, to the end of the run; over gloo, from the error of the first rank.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch.utils.data import DataLoader

from benchmarks import hang_rank
from benchmarks.hang_rank import KINDS
from phalanx import PyTorchDDPTrainer
from phalanx.errors import PhalanxError
from phalanx.launch import LaunchSpec, ScriptTarget, launch
from phalanx.launch.output import PlainConsole

_KEPT = 20_000
"""Characters of each file of a rank that the results keep of an injection whose report was wrong."""
RANK_FILE = Path(hang_rank.__file__)
PLACES = ((1, 4), (2, 7), (0, 5), (1, 8), (2, 3), (0, 6))
"""Rank and step."""
TIMEOUT = {"nccl": 8.0}
"""Seconds, else 3: the processes that share a GPU take turns to begin."""


class Injection(NamedTuple):
    """One fault and where it is injected."""

    mode: str
    backend: str
    kind: str
    rank: int
    step: int
    ranks: int

    @property
    def timeout(self) -> float:
        """Seconds after which a rank has waited too long."""
        return TIMEOUT.get(self.backend, 3.0)


class Quiet(PlainConsole):
    """Prints nothing."""

    def handle(self, event: dict[str, object]) -> None:
        """Drop it."""

    def notice(self, text: str) -> None:
        """Drop it."""


def marked_line(name: str) -> str:
    """Return file:line of a mark in the program of the ranks."""
    lines = RANK_FILE.read_text().splitlines()
    return f"{RANK_FILE.name}:{next(n for n, line in enumerate(lines, 1) if f'# at: {name}' in line)}"


def inject(given: Injection) -> tuple[Injection, str, float, dict[str, str]]:
    """Run once with a fault; return the report, the seconds to the end, and the ends of what the ranks have written."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fault = {"HANG": f"{given.kind},{given.rank},{given.step}", "HANG_NOTE": str(folder / "fault")}
        os.environ |= {**fault, "HANG_BACKEND": given.backend, "HANG_TIMEOUT": str(given.timeout)}
        if given.backend == "nccl":  # without MPS: what kills a rank while its kernel runs may end the daemon's others
            os.environ["CUDA_MPS_PIPE_DIRECTORY"] = name
        report = _run_script(folder, given) if given.mode == "script" else _train(folder, given)
        ended = time.time()
        errors = [json.loads(path.read_text())["time"] for path in folder.rglob("*.error.json")]
        if given.backend == "nccl" and not errors and (folder / "fault").exists():
            errors = [float((folder / "fault").read_text()) + given.timeout]
        written = {path.name: path.read_text(errors="replace")[-_KEPT:] for path in folder.rglob("rank-*.*")}
        return given, report, max(0.0, ended - min(errors, default=ended)), written


def _run_script(folder: Path, given: Injection) -> str:
    spec = LaunchSpec(
        target=ScriptTarget(RANK_FILE),
        ranks_per_node=given.ranks,
        log_dir=folder,
        ranks_per_gpu=given.ranks if given.backend == "nccl" else 1,
    )
    return str(launch(spec, Quiet()).failure)


def _train(folder: Path, given: Injection) -> str:
    data = hang_rank.Samples()
    on_gpu = given.backend == "nccl"
    trainer = PyTorchDDPTrainer(
        model=torch.nn.Linear(16, 4),
        loss_fn=hang_rank.total,
        **({"num_gpus": given.ranks, "share_gpus": True} if on_gpu else {"num_workers": given.ranks, "device": "cpu"}),
        epochs=1,
        batch_size=1,
        communication_backend=given.backend,
        timeout=given.timeout,
        run_dir=str(folder),
        callbacks=[hang_rank.FaultyStep()],
        verbosity="quiet",
        progress=False,
    )
    try:
        trainer.fit(DataLoader(data, num_workers=int("loader" in given.kind)))
    except PhalanxError as error:
        return str(error)
    return "the run succeeded"


def is_right(report: str, mode: str, kind: str, rank: int) -> bool:
    """Whether a report names the guilty rank first, and the line."""
    head, _, rest = report.partition("\n")
    if not re.match(rf"rank {rank}\b", head):
        return False
    if kind == "killed loader":  # torch raises anywhere: the message names the data set, and the user's loop if any
        loop = f", iterated at {marked_line('data')}." if mode == "script" else "."
        return f"It loads Samples.__getitem__ ({marked_line('sample')}){loop}" in head
    if kind == "loader" and mode == "trainer":  # the user's code is not on the stack: the loader's is
        return re.search(r"it is at \S+\.py:\d+", head) is not None
    name, _, line = marked_line(KINDS[kind]).partition(":")
    return f"{name}:{line}" in head or f'{name}", line {line},' in rest


def _run(asked: list[Injection], jobs: int) -> Iterator[tuple[Injection, str, float, dict[str, str]]]:
    """Run all injections, several at a time in separate processes, and yield their results in order."""
    if jobs == 1:
        yield from map(inject, asked)
        return
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(inject, asked)


def main() -> int:
    """Inject all faults and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--modes", default="script,trainer")
    parser.add_argument("--backends", default="gloo,phalanx", help="of gloo, phalanx (shared memory), nccl")
    parser.add_argument("--repeat", type=int, default=3, help="ranks and steps per kind, mode and backend")
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="injections at a time")
    parser.add_argument("--json", help="write the results to this file")
    options = parser.parse_args()
    places = [place for place in PLACES if place[0] < options.ranks][: options.repeat]
    asked = [
        Injection(mode, backend, kind, rank, step, options.ranks)
        for mode in options.modes.split(",")
        for backend in options.backends.split(",")
        for kind in options.kinds.split(",")
        for rank, step in places
    ]
    found: dict[tuple[str, str, str], list[tuple[bool, float]]] = defaultdict(list)
    rows = []
    for given, report, seconds, written in _run(asked, options.jobs):
        right = is_right(report, given.mode, given.kind, given.rank)
        found[given.kind, given.mode, given.backend].append((right, seconds))
        rows.append({**given._asdict(), "right": right, "seconds": round(seconds, 2), "report": report})
        if not right:
            rows[-1]["written"] = written
            print(f"--- {given}:\n{report}\n", flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1))
    print(f"{'fault':<14} {'in':<8} {'over':<8} right  slowest report")
    for (kind, mode, backend), results in found.items():
        right = sum(result for result, _ in results)
        slowest = max(seconds for _, seconds in results)
        print(f"{kind:<14} {mode:<8} {backend:<8} {right}/{len(results)}    {slowest:.1f} s")
    total = [result for results in found.values() for result, _ in results]
    print(f"{sum(total)} of {len(total)} injections: right rank and line")
    return 0 if all(total) else 1


if __name__ == "__main__":
    sys.exit(main())
