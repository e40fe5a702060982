"""One GPU, one table: hand-written loops, Accelerate, Lightning and HF Trainer against Phalanx, also fast and small.

    python benchmarks/gpu_table.py --json table.json            # every model, under 20 minutes on one H200
    python benchmarks/gpu_table.py --model gpt2 --only raw ours # a part of it
    python benchmarks/gpu_table.py --curves                     # 2,000 steps of each mode of Phalanx as well

Where a command may not take that long, name some models, then the others, with the same file: it is added to, and the
last command prints the whole table (about 9 minutes each on an H200):

    python benchmarks/gpu_table.py --json table.json --model gpt2 resnet50
    python benchmarks/gpu_table.py --json table.json --model llama-1b gpt2-medium gpt2-xl vit-b16 bert-large

The rivals train the model as people write it by hand (plain_models.py; ResNet-50 and ViT of torchvision, BERT-Large
of transformers), compiled, in bf16, channels last, with fused AdamW. Phalanx trains its own language models by their
presets, and the same vision models and BERT. Every model has a separate process with an empty compile cache; in it
one contestant follows the other, on equal batches in equal order. `first step` is the time from the call to the end of
the first step, compilation included. `loss` is the mean of the last 20 of 300 steps: the steps that are timed.
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
from pathlib import Path
from typing import Any

import torch
from clock import StepClock
from contestants import CONTESTANTS as LOOPS
from gpu_cases import CASES, CONTESTANTS, MODES, Case, text
from report import describe, environment, table, write_json
from torch.utils.data import DataLoader, Dataset
from workloads import Task, Workload

from phalanx import PyTorchDDPTrainer, torch_compat

_PEAK = 989e12
"""bf16 operations per second of an H100 or H200, of which MFU is a share, on other GPUs too."""
_WARMUP = 10
_WEIGHT_DECAY = 0.01
"""That of torch's AdamW, which the rivals use."""


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
            _synchronize()
            self.first = time.time() - self.started
        self.peak = _reserved() if self.taken == self.total_steps else self.peak


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _reserved() -> int:
    return torch.cuda.max_memory_reserved() if torch.cuda.is_available() else 0


def main() -> None:
    """Run each model in a separate process, and print the tables."""
    options = _parse()
    if options.inside:
        torch.set_float32_matmul_precision("high")
        measure(CASES[options.model[0]], options.only, options.steps, options.json)
        return
    document = _read(options.json)
    document["environment"] = environment("cuda")
    print(describe(document["environment"]), flush=True)
    for model in options.model or CASES:
        began = time.time()
        document["models"].setdefault(model, {}).update(_in_process(model, options))
        document["seconds"][model] = time.time() - began
        print(f"\n{_table(model, document)}\n{model}: {document['seconds'][model]:.0f} s", flush=True)
        write_json(options.json, document)
    if options.curves:
        document["curves"] = curves(options.curves, [name for name in MODES if name in (options.only or MODES)])
        write_json(options.json, document)
    print(f"\n{whole_table(document)}", flush=True)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=tuple(CASES), help="which models (default: all)")
    parser.add_argument("--only", nargs="+", choices=CONTESTANTS, help="which contestants (default: as the model has)")
    parser.add_argument("--steps", type=int, default=20, help="measured steps, where no loss is compared")
    parser.add_argument("--curves", type=int, nargs="?", const=2000, default=0, help="steps of a loss curve per mode")
    parser.add_argument("--json", type=Path, help="write the numbers here; what the file has of other models stays")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def _read(path: Path | None) -> dict[str, Any]:
    """Return the numbers of earlier commands, and places for those that were not measured."""
    earlier = json.loads(path.read_text(encoding="utf-8")) if path is not None and path.is_file() else {}
    return {"models": {}, "seconds": {}, **earlier}


def _in_process(model: str, options: argparse.Namespace) -> dict[str, Any]:
    if not torch.cuda.is_available():
        sys.exit("gpu_table.py measures one GPU, and torch finds none here.")
    with tempfile.TemporaryDirectory(prefix="phalanx-bench-") as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, __file__, "--inside", "--model", model, "--steps", str(options.steps)]
        command += ["--json", str(result), "--only", *(options.only or CASES[model].contestants)]
        caches = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}
        code = subprocess.run(command, check=False, env={**os.environ, **caches}).returncode
        if code:
            print(f"{model}: its process ended with exit code {code}; contestants without a row were not measured")
        return json.loads(result.read_text()) if result.is_file() else {}


def measure(
    case: Case, names: list[str], steps: int, path: Path | None = None, device: str = "cuda"
) -> dict[str, dict[str, Any]]:
    """Train a model with one contestant after the other; return their numbers, and write them after each.

    On a CPU, for tests: in fp32, not compiled.
    """
    found: dict[str, dict[str, Any]] = {}
    flops, total = _flops(case), case.loss_steps or _WARMUP + steps
    data = case.data(case.batch * (total + 2))  # a loop that looks one batch ahead must not meet the end of the epoch
    for name in names:
        if name not in MODES and not LOOPS[name].is_installed:
            continue
        try:
            found[name] = _train(case, name, GpuClock(_WARMUP, total - _WARMUP), data, device)
            found[name]["mfu"] = case.batch * flops / (found[name]["ms"] / 1e3) / _PEAK
        except Exception as error:  # noqa: BLE001 - one contestant that fails must not cost the others
            found[name] = {"failed": f"{type(error).__name__}: {error}"[:500]}
        print(f"{name}: {found[name]}", flush=True)
        if path is not None:
            path.write_text(json.dumps(found), encoding="utf-8")
        _release(device)
    return found


def _flops(case: Case) -> float:
    """Return the operations of a sample; 0, and no MFU, for a version of a library whose model cannot be counted."""
    try:
        return case.flops
    except Exception as error:  # noqa: BLE001 - its speed is measured all the same
        print(f"operations are not counted: {type(error).__name__}: {error}"[:500], flush=True)
        return 0.0


def _release(device: str) -> None:
    """Forget the contestant before: its graphs and its memory."""
    torch._dynamo.reset()
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _train(case: Case, name: str, clock: GpuClock, data: Dataset[Any], device: str) -> dict[str, Any]:
    torch.manual_seed(0)
    with torch.device(device):  # weights of a billion parameters are drawn in no time there
        model = (case.ours if name in MODES else case.plain)()
    on_gpu = device == "cuda"
    options = {"bf16": on_gpu, "compile": on_gpu, "in_order": True, "workers": case.workers if on_gpu else 0}
    workload = Workload(case.batch, clock.warmup, clock.steps, **options)
    task = Task(workload, model.cpu(), data, data, clock, device, 1)
    _release(device)
    compiling = _compile_seconds()
    clock.started = time.time()
    if name in MODES:
        _run_ours(task, {**(MODES[name] if on_gpu else {}), **case.settings})
    else:
        getattr(importlib.import_module(LOOPS[name].module), LOOPS[name].function)(task)
    ms = clock.ms_per_step
    units = case.batch * (case.shape[0] if case.vocabulary else 1)
    numbers = {"ms": ms, "per_second": units / ms * 1e3, "gib": clock.peak / 2**30}
    loss = {"loss": clock.last_loss} if case.loss_steps else {}
    return {**numbers, "first": clock.first, "compile": compiling(), **loss}


def _run_ours(task: Task, settings: dict[str, Any]) -> None:
    def after_step(info: Any) -> None:
        task.clock.note(info.loss_tensor)
        task.clock.tick()

    trainer = PyTorchDDPTrainer(
        task.model,
        device=task.device,
        learning_rate=1e-4,
        weight_decay=_WEIGHT_DECAY,
        max_steps=task.steps,
        callbacks=[after_step],
        **settings,
    )
    with tempfile.TemporaryDirectory(prefix="phalanx-bench-") as run_dir:
        trainer.fit(task.loader(), run_dir=run_dir)


def _compile_seconds() -> Callable[[], float]:
    """Return a function of the seconds that torch.compile has compiled since this call."""
    spent, began = [0.0], [0.0]
    torch_compat.around_compiles(
        lambda: began.__setitem__(0, time.perf_counter()),
        lambda: spent.__setitem__(0, spent[0] + time.perf_counter() - began[0]),
    )
    return lambda: spent[0]


def whole_table(document: dict[str, Any]) -> str:
    """Return the tables of all models, and how long they took."""
    known = [model for model in CASES if model in document["models"]]
    total = sum(document["seconds"].get(model, 0.0) for model in known)
    return "\n".join([*(_table(model, document) for model in known), f"{len(known)} models in {total:.0f} s"])


_HEADER = ("x raw", "MFU", "GiB", "x raw", "first step", "compiling")


def _table(model: str, document: dict[str, Any]) -> str:
    case, found = CASES[model], document["models"][model]
    header = ["contestant", "tokens/s" if case.vocabulary else "images/s", *_HEADER]
    header += [f"loss at {case.loss_steps}"] * bool(case.loss_steps)
    raw = found.get("raw", {})
    rows = [[name, *_cells(found[name], raw, len(header) - 1)] for name in CONTESTANTS if name in found]
    return table(f"{model}, {case.title}", header, rows)


def _cells(values: dict[str, Any], raw: dict[str, Any], count: int) -> list[str]:
    """Return the numbers of a contestant as text, ratios to the raw loop among them."""
    if "failed" in values:
        return ["failed", *["-"] * (count - 1)]
    speed, memory = (f"{values[name] / raw[name]:.2f}" if raw.get(name) else "-" for name in ("per_second", "gib"))
    mfu = f"{values['mfu']:.1%}" if values["mfu"] else "-"
    cells = [f"{values['per_second']:,.0f}", speed, mfu, f"{values['gib']:.1f}", memory]
    cells += [f"{values['first']:.1f} s", f"{values['compile']:.1f} s"]
    return [*cells, f"{values['loss']:.4f}"] if "loss" in values else [*cells, *["-"] * (count - len(cells))]


def curves(steps: int, modes: list[str]) -> dict[str, list[float]]:
    """Train GPT-2 124M on the bytes of Python's library in each mode from equal weights; return the losses."""
    found: dict[str, list[float]] = {}
    data = text(4 * steps, 1024)
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
            **MODES[name],
        )
        with tempfile.TemporaryDirectory(prefix="phalanx-bench-") as run_dir:
            trainer.fit(DataLoader(data, batch_size=4, shuffle=False, pin_memory=True), run_dir=run_dir)
        found[name] = [round(loss.item(), 4) for loss in losses]
        last = sum(found[name][-100:]) / 100
        print(f"curve {name}: loss at 300 {sum(found[name][290:310]) / 20:.4f}, last 100 {last:.4f}", flush=True)
        _release("cuda")
    return found


if __name__ == "__main__":
    main()
