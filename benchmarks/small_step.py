"""What a small training step costs: a raw loop, a raw loop captured as a CUDA graph, and Phalanx with and without.

    python benchmarks/small_step.py                      # an MLP, the GPT `debug` and a ResNet-18 at batch 8, on a GPU
    python benchmarks/small_step.py --model mlp --steps 2000 --rounds 3

One process measures all rows of a model in turns, `--rounds` times; the median counts. The optimizer is fused AdamW
everywhere. The raw loops train on batches that are on the device already; Phalanx trains on a plain Dataset (a length
and a `__getitem__`) or, in the rows "tensors", on a TensorDataset, with its logging as it comes. A captured run has
more steps, and a longer warm-up: worker processes, which fetch ahead where the device waits for data, need some tenths
of a second to start.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout need not be installed

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from workloads import PlainDataset

from phalanx import Callback, PyTorchDDPTrainer
from phalanx.zoo.models.gpt import gpt
from phalanx.zoo.models.resnet import resnet

Loss = Callable[[nn.Module, tuple[Tensor, ...]], Tensor]


def make_model(name: str) -> nn.Module:
    """Return a new model, with equal weights each time."""
    torch.manual_seed(0)
    if name == "mlp":
        return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    return gpt("debug", seq_len=128) if name == "gpt" else resnet("resnet18")


def make_data(name: str, samples: int) -> TensorDataset:
    """Return random samples of a model."""
    torch.manual_seed(1)
    if name == "mlp":
        return TensorDataset(torch.randn(samples, 64), torch.randint(10, (samples,)))
    if name == "gpt":
        tokens = torch.randint(256, (samples, 129))
        return TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    few = torch.randn(64, 3, 224, 224)  # images of 600 kB each: the same ones again and again
    return TensorDataset(few[torch.arange(samples) % 64] if samples <= 4096 else few, torch.randint(1000, (samples,)))


def loss_of(name: str, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """Return the loss of a batch."""
    if name == "gpt":
        loss: Tensor = model(*batch).loss
        return loss
    return F.cross_entropy(model(batch[0]), batch[1])


def raw_eager(name: str, batch_size: int, steps: int) -> float:
    """Return the milliseconds per step of a hand-written loop."""
    model = make_model(name).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    batches = _on_device(name, batch_size)

    def step() -> None:
        loss_of(name, model, next(batches)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return _timed(step, steps)


def raw_captured(name: str, batch_size: int, steps: int) -> float:
    """Return the milliseconds per step of a hand-written loop around a CUDA graph."""
    model = make_model(name).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=True)
    batches = _on_device(name, batch_size)
    static = tuple(tensor.clone() for tensor in next(batches))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())

    def body() -> None:
        loss_of(name, model, static).backward()
        optimizer.step()
        optimizer.zero_grad()

    with torch.cuda.stream(side):
        for _ in range(3):
            body()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()

    def step() -> None:
        for held, tensor in zip(static, next(batches), strict=True):
            held.copy_(tensor, non_blocking=True)
        graph.replay()

    return _timed(step, steps)


class Clock(Callback):
    """Times the steps after the first ones."""

    def __init__(self, warmup: int, steps: int) -> None:
        self.warmup, self.steps = warmup, steps
        self.began = self.ended = 0.0

    def on_step_end(self, trainer, info) -> None:
        if info.step == self.warmup:
            torch.cuda.synchronize()
            self.began = time.perf_counter()
        elif info.step == self.warmup + self.steps:
            torch.cuda.synchronize()
            self.ended = time.perf_counter()


Clock.__module__ = "phalanx"  # it changes nothing of the step, which the loop would have to look for


def phalanx_step(name: str, batch_size: int, steps: int, *, capture: bool, tensors: bool = False) -> float:
    """Return the milliseconds per step of Phalanx's trainer."""
    warmup = 60
    if capture and name == "mlp":
        warmup, steps = 3 * steps, 6 * steps
    clock = Clock(warmup, steps)
    data = make_data(name, batch_size * (warmup + steps + 2500 * (name == "mlp")))
    model = make_model(name)
    with tempfile.TemporaryDirectory(prefix="phalanx-bench-") as run_dir:
        trainer = PyTorchDDPTrainer(
            model,
            loss_fn=None if name == "gpt" else F.cross_entropy,
            num_gpus=1,
            batch_size=batch_size,
            max_steps=warmup + steps,
            learning_rate=1e-4,
            capture=capture,
            callbacks=[clock],
            progress=False,
            run_dir=run_dir,
        )
        trainer.fit(data if tensors else PlainDataset(data))
    return (clock.ended - clock.began) / steps * 1e3


def _on_device(name: str, batch_size: int) -> Iterator[tuple[Tensor, ...]]:
    data = make_data(name, batch_size * 4)
    parts = zip(*(tensor.cuda().split(batch_size) for tensor in data.tensors), strict=True)
    return itertools.cycle(list(parts))


def _timed(step: Callable[[], None], steps: int) -> float:
    for _ in range(30):
        step()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / steps * 1e3


ROWS: dict[str, Callable[..., float]] = {
    "raw eager": raw_eager,
    "raw captured": raw_captured,
    "phalanx, eager": lambda *given: phalanx_step(*given, capture=False),
    "phalanx, captured": lambda *given: phalanx_step(*given, capture=True),
    "phalanx, captured, tensors": lambda *given: phalanx_step(*given, capture=True, tensors=True),
}
BATCH = {"mlp": 32, "gpt": 8, "resnet18": 8}
STEPS = {"mlp": 1000, "gpt": 300, "resnet18": 100}


def main() -> None:
    """Measure, and print a table for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=tuple(BATCH), default=list(BATCH))
    parser.add_argument("--steps", type=int, help="measured steps (default: by model)")
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("small_step.py measures CUDA graphs: it needs a GPU, and torch finds none here.")
        return
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}")
    for name in options.model:
        steps = options.steps or STEPS[name]
        found: dict[str, list[float]] = {row: [] for row in ROWS}
        for _ in range(options.rounds):
            for row, measure in ROWS.items():
                found[row].append(measure(name, BATCH[name], steps))
        print(f"\n{name}, batch {BATCH[name]}, {steps} steps" + " " * 8 + "ms per step   times raw eager")
        raw = median(found["raw eager"])
        for row, values in found.items():
            print(f"  {row:<28} {median(values):10.4f} {raw / median(values):12.2f}x", flush=True)


if __name__ == "__main__":
    main()
