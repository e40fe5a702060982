"""From a killed rank to the next committed step, what growing costs, and what it costs to be recoverable.

    python benchmarks/recovery.py                  # all three, on 4 CPU ranks
    python benchmarks/recovery.py --only recovery --rounds 5

*recovery*: one of 4 ranks gets SIGKILL after a step; the time until the next step is complete, in Phalanx with
max_restarts, and for the same model under `torchrun --max-restarts` with a checkpoint (`torch.save`) after each step.
*growing*: 3 ranks become 4; the longest time between two steps of the others. *steady*: the median step of about 2 ms
with max_restarts = 3 against max_restarts = 0, in alternation.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from report import describe, environment
from torch import nn
from torch.utils.data import TensorDataset

import phalanx

RANKS, STEPS, KILLED, AT = 4, 60, 2, 30
_GROW_STEPS = 150
_STEADY_STEPS, _WARMUP = 400, 50

TORCHRUN = """
import os, signal, sys, time
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
folder, steps, killed, at = sys.argv[1], *map(int, sys.argv[2:5])
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
# Not init_process_group("gloo") alone: after a restart it would read the addresses of the ranks before, and fail.
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
prefix = "attempt" + os.environ["TORCHELASTIC_RESTART_COUNT"]
dist.init_process_group("gloo", store=dist.PrefixStore(prefix, store), rank=rank, world_size=size)
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
kept, begin = os.path.join(folder, "last.pt"), 0
if os.path.exists(kept):
    state = torch.load(kept)
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    begin = state["step"]
data = torch.randn(32, 256), torch.randint(0, 10, (32,))
for step in range(begin + 1, steps + 1):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(data[0]), data[1]).backward()
    optimizer.step()
    if rank == 0:
        state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, kept + ".new")
        os.replace(kept + ".new", kept)
        with open(os.path.join(folder, "steps"), "a") as file:
            print(step, time.time(), file=file)
    mark = os.path.join(folder, "killed")
    if rank == killed and step == at and not os.path.exists(mark):
        with open(mark, "w") as file:
            file.write(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
dist.destroy_process_group()
"""


class Marked(phalanx.Callback):
    """Notes on rank 0 when each step was complete; kills a rank or asks for more ranks after a step."""

    def __init__(self, folder: Path, killed: int | None = None, grow_to: int | None = None) -> None:
        self._folder, self._killed, self._grow_to = folder, killed, grow_to

    def on_step_end(self, trainer: Any, info: phalanx.StepInfo) -> None:
        """Note the time, then do it."""
        if trainer.formation.rank == 0:
            with (self._folder / "steps").open("a") as file:
                print(info.step, time.time(), file=file)
        mark = self._folder / "killed"
        if info.step != AT or mark.exists():
            return
        if trainer.formation.rank == self._killed:
            mark.write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        elif trainer.formation.rank == 0 and self._grow_to is not None:
            mark.write_text(str(time.time()))
            (self._folder / "run" / "logs" / "ranks.request").write_text(json.dumps({"ranks": self._grow_to}))


class Clock(phalanx.Callback):
    """Keeps the times between steps, and writes their median."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._times: list[float] = []

    def on_step_end(self, trainer: Any, info: phalanx.StepInfo) -> None:
        """Note the time."""
        self._times.append(time.perf_counter())

    def on_fit_end(self, trainer: Any) -> None:
        """Write the median step in milliseconds."""
        if trainer.formation.rank == 0:
            later = self._times[_WARMUP:]
            self._path.write_text(str(1e3 * median(b - a for a, b in pairwise(later))))


def train(folder: Path, callback: phalanx.Callback, width: int = 512, **settings: Any) -> None:
    """Train the model of the torchrun script, of another width for longer steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, width), nn.ReLU(), nn.Linear(width, 10))
    data = TensorDataset(torch.randn(8192, 256), torch.randint(0, 10, (8192,)))
    chosen: dict[str, Any] = {"num_workers": RANKS, "max_steps": STEPS, "max_restarts": 3, **settings}
    trainer = phalanx.PyTorchDDPTrainer(
        model=model,
        device="cpu",
        batch_size=32,
        optimizer="sgd",
        verbosity="quiet",
        progress=False,
        run_dir=str(folder / "run"),
        callbacks=[callback],
        **chosen,
    )
    trainer.fit(data)


def read_steps(folder: Path) -> list[tuple[int, float]]:
    """Return each step and when it was complete."""
    lines = (folder / "steps").read_text().splitlines()
    return [(int(line.split()[0]), float(line.split()[1])) for line in lines]


def recovery(folder: Path) -> tuple[float, int]:
    """Return the seconds from the kill to the next new step, and the steps that were done twice."""
    killed = float((folder / "killed").read_text())
    steps = read_steps(folder)  # rank 0 may note the step of the kill after it
    lost = len(steps) - len({step for step, _ in steps})
    return next(when for step, when in steps if step > AT) - killed, lost


def under_torchrun(folder: Path) -> tuple[float, int]:
    """Kill a rank under torchrun, which restarts all from the checkpoint of the last step."""
    (folder / "train.py").write_text(TORCHRUN)
    words = ["--nproc-per-node", RANKS, "--max-restarts", 3, "--standalone", "train.py", folder, STEPS, KILLED, AT]
    command = [sys.executable, "-m", "torch.distributed.run", *map(str, words)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=folder, env=env, check=True, capture_output=True, timeout=180)
    return recovery(folder)


def under_phalanx(folder: Path) -> tuple[float, int]:
    """Kill a rank that Phalanx replaces."""
    train(folder, Marked(folder, killed=KILLED), strategy="ddp")
    return recovery(folder)


def grown(folder: Path) -> float:
    """Return the longest time between two steps while a rank is added."""
    train(folder, Marked(folder, grow_to=RANKS), num_workers=(RANKS - 1, RANKS), max_steps=_GROW_STEPS, width=2048)
    times = [when for step, when in read_steps(folder) if step >= AT]
    return max(b - a for a, b in pairwise(times))


def steady(folder: Path, restarts: int) -> float:
    """Return the median step in milliseconds."""
    path = folder / "median"
    train(folder, Clock(path), 1024, num_workers=2, max_restarts=restarts, max_steps=_STEADY_STEPS)
    return float(path.read_text())


def main() -> None:
    """Run what is asked for, and print each figure with its goal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=("recovery", "growing", "steady"))
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    chosen = options.only or ("recovery", "growing", "steady")
    print(describe(environment()), flush=True)
    if "recovery" in chosen:
        rounds = [(in_folder(under_phalanx), in_folder(under_torchrun)) for _ in range(options.rounds)]
        ours, theirs = (median(each[which][0] for each in rounds) for which in (0, 1))
        lost = max(each[0][1] for each in rounds)
        print(f"one of {RANKS} ranks killed, to the next step: {ours:.2f} s (goal 1 s), {lost} steps lost")
        print(f"the same under torchrun:                   {theirs:.2f} s, {theirs / ours:.1f}x (goal 8x)", flush=True)
    if "growing" in chosen:
        pause = median(in_folder(grown) for _ in range(options.rounds))
        print(f"{RANKS - 1} ranks become {RANKS}, the others wait:       {pause:.2f} s (goal 1 s)", flush=True)
    if "steady" in chosen:
        pairs = [(in_folder(steady, 0), in_folder(steady, 3)) for _ in range(2 * options.rounds)]
        plain, able = (median(pair[which] for pair in pairs) for which in (0, 1))
        more = median(second / first for first, second in pairs) - 1
        print(f"a step of {plain:.2f} ms, recoverable:            {able:.2f} ms, {more:+.1%} (goal 1%)")


def in_folder(measure: Any, *arguments: Any) -> Any:
    """Measure with an empty folder."""
    with tempfile.TemporaryDirectory() as folder:
        return measure(Path(folder), *arguments)


if __name__ == "__main__":
    main()
