"""Four ways to keep a sharded model: one file, shards, shards written while training goes on, and another layout.

phalanx train --script fsdp_checkpoint.py --num-workers 2                              # saves in all ways
phalanx train --script fsdp_checkpoint.py --num-workers 4 -- --resume                  # 4 ranks take up what 2 left
python fsdp_checkpoint.py --resume --strategy ddp                                      # and so does one
python fsdp_checkpoint.py --weights kept/weights.safetensors --steps 0                 # or the weights alone
torchrun --standalone --nproc-per-node 2 fsdp_checkpoint.py
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import phalanx
from phalanx.zoo.data import load
from phalanx.zoo.models import build


def main() -> None:
    args = parse_args()
    folder = Path(args.dir)
    formation = phalanx.Formation(strategy=args.strategy, batch_size=args.batch_size)
    torch.manual_seed(0)
    model = build("gpt", preset="debug")
    if args.weights:
        model.load_state_dict(load_file(args.weights))  # whole weights go in before the model is sharded
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader, val = (load("text", split=split, seq_len=32, max_bytes=60_000) for split in ("train", "val"))
    model, optimizer, loader = formation.prepare(model, optimizer, loader)
    run = Run(formation, model, optimizer, loader, formation.prepare_loader(val, training=False))

    if args.resume:
        formation.load(folder / "sharded")  # whatever number of ranks and whatever strategy wrote it
        formation.print(f"resumed at step {formation.step}, loss {run.evaluate():.6f}")
    run.train(args.steps)
    formation.print(f"step {formation.step}, loss {run.evaluate():.6f}")
    if not args.resume and not args.weights:
        save_whole(run, folder / "weights.safetensors")
        save_shards(run, folder / "sharded")
        save_while_training(run, folder / "async", args.steps)
    del model, optimizer, loader, run
    formation.close()


def save_whole(run: Run, path: Path) -> None:
    """1. All weights in one file, for inference and for other libraries. Rank 0 needs memory for the whole model.

    Every rank takes part: the shards are gathered from all of them. With the trainer this is `trainer.save(path)`.
    """
    start = time.perf_counter()
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(run.formation.unwrap(run.model), options=options)
    if run.formation.is_main:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Tied weights (GPT-2's embedding and head) share memory, which safetensors refuses.
        save_file({name: value.clone() for name, value in weights.items()}, path)
    run.report("one file", start)


def save_shards(run: Run, directory: Path) -> None:
    """2. Everything that a run needs to go on, each rank its own part: weights, optimizer, data position, RNG.

    Written aside and published by one rename, so a crash leaves the checkpoint before it. With the trainer this is
    `checkpoint_dir=`. 4. No layout is in it: see --resume.
    """
    start = time.perf_counter()
    run.formation.save(directory)
    run.report("shards", start)


def save_while_training(run: Run, directory: Path, steps: int) -> None:
    """3. Copy the shards to CPU memory, go on, and let threads write, hash and publish the copy meanwhile.

    It is complete when `finish_save()` returns. The trainer saves like this by default (`async_checkpoint`).
    """
    before, step = run.evaluate(), run.formation.step
    start = time.perf_counter()
    run.formation.save_async(directory)
    run.report("async", start)
    run.train(steps)
    after = run.evaluate()
    run.formation.finish_save()

    # Read it back, to see that it holds the moment of the save and not what came after.
    run.formation.load(directory)
    assert run.formation.step == step
    run.formation.print(
        f"async: loss {before:.6f} when saved, {after:.6f} after {steps} more steps, {run.evaluate():.6f} read back"
    )


class Run:
    """Your own loop, in steps."""

    def __init__(self, formation: phalanx.Formation, model: nn.Module, optimizer: Any, loader: Any, val: Any) -> None:
        self.formation, self.model, self.optimizer, self.loader, self.val = formation, model, optimizer, loader, val

    def train(self, steps: int) -> None:
        end = self.formation.step + steps
        while self.formation.step < end:
            for tokens, targets in self.loader:
                _, loss = self.loss(tokens, targets)
                self.formation.backward(loss)
                self.optimizer.step()
                self.optimizer.zero_grad()
                if self.formation.step == end:
                    break

    def loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each sample's loss, and their mean."""
        losses = F.cross_entropy(self.model(tokens).transpose(1, 2), targets, reduction="none").mean(1)
        return losses, losses.mean()

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the mean loss over all samples of all ranks."""
        total = count = 0.0
        for tokens, targets in self.val:
            own = self.val.current.samples
            total += self.loss(tokens, targets)[0][:own].sum().item()
            count += own
        return (self.formation.reduce(total, "sum") / self.formation.reduce(count, "sum")).item()

    def report(self, name: str, start: float) -> None:
        seconds = self.formation.reduce(time.perf_counter() - start, "max").item()
        self.formation.print(f"{name}: training stood still for {seconds:.3f} s")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Checkpoints of a sharded model.")
    parser.add_argument("--dir", default="kept", help="where everything goes")
    parser.add_argument("--resume", action="store_true", help="take up the sharded checkpoint of --dir")
    parser.add_argument("--weights", help="start from the weights of this file")
    parser.add_argument("--strategy", choices=("fsdp", "ddp"), default="fsdp")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=8, help="sequences per rank")
    parser.add_argument("--local-rank", "--local_rank", type=int, help="from a launcher; the environment says the same")
    return parser.parse_args()


if __name__ == "__main__":
    main()
