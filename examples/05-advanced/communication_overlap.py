"""How much of the gradients' all-reduce hides behind backward: timed with and without overlap, by bucket size.

    phalanx train --script communication_overlap.py --num-workers 2
    torchrun --standalone --nproc-per-node 2 communication_overlap.py
    phalanx train --script communication_overlap.py --num-workers 2 -- --buckets 1 25 --trace trace.json

DDP puts gradients into buckets and sends a bucket as soon as backward has filled it, while backward goes on with the
layers before. Small buckets start early but pay the cost of a message often; one bucket for everything starts when
backward is over. What is best depends on the model and the network: measure. A share that is negative, or that the one
large bucket shows as well, is not overlap but noise, or the cost of something else: run it again on an idle machine.

On a CPU the ranks' own cores carry the messages, so communication takes time away from backward even where the two
overlap. On GPUs it runs beside the computation. The trace opens in chrome://tracing or ui.perfetto.dev.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

import phalanx


def build_model(width: int, layers: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)))


class Measured:
    """The same model twice: by itself, and in formation."""

    def __init__(self, args: argparse.Namespace, bucket_cap_mb: float) -> None:
        self.formation = phalanx.Formation(strategy="ddp", bucket_cap_mb=bucket_cap_mb)
        if self.formation.world_size == 1:
            raise SystemExit("one rank has no peer: start two, as the first lines of this file say")
        self.ddp = self.formation.prepare(build_model(args.width, args.layers))
        self.plain = build_model(args.width, args.layers).to(self.formation.device)
        # Its gradients lie in one piece of memory, as DDP's lie in its buckets: nothing has to be copied to be sent.
        self.gradients = torch.zeros(sum(p.numel() for p in self.plain.parameters()), device=self.formation.device)
        parts = self.gradients.split([p.numel() for p in self.plain.parameters()])
        for parameter, part in zip(self.plain.parameters(), parts, strict=True):
            parameter.grad = part.view_as(parameter)
        self.inputs = torch.randn(args.batch_size, args.width, device=self.formation.device)

    def compute(self) -> None:
        """Forward and backward, and nothing is sent."""
        self.plain(self.inputs).square().mean().backward()

    def one_after_the_other(self) -> None:
        """Forward and backward, then one all-reduce of all gradients."""
        self.compute()
        dist.all_reduce(self.gradients)
        self.gradients /= self.formation.world_size

    def overlapped(self) -> None:
        """Forward and backward, in which DDP sends each bucket as soon as it is full."""
        self.ddp(self.inputs).square().mean().backward()

    def time(self, repeats: int) -> dict[str, float]:
        """Return each step's median milliseconds on the slowest rank; they take turns, and share disturbances."""
        steps = {"compute": self.compute, "apart": self.one_after_the_other, "overlapped": self.overlapped}
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        for repeat in range(repeats + 2):  # the first ones warm up: DDP makes its buckets anew after its first step
            for name, step in steps.items():
                self.ddp.zero_grad()
                self.gradients.zero_()
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
        del self.ddp
        self.formation.close()


def measure(args: argparse.Namespace, bucket_cap_mb: float) -> dict[str, float]:
    """Return milliseconds without an all-reduce, with one after backward and with one meanwhile; and what is hidden."""
    measured = Measured(args, bucket_cap_mb)
    found = measured.time(args.repeats)
    measured.close()
    # What the all-reduce costs when nothing hides it, and how much of that DDP hides behind backward.
    all_reduce = found["apart"] - found["compute"]
    return {**found, "hidden": (found["apart"] - found["overlapped"]) / all_reduce if all_reduce > 0 else math.nan}


def write_trace(args: argparse.Namespace) -> None:
    """Record one synchronised step of rank 0, with the bucket size that was named first."""
    measured = Measured(args, args.buckets[0])
    for _ in range(2):
        measured.overlapped()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with profile(activities=activities) as profiler:
        measured.overlapped()
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
    parser.add_argument("--local-rank", "--local_rank", type=int, help="from a launcher; the environment says the same")
    return parser.parse_args()


if __name__ == "__main__":
    main()
