"""Final project, the example: the training with Phalanx.

``phalanx train --script train.py --num-workers 2 --max-steps 24 -- 16`` runs it with 16 samples per rank.
"""

from __future__ import annotations

import sys

import torch
from project import Texts, build

from phalanx import Trainer

if __name__ == "__main__":
    model, _, _, loss_of = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    Trainer(model, loss_fn=loss_of, optimizer=optimizer, batch_size=int(sys.argv[1])).fit(Texts())
