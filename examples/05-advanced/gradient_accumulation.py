"""Large batches in little memory: 1 x 32, 2 x 16 and 4 x 8 samples give the same gradient.

    python gradient_accumulation.py                                                # one rank
    phalanx train --script gradient_accumulation.py --num-workers 2                # 32 samples over two ranks
    torchrun --standalone --nproc-per-node 2 gradient_accumulation.py

A step's gradient is the mean over its samples, however they are cut. Sentences of different lengths make that harder
than it looks: the mean of the micro-batches' means is not the mean over all tokens. The last column shows that mistake.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import phalanx

VOCABULARY, LENGTH, PADDING = 50, 12, -100


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(VOCABULARY, 32), nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, VOCABULARY)).double()


def build_data(samples: int) -> TensorDataset:
    """Return sentences of different lengths; the labels behind a sentence's end do not count."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCABULARY, (samples, LENGTH), generator=generator)
    labels = (tokens * 7 + 3) % VOCABULARY
    lengths = torch.randint(1, LENGTH + 1, (samples, 1), generator=generator)
    labels[torch.arange(LENGTH) >= lengths] = PADDING
    return TensorDataset(tokens, labels)


def loss_fn(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=PADDING)


def gradient_of_one_step(batch: int, accumulation: int, *, careful: bool = True) -> torch.Tensor:
    """Return the gradient of a global batch in your own loop, as one long vector."""
    with phalanx.Formation(
        gradient_accumulation_steps=accumulation, batch_size=per_rank(batch, accumulation)
    ) as formation:
        model = build_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        model, optimizer, loader = formation.prepare(model, optimizer, DataLoader(build_data(batch)))
        for tokens, labels in loader:
            loss = loss_fn(model(tokens), labels)
            # The weight says what this loss is the mean of. Without one, micro-batches count by their samples.
            formation.backward(loss, weight=(labels != PADDING).sum() if careful else None)
            # Between the boundaries of a step these do nothing; gradients travel on its last micro-batch only.
            formation.clip_grad_norm(1e9)
            gradient = flat_gradient(model)
            optimizer.step()
            optimizer.zero_grad()
        del model, optimizer, loader
    return gradient


def flat_gradient(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).clone()


def loss_by_trainer(batch: int, accumulation: int, steps: int) -> float:
    """Return the loss after some steps of the trainer, in which all of this is two settings."""
    trainer = phalanx.Trainer(
        build_model(),
        loss_fn=loss_fn,
        batch_size=per_rank(batch, accumulation),
        gradient_accumulation_steps=accumulation,
        loss_weighting="tokens",
        max_steps=steps,
        learning_rate=1e-2,
        progress=False,
    )
    data = build_data(4 * batch)
    return trainer.fit(data, data).epochs[-1].val["loss"]


def per_rank(batch: int, accumulation: int) -> int:
    """Return the samples of a rank's micro-batch, of which a global batch has accumulation x ranks."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if batch % (accumulation * ranks):
        raise SystemExit(f"{batch} samples cannot be cut into {accumulation} micro-batches on {ranks} ranks")
    return batch // (accumulation * ranks)


def main() -> None:
    args = parse_args()
    whole = gradient_of_one_step(args.batch, args.accumulate[0])
    lines = ["accumulation x batch   off from the first   by samples (wrong)   loss by the trainer"]
    for accumulation in args.accumulate:
        off, wrong = (
            (gradient_of_one_step(args.batch, accumulation, careful=careful) - whole).norm() / whole.norm()
            for careful in (True, False)
        )
        loss = loss_by_trainer(args.batch, accumulation, args.steps)
        shape = f"{accumulation} x {args.batch // accumulation}"
        lines.append(f"{shape:<20} {off:20.1e} {wrong:20.1e} {loss:21.10f}")
    if os.environ.get("RANK", "0") == "0":
        print("\n".join(lines))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The same gradient in one piece and in several.")
    parser.add_argument("--batch", type=int, default=32, help="samples of a step, over all ranks and micro-batches")
    parser.add_argument("--accumulate", type=int, nargs="+", default=[1, 2, 4], help="micro-batches a step")
    parser.add_argument("--steps", type=int, default=8, help="of the trainer")
    parser.add_argument("--local-rank", "--local_rank", type=int, help="from a launcher; the environment says the same")
    return parser.parse_args()


if __name__ == "__main__":
    main()
