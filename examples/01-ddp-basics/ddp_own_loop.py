"""Your own loop: `Formation` puts the model, the optimizer and the loader on all ranks, the loop stays yours.

phalanx train --script ddp_own_loop.py --num-workers 2
torchrun --standalone --nproc-per-node 2 ddp_own_loop.py
python ddp_own_loop.py                                                       # one rank
phalanx train --script ddp_own_loop.py --num-workers 2 -- --checkpoint-dir ckpt --epochs 6   # again: it goes on
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import phalanx
from phalanx.zoo.data import load


def main() -> None:
    args = parse_args()
    formation = phalanx.Formation(
        batch_size=args.batch_size, gradient_accumulation_steps=args.accumulate, mixed_precision=args.bf16 and "bf16"
    )
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loader = DataLoader(load("digits"), batch_size=args.batch_size, shuffle=True)
    model, optimizer, loader = formation.prepare(model, optimizer, loader)
    val = formation.prepare_loader(load("digits", split="val"), training=False)
    if args.checkpoint_dir:
        formation.load(args.checkpoint_dir, required=False)

    for epoch in range(loader.epoch, args.epochs):
        model.train()
        for images, labels in loader:
            with formation.autocast():
                loss = F.cross_entropy(model(images), labels)
            formation.backward(loss)
            # Between the boundaries of an accumulated step these three do nothing.
            formation.clip_grad_norm(1.0)
            optimizer.step()
            optimizer.zero_grad()
        accuracy = evaluate(formation, model, val)
        formation.print(f"epoch {epoch + 1}/{args.epochs} step {formation.step} accuracy {accuracy:.4f}")
        if args.checkpoint_dir:
            formation.save(args.checkpoint_dir)
    # The group can be destroyed only after everything that uses it has been deleted.
    del model, optimizer, loader, val
    formation.close()


@torch.no_grad()
def evaluate(formation: phalanx.Formation, model: nn.Module, loader: DataLoader) -> float:
    """Return the accuracy over all samples. A rank with fewer samples gets a padded batch: `current` says how many."""
    bare = formation.unwrap(model).eval()
    correct = total = 0
    for images, labels in loader:
        own = loader.current.samples
        correct += (bare(images).argmax(dim=1) == labels)[:own].sum().item()
        total += own
    return (formation.reduce(correct, "sum") / formation.reduce(total, "sum")).item()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Your own loop on all ranks.")
    parser.add_argument("--epochs", "--num-epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32, help="samples per rank and micro-batch")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches an optimizer step")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16 where that is safe")
    parser.add_argument("--checkpoint-dir", help="where checkpoints go, and where a run is taken up again")
    parser.add_argument("--local-rank", "--local_rank", type=int, help="from a launcher; the environment says the same")
    return parser.parse_args()


if __name__ == "__main__":
    main()
