"""Digits on two ranks: your own loop.

phalanx train --script phalanx_loop.py --num-workers 2 --device cpu     # on GPUs: --num-gpus 8
"""

import torch
from parts import make_model, train_data, val_data
from torch.nn.functional import cross_entropy

import phalanx

f = phalanx.Formation(batch_size=32)
model = make_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
model, optimizer, loader = f.prepare(model, optimizer, train_data)

for _ in range(3):
    for images, labels in loader:
        loss = cross_entropy(model(images), labels)
        f.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

counts = torch.zeros(2, device=f.device)
with torch.no_grad():
    for images, labels in f.prepare_loader(val_data, training=False):
        right = (model(images).argmax(1) == labels).sum()
        counts += torch.tensor([right, len(labels)], device=f.device)
counts = f.reduce(counts, op="sum")
f.print(f"accuracy {counts[0] / counts[1]:.3f}")
if f.is_main:
    torch.save(f.unwrap(model).state_dict(), "model.pt")
f.close()
