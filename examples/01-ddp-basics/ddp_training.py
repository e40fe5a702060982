"""The production template: Phalanx's trainer with checkpoints, resume, mixed precision, accumulation and a schedule.

    python ddp_training.py --num-workers 2                                       # starts its ranks itself
    phalanx train --script ddp_training.py --num-workers 2                       # the same
    torchrun --standalone --nproc-per-node 2 ddp_training.py                     # the same
    python ddp_training.py --num-workers 2 --checkpoint-dir ckpt --resume        # go on where it was stopped

Replace `build_model` and `build_loaders` with your own; nothing else has to change. Your own loop instead of the
trainer's: see ddp_own_loop.py.
"""

from __future__ import annotations

import argparse
import os

import torch
from torch import nn
from torch.utils.data import DataLoader

import phalanx
from phalanx.zoo.data import load


def build_model() -> nn.Module:
    """Return the model, on the CPU and unwrapped: the trainer moves and wraps it."""
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten()),
        *(nn.Dropout(0.1), nn.Linear(64 * 4 * 4, 10)),
    )


def build_loaders(args: argparse.Namespace) -> tuple[DataLoader, DataLoader]:
    """Return plain DataLoaders: the trainer gives each rank its share of them."""
    name, options = ("mnist", {"root": args.data_dir}) if args.data_dir else ("digits", {})
    train, val = load(name, split="train", **options), load(name, split="val", **options)
    pinned = torch.cuda.is_available()
    return (
        DataLoader(train, batch_size=args.batch_size, shuffle=True, num_workers=args.loader_workers, pin_memory=pinned),
        DataLoader(val, batch_size=256, num_workers=args.loader_workers, pin_memory=pinned),
    )


def main() -> None:
    args = parse_args()
    trainer = phalanx.PyTorchDDPTrainer(
        build_model(),
        loss_fn=nn.CrossEntropyLoss(label_smoothing=0.05),
        num_workers=args.num_workers,
        epochs=args.epochs,
        batch_size=args.batch_size,
        learning_rate=args.lr,
        weight_decay=0.01,
        lr_schedule="cosine",
        warmup=0.1,  # a share of the run; a whole number would be steps
        mixed_precision={"auto": True, "fp32": False}.get(args.precision, args.precision),
        gradient_accumulation_steps=args.accumulate,
        gradient_clipping=1.0,
        checkpoint_dir=args.checkpoint_dir,
        checkpoint_frequency=1,  # epochs; "500 steps" for steps
        keep_last=2,
        resume_from_checkpoint=args.resume,
        tensorboard=True,
        seed=args.seed,
    )
    history = trainer.fit(*build_loaders(args))
    if args.save:
        trainer.save(args.save)
    if os.environ.get("RANK", "0") == "0":  # under phalanx train and torchrun every rank comes here
        print(f"best accuracy {history.best_accuracy:.4f}, {history.throughput:,.0f} samples/s")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The production template.")
    parser.add_argument("--num-workers", type=int, help="ranks (default: every GPU, or 1)")
    parser.add_argument("--data-dir", help="folder with MNIST's IDX files (default: the embedded 8x8 digits)")
    parser.add_argument("--loader-workers", type=int, default=0, help="data loading processes a rank")
    parser.add_argument("--epochs", "--num-epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=32, help="samples per rank and micro-batch")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches an optimizer step")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--precision", choices=("auto", "fp32", "bf16", "fp16"), default="fp32")
    parser.add_argument("--checkpoint-dir", default="checkpoints")
    parser.add_argument("--resume", action="store_true", help="go on from the newest complete checkpoint, if any")
    parser.add_argument("--save", help="file for the trained weights, such as model.safetensors")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--local-rank", "--local_rank", type=int, help="from a launcher; the environment says the same")
    return parser.parse_args()


if __name__ == "__main__":
    main()
