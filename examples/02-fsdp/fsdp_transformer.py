"""A transformer that no rank ever holds whole: built on the meta device, sharded block by block, trained in bf16.

    python fsdp_transformer.py --num-workers 2                                        # starts its ranks itself
    phalanx train --script fsdp_transformer.py --num-workers 2                        # the same
    torchrun --standalone --nproc-per-node 2 fsdp_transformer.py                      # the same
    python fsdp_transformer.py --num-workers 2 --model gpt --save gpt.safetensors     # whole weights in one file
    python fsdp_transformer.py --num-gpus 8 --preset 8b --steps 100 --offload cpu     # a real one

Reads bytes of Python's own standard library, so nothing is downloaded. Swap `build_model` for your own: it needs an
`init_weights()` method that draws the weights once there is memory for them.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import phalanx
from phalanx.zoo.data import load
from phalanx.zoo.models import build


def build_model(args: argparse.Namespace) -> nn.Module:
    """Return a model with shapes and no memory: each rank gets memory for its shards only."""
    with torch.device("meta"):
        return build(args.model, preset=args.preset)


class MemoryReport(phalanx.Callback):
    """Says what this rank holds. It runs on every rank; `formation.print` prints on the main one."""

    def on_fit_start(self, trainer: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    def on_fit_end(self, trainer: Any) -> None:
        formation, model = trainer.formation, trainer.model
        total = sum(parameter.numel() for parameter in model.parameters())
        mine = sum(here(parameter).numel() for parameter in model.parameters())
        states = sum(here(value).nbytes for state in trainer.optimizer.state.values() for value in state.values())
        formation.print(f"{total:,} parameters, {mine:,} of them on this rank ({mine / total:.0%})")
        formation.print(f"{states / 2**20:.2f} MiB of optimizer states on this rank")
        if torch.cuda.is_available():
            peak = formation.reduce(torch.cuda.max_memory_allocated(), "max").item()
            formation.print(f"{peak / 2**20:,.0f} MiB at most on any GPU")


def here(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def main() -> None:
    args = parse_args()
    model = build_model(args)
    fast = "bf16" if torch.cuda.is_available() else True  # on a CPU: bf16 where it has it, else fp32
    trainer = phalanx.Trainer(
        model,
        num_workers=args.num_workers,
        num_gpus=args.num_gpus,
        strategy="fsdp",
        wrap_class=args.wrap_class,  # gathered as one; left out, the repeated blocks are found by themselves
        mixed_precision={"auto": fast, "fp32": False}.get(args.precision, args.precision),  # gathered in it, too
        activation_checkpointing=not args.no_recompute,  # backward computes each block again
        offload=args.offload,
        batch_size=args.batch_size,
        max_steps=args.steps,
        learning_rate=args.lr,
        lr_schedule="cosine",
        warmup=0.1,
        gradient_clipping=1.0,
        callbacks=[MemoryReport()],
    )
    window = min(args.window, model.config.seq_len)
    train = load("text", seq_len=window, max_bytes=args.bytes)
    val = load("text", split="val", seq_len=window, max_bytes=args.bytes // 20)
    history = trainer.fit(train, val)
    if args.save:
        trainer.save(args.save)  # gathers the shards; one rank writes
    losses = [record["loss"] for record in history.steps]
    if os.environ.get("RANK", "0") == "0":  # under phalanx train and torchrun every rank comes here
        print(f"loss {losses[0]:.4f} at first, {losses[-1]:.4f} at the end")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A transformer that no rank ever holds whole.")
    parser.add_argument("--num-workers", type=int, help="ranks (default: every GPU, or 1)")
    parser.add_argument("--num-gpus", type=int, help="the same, for CUDA")
    parser.add_argument("--model", choices=("llama", "gpt"), default="llama")
    parser.add_argument("--preset", default="debug", help="its size: debug, small, 1b, 8b, ... (see docs/models.md)")
    parser.add_argument("--precision", choices=("auto", "fp32", "bf16", "fp16"), default="auto")
    parser.add_argument("--no-recompute", action="store_true", help="keep activations instead of computing them again")
    parser.add_argument("--offload", choices=("none", "cpu"), default="none", help="where parameters and states live")
    parser.add_argument("--wrap-class", default="Block", help="class of the blocks that are gathered one at a time")
    parser.add_argument("--batch-size", type=int, default=8, help="sequences per rank")
    parser.add_argument("--window", type=int, default=64, help="tokens in a sequence")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--bytes", type=int, default=200_000, help="how much text to read")
    parser.add_argument("--save", help="file for the trained weights, such as model.safetensors")
    parser.add_argument("--local-rank", "--local_rank", type=int, help="from a launcher; the environment says the same")
    return parser.parse_args()


if __name__ == "__main__":
    main()
