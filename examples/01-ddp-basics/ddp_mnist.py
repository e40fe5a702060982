"""Train on handwritten digits with nothing but torch's own DDP: the whole of data-parallel training in one file.

    phalanx train --script ddp_mnist.py --num-workers 2
    torchrun --standalone --nproc-per-node 2 ddp_mnist.py
    srun --ntasks 4 --gpus 4 python ddp_mnist.py
    phalanx train --script ddp_mnist.py --num-workers 2 -- --data-dir path/to/mnist --epochs 3

The 8x8 digits that ship with Phalanx are used by default; --data-dir names a folder with MNIST's IDX files. Everything
else here is torch, and starts wherever RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT are set; what Slurm
and MPI set instead is translated.
"""

from __future__ import annotations

import argparse
import gc
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

from phalanx.world.env import export_rank_env, read_rank_env
from phalanx.zoo.data import load


def main() -> None:
    args = parse_args()
    device = join_group()
    torch.manual_seed(args.seed)
    train_data, val_data = read_data(args.data_dir)

    # Every rank starts from the same weights: DDP broadcasts rank 0's when it wraps the model.
    model = DistributedDataParallel(ConvNet().to(device), device_ids=[device.index] if device.type == "cuda" else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)

    # The sampler gives each rank its own share of the data; batch_size is per rank.
    sampler: DistributedSampler[Any] = DistributedSampler(train_data, shuffle=True, seed=args.seed)
    loader = DataLoader(train_data, batch_size=args.batch_size, sampler=sampler)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)  # without this every epoch has the same order
        loss = train_one_epoch(model, loader, optimizer, device)
        accuracy = evaluate(model.module, val_data, device)
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}/{args.epochs} loss {loss:.4f} accuracy {accuracy:.4f}", flush=True)

    if args.save is not None and dist.get_rank() == 0:  # all ranks hold the same weights: one writes them
        torch.save(model.module.state_dict(), args.save)
        print(f"saved {args.save}", flush=True)
    del model, optimizer
    gc.collect()  # DDP goes before its process group: threads of gloo can abort a process that ends with both
    dist.barrier()
    dist.destroy_process_group()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Handwritten digits with plain torch DDP.")
    parser.add_argument("--data-dir", help="folder with MNIST's IDX files (default: the embedded 8x8 digits)")
    parser.add_argument("--epochs", "--num-epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32, help="samples per rank")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path, help="file for the trained weights")
    parser.add_argument("--local-rank", "--local_rank", type=int, help="from a launcher; the environment says the same")
    return parser.parse_args()


def join_group() -> torch.device:
    """Meet the other ranks and return this rank's device: its own GPU where there are any, else the CPU."""
    place = read_rank_env()
    if place is not None:
        export_rank_env(place)  # srun and mpirun have other names for RANK, WORLD_SIZE, ...
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl")
        return device
    dist.init_process_group("gloo")
    return torch.device("cpu")


def read_data(folder: str | None) -> tuple[Dataset[Any], Dataset[Any]]:
    """Return (images, labels) for training and for validation."""
    if folder is None:
        return load("digits", split="train"), load("digits", split="val")
    return load("mnist", split="train", root=folder), load("mnist", split="val", root=folder)


class ConvNet(nn.Module):
    """Two convolutions and a linear layer, for grey images of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU()),
            *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten()),
        )
        self.head = nn.Linear(64 * 4 * 4, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(images))


def train_one_epoch(
    model: nn.Module, loader: DataLoader[Any], optimizer: torch.optim.Optimizer, device: torch.device
) -> float:
    """Train on this rank's share and return the mean loss over all ranks."""
    model.train()
    total = torch.zeros((), device=device)
    for images, labels in loader:
        loss = F.cross_entropy(model(images.to(device)), labels.to(device))
        loss.backward()  # DDP averages the gradients over the ranks while this runs
        optimizer.step()
        optimizer.zero_grad()
        total += loss.detach()  # stays on the device: reading it here would make every step wait
    dist.all_reduce(total)
    return total.item() / len(loader) / dist.get_world_size()


@torch.no_grad()
def evaluate(model: nn.Module, data: Dataset[Any], device: torch.device) -> float:
    """Return the accuracy over all samples, each counted once.

    A DistributedSampler would repeat samples to make the shares equal; evaluation needs no equal shares.
    """
    model.eval()
    mine = range(dist.get_rank(), len(data), dist.get_world_size())  # type: ignore[arg-type]
    counts = torch.zeros(2, device=device, dtype=torch.long)
    for images, labels in DataLoader(Subset(data, mine), batch_size=256):
        correct = model(images.to(device)).argmax(dim=1) == labels.to(device)
        counts += torch.stack([correct.sum(), torch.tensor(len(labels), device=device)])
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


if __name__ == "__main__":
    main()
