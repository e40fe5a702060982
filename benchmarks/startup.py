"""How long until training starts: from the command to the first optimizer step, on 2 and 4 ranks.

    python benchmarks/startup.py
    python benchmarks/startup.py --ranks 4 --rounds 10 --json startup.json

The same script (first_step.py: plain DDP on gloo) is started by `phalanx train --script`, by torchrun and by
`accelerate launch`, one after the other in every round. Also measured: a second `fit` in one Python session, and
`phalanx --help` against `python -c "import torch"`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from report import describe, environment, ratio, table, write_json

if TYPE_CHECKING:
    from collections.abc import Callable

_HERE = Path(__file__).resolve().parent
_TIMEOUT = 300

Rounds = dict[str, list[float]]


def main() -> None:
    """Measure and print the tables."""
    options = _parse()
    document: dict[str, Any] = {"environment": environment()}
    print(describe(document["environment"]), flush=True)
    # No contestant should pay for reading torch from the disk for the first time.
    _run([sys.executable, "-c", "import torch.distributed, torch._dynamo"], cwd=_HERE)
    for ranks in options.ranks:
        rounds = _interleave(_starters(ranks), options.rounds, f"{ranks} ranks")
        document[f"first step on {ranks} ranks"] = rounds
        print("\n" + _rivals_table(f"command to first optimizer step, {ranks} ranks", rounds), flush=True)
    document["fit"] = _fits(max(options.ranks), options.rounds)
    document["help"] = _interleave(_commands(), options.rounds, "command line")
    print("\n" + _own_tables(document, max(options.ranks)), flush=True)
    write_json(options.json, document)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write every round's seconds here")
    return parser.parse_args()


def _starters(ranks: int) -> dict[str, Callable[[], float]]:
    """Return, by name, what starts the script and returns the seconds to its first step."""
    python = [sys.executable, "-m"]
    script = str(_HERE / "first_step.py")
    train = ["--script", script, "--num-workers", str(ranks), "--device", "cpu", "--"]
    # --multi_gpu starts local ranks whether or not there is a GPU; --cpu starts more than one only through MPI.
    local = ["--multi_gpu", f"--num_processes={ranks}", "--num_machines=1", "--main_process_port=0"]
    plain = ["--mixed_precision=no", "--dynamo_backend=no"]
    commands = {
        "phalanx train": [*python, "phalanx", "train", *train],
        "torchrun": [*python, "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", script],
        "accelerate launch": [*python, "accelerate.commands.launch", *local, *plain, script],
    }
    if not _installed("accelerate"):
        del commands["accelerate launch"]
    return {name: partial(_seconds_to_first_step, command) for name, command in commands.items()}


def _installed(package: str) -> bool:
    return find_spec(package) is not None


def _seconds_to_first_step(command: list[str]) -> float:
    with tempfile.TemporaryDirectory(prefix="phalanx-bench-") as name:
        mark = Path(name) / "first-step"
        started = time.time()
        _run([*command, str(mark)], cwd=Path(name))
        return float(mark.read_text()) - started


def _run(command: list[str], cwd: Path) -> str:
    """Run to the end, in its own folder, and return what it printed; its failure is ours."""
    # Every starter of ranks gives a rank one thread here: without this torchrun prints a warning about it.
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(_HERE.parent)}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=_TIMEOUT, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def _interleave(contestants: dict[str, Callable[[], float]], rounds: int, title: str) -> Rounds:
    seconds: Rounds = {name: [] for name in contestants}
    for number in range(1, rounds + 1):
        for name, measure in contestants.items():
            seconds[name].append(measure())
            print(f"{title}, round {number}/{rounds}, {name}: {seconds[name][-1]:.2f} s", flush=True)
    return seconds


def _fits(ranks: int, rounds: int) -> Rounds:
    """Return the seconds from the call of fit to its first step: the first and the second fit of a session."""
    found: Rounds = {"first fit": [], "second fit": []}
    for number in range(1, rounds + 1):
        with tempfile.TemporaryDirectory(prefix="phalanx-bench-") as name:
            output = _run([sys.executable, str(_HERE / "two_fits.py"), str(ranks)], cwd=Path(name))
        for key, value in zip(found, json.loads(output.splitlines()[-1]), strict=True):
            found[key].append(value)
            print(f"fit, round {number}/{rounds}, {key}: {value:.2f} s", flush=True)
    return found


def _commands() -> dict[str, Callable[[], float]]:
    installed = Path(sys.executable).with_name("phalanx")  # what a user types
    phalanx = [str(installed)] if installed.exists() else [sys.executable, "-m", "phalanx"]
    words = {"phalanx --help": [*phalanx, "--help"], 'python -c "import torch"': [sys.executable, "-c", "import torch"]}
    return {name: partial(_seconds, command) for name, command in words.items()}


def _seconds(command: list[str]) -> float:
    started = time.perf_counter()
    _run(command, cwd=_HERE)
    return time.perf_counter() - started


def _rivals_table(title: str, rounds: Rounds) -> str:
    """Compare each with the better rival: the one with the smaller median."""
    rivals = [name for name in rounds if name != "phalanx train"]
    best = min(rivals, key=lambda name: median(rounds[name]))
    return table(title, ["starter", "median s", "min s", f"x {best}"], _rows(rounds, best))


def _own_tables(document: dict[str, Any], ranks: int) -> str:
    fits, helps = document["fit"], document["help"]
    last = list(helps)[-1]
    return "\n".join(
        [
            table(
                f"fit() to first optimizer step, {ranks} ranks",
                ["call", "median s", "min s", "x first"],
                _rows(fits, "first fit"),
            ),
            table("command line", ["command", "median s", "min s", "x import torch"], _rows(helps, last)),
        ]
    )


def _rows(rounds: Rounds, base: str) -> list[list[str]]:
    return [
        [name, f"{median(values):.2f}", f"{min(values):.2f}", f"{ratio(values, rounds[base]):.2f}"]
        for name, values in rounds.items()
    ]


if __name__ == "__main__":
    main()
