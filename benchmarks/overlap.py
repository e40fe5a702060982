"""How much communication overlaps with computation, and how often the host waits for the device, per step of two ranks.

    python benchmarks/overlap.py                                      # ddp and fsdp; ranks that share a GPU, or on CPUs
    python benchmarks/overlap.py --rows ddp "ddp, 3 MB" fsdp          # with smaller buckets
    python benchmarks/overlap.py --rows tensor "tensor, overlapped"   # compiled, on a GPU: a minute more

Each row is a run with `profile`, and its figures are those of `phalanx report RUN --profile`: hidden communication as a
share of all, communication during which no computation runs, and the calls in which Python waits for the GPU. Ranks
that share a GPU take turns or divide it: what overlaps is shown, not how fast it is. `--gpus N`: N GPUs, a rank each.
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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout need not be installed

import torch
from torch.utils.data import TensorDataset

from phalanx import PyTorchDDPTrainer
from phalanx.strategies.tensor_overlap import ALLOW_SHARED
from phalanx.zoo.models.gpt import gpt

ROOT = Path(__file__).resolve().parents[1]
TENSOR = {"tensor_parallel": 2, "compile": True}
ROWS: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "ddp, 3 MB": {"strategy": "ddp", "bucket_cap_mb": 3.0},
    "fsdp": {"strategy": "fsdp"},
    "tensor": TENSOR,
    "tensor, overlapped": TENSOR,
}
SHAPES: dict[str, dict[str, Any]] = {
    "cuda": {"layers": 8, "hidden": 1024, "heads": 16, "seq_len": 512},
    "cpu": {"layers": 6, "hidden": 256, "heads": 4, "seq_len": 128},
}
FIRST, LAST = 13, 16
"""The recorded steps: later than those in which DDP chooses its buckets and waits for its timers (10 steps)."""


def train(name: str, device: str, gpus: int, run_dir: Path) -> None:
    """Run the steps of a row, and leave its profile."""
    shape = SHAPES[device]
    torch.manual_seed(0)
    tokens = torch.randint(256, (8 * 2 * max(gpus, 2) * LAST, shape["seq_len"] + 1))
    settings: dict[str, Any] = {"device": device, "num_workers": gpus or 2, **ROWS[name]}
    if device == "cuda":
        settings |= {"mixed_precision": "bf16", "share_gpus": not gpus}
        os.environ[ALLOW_SHARED] = str(int("overlapped" in name))  # the ranks inherit it
    profile = f"steps={FIRST}:{LAST}"
    trainer = PyTorchDDPTrainer(
        gpt(**shape), batch_size=8, max_steps=LAST, profile=profile, run_dir=str(run_dir), verbosity="quiet", **settings
    )
    trainer.fit(TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()))


def report(run_dir: Path) -> dict[str, Any]:
    """Return what `phalanx report --profile` says of a run."""
    command = [sys.executable, "-m", "phalanx.cli", "report", str(run_dir), "--profile", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def row(name: str, found: dict[str, Any]) -> str:
    """Return a row of the table: means over the recorded steps, host waits of the rank that has most of them."""
    steps, splits = len(found["steps"]), found["splits"]
    exposed, hidden = (sum(each["seconds"][kind] for each in splits) / len(splits) for kind in ("exposed", "hidden"))
    waits = max((sum(each["calls"] for each in waits) / steps for waits in found["host_waits"].values()), default=0.0)
    figures = (found["overlap"] * 100, exposed * 1e3, (exposed + hidden) * 1e3, found["step_seconds"] * 1e3, waits)
    return f"{name:20} {figures[0]:7.0f}% {figures[1]:12.2f} {figures[2]:12.2f} {figures[3]:9.2f} {figures[4]:11.1f}"


def main() -> None:
    """Print a row for each run, and where the host waits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=["ddp", "fsdp"], metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--device", choices=tuple(SHAPES), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--gpus", type=int, default=0, help="GPUs with a rank each (default: two ranks on one)")
    options = parser.parse_args()
    print(f"{'':20} {'overlap':>8} {'exposed ms':>12} {'comm. ms':>12} {'step ms':>9} {'host waits':>11}")
    for name in options.rows:
        with tempfile.TemporaryDirectory() as folder:
            train(name, options.device, options.gpus, Path(folder) / "run")
            found = report(Path(folder) / "run")
        print(row(name, found), flush=True)
        for rank, waits in found["host_waits"].items():
            for each in waits:
                print(f"{'':20} rank {rank} waits {each['calls'] / len(found['steps']):.1f} times in {each['name']}")


if __name__ == "__main__":  # ranks import this file
    main()
