"""What a framework adds to a training step: a raw PyTorch loop against Phalanx, Accelerate, Lightning and HF Trainer.

    python benchmarks/step_overhead.py                                # 2 gloo ranks on the CPU: MLP and small GPT
    python benchmarks/step_overhead.py --device cuda                  # one GPU: MLP, small GPT, compiled GPT-2 124M
    python benchmarks/step_overhead.py --model mlp --only raw phalanx --rounds 10 --json steps.json

Every round trains each contestant once in fresh processes, one contestant after the other, so that a busy moment of the
machine hits all of them alike. All use the same model, batch size and fused AdamW, and a plain Dataset (a length and a
`__getitem__`), as users have it; two more rows train on a TensorDataset. Phalanx runs with its logging as it comes, the
rivals with logging, checkpoints and progress bars turned off. The stopwatch is a hook on the optimizer in rank 0 (see
clock.py): it takes the time between two optimizer steps, warm-up excluded, and so needs nothing of the framework that
it measures.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median
from typing import Any

from contestants import CONTESTANTS
from rank_group import ContestantFailed, measure
from report import describe, environment, ratio, table, write_json
from workloads import WORKLOADS, Workload

_MODELS = {"cpu": ["mlp", "gpt"], "cuda": ["mlp", "gpt", "gpt2"]}
_APART = ("phalanx-fsdp", "raw-fsdp", "raw-on-phalanx")
"""Who is measured only where --only says so, or by distributed_benchmarks.py."""
_HEAVY = ["raw", "phalanx", "accelerate", "lightning"]
"""Who trains the big model unless --only says otherwise: the device's time is dear."""


def main() -> None:
    """Run the rounds and print a table a model."""
    options = _parse()
    document: dict[str, Any] = {"environment": environment(options.device), "ranks": options.ranks, "models": {}}
    print(describe(document["environment"]), flush=True)
    for model in options.model or _MODELS[options.device]:
        chosen = _chosen(options, model)
        rounds: dict[str, list[float]] = {name: [] for name in chosen if CONTESTANTS[name].is_installed}
        document["models"][model] = rounds
        for number in range(1, options.rounds + 1):
            _run_round(number, model, rounds, options)
            write_json(options.json, document)  # a long run that is cut off keeps what it has
        print("\n" + _table(model, chosen, rounds, options), flush=True)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, help="ranks (default: 2 on the CPU, 1 on CUDA)")
    parser.add_argument("--model", nargs="+", choices=tuple(WORKLOADS), help="which models (default: by device)")
    parser.add_argument("--only", nargs="+", choices=tuple(CONTESTANTS), help="which contestants; raw is always run")
    parser.add_argument("--steps", type=int, default=0, help="measured steps (default: the model's own number)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write every round's numbers here")
    options = parser.parse_args()
    options.ranks = options.ranks or (2 if options.device == "cpu" else 1)
    return options


def _chosen(options: argparse.Namespace, model: str) -> list[str]:
    names = options.only or (_HEAVY if model.startswith("gpt2") else [n for n in CONTESTANTS if n not in _APART])
    # With several ranks raw is in DDP already; with one there is nothing to average.
    useless = ("raw-ddp", "raw-fsdp") if options.ranks > 1 else ("phalanx-ddp", "phalanx-ring")
    names = [name for name in names if name not in useless or name in (options.only or ())]
    return ["raw", *(name for name in names if name != "raw")]


def _run_round(number: int, model: str, rounds: dict[str, list[float]], options: argparse.Namespace) -> None:
    """Add one round's milliseconds a step to each contestant; who failed before has fewer rounds and is out."""
    for name, values in rounds.items():
        if len(values) < number - 1:
            continue
        try:
            ms = measure(name, model, device=options.device, ranks=options.ranks, steps=options.steps)
        except ContestantFailed as error:
            print(f"{model} round {number} {name} failed: {error}", flush=True)
            continue
        values.append(ms)
        print(f"{model} round {number}/{options.rounds} {name}: {ms:.3f} ms", flush=True)


def _table(model: str, chosen: list[str], rounds: dict[str, list[float]], options: argparse.Namespace) -> str:
    workload = WORKLOADS[model]
    header = ["contestant", "median ms", "min ms", "x raw", "x raw (min)"]
    if workload.time:
        header.append("tokens/s")
    rows = [_row(name, rounds, workload, options) for name in chosen]
    steps = options.steps or workload.steps
    ranks = f"{options.ranks} rank{'s' * (options.ranks > 1)} on {options.device}"
    title = f"{model}: {ranks}, {steps} steps, {options.rounds} rounds"
    return table(title, header, rows)


def _row(name: str, rounds: dict[str, list[float]], workload: Workload, options: argparse.Namespace) -> list[str]:
    width = 6 if workload.time else 5
    title, base, values = CONTESTANTS[name].title, rounds["raw"], rounds.get(name)
    if values is None or len(values) < options.rounds:
        reason = "not installed" if values is None else "failed"
        return [title, reason, *["-"] * (width - 2)]
    cells = [title, f"{median(values):.2f}", f"{min(values):.2f}"]
    cells += (
        [f"{ratio(values, base):.2f}", f"{min(values) / min(base):.2f}"] if len(base) == options.rounds else ["-", "-"]
    )
    if workload.time:
        tokens = workload.batch_size * workload.time * options.ranks
        cells.append(f"{tokens / median(values) * 1e3:,.0f}")
    return cells


if __name__ == "__main__":
    main()
