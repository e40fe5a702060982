"""Digits on two ranks, with torch alone.

torchrun --nproc-per-node 2 with_torchrun.py
phalanx train --script with_torchrun.py --num-workers 2 --device cpu      # unchanged
"""

import torch
import torch.distributed as dist
from parts import make_model, train_data, val_data
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
model = DistributedDataParallel(make_model())
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
sampler = DistributedSampler(train_data)
loader = DataLoader(train_data, batch_size=32, sampler=sampler)
val_sampler = DistributedSampler(val_data, shuffle=False)
val_loader = DataLoader(val_data, batch_size=32, sampler=val_sampler)

for epoch in range(3):
    sampler.set_epoch(epoch)
    for images, labels in loader:
        loss = cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

counts = torch.zeros(2)
with torch.no_grad():
    for images, labels in val_loader:
        right = (model(images).argmax(1) == labels).sum()
        counts += torch.tensor([right, len(labels)])
dist.all_reduce(counts)
if dist.get_rank() == 0:
    print(f"accuracy {counts[0] / counts[1]:.3f}")
    torch.save(model.module.state_dict(), "model.pt")
del model
dist.destroy_process_group()
