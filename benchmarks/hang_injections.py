"""Inject faults that make ranks hang, and check that the report names the right rank and line.

    python benchmarks/hang_injections.py [--kinds missing,order] [--repeat 3]

Each fault is injected into a plain torch script that only uses the launcher, and into a run of the trainer, over gloo
and over shared memory, in different ranks and steps. Detected: from the error of the first rank to the end of the run.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch.utils.data import DataLoader

from benchmarks import hang_rank
from benchmarks.hang_rank import KINDS
from phalanx import PyTorchDDPTrainer
from phalanx.errors import PhalanxError
from phalanx.launch import LaunchSpec, ScriptTarget, launch
from phalanx.launch.output import PlainConsole

RANK_FILE = Path(hang_rank.__file__)
PLACES = ((1, 4), (2, 7), (0, 5), (1, 8), (2, 3), (0, 6))
"""Rank and step."""
TIMEOUT = 3.0


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


def inject(mode: str, backend: str, kind: str, rank: int, step: int, ranks: int) -> tuple[str, float]:
    """Run once with a fault; return the report and the seconds from the first error to the end."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"HANG": f"{kind},{rank},{step}", "HANG_BACKEND": backend, "HANG_TIMEOUT": str(TIMEOUT)}
        report = _run_script(Path(folder), ranks) if mode == "script" else _train(Path(folder), backend, kind, ranks)
        ended = time.time()
        errors = [json.loads(path.read_text())["time"] for path in Path(folder).rglob("*.error.json")]
        return report, ended - min(errors, default=ended)


def _run_script(folder: Path, ranks: int) -> str:
    spec = LaunchSpec(target=ScriptTarget(RANK_FILE), ranks_per_node=ranks, log_dir=folder)
    return str(launch(spec, Quiet()).failure)


def _train(folder: Path, backend: str, kind: str, ranks: int) -> str:
    data = hang_rank.Samples()
    trainer = PyTorchDDPTrainer(
        model=torch.nn.Linear(16, 4),
        loss_fn=hang_rank.total,
        num_workers=ranks,
        device="cpu",
        epochs=1,
        batch_size=1,
        communication_backend=backend,
        timeout=TIMEOUT,
        run_dir=str(folder),
        callbacks=[hang_rank.FaultyStep()],
        progress=False,
        verbosity="quiet",
    )
    try:
        trainer.fit(DataLoader(data, num_workers=int("loader" in kind)))
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


def main() -> int:
    """Inject all faults and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--modes", default="script,trainer")
    parser.add_argument("--backends", default="gloo,phalanx")
    parser.add_argument("--repeat", type=int, default=3, help="ranks and steps per kind, mode and backend")
    parser.add_argument("--ranks", type=int, default=3)
    options = parser.parse_args()
    found: dict[tuple[str, str, str], list[tuple[bool, float]]] = defaultdict(list)
    for mode in options.modes.split(","):
        for backend in options.backends.split(","):
            for kind in options.kinds.split(","):
                for rank, step in [place for place in PLACES if place[0] < options.ranks][: options.repeat]:
                    report, seconds = inject(mode, backend, kind, rank, step, options.ranks)
                    right = is_right(report, mode, kind, rank)
                    found[kind, mode, backend].append((right, seconds))
                    if not right:
                        print(f"--- {kind}, {mode}, {backend}, rank {rank}, step {step}:\n{report}\n", flush=True)
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
