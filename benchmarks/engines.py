"""The same model and batch under every engine, each started by its own launcher: steps/s, start-up and memory.

    python benchmarks/engines.py                                  # 2 CPU ranks, MLP and small GPT; a quarter of an hour
    python benchmarks/engines.py --model mlp --rounds 1 --only raw pytorch-ddp

Rounds alternate: every engine trains once in fresh processes, then every engine again. The stopwatch is a hook on the
optimizer in rank 0. Start-up is from the command to the end of the first step; memory is the peak of the largest rank
(its whole process, libraries included). TensorFlow trains the same perceptron as a Keras model.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from rank_group import ContestantFailed, check_trained_together
from report import describe, environment, table, write_json

_HERE = Path(__file__).resolve().parent
_SCRIPT = str(_HERE / "engine_rank.py")


@dataclass(frozen=True)
class Engine:
    """A title, the package it needs, the words that start its ranks, and whom it is held against."""

    title: str
    package: str
    starter: str
    against: str = "raw"
    models: tuple[str, ...] = ("mlp", "gpt")


_PHALANX = "{python} -m phalanx.cli train --device cpu --num-workers {ranks} --run-dir {folder}/run"
ENGINES = {
    "raw": Engine("raw DDP, torchrun", "torch", "{python} -m torch.distributed.run --nproc-per-node {ranks} {script}"),
    "pytorch-ddp": Engine("pytorch-ddp", "torch", f"{_PHALANX} --script {{script}} --"),
    "ray": Engine("ray", "ray", f"{_PHALANX} --backend ray --script {{script}} --", against="pytorch-ddp"),
    "horovod-raw": Engine(
        "raw Horovod, horovodrun", "horovod", "{bin}/horovodrun --gloo -np {ranks} {python} {script}"
    ),
    "horovod": Engine(
        "horovod", "horovod", f"{_PHALANX} --backend horovod --script {{script}} --", against="horovod-raw"
    ),
    "deepspeed": Engine("deepspeed", "deepspeed", f"{_PHALANX} --backend deepspeed --script {{script}} --"),
    "tensorflow": Engine(
        "tensorflow (Keras)", "tensorflow", f"{_PHALANX} --backend tensorflow --script {{script}} --", models=("mlp",)
    ),
}


@dataclass
class Rounds:
    """What one engine measured, round by round."""

    ms: list[float] = field(default_factory=list)
    start: list[float] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)


def main() -> None:
    """Run the rounds and print a table a model."""
    options = _parse()
    document: dict[str, Any] = {"environment": environment(), "ranks": options.ranks, "models": {}}
    print(describe(document["environment"]), flush=True)
    for model in options.model:
        chosen = [name for name in options.only if model in ENGINES[name].models and find_spec(ENGINES[name].package)]
        rounds = {name: Rounds() for name in chosen}
        document["models"][model] = {name: vars(found) for name, found in rounds.items()}
        for number in range(1, options.rounds + 1):
            for name in chosen:
                _run(name, model, options, rounds[name], number)
            write_json(options.json, document)
        print("\n" + _table(model, rounds, options), flush=True)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--model", nargs="+", choices=("mlp", "gpt"), default=["mlp", "gpt"])
    parser.add_argument("--only", nargs="+", choices=tuple(ENGINES), default=list(ENGINES))
    parser.add_argument("--steps", type=int, default=0, help="measured steps (default: the model's own number)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write every round's numbers here")
    return parser.parse_args()


def _run(name: str, model: str, options: argparse.Namespace, rounds: Rounds, number: int) -> None:
    try:
        found, began = _measure(name, model, options)
    except ContestantFailed as error:
        print(f"{model} round {number} {name} failed: {error}", flush=True)
        return
    rounds.ms.append(found[0]["ms_per_step"])
    rounds.start.append(found[0]["first_at"] - began)
    rounds.memory.append(max(result["peak_bytes"] for result in found))
    print(
        f"{model} round {number}/{options.rounds} {name}: {rounds.ms[-1]:.3f} ms, start {rounds.start[-1]:.1f} s",
        flush=True,
    )


def _measure(name: str, model: str, options: argparse.Namespace) -> tuple[list[dict[str, Any]], float]:
    """Train once by an engine's own launcher; return what the ranks wrote, and when the command was given."""
    folder = Path(tempfile.mkdtemp(prefix="phalanx-bench-"))
    try:
        places = {"python": sys.executable, "bin": str(Path(sys.executable).parent), "script": _SCRIPT}
        words = ENGINES[name].starter.format(**places, ranks=options.ranks, folder=folder).split()
        words += [name, model, str(options.steps), str(folder)]
        threads = str(max(1, (os.cpu_count() or 1) // options.ranks))
        root = str(_HERE.parent)
        env = {**os.environ, "OMP_NUM_THREADS": threads, "PYTHONPATH": root, "TF_CPP_MIN_LOG_LEVEL": "3"}
        began = time.time()
        done = subprocess.run(words, env=env, cwd=folder, capture_output=True, text=True, timeout=540, check=False)
        if done.returncode:
            tail = (done.stdout + done.stderr).strip().splitlines()[-12:]
            raise ContestantFailed(f"exit code {done.returncode}:\n    " + "\n    ".join(tail))
        results = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(options.ranks)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    check_trained_together(results)
    return results, began


def _table(model: str, rounds: dict[str, Rounds], options: argparse.Namespace) -> str:
    header = ["engine", "steps/s", "x", "of", "start s", "peak MB a rank"]
    rows = [_row(name, rounds) for name in rounds]
    return table(f"{model}: {options.ranks} ranks on the CPU, {options.rounds} rounds", header, rows)


def _row(name: str, rounds: dict[str, Rounds]) -> list[str]:
    engine, found = ENGINES[name], rounds[name]
    if not found.ms:
        return [engine.title, "failed", *["-"] * 4]
    base = rounds.get(engine.against)
    comparable = base is not None and name != engine.against and len(base.ms) == len(found.ms)
    speed = f"{median(b / f for b, f in zip(base.ms, found.ms, strict=True)):.2f}" if base and comparable else "-"
    return [
        engine.title,
        f"{1e3 / median(found.ms):,.1f}",
        speed,
        ENGINES[engine.against].title.split(",")[0] if comparable else "-",
        f"{median(found.start):.1f}",
        f"{median(found.memory) / 1e6:,.0f}",
    ]


if __name__ == "__main__":
    main()
