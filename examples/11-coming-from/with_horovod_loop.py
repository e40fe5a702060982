"""Digits on two ranks, with Horovod.

horovodrun -np 2 python with_horovod_loop.py
phalanx train --script with_horovod_loop.py --backend horovod --num-workers 2     # unchanged
"""

import horovod.torch as hvd
import torch
from parts import make_model, train_data, val_data
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler

hvd.init()
model = make_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
sampler = DistributedSampler(train_data, hvd.size(), hvd.rank())
loader = DataLoader(train_data, batch_size=32, sampler=sampler)
val_sampler = DistributedSampler(val_data, hvd.size(), hvd.rank(), shuffle=False)
val_loader = DataLoader(val_data, batch_size=32, sampler=val_sampler)

for epoch in range(3):
    sampler.set_epoch(epoch)
    for images, labels in loader:
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()

counts = torch.zeros(2)
with torch.no_grad():
    for images, labels in val_loader:
        right = (model(images).argmax(1) == labels).sum()
        counts += torch.tensor([right, len(labels)])
counts = hvd.allreduce(counts, op=hvd.Sum)
if hvd.rank() == 0:
    print(f"accuracy {counts[0] / counts[1]:.3f}")
    torch.save(model.state_dict(), "model.pt")
