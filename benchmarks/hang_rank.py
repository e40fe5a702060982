"""A small training loop with one fault in one rank: what `hang_injections.py` runs, as a plain torch script or trainer.

The comments `# at: name` mark the lines that the report of a fault must name.
"""

from __future__ import annotations

import datetime
import os
import signal
import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from phalanx.loop.hooks import Callback
from phalanx.loop.step_info import StepInfo

KINDS = {
    "missing": "metric",
    "order": "metric",
    "shape": "metric",
    "dtype": "metric",
    "eval": "eval",
    "swallowed": "metric",
    "loader": "data",
    "killed loader": "data",
    "stopped": "metric",
    "loop": "loop",
    "lock": "lock",
    "subgroup": "away",
    "message": "away",
}
"""Kinds of faults, and the line that must be named."""
DEVICE = "cuda" if os.environ.get("HANG_BACKEND") == "nccl" else "cpu"
SHARED = 1 << 20 if DEVICE == "cuda" else 3
"""Elements of a broadcast. nccl compares nothing: calls of about the same size may pass, and give wrong results."""
STEPS = 12
SAMPLES = 3 * STEPS


class Samples(Dataset):
    """Random samples; the loader of the guilty rank stops in its worker process."""

    def __init__(self) -> None:
        self._drawn = -1

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:  # at: sample
        fault = Fault.from_environment()
        self._drawn = step = self._drawn + 1
        if fault.is_due("loader", step):
            fault.note()
            time.sleep(1000)
        if fault.is_due("killed loader", step):
            fault.note()
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.ones(16), torch.zeros(4)


class Fault:
    """One fault: its kind, the rank and the step at which it happens."""

    def __init__(self, kind: str, rank: int, step: int) -> None:
        self.kind, self.rank, self.step = kind, rank, step
        self.own, self.ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.lock = threading.Lock()
        self.pair: Any = None
        """A group of the guilty rank and the next one, where the fault is in it."""

    @classmethod
    def from_environment(cls) -> Fault:
        kind, rank, step = os.environ["HANG"].split(",")
        return cls(kind, int(rank), int(step))

    def is_due(self, kind: str, step: int) -> bool:
        return (self.kind, self.rank, self.step) == (kind, self.own, step)

    def note(self) -> None:
        """Note when the fault happens."""
        with open(os.environ.get("HANG_NOTE", os.devnull), "w") as file:
            file.write(str(time.time()))

    def begin(self) -> None:
        """Make the group that the fault is in; all ranks call this."""
        if self.kind == "subgroup":
            self.pair = dist.new_group(sorted({self.rank, (self.rank + 1) % self.ranks}))

    def communicate(self, step: int) -> None:
        """Call the collectives of a step, except for what the fault changes."""
        if self.is_due(self.kind, step):
            if DEVICE == "cuda":  # what was called before has then reached all ranks: the fault is at this step's calls
                torch.cuda.synchronize()
                time.sleep(0.3)
            self.note()
        if self.is_due("stopped", step):
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.is_due("loop", step):
            while True: step += 0  # at: loop  # fmt: skip  # noqa: E701
        if self.is_due("lock", step):
            self.lock.acquire()
            self.lock.acquire()  # at: lock
        if self.is_due("eval", step):
            gathered = [torch.zeros(2, device=DEVICE) for _ in range(self.ranks)]
            dist.all_gather(gathered, torch.zeros(2, device=DEVICE))  # at: eval
        try:
            self.check(step)
            metric = torch.ones(4 + self.is_due("shape", step) * (SHARED - 2), device=DEVICE)
            if self.is_due("dtype", step):
                metric = metric.double()
            if self.is_due("order", step):
                dist.broadcast(torch.zeros(SHARED, device=DEVICE), 0)
            if not self.is_due("missing", step):
                dist.all_reduce(metric)  # at: metric
        except ValueError:
            pass  # the fault "swallowed"
        if self.is_due("subgroup", step) or self.is_due("message", step):
            time.sleep(1000)  # at: away
        if self.kind == "subgroup" and dist.get_rank(self.pair) >= 0:
            dist.all_reduce(torch.ones(4, device=DEVICE), group=self.pair)
        if self.kind == "message":
            self.pass_on()
        dist.broadcast(torch.zeros(SHARED, device=DEVICE), 0)
        if DEVICE == "cuda":
            torch.cuda.synchronize()  # as a loop that prints its loss

    def pass_on(self) -> None:
        """Send to the next rank and receive from the one before."""
        sent, taken = torch.ones(4, device=DEVICE), torch.ones(4, device=DEVICE)
        after, before = (self.own + 1) % self.ranks, (self.own - 1) % self.ranks
        pair = [dist.P2POp(dist.isend, sent, after), dist.P2POp(dist.irecv, taken, before)]
        for work in dist.batch_isend_irecv(pair):
            work.wait()

    def check(self, step: int) -> None:
        if self.is_due("swallowed", step):
            raise ValueError("a bad sample")


def total(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return a loss."""
    return (output - target).sum()


class FaultyStep(Callback):
    """Calls the collectives of a step, with the fault, in a run of the trainer."""

    def on_fit_start(self, trainer: Any) -> None:
        self._fault = Fault.from_environment()
        self._fault.begin()

    def on_step_end(self, trainer: Any, info: StepInfo) -> None:
        self._fault.communicate(info.step - 1)


def main() -> None:
    """Train as a plain torch script would."""
    fault = Fault.from_environment()
    seconds = float(os.environ.get("HANG_TIMEOUT", "3"))
    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    store, rank, size = next(dist.rendezvous("env://"))
    store.set("ready/" + str(rank), "")
    store.wait([f"ready/{other}" for other in range(size)])  # how long ranks take to start is not what is measured
    group = {"store": store, "rank": rank, "world_size": size, "timeout": datetime.timedelta(seconds=seconds)}
    dist.init_process_group(os.environ.get("HANG_BACKEND", "gloo"), **group)
    fault.begin()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 4).to(DEVICE))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    workers = int("loader" in fault.kind)
    loader = DataLoader(Samples(), batch_size=1, num_workers=workers)
    for step, (batch, _) in enumerate(loader):  # at: data
        model(batch.to(DEVICE)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        fault.communicate(step)
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
