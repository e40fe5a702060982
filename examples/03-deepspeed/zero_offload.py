"""Move optimizer states and parameters out of the accelerator: into CPU memory, or onto a fast disk.

    python zero_offload.py                                                # one rank: off, then CPU
    phalanx train --script zero_offload.py --num-workers 2                # the same on two
    python zero_offload.py --offload nvme --nvme-path /path/on/nvme       # optimizer states and parameters on disk

Adam keeps 8 bytes of states for every parameter, and with bf16 weights 4 more for their fp32 masters: offloaded, the
accelerator need not hold them. The price is their way over the bus (or from the disk) in every step.
NVMe needs libaio's headers, and DeepSpeed compiles its reader once.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from torch import nn

import phalanx
from phalanx.zoo.data import load


def build_model(width: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.Linear(width, 10))


def train(args: argparse.Namespace, offload: str) -> str:
    """Train once; return one line about it."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    stage = 3 if offload == "nvme" else args.stage
    settings = {"offload": offload, **({"nvme_path": args.nvme_path} if offload == "nvme" else {})}
    torch.manual_seed(0)
    trainer = phalanx.Trainer(
        build_model(args.width), strategy="deepspeed", zero_stage=stage, batch_size=64, max_steps=args.steps, **settings
    )
    history = trainer.fit(load("digits"), load("digits", split="val"))
    line = f"offload {offload:<4} stage {stage}: loss {history.epochs[-1].val['loss']:.4f}"
    line += f", {history.throughput:,.0f} samples/s"
    if torch.cuda.is_available():
        line += f", {torch.cuda.max_memory_allocated() / 2**20:,.0f} MiB at most on the GPU"
    if offload == "nvme":
        files = [path for path in Path(args.nvme_path).rglob("*") if path.is_file()]
        line += f", {sum(path.stat().st_size for path in files) / 2**20:,.1f} MiB in {len(files)} files on disk"
    return line


def main() -> None:
    args = parse_args()
    lines = [train(args, offload) for offload in ("none", args.offload)]
    if os.environ.get("RANK", "0") == "0":  # under a launcher every rank comes here
        print("\n".join(lines))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Offload with DeepSpeed.")
    parser.add_argument("--offload", choices=("cpu", "nvme"), default="cpu")
    parser.add_argument("--nvme-path", help="folder on a fast disk")
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), default=2, help="ZeRO's stage (NVMe needs 3)")
    parser.add_argument("--width", type=int, default=256, help="only tensors over 1 MiB go to NVMe: 1024 has some")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--local-rank", "--local_rank", type=int, help="from a launcher; the environment says the same")
    return parser.parse_args()


if __name__ == "__main__":
    main()
