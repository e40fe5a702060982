"""Train with DeepSpeed's engine by one of its JSON files; "auto" in the JSON is filled from the trainer's settings.

    phalanx train --script deepspeed_train.py --num-workers 2
    deepspeed --num_gpus 2 deepspeed_train.py                                    # DeepSpeed's own launcher: the same
    deepspeed --num_gpus 2 deepspeed_train.py --deepspeed_config configs/zero3_config.json
    python deepspeed_train.py --num-workers 2 --config configs/zero3_config.json # starts its ranks itself
    python deepspeed_train.py --num-workers 2 --checkpoint-dir ckpt --resume     # go on, with any strategy

The model, the data and the settings are yours; what the JSON says outright and what is set here must not contradict
each other. Without DeepSpeed, `--native 2` trains by the same stage of ZeRO through torch's own fully_shard.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

import phalanx
from phalanx.zoo.data import load

CONFIGS = Path(__file__).resolve().parent / "configs"


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(),
        *(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256)),
        *(nn.Linear(256, 256), nn.GELU(), nn.LayerNorm(256)),
        nn.Linear(256, 10),
    )


def main() -> None:
    args = parse_args()
    torch.manual_seed(0)  # the first weights of every run are the same
    engine = {"zero_stage": args.native} if args.native else {"deepspeed_config": args.config}
    trainer = phalanx.Trainer(
        build_model(),
        loss_fn=nn.CrossEntropyLoss(),
        num_workers=args.num_workers,
        epochs=args.epochs,
        batch_size=args.batch_size,
        gradient_accumulation_steps=args.accumulate,
        learning_rate=2e-3,
        weight_decay=0.01,
        warmup=0.1,
        lr_schedule="cosine",
        mixed_precision=args.bf16 and "bf16",
        checkpoint_dir=args.checkpoint_dir,
        checkpoint_frequency=1 if args.checkpoint_dir else None,
        resume_from_checkpoint=args.resume,
        **engine,
    )
    history = trainer.fit(DataLoader(load("digits"), shuffle=True), load("digits", split="val"))
    if args.save:
        trainer.save(args.save)
    if os.environ.get("RANK", "0") == "0":  # under a launcher every rank comes here
        print(f"best accuracy {history.best_accuracy:.4f}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train with DeepSpeed's engine.")
    parser.add_argument(
        "--config", "--deepspeed_config", default=CONFIGS / "zero2_config.json", help="DeepSpeed's JSON"
    )
    parser.add_argument("--deepspeed", action="store_true", help="taken as given: DeepSpeed is on unless --native is")
    parser.add_argument("--native", type=int, choices=(1, 2, 3), help="ZeRO without DeepSpeed: this stage")
    parser.add_argument("--num-workers", type=int, help="ranks (default: every GPU, or 1)")
    parser.add_argument("--epochs", "--num-epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=16, help="samples per rank and micro-batch")
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches of one step")
    parser.add_argument("--bf16", action="store_true", help="bf16 weights, fp32 masters")
    parser.add_argument("--checkpoint-dir")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    parser.add_argument("--save", help="write the weights here (.safetensors or .pt)")
    parser.add_argument("--local-rank", "--local_rank", type=int, help="from a launcher; the environment says the same")
    return parser.parse_args()


if __name__ == "__main__":
    main()
