"""Pipeline x fsdp x tensor: one model laid over a 2 x 2 x 2 mesh of ranks, and the proof that it trains the same.

    python hybrid_parallelism.py                                                   # 8 ranks, 2 x 2 x 2
    python hybrid_parallelism.py --pipeline 1                                      # 4 ranks: fsdp 2 x tensor 2
    python hybrid_parallelism.py --data 1 --tensor 1 --schedule zero-bubble        # 2 ranks: a pipeline alone
    phalanx train --script hybrid_parallelism.py --num-workers 8 -- --no-verify    # ranks that another launcher starts
    python hybrid_parallelism.py --pipeline 2 --tensor 8 --data 4 --preset 70b --device cuda --no-verify

Ranks with neighbouring numbers share layers (tensor: it talks most, keep it within a machine), then come those that
share parameters (fsdp), and farthest apart are the stages of the pipeline, which talk least.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

import torch
from torch import nn

import phalanx
from phalanx.zoo.data import load
from phalanx.zoo.models import build


def layout(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that lay the model over the ranks; the rest of a run does not change with them."""
    return {
        "num_workers": args.pipeline * args.data * args.tensor,
        "strategy": args.data_strategy,
        "tensor_parallel": args.tensor,
        "pipeline_parallel": args.pipeline,
        **({"pipeline_schedule": args.schedule} if args.pipeline > 1 else {}),
        "batch_size": args.global_batch // args.data,  # ranks that share layers or form a pipeline share their samples
        "device": args.device,
    }


def build_model(args: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    return build("llama", preset=args.preset, layers=args.layers)


def build_data(args: argparse.Namespace) -> Any:
    return load("text", seq_len=args.window, max_bytes=50_000)


def train(args: argparse.Namespace) -> None:
    """Train on the layout; every rank of a launcher comes here, or this process, which then starts the ranks."""
    trainer = phalanx.Trainer(
        build_model(args),
        **layout(args),
        max_steps=args.steps,
        learning_rate=3e-3,
        gradient_clipping=1.0,  # by one norm over all stages, layers and shards
        log_every_n_steps=1,
    )
    history = trainer.fit(build_data(args))
    if os.environ.get("RANK", "0") == "0":
        print("losses " + " ".join(f"{record['loss']:.6f}" for record in history.steps))


def prove(args: argparse.Namespace) -> bool:
    """Train a few steps on the layout and in one process, in float64 and float32, and compare all there is."""
    print("comparing with one process: losses, gradients and weights", flush=True)
    verdict = phalanx.verify(
        build_model(args), build_data(args), **layout(args), max_steps=3, gradient_clipping=1.0, learning_rate=3e-3
    )
    print(verdict if args.tables or not verdict else str(verdict).strip().splitlines()[-1])
    return bool(verdict)


def main() -> None:
    args = parse_args()
    train(args)
    # A proof starts its own ranks, so it belongs into a process that is none.
    if args.verify and "RANK" not in os.environ and not prove(args):
        sys.exit(1)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Pipeline x fsdp x tensor.")
    parser.add_argument("--pipeline", type=int, default=2, help="stages in a row")
    parser.add_argument("--data", type=int, default=2, help="groups of ranks that see different samples")
    parser.add_argument("--tensor", type=int, default=2, help="ranks that share every layer")
    parser.add_argument("--data-strategy", choices=("fsdp", "ddp"), default="fsdp", help="what the data axis does")
    parser.add_argument("--schedule", choices=("gpipe", "1f1b", "interleaved", "zero-bubble"), default="1f1b")
    parser.add_argument("--preset", default="debug", help="size of the Llama")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--window", type=int, default=32, help="tokens in a sequence")
    parser.add_argument("--global-batch", type=int, default=8, help="sequences per step, over all ranks")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--verify", action=argparse.BooleanOptionalAction, default=True, help="prove it afterwards")
    parser.add_argument("--tables", action="store_true", help="show all that the proof compared")
    return parser.parse_args()


if __name__ == "__main__":
    main()
