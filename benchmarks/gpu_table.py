"""One GPU, one table: hand-written loops, Accelerate, Lightning and HF Trainer against Phalanx, also fast and small.

    python benchmarks/gpu_table.py                              # every model, under 20 minutes on one H200
    python benchmarks/gpu_table.py --model gpt2 --only raw ours # a part of it
    python benchmarks/gpu_table.py --curves --json table.json   # 2,000 steps of each mode of Phalanx as well

The rivals train the model as people write it by hand (plain_models.py; ResNet-50 and ViT of torchvision, BERT-Large
of transformers), compiled, in bf16, with fused AdamW. Phalanx trains its own language models by their presets, and the
same vision models and BERT. Every model has a process of its own with an empty compile cache; in it one contestant
follows the other. `first` is the time from the call to the end of the first step, compilation included.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from clock import StepClock
from contestants import CONTESTANTS
from plain_models import Bert, Images, PlainDecoder
from report import describe, environment, table, write_json
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from workloads import PlainDataset, Task, Workload

from phalanx import PyTorchDDPTrainer, torch_compiler

_MODES: dict[str, dict[str, Any]] = {
    "ours": {"mixed_precision": "bf16", "compile": True},
    "ours fast": {"fast": True},
    "ours small": {"memory": True, "mixed_precision": "bf16"},
}
_RIVALS = {"raw": "raw", "accelerate": "accelerate", "lightning": "lightning", "hf": "hf"}
_PEAK = 989e12
"""bf16 operations per second of an H100 or H200."""


@dataclass(frozen=True)
class Case:
    """A model of the table: how the rivals build it, how Phalanx does, and its batch."""

    plain: Callable[[], nn.Module]
    ours: Callable[[], nn.Module]
    batch: int
    shape: tuple[int, ...]
    """Of a sample: (tokens,), or (channels, height, width) of an image."""
    vocabulary: int
    flops: Callable[[nn.Module], float]
    """Operations of training on one sample, of our model."""


def _gpt(preset: str, layers: int, hidden: int, heads: int, batch: int) -> Case:
    def ours() -> nn.Module:
        from phalanx.models.gpt import gpt

        return gpt(preset)

    plain = lambda: PlainDecoder(50257, 1024, layers, hidden, heads)  # noqa: E731
    return Case(plain, ours, batch, (1024,), 50257, lambda model: 1024 * model.flops_per_token(1024))


def _llama() -> Case:
    def ours() -> nn.Module:
        from phalanx.models.llama import llama

        return llama("1b", seq_len=2048)

    plain = lambda: PlainDecoder(128256, 2048, 16, 2048, 32, 8, 8192, llama=True)  # noqa: E731
    return Case(plain, ours, 8, (2048,), 128256, lambda model: 2048 * model.flops_per_token(2048))


def _same(make: Callable[[], nn.Module], batch: int, shape: tuple[int, ...], vocabulary: int) -> Case:
    """Return a model that the rivals and Phalanx train alike."""
    return Case(make, make, batch, shape, vocabulary, lambda model: 0.0)


CASES = {
    "gpt2": _gpt("gpt2", 12, 768, 12, 32),
    "llama-1b": _llama(),
    "gpt2-medium": _gpt("gpt2-medium", 24, 1024, 16, 16),
    "gpt2-xl": _gpt("gpt2-xl", 48, 1600, 25, 8),
    "resnet50": _same(lambda: Images("resnet50"), 256, (3, 224, 224), 0),
    "vit-b16": _same(lambda: Images("vit_b_16"), 256, (3, 224, 224), 0),
    "bert-large": _same(Bert, 32, (512,), 30522),
}


class GpuClock(StepClock):
    """The stopwatch, with the time of the first step, and the most memory that torch has taken from the device.

    Not what tensors use of it, as is usual: of a CUDA graph's memory torch does not count that.
    """

    def __init__(self, warmup: int, steps: int) -> None:
        super().__init__(warmup, steps)
        self.started, self.first, self.peak = time.time(), 0.0, 0

    def tick(self) -> None:
        """Count a step that is done."""
        super().tick()
        if self.taken == 1:
            torch.cuda.synchronize()
            self.first = time.time() - self.started
        self.peak = torch.cuda.max_memory_reserved() if self.taken == self.total_steps else self.peak


def main() -> None:
    """Run each model in a process of its own, and print the tables."""
    options = _parse()
    if options.inside:
        _measure(options.model[0], options.only, options.steps, options.json)
        return
    document: dict[str, Any] = {"environment": environment("cuda"), "models": {}}
    print(describe(document["environment"]), flush=True)
    for model in options.model or CASES:
        document["models"][model] = _in_process(model, options)
        print("\n" + _table(model, document["models"][model]), flush=True)
        write_json(options.json, document)
    if options.curves:
        document["curves"] = curves(options.curves, [name for name in options.only if name in _MODES])
        write_json(options.json, document)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=tuple(CASES), help="which models (default: all)")
    parser.add_argument("--only", nargs="+", choices=(*_RIVALS, *_MODES), default=[*_RIVALS, *_MODES])
    parser.add_argument("--steps", type=int, default=20, help="measured steps")
    parser.add_argument("--curves", type=int, nargs="?", const=2000, default=0, help="steps of a loss curve per mode")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def _in_process(model: str, options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="phalanx-bench-") as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, __file__, "--inside", "--model", model, "--steps", str(options.steps)]
        command += ["--json", str(result), "--only", *options.only]
        caches = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}
        subprocess.run(command, check=False, env={**os.environ, **caches})
        return json.loads(result.read_text()) if result.is_file() else {}


def _measure(model: str, names: list[str], steps: int, path: Path) -> None:
    torch.set_float32_matmul_precision("high")
    found: dict[str, Any] = {}
    for name in names:
        if name in _RIVALS and not CONTESTANTS[_RIVALS[name]].is_installed:
            continue
        try:
            found[name] = _train(CASES[model], name, steps)
        except Exception as error:  # noqa: BLE001 - one contestant that fails must not cost the others
            found[name] = {"failed": f"{type(error).__name__}: {error}"[:500]}
        print(f"{model} {name}: {found[name]}", flush=True)
        path.write_text(json.dumps(found), encoding="utf-8")
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()


def _train(case: Case, name: str, steps: int) -> dict[str, float]:
    torch.manual_seed(0)
    clock = GpuClock(10, steps)
    is_ours = name in _MODES
    model = case.ours() if is_ours else case.plain()
    flops = case.flops(model) if is_ours else 0.0
    data = _data(case, case.batch * (clock.total_steps + 2))
    workload = Workload(case.batch, clock.warmup, clock.steps, bf16=True, compile=True)
    task = Task(workload, model, PlainDataset(data), data, clock, "cuda", 1)
    torch.cuda.reset_peak_memory_stats()
    compiling = _compile_seconds()
    clock.started = time.time()
    if is_ours:
        _run_ours(task, _MODES[name])
    else:
        contestant = CONTESTANTS[_RIVALS[name]]
        getattr(importlib.import_module(contestant.module), contestant.function)(task)
    ms = clock.ms_per_step
    units = case.batch * (case.shape[0] if case.vocabulary else 1)
    return {
        "ms": ms,
        "per_second": units / ms * 1e3,
        "mfu": case.batch * flops / (ms / 1e3) / _PEAK,
        "gib": clock.peak / 2**30,
        "first": clock.first,
        "compile": compiling(),
    }


def _data(case: Case, samples: int) -> TensorDataset:
    if not case.vocabulary:
        images = torch.randint(256, (samples, *case.shape), dtype=torch.uint8)
        return TensorDataset(images, torch.randint(1000, (samples,)))
    tokens = torch.randint(case.vocabulary, (samples, case.shape[0] + 1))
    return TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def _run_ours(task: Task, settings: dict[str, Any]) -> None:
    trainer = PyTorchDDPTrainer(
        task.model,
        device="cuda",
        learning_rate=1e-4,
        max_steps=task.steps,
        callbacks=[lambda *_: task.clock.tick()],
        **settings,
    )
    loader = DataLoader(task.dataset, batch_size=task.workload.batch_size, shuffle=True, pin_memory=True)
    with tempfile.TemporaryDirectory(prefix="phalanx-bench-") as run_dir:
        trainer.fit(loader, run_dir=run_dir)


def _compile_seconds() -> Callable[[], float]:
    """Return a function of the seconds that torch.compile has compiled since this call."""
    spent, began = [0.0], [0.0]
    torch_compiler.around_compiles(
        lambda: began.__setitem__(0, time.perf_counter()),
        lambda: spent.__setitem__(0, spent[0] + time.perf_counter() - began[0]),
    )
    return lambda: spent[0]


def _table(model: str, found: dict[str, Any]) -> str:
    header = [
        "contestant",
        "tokens/s" if CASES[model].vocabulary else "images/s",
        "x raw",
        "MFU",
        "GiB",
        "x raw",
        "first step",
        "compiling",
    ]
    raw = found.get("raw", {})
    rows = []
    for name, values in found.items():
        if "failed" in values:
            rows.append([name, "failed", *["-"] * (len(header) - 2)])
            continue
        speed = values["per_second"] / raw["per_second"] if "ms" in raw else 0.0
        memory = values["gib"] / raw["gib"] if "ms" in raw else 0.0
        mfu = f"{values['mfu']:.1%}" if values["mfu"] else "-"
        cells = [f"{values['per_second']:,.0f}", f"{speed:.2f}", mfu, f"{values['gib']:.1f}", f"{memory:.2f}"]
        rows.append([name, *cells, f"{values['first']:.1f} s", f"{values['compile']:.1f} s"])
    case = CASES[model]
    size = f"{case.batch} x {case.shape[0]}" if case.vocabulary else f"{case.batch} images"
    return table(f"{model}, batch {size}", header, rows)


def curves(steps: int, modes: list[str]) -> dict[str, list[float]]:
    """Train GPT-2 124M on the bytes of Python's library in each mode from equal weights; return the losses."""
    found: dict[str, list[float]] = {}
    data = _text(4 * steps, 1024)
    for name in modes:
        torch.manual_seed(0)
        losses: list[torch.Tensor] = []
        trainer = PyTorchDDPTrainer(
            CASES["gpt2"].ours(),
            device="cuda",
            learning_rate=3e-4,
            warmup=100,
            lr_schedule="cosine",
            gradient_clipping=1.0,
            max_steps=steps,
            callbacks=[lambda info, kept=losses: kept.append(info.loss_tensor.detach().clone())],
            **_MODES[name],
        )
        with tempfile.TemporaryDirectory(prefix="phalanx-bench-") as run_dir:
            trainer.fit(DataLoader(data, batch_size=4, shuffle=False, pin_memory=True), run_dir=run_dir)
        found[name] = [round(loss.item(), 4) for loss in losses]
        last = sum(found[name][-100:]) / 100
        print(f"curve {name}: loss at 300 {sum(found[name][290:310]) / 20:.4f}, last 100 {last:.4f}", flush=True)
        torch._dynamo.reset()
        gc.collect()
    return found


def _text(samples: int, time_steps: int) -> TensorDataset:
    """Return windows of the Python library's sources, in a fixed random order."""
    folder = Path(importlib.import_module("argparse").__file__).parent
    files = sorted(folder.rglob("*.py"))
    text = b"".join(path.read_bytes() for path in files)[: 64 << 20]
    stream = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    starts = torch.randint(len(stream) - time_steps - 1, (samples,), generator=torch.Generator().manual_seed(0))
    windows = torch.stack([stream[start : start + time_steps + 1] for start in starts.tolist()]).long()
    return TensorDataset(windows[:, :-1].contiguous(), windows[:, 1:].contiguous())


if __name__ == "__main__":
    main()
