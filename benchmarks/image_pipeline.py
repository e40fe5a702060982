"""Images per second of ResNet-50: from memory, from JPEGs in shards, and by a loop with torchvision's ImageFolder.

    phalanx data make shapes --out shapes --size 256
    python benchmarks/image_pipeline.py shapes
    python benchmarks/image_pipeline.py shapes --only memory shards --device cpu --steps 4 --batch 8 --model debug

`memory`: uint8 images that need no decoding, through the same trainer, augmentation and worker processes as `shards`:
the goal for `shards` is 0.9 of it. `torchvision`: the loop that people write by hand: the same JPEGs as files,
RandomResizedCrop and flip in worker processes, then bf16, channels last, torch.compile and fused SGD. Every row has as
many worker processes and a separate process. The warm-up is longer than what workers read ahead.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout need not be installed

import torch
import torch.nn.functional as F
from clock import StepClock
from gpu_cases import Repeated, images
from report import describe, environment, table, write_json
from torch.utils.data import DataLoader, Dataset, Subset

from phalanx import PyTorchDDPTrainer
from phalanx.data.hints import LoaderHints
from phalanx.zoo.data.augment import Augment
from phalanx.zoo.data.shards import shards
from phalanx.zoo.models.resnet import resnet

_HELD, _PIXELS, _CROP = 2048, 256, 224
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class InMemory(Repeated):
    """Images that need no decoding, loaded by as many processes as those that do."""

    def __init__(self, samples: int, workers: int) -> None:
        super().__init__(images(_HELD, (3, _PIXELS, _PIXELS)), samples)
        self.loader_hints = LoaderHints(workers=workers)


def run_ours(data: Dataset[Any], options: argparse.Namespace, clock: StepClock) -> None:
    """Train as the recipe `imagenet` does."""
    on_gpu = options.device == "cuda"
    fast = {"mixed_precision": "bf16", "channels_last": True, "compile": True} if on_gpu else {}
    trainer = PyTorchDDPTrainer(
        resnet(options.model, classes=1000, channels=3),
        loss_fn="cross_entropy",
        augment=Augment(crop=_CROP),
        device=options.device,
        optimizer="sgd",
        learning_rate=0.1,
        batch_size=options.batch,
        drop_last=True,
        max_steps=clock.total_steps,
        callbacks=[lambda info: clock.tick()],
        **fast,
    )
    with tempfile.TemporaryDirectory(prefix="phalanx-bench-") as run_dir:
        trainer.fit(data, run_dir=run_dir)


def run_torchvision(options: argparse.Namespace, clock: StepClock) -> None:
    """Train by hand, on the images of the shards as files in class folders."""
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import v2

    steps = [v2.RandomResizedCrop(_CROP), v2.RandomHorizontalFlip(), v2.PILToTensor()]
    model = resnet(options.model, classes=1000, channels=3).to(options.device, memory_format=torch.channels_last)
    run = torch.compile(model) if options.device == "cuda" else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-5, fused=True)
    mean, std = (torch.tensor(values, device=options.device).view(1, 3, 1, 1) * 255 for values in (_MEAN, _STD))
    with tempfile.TemporaryDirectory(prefix="phalanx-bench-") as folder:
        write_files(Path(options.folder), Path(folder))
        workers = {"num_workers": options.workers, "persistent_workers": options.workers > 0, "pin_memory": True}
        loader = DataLoader(
            ImageFolder(folder, v2.Compose(steps)), options.batch, shuffle=True, drop_last=True, **workers
        )
        while clock.taken < clock.total_steps:
            for pixels, labels in loader:
                pixels, labels = (part.to(options.device, non_blocking=True) for part in (pixels, labels))
                scaled = ((pixels.float() - mean) / std).contiguous(memory_format=torch.channels_last)
                with torch.autocast(options.device, torch.bfloat16, enabled=options.device == "cuda"):
                    loss = F.cross_entropy(run(scaled), labels)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                clock.tick()
                if clock.taken == clock.total_steps:
                    break


def write_files(shard_folder: Path, folder: Path) -> None:
    """Write the training images of shards as they are, as `ImageFolder` wants them."""
    for shard in sorted(shard_folder.glob("train-*.tar")):
        with tarfile.open(shard) as tar:
            content = {member.name: tar.extractfile(member).read() for member in tar if member.isfile()}
        for name, label in content.items():
            if name.endswith(".cls"):
                place = folder / f"{int(label):04d}"
                place.mkdir(exist_ok=True)
                (place / f"{shard.stem}-{name[:-4]}.jpg").write_bytes(content[f"{name[:-4]}.jpg"])


def measure(name: str, options: argparse.Namespace) -> dict[str, float]:
    """Train with one row's data, and return its speed."""
    torch.set_float32_matmul_precision("high")
    source = shards(root=options.folder, size=_PIXELS, workers=options.workers)
    clock = StepClock(options.warmup, options.steps)
    if name == "torchvision":
        run_torchvision(options, clock)
    else:
        run_ours(InMemory(len(source), options.workers) if name == "memory" else source, options, clock)
    return {"ms": clock.ms_per_step, "per_second": options.batch / clock.ms_per_step * 1e3}


def decoding(options: argparse.Namespace) -> float:
    """Return the images per second that one core reads and decodes."""
    source = Subset(shards(root=options.folder, size=_PIXELS, workers=0), range(200))
    began = time.perf_counter()
    for number in range(len(source)):
        source[number]
    return len(source) / (time.perf_counter() - began)


def main() -> None:
    """Print the rows, each against the images in memory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="shards of JPEGs")
    parser.add_argument("--only", nargs="+", default=["memory", "shards", "torchvision"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", default="resnet50", help="a preset of phalanx.zoo.models.resnet")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--warmup", type=int, default=60, help="steps before those that are measured")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--workers", type=int, default=max(1, len(os.sched_getaffinity(0)) - 1))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        write_json(options.json, measure(options.only[0], options))
        return
    document: dict[str, Any] = {"environment": environment(options.device), "rows": {}}
    print(describe(document["environment"]), flush=True)
    for name in options.only:
        document["rows"][name] = _in_process(name)
        print(name, document["rows"][name], flush=True)
    document["one core decodes"] = decoding(options)
    write_json(options.json, document)
    base = document["rows"].get("memory", {}).get("per_second")
    rows = [
        [name, f"{found['per_second']:,.0f}", f"{found['per_second'] / base:.2f}" if base else "-"]
        for name, found in document["rows"].items()
    ]
    print(table(f"{options.model}, {options.workers} workers", ["data", "images/s", "x memory"], rows))
    print(f"one core reads and decodes {document['one core decodes']:,.0f} images/s")


def _in_process(name: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="phalanx-bench-") as folder:
        result = Path(folder) / "row.json"
        words = [*sys.argv[1:], "--inside", "--only", name, "--json", str(result)]
        subprocess.run([sys.executable, __file__, *words], check=True)
        found: dict[str, float] = json.loads(result.read_text())
        return found


if __name__ == "__main__":
    main()
