"""Lab 04: the same pictures and the same model under a trainer of Phalanx, so that its report can be compared.

``phalanx train --script phalanx_twin.py --num-workers 2 --device cpu``, then ``phalanx report last --profile``.
"""

from __future__ import annotations

import torch
from slow_trainer import Pictures, SlowTrainer
from torch import Tensor, nn
from torch.utils.data import Dataset

from phalanx import Trainer


class Decoded(Dataset[tuple[Tensor, Tensor]]):
    """The training pictures; each access decodes one."""

    def __init__(self) -> None:
        self.pictures = Pictures()

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.pictures.decode(index), self.pictures.labels[index]


if __name__ == "__main__":
    torch.manual_seed(1)
    model = SlowTrainer.make_model()
    trainer = Trainer(
        model,
        batch_size=32,
        epochs=2,
        loss_fn=nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    )
    trainer.fit(Decoded(), profile="steps=4:10")
