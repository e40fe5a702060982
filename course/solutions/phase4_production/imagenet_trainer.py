"""Train a ResNet on any number of ranks: resumable, monitored, with what phases 1 to 4 taught; see README.md."""

import argparse
import gc
import json
import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy
import torch
import torch.distributed as dist
from fault_tolerance import CheckpointStore
from monitoring import GradientCompressor, MetricWindow, StepProfiler
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

STOP = threading.Event()
SAVED = 75  # exit code after SIGTERM: the state is saved, start it again
RESNETS = {"resnet8": (False, 16, (1, 1, 1)), "resnet18": (False, 64, (2,) * 4), "resnet50": (True, 64, (3, 4, 6, 3))}


def convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Sequential:
    """Return a convolution with batch normalisation."""
    return nn.Sequential(nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False), nn.BatchNorm2d(outputs))


class Block(nn.Module):
    """A residual block: two 3x3 convolutions, or a bottleneck of 1x1, 3x3 and 1x1."""

    def __init__(self, inputs: int, width: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        outputs = 4 * width if bottleneck else width
        plan = [(inputs, width, 3, stride), (width, outputs, 3, 1)]
        if bottleneck:
            plan = [(inputs, width, 1, 1), (width, width, 3, stride), (width, outputs, 1, 1)]
        first, *rest = (convolution(*sizes) for sizes in plan)
        self.body = nn.Sequential(first, *(part for layer in rest for part in (nn.ReLU(), layer)))
        changes = inputs != outputs or stride > 1
        self.shortcut = convolution(inputs, outputs, 1, stride) if changes else nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        """Return the sum of the body and the shortcut."""
        return (self.body(images) + self.shortcut(images)).relu()


def resnet(name: str, classes: int, image_size: int) -> nn.Sequential:
    """Return a network of RESNETS; small images keep their size in the first layer."""
    bottleneck, width, depths = RESNETS[name]
    large = [convolution(3, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    layers = large if image_size > 64 else [convolution(3, width, 3), nn.ReLU()]
    inputs = width
    for stage, depth in enumerate(depths):
        for number in range(depth):
            layers.append(Block(inputs, width << stage, 2 if stage and not number else 1, bottleneck))
            inputs = (width << stage) * (4 if bottleneck else 1)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


def draw(length: int, size: int, seed: int) -> list[tuple[Tensor, int]]:
    """Return striped images with noise: the class sets their direction, the number of the sample all the rest."""
    images, grid = [], torch.linspace(-1, 1, size)
    for number in range(length):
        noise, angle = torch.Generator().manual_seed(seed * 1_000_003 + number), math.pi * (number % 10) / 10
        place = grid[:, None] * math.sin(angle) + grid[None, :] * math.cos(angle)
        stripes = torch.sin(8 * place + 6.28 * torch.rand((), generator=noise))
        images.append((stripes + 2 * torch.randn(3, size, size, generator=noise), number % 10))
    return images


class FolderImages:
    """Images in one folder per class, as ImageNet is unpacked; a random crop for training, the middle otherwise."""

    def __init__(self, folder: Path, size: int) -> None:
        names = sorted(path.name for path in folder.iterdir() if path.is_dir())
        self.files = [(path, label) for label, name in enumerate(names) for path in sorted((folder / name).iterdir())]
        self.size, self.classes, self.crop = size, len(names), folder.name == "train"

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        from PIL import Image

        path, label = self.files[number]
        with Image.open(path) as file:
            scale = 1.15 * self.size / min(file.size)
            image = file.convert("RGB").resize([max(self.size, round(side * scale)) for side in file.size])
        corner = torch.rand(2) if self.crop else torch.tensor([0.5, 0.5])
        left, top = (corner * (torch.tensor(image.size) - self.size)).int()
        pixels = torch.from_numpy(numpy.asarray(image).copy())[top : top + self.size, left : left + self.size]
        return (pixels.permute(2, 0, 1) / 255 - 0.45) / 0.225, label


class Trainer:
    """One run of the training on this rank."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.rank, self.world = args, dist.get_rank(), dist.get_world_size()
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        folders = args.data_dir and [FolderImages(args.data_dir / part, args.image_size) for part in ("train", "val")]
        self.data = folders or [draw(length, args.image_size, length) for length in (args.samples, args.samples // 4)]
        classes = folders[0].classes if folders else 10
        torch.manual_seed(args.seed)
        self.model = resnet(args.model, classes, args.image_size).to(self.device)
        self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(args.ema), use_buffers=True)
        self.optimizer = torch.optim.SGD(self.model.parameters(), args.lr, momentum=0.9, weight_decay=5e-4)
        self.parallel = DistributedDataParallel(self.model)
        self.compressor = GradientCompressor(args.compress)
        if args.compress < 1:
            names = {parameter: name for name, parameter in self.model.named_parameters()}
            self.parallel.register_comm_hook(names, self.compressed)
        self.store, self.profiler = CheckpointStore(args.out / "checkpoints", keep=2), StepProfiler()
        self.window = MetricWindow(["loss", "seconds", "stop"], capacity=args.log_every)
        self.steps_per_epoch, self.step = len(self.data[0]) // args.batch, 0

    def compressed(self, names: dict[Tensor, str], bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Average a bucket by top-k; parameter by parameter, as a resumed run begins with other buckets."""
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            gradient.copy_(self.compressor.average(names[parameter], gradient))
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    def batches(
        self, data: list[tuple[Tensor, int]] | FolderImages, order: list[int]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's part of each global batch; the batch does not depend on the number of ranks."""
        size = self.args.batch
        parts = [order[at : at + size][self.rank :: self.world] for at in range(0, len(order), size)]
        for images, labels in DataLoader(data, batch_sampler=parts, num_workers=self.args.workers):
            yield images.to(self.device, non_blocking=True), labels.to(self.device, non_blocking=True)

    def run(self) -> int:
        """Train from the last checkpoint to the end, and return the exit code."""
        self.resume()
        while self.step < self.args.epochs * self.steps_per_epoch:
            if self.epoch(*divmod(self.step, self.steps_per_epoch)):
                return SAVED
        self.evaluate()
        if self.args.profile and self.rank == 0:
            print({name: f"{1000 * seconds:.1f} ms" for name, seconds in self.profiler.summary().items()})
        return 0

    def epoch(self, epoch: int, position: int) -> bool:
        """Train an epoch from a position on; return whether the run was asked to stop."""
        count, shuffle = self.steps_per_epoch, torch.Generator().manual_seed(epoch)
        order = torch.randperm(len(self.data[0]), generator=shuffle).tolist()
        batches = self.batches(self.data[0], order[position * self.args.batch : count * self.args.batch])
        for _ in range(position, count):
            torch.manual_seed(self.args.seed + self.step * self.world + self.rank)  # crops: from the step alone
            began = time.perf_counter()
            with self.profiler.step():
                loss, samples = self.train_step(batches)
            self.window.add(samples, loss=loss, seconds=time.perf_counter() - began, stop=float(STOP.is_set()))
            self.step += 1
            stop = self.step % self.args.log_every == 0 and self.report()
            if stop or self.step % self.args.save_every == 0 or self.step == self.args.epochs * count:
                self.save()
            if stop:
                return True
        return False

    def train_step(self, batches: Iterator[tuple[Tensor, Tensor]]) -> tuple[Tensor, int]:
        """Make one step, and return its loss and the number of samples."""
        total = self.args.epochs * self.steps_per_epoch
        warm_up, falling = 20 * (self.step + 1) / total, 0.5 + 0.5 * math.cos(math.pi * self.step / total)
        for group in self.optimizer.param_groups:
            group["lr"] = self.args.lr * min(warm_up, falling)
        with self.profiler.part("data"):
            images, labels = next(batches)
        with self.profiler.part("forward"), torch.autocast("cuda", torch.bfloat16, enabled=self.device.type == "cuda"):
            loss = cross_entropy(self.parallel(images), labels)
        with self.profiler.part("backward and communication"):
            self.optimizer.zero_grad()
            loss.backward()
        with self.profiler.part("optimizer"):
            self.optimizer.step()
            self.average.update_parameters(self.model)
        return loss, len(labels)

    def report(self) -> bool:
        """Write the metrics of all ranks since the last report; return whether a rank was asked to stop."""
        found = self.window.reduce()
        if self.rank == 0:
            line = {"step": self.step, "loss": found["loss"].mean, "seconds": vars(found["seconds"])}
            with open(self.args.out / "metrics.jsonl", "a") as file:
                file.write(json.dumps(line) + "\n")
        return found["stop"].maximum > 0

    @torch.no_grad()
    def evaluate(self) -> None:
        """Print the accuracy of the averaged model on the validation images."""
        self.average.eval()
        right = torch.zeros((), device=self.device)
        for images, labels in self.batches(self.data[1], list(range(len(self.data[1])))):
            right += (self.average(images).argmax(1) == labels).sum()
        dist.all_reduce(right)
        if self.rank == 0:
            print(f"{self.step} steps, accuracy {100 * right / len(self.data[1]):.1f}% on {len(self.data[1])} images")

    def save(self) -> None:
        """Write a checkpoint; what differs between ranks, the residuals of the compression, is gathered on rank 0."""
        residuals = [{} for _ in range(self.world)]
        dist.all_gather_object(residuals, self.compressor.residuals)
        if self.rank == 0:
            parts = {name: getattr(self, name).state_dict() for name in ("model", "average", "optimizer")}
            self.store.save(self.step, {**parts, "residuals": residuals})

    def resume(self) -> None:
        """Go on from the last checkpoint, where there is one; residuals of another number of ranks are left out."""
        self.step, state = self.store.load() or (0, {})
        for name in state.keys() & {"model", "average", "optimizer"}:
            getattr(self, name).load_state_dict(state[name])
        if len(state.get("residuals", [])) == self.world:
            self.compressor.residuals = state["residuals"][self.rank]


def main() -> int:
    """Read the flags, join the group and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=RESNETS, default="resnet8")
    parser.add_argument("--data-dir", type=Path, help="ImageNet as folders; without it images are drawn")
    parser.add_argument("--out", type=Path, default=Path("runs/imagenet"), help="checkpoints and metrics.jsonl")
    parser.add_argument("--compress", type=float, default=1.0, help="share of each gradient to send, e.g. 0.01")
    parser.add_argument("--profile", action="store_true", help="print where the time of a step goes")
    numbers = {"image-size": 24, "samples": 1500, "epochs": 2, "batch": 50, "workers": 0, "seed": 0}
    for name, value in {**numbers, "log-every": 5, "save-every": 20, "lr": 0.1, "ema": 0.9}.items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    args = parser.parse_args()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", **alone)
    signal.signal(signal.SIGTERM, lambda *_: STOP.set())
    code = Trainer(args).run()
    gc.collect()  # DDP ends before the group that it uses
    dist.destroy_process_group()
    return code


if __name__ == "__main__":
    raise SystemExit(main())
