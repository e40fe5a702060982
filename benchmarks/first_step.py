"""What startup.py starts on N ranks: one plain DDP step, then rank 0 writes the time to the file it is given."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)))
optimizer = torch.optim.AdamW(model.parameters())
loss = nn.functional.cross_entropy(model(torch.randn(32, 64)), torch.randint(10, (32,)))
torch.autograd.backward(loss)
optimizer.step()
if dist.get_rank() == 0:
    Path(sys.argv[1]).write_text(repr(time.time()))
dist.barrier()
del model  # before its group, or the reducer may hang in tear-down
dist.destroy_process_group()
