"""The planner's memory beside what a training step really takes on one GPU.

    python benchmarks/planner_memory.py --measure rows.csv            # on a machine with a GPU
    python benchmarks/planner_memory.py                               # compare with the rows measured on an H200

Each row is a real step of `Formation` at world size 1 with AdamW: the highest allocated memory from the start of a step
to its end (after steps that create the optimizer's states), and the memory that the allocator had reserved.
"""

from __future__ import annotations

import argparse
import csv
import gc
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from report import table

FIELDS = (
    "model",
    "recompute",
    "compile",
    "precision",
    "lora",
    "seq",
    "micro_batch",
    "loss",
    "forward_end",
    "forward_peak",
    "backward_peak",
    "step_peak",
    "allocated_peak",
    "reserved_peak",
    "seconds",
)
MIB = 2**20
_ROWS = Path(__file__).resolve().parents[1] / "tests" / "recorded" / "planner" / "h200_memory.csv"
_SHAPES: dict[str, Any] = {}
_BATCHES = (1, 2, 4, 8, 16, 32, 64)


def main() -> None:
    """Measure rows, or compare rows that were measured with the prediction."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", type=Path, help="measure here, and write the rows to this file")
    parser.add_argument("--set", default="main", choices=sorted(CASES), help="which cases to measure")
    parser.add_argument("--rows", type=Path, help="compare the rows of this file (default: those in tests/recorded)")
    options = parser.parse_args()
    if options.measure:
        measure(CASES[options.set], options.measure)
    compare(options.measure or options.rows or _ROWS)


def compare(path: Path) -> None:
    """Print predicted and measured peaks, and the error of each; the parts of the prediction without the reserve."""
    with path.open() as file:
        rows = list(csv.DictReader(file))
    lines, errors = [], []
    for row in rows:
        measured, predicted = float(row["allocated_peak"]) / 1024, predict(row)
        errors.append(predicted / measured - 1)
        kind = [row[name] for name in ("model", "recompute", "compile", "precision", "lora", "micro_batch")]
        lines.append([*kind, f"{measured:.2f}", f"{predicted:.2f}", f"{100 * errors[-1]:+.1f}%"])
    head = ["model", "recompute", "compile", "precision", "lora", "micro-batch", "measured GiB", "predicted", "error"]
    print(table("peak of torch.cuda.max_memory_allocated in a step", head, lines))
    size = [abs(error) for error in errors]
    print(f"{len(size)} rows: mean error {100 * sum(size) / len(size):.2f}%, worst {100 * max(size):.2f}%")


def predict(row: dict[str, str]) -> float:
    """Return the planner's GiB for a measured row."""
    from phalanx.tools.plan.model import ModelShape
    from phalanx.tools.plan.plans import Goal, Layout
    from phalanx.tools.plan.presets import gpu
    from phalanx.tools.plan.rank_memory import rank_memory
    from phalanx.tools.plan.trace import trace_import

    family, preset = row["model"].split(":")
    shape = _SHAPES.setdefault(
        row["model"], trace_import(f"phalanx.zoo.models.{family}:{family}", None, {"preset": preset})
    )
    if isinstance(shape, ModelShape):  # rows without this field were measured when models had all logits
        shape = replace(shape, reference=row.get("loss") == "chunked")
    batch = int(row["micro_batch"])
    layout = Layout(micro_batch=batch, recompute=row["recompute"], lora_rank=int(row["lora"]) or None)
    compiled = row["compile"].lower() == "true"
    goal = Goal(global_batch=batch, seq_len=int(row["seq"]), precision=row["precision"], compile=compiled)
    parts = rank_memory(shape, gpu("h200"), layout, goal)["all"]
    return sum(parts.values()) - parts["reserve"]


def _grid(model: str, batches: tuple[int, ...] = _BATCHES, **change: Any) -> list[dict[str, Any]]:
    kinds = [change.pop("recompute")] if "recompute" in change else ["none", "selective", "full"]
    return [{"model": model, "recompute": kind, "micro_batch": batch, **change} for kind in kinds for batch in batches]


CASES: dict[str, list[dict[str, Any]]] = {
    "main": [*_grid("gpt:gpt2"), *_grid("gpt:gpt2-xl")],
    "others": [
        *_grid("gpt:gpt2-medium", (4, 32)),
        *_grid("gpt:gpt2", (1, 16), precision="fp32"),
        *_grid("gpt:gpt2-xl", (1, 8), lora=16),
        *_grid("llama:1b", (1, 8)),
        *_grid("moe:small", (1, 16)),
        *_grid("vit:base", (8, 64)),
        *_grid("resnet:resnet50", (8, 64), recompute="none"),
    ],
    "compile": [
        *_grid("gpt:gpt2", (1, 8, 32), compile=True, recompute="none"),
        *_grid("gpt:gpt2", (8, 32), compile=True, recompute="full"),
        *_grid("gpt:gpt2", (8,), compile=True, recompute="selective"),
    ],
}


def measure(cases: list[dict[str, Any]], path: Path) -> None:
    """Measure each case that fits, and write the rows."""
    import torch

    too_large: set[tuple[Any, ...]] = set()
    with path.open("w", newline="") as file:
        rows = csv.DictWriter(file, FIELDS)
        rows.writeheader()
        for case in cases:
            case = {"compile": False, "precision": "bf16", "lora": 0, "seq": 1024, **case}
            kind = tuple(value for name, value in case.items() if name != "micro_batch")
            if kind in too_large:
                continue
            try:
                row = {**case, "loss": "chunked", **_measure_one(**case)}
            except torch.OutOfMemoryError:
                too_large.add(kind)
                print("does not fit:", case, flush=True)
                continue
            finally:
                gc.collect()
                torch._dynamo.reset()
                torch.cuda.empty_cache()
            rows.writerow(row)
            file.flush()
            print(
                {name: round(value, 4) if isinstance(value, float) else value for name, value in row.items()},
                flush=True,
            )


def _measure_one(
    model: str, recompute: str, micro_batch: int, seq: int, *, compile: bool, precision: str, lora: int
) -> dict[str, float]:
    import torch

    import phalanx
    from phalanx.zoo.models.registry import build

    family, preset = model.split(":")
    settings: dict[str, Any] = {"device": "cuda", "strategy": "ddp", "compile": compile}
    settings |= {"activation_checkpointing": {"none": False, "full": True}.get(recompute, recompute)}
    settings |= {} if precision == "fp32" else {"mixed_precision": precision}
    settings |= {"lora_rank": lora} if lora else {}
    with phalanx.Formation(**settings) as formation:
        with torch.device("cuda"):
            net = build(family, preset=preset)
        wrapped = formation.prepare(net)
        trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
        optimizer = formation.prepare(torch.optim.AdamW(trained, lr=1e-4, fused=True))
        inputs, targets = _batch(family, net, micro_batch, seq)
        found: dict[str, float] = {}
        for _ in range(4):
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.synchronize()
            began = time.perf_counter()
            with formation.autocast():
                loss = _loss(net, wrapped, inputs, targets)
            found["forward_end"] = torch.cuda.memory_allocated() / MIB
            found["forward_peak"] = _peak()
            formation.backward(loss)
            found["backward_peak"] = _peak()
            optimizer.step()
            optimizer.zero_grad()
            del loss
            found["step_peak"] = _peak()
            found["seconds"] = time.perf_counter() - began
        found["allocated_peak"] = max(found["forward_peak"], found["backward_peak"], found["step_peak"])
        found["reserved_peak"] = torch.cuda.max_memory_reserved() / MIB
    return found


def _loss(net: Any, wrapped: Any, inputs: Any, targets: Any) -> Any:
    """Return the loss as the trainer does: the logits are not kept beside it."""
    import torch

    if hasattr(net, "loss_from_output"):
        return wrapped(inputs, targets)[0]
    return torch.nn.functional.cross_entropy(wrapped(inputs), targets)


def _batch(family: str, net: Any, batch: int, seq: int) -> tuple[Any, Any]:
    import torch

    if family in ("vit", "resnet"):
        return torch.randn(batch, 3, 224, 224, device="cuda"), torch.zeros(batch, dtype=torch.long, device="cuda")
    seq = min(seq, net.config.seq_len)
    tokens = torch.randint(net.config.vocab_size, (batch, seq), device="cuda")
    return tokens, tokens.roll(-1, 1)


def _peak() -> float:
    import torch

    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() / MIB
    torch.cuda.reset_peak_memory_stats()
    return peak


main()
