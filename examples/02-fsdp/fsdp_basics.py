"""Sharded data-parallel training in your own loop: what a rank holds, and that it learns what ddp learns.

    phalanx train --script fsdp_basics.py --num-workers 2
    torchrun --standalone --nproc-per-node 2 fsdp_basics.py
    phalanx train --script fsdp_basics.py --num-workers 2 -- --strategy ddp         # the same, every rank holds all
    phalanx train --script fsdp_basics.py --num-workers 4 -- --sharding hybrid --shard-size 2

Under ddp every rank holds all parameters, gradients and optimizer states. Under fsdp it holds its part of each, and
gathers a block's parameters just before the block computes.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

import phalanx
from phalanx.zoo.data import load


class Block(nn.Module):
    """The unit of sharding: its parameters are gathered together and let go of together."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.embed = nn.Linear(64, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))  # found by themselves: they are repeated
        self.head = nn.Linear(width, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.embed(images.flatten(1))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def main() -> None:
    args = parse_args()
    formation = phalanx.Formation(
        strategy=args.strategy,
        # How to shard is a question for fsdp only.
        **({"sharding": args.sharding, "shard_size": args.shard_size} if args.strategy == "fsdp" else {}),
        batch_size=args.batch_size,
    )
    torch.manual_seed(0)
    model = Net(args.width, args.blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # made before sharding: it follows its parameters
    loader = DataLoader(load("digits"), batch_size=args.batch_size, shuffle=True)
    model, optimizer, loader = formation.prepare(model, optimizer, loader)
    val = formation.prepare_loader(load("digits", split="val"), training=False)
    show_one_parameter(formation, model)

    gradients = 0
    for epoch in range(args.epochs):
        for images, labels in loader:
            loss = F.cross_entropy(model(images), labels)
            formation.backward(loss)
            formation.clip_grad_norm(1.0)  # one norm over all shards, equal on all ranks
            optimizer.step()
            gradients = held([parameter.grad for parameter in model.parameters()])
            optimizer.zero_grad()
        formation.print(f"epoch {epoch + 1}/{args.epochs} accuracy {evaluate(formation, model, val):.4f}")

    show_memory(formation, model, optimizer, gradients)
    del model, optimizer, loader, val
    formation.close()


def show_one_parameter(formation: phalanx.Formation, model: nn.Module) -> None:
    """A sharded parameter is a DTensor: it has its whole shape, and this rank's rows of it in memory."""
    weight = formation.unwrap(model).blocks[0].up.weight
    formation.print(f"blocks.0.up.weight is {list(weight.shape)}, this rank holds {list(here(weight).shape)}")


def show_memory(
    formation: phalanx.Formation, model: nn.Module, optimizer: torch.optim.Optimizer, gradients: int
) -> None:
    whole = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    moments = [value for state in optimizer.state.values() for name, value in state.items() if name != "step"]
    parts = {"parameters": held(list(model.parameters())), "gradients": gradients, "optimizer states": held(moments)}
    for name, size in parts.items():
        total = whole * (2 if name == "optimizer states" else 1)  # Adam has two moments
        formation.print(f"{name:<16} {size / 2**20:6.2f} MiB on this rank, {size / total:.0%} of them all")


def held(tensors: list[torch.Tensor | None]) -> int:
    """Return the bytes of these tensors that lie on this rank."""
    return sum(here(tensor).numel() * tensor.element_size() for tensor in tensors if tensor is not None)


def here(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def evaluate(formation: phalanx.Formation, model: nn.Module, loader: DataLoader) -> float:
    """Return the accuracy over all samples. Every rank takes part in every batch: it holds a part of the model."""
    correct = total = 0
    for images, labels in loader:
        own = loader.current.samples  # a rank that has run out gets a padded batch of 0 samples
        correct += (model(images).argmax(dim=1) == labels)[:own].sum().item()
        total += own
    return (formation.reduce(correct, "sum") / formation.reduce(total, "sum")).item()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Sharded data-parallel training in your own loop.")
    parser.add_argument("--strategy", choices=("fsdp", "ddp"), default="fsdp")
    parser.add_argument("--sharding", choices=("full", "grad-op", "hybrid", "hybrid-grad-op"), default="full")
    parser.add_argument("--shard-size", type=int, help="hybrid: ranks that together hold one copy")
    parser.add_argument("--epochs", "--num-epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32, help="samples per rank")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--local-rank", "--local_rank", type=int, help="from a launcher; the environment says the same")
    return parser.parse_args()


if __name__ == "__main__":
    main()
