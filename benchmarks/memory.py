"""What each strategy keeps in a rank's memory, beside the closed form: parameters, gradients, optimizer states.

    python benchmarks/memory.py
    python benchmarks/memory.py --device cuda --json memory.json

A GPT in float32 with Adam: 4 bytes a parameter, 4 for its gradient, 8 for the two moments, divided by the ranks that
share them. Measured after a backward pass (resident set on the CPU, allocated memory on a GPU), above what the process
held before the model was built; activations are kept tiny. `peak` is the highest that was ever held: the parts that are
gathered, and on the CPU a whole model where it is built before it is cut (all but ddp are built on the meta device).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from report import describe, environment, table, write_json

_HERE = Path(__file__).resolve().parent
_BYTES = 16
_RETURNED = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""glibc keeps freed memory for later, which the resident set counts; with these it gives large pieces back at once."""
_SHAPE = {"preset": "debug", "layers": 12, "heads": 12, "hidden": 768, "seq_len": 64}

STRATEGIES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "ddp": (2, 1, {"strategy": "ddp"}),
    "fsdp": (2, 2, {"strategy": "fsdp"}),
    "fsdp, 4 ranks": (4, 4, {"strategy": "fsdp"}),
    "fsdp, grad-op": (2, 2, {"strategy": "fsdp", "sharding": "grad-op"}),
    "zero_stage 1": (2, 2, {"zero_stage": 1}),
    "zero_stage 2": (2, 2, {"zero_stage": 2}),
    "zero_stage 3": (2, 2, {"zero_stage": 3}),
    "tensor": (2, 2, {"tensor_parallel": 2}),
    "context": (2, 2, {"context_parallel": 2}),
    "pipeline": (2, 2, {"pipeline_parallel": 2, "microbatches": 2}),
    "pipeline 2 x fsdp 2": (4, 4, {"pipeline_parallel": 2, "microbatches": 2, "strategy": "fsdp"}),
    "fsdp 2 x tensor 2": (4, 4, {"tensor_parallel": 2, "strategy": "fsdp"}),
}
"""Name to (ranks, ranks that share one copy of the states, settings)."""


def main() -> None:
    """Measure each strategy in separate processes and print the table."""
    options = _parse()
    document: dict[str, Any] = {"environment": environment(), "strategies": {}}
    print(describe(document["environment"]), flush=True)
    parameters = _count(_SHAPE)
    rows = []
    for name, (ranks, sharers, settings) in STRATEGIES.items():
        if options.only and name not in options.only:
            continue
        held = _run(name, ranks, {**settings, "device": options.device, **_sharing(options.device)})
        wanted = _BYTES * parameters / sharers
        most = max(found["held"] for found in held)
        document["strategies"][name] = {"ranks": held, "closed_form": wanted}
        peak = max(found["peak"] for found in held)
        rows.append([name, str(ranks), _mb(wanted), _mb(most), f"{most / wanted:.2f}", _mb(peak)])
        print(f"  {name}: {most / wanted:.2f} of the closed form", flush=True)
    head = ["strategy", "ranks", "closed form MB", "measured MB", "ratio", "peak MB"]
    print("\n" + table(f"a rank of a GPT with {parameters / 1e6:.1f} million parameters, Adam, float32", head, rows))
    write_json(options.json, document)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--only", nargs="+", metavar="STRATEGY", help="measure these alone")
    parser.add_argument("--json", type=Path, help="write what was measured here")
    return parser.parse_args()


def _sharing(device: str) -> dict[str, Any]:
    return {"communication_backend": "gloo"} if device == "cuda" else {}  # several ranks on one GPU


def _count(shape: dict[str, Any]) -> int:
    import torch

    from phalanx.zoo.models.gpt import gpt

    with torch.device("meta"):
        return gpt(**shape).num_parameters()


def _run(name: str, ranks: int, settings: dict[str, Any]) -> list[dict[str, float]]:
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        request = {"settings": settings, "model": _SHAPE, "on_meta": name != "ddp", "answer": str(answer)}
        start = ["train", "--script", str(_HERE / "memory_rank.py"), "--num-workers", str(ranks), "--device"]
        place = [settings["device"], *(["--communication-backend", "gloo"] if settings["device"] == "cuda" else [])]
        command = [sys.executable, "-m", "phalanx", *start, *place, "--", json.dumps(request)]
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL, env={**os.environ, **_RETURNED})
        found: list[dict[str, float]] = json.loads(answer.read_text())
    return found


def _mb(value: float) -> str:
    return f"{value / 1e6:.0f}"


main()
