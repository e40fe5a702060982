"""How much of the gradients' all-reduce hides behind backward: timed with and without overlap, by bucket size.

    phalanx train --script communication_overlap.py --num-workers 2
    torchrun --standalone --nproc-per-node 2 communication_overlap.py
    phalanx train --script communication_overlap.py --num-workers 2 -- --buckets 1 25 --trace trace.json

DDP puts gradients into buckets and sends a bucket as soon as backward has filled it, while backward goes on with the
layers before. Small buckets start early but pay the cost of a message often; one large bucket starts when backward is
over and hides nothing. What is best depends on the model and the network: measure.

On a CPU the ranks' own cores carry the messages, so communication takes time away from backward even where the two
overlap. On GPUs it runs beside the computation. The trace opens in chrome://tracing or ui.perfetto.dev.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

import phalanx


def build_model(width: int, layers: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)))


class Measured:
    """One model in formation, whose step can be run in parts."""

    def __init__(self, args: argparse.Namespace, bucket_cap_mb: float) -> None:
        self.formation = phalanx.Formation(bucket_cap_mb=bucket_cap_mb)
        if self.formation.world_size == 1:
            raise SystemExit("one rank has nobody to talk to: start two, as the first lines of this file say")
        self.model = self.formation.prepare(build_model(args.width, args.layers))  # torch's DDP
        self.inputs = torch.randn(args.batch_size, args.width, device=self.formation.device)

    def backward(self, *, synchronised: bool) -> None:
        """Forward and backward; `synchronised`: DDP sends each bucket as soon as it is full."""
        with nullcontext() if synchronised else self.model.no_sync():
            self.model(self.inputs).square().mean().backward()

    def all_reduce(self) -> None:
        """Average all gradients in one message, after backward: as a loop without buckets would."""
        gradients = [parameter.grad for parameter in self.model.parameters()]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat)
        flat /= self.formation.world_size
        parts = flat.split([gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))

    def time(self, steps: dict[str, Any], repeats: int) -> dict[str, float]:
        """Return each step's median milliseconds on the slowest rank; they take turns, and share disturbances."""
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        for repeat in range(repeats + 2):  # the first ones warm up: DDP makes its buckets anew after its first step
            for name, step in steps.items():
                self.model.zero_grad()
                self.wait()
                start = time.perf_counter()
                step()
                self.wait()
                if repeat >= 2:
                    seconds[name].append(time.perf_counter() - start)
        medians = {name: statistics.median(taken) * 1e3 for name, taken in seconds.items()}
        return {name: self.formation.reduce(median, "max").item() for name, median in medians.items()}

    def wait(self) -> None:
        """Wait for the device, then for the other ranks: work that was only enqueued has not been done."""
        if self.formation.device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()

    def close(self) -> None:
        del self.model
        self.formation.close()


def measure(args: argparse.Namespace, bucket_cap_mb: float) -> dict[str, float]:
    """Return milliseconds of each part, and of the whole with and without overlap."""
    measured = Measured(args, bucket_cap_mb)

    def apart() -> None:
        measured.backward(synchronised=False)
        measured.all_reduce()

    steps = {
        "compute": lambda: measured.backward(synchronised=False),
        "apart": apart,
        "overlapped": lambda: measured.backward(synchronised=True),
    }
    found = measured.time(steps, args.repeats)
    measured.close()
    # What the all-reduce costs when nothing hides it, and how much of that is gone when DDP does it meanwhile.
    found["all-reduce"] = found["apart"] - found["compute"]
    found["hidden"] = (found["apart"] - found["overlapped"]) / found["all-reduce"] if found["all-reduce"] > 0 else 0.0
    return found


def write_trace(args: argparse.Namespace) -> None:
    """Record one synchronised step of rank 0, with the bucket size that was named first."""
    measured = Measured(args, args.buckets[0])
    for _ in range(2):
        measured.backward(synchronised=True)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with profile(activities=activities) as profiler:
        measured.backward(synchronised=True)
        measured.wait()
    if measured.formation.is_main:
        profiler.export_chrome_trace(args.trace)
        print(f"trace of one step with buckets of {args.buckets[0]:g} MB: {args.trace}")
    measured.close()


def main() -> None:
    args = parse_args()
    rows = {bucket: measure(args, bucket) for bucket in args.buckets}
    if os.environ.get("RANK", "0") == "0":
        size = sum(parameter.numel() for parameter in build_model(args.width, args.layers).parameters()) * 4 / 1e6
        print(f"{size:.1f} MB of gradients, {args.layers} layers; milliseconds of a forward and backward pass")
        print("bucket MB   without all-reduce   all-reduce after it   overlapped   hidden")
        for bucket, row in rows.items():
            times = f"{row['compute']:20.1f} {row['apart']:21.1f} {row['overlapped']:12.1f}"
            print(f"{bucket:9g} {times} {row['hidden']:8.0%}")
    if args.trace:
        write_trace(args)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="How much of the all-reduce hides behind backward.")
    parser.add_argument("--buckets", type=float, nargs="+", default=[1, 5, 25, 1000], help="bucket_cap_mb to try")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=256, help="samples per rank")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--trace", help="file for a profile of one step of rank 0")
    return parser.parse_args()


if __name__ == "__main__":
    main()
