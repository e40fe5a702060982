"""Train on the 8x8 digits with Horovod averaging the gradients, under any launcher.

    python horovod_train.py --num-workers 2                                      # starts horovodrun itself
    phalanx train --script horovod_train.py --backend horovod --num-workers 2    # so does this
    horovodrun -np 2 python horovod_train.py                                     # and so do you
    phalanx train --script horovod_train.py --backend horovod --num-workers 2 --min-workers 1 \\
        --host-discovery-script ./hosts.sh                        # ranks may be lost, and others come

Horovod has to be built once: make horovod, or python tools/build_horovod.py.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn

import phalanx
from phalanx.zoo.data import load


def build_model() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-workers", type=int, help="ranks, where this script starts them")
    parser.add_argument("--epochs", "--num-epochs", type=int, default=3)
    parser.add_argument("--compression", choices=("none", "fp16"), default="none", help="gradients on the wire")
    parser.add_argument("--save", type=Path, help="write the trained weights here")
    parser.add_argument("--local-rank", "--local_rank", type=int, help="from a launcher; the environment says the same")
    args = parser.parse_args()

    torch.manual_seed(0)
    model = build_model()
    # Everything that is not said here comes from the command line that started the rank, or has its default.
    told = {} if args.num_workers is None else {"num_workers": args.num_workers}
    trainer = phalanx.HorovodTrainer(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        loss_fn=nn.CrossEntropyLoss(),
        compression=args.compression,
        batch_size=32,
        lr_scaling="linear",
        base_batch_size=32,
        **told,
    )
    history = trainer.fit(load("digits"), load("digits", split="val"), epochs=args.epochs)
    accuracy = trainer.metric_average(history.best_accuracy or 0.0, name="accuracy")
    print(f"accuracy {accuracy:.3f}, the mean over the ranks")
    if args.save is not None:
        trainer.save(args.save)


if __name__ == "__main__":
    main()
