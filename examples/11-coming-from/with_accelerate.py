"""Digits on two ranks, with Accelerate.

torchrun --nproc-per-node 2 with_accelerate.py                             # or accelerate launch, once configured
phalanx train --script with_accelerate.py --num-workers 2 --device cpu     # unchanged
"""

import torch
from accelerate import Accelerator
from parts import make_model, train_data, val_data
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

accelerator = Accelerator(cpu=True)
model = make_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
loader = DataLoader(train_data, batch_size=32, shuffle=True)
val_loader = DataLoader(val_data, batch_size=32)
model, optimizer, loader, val_loader = accelerator.prepare(model, optimizer, loader, val_loader)

for _ in range(3):
    for images, labels in loader:
        loss = cross_entropy(model(images), labels)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

right, seen = 0, 0
with torch.no_grad():
    for images, labels in val_loader:
        guesses = model(images).argmax(1)
        guesses, labels = accelerator.gather_for_metrics((guesses, labels))
        right += (guesses == labels).sum().item()
        seen += len(labels)
accelerator.print(f"accuracy {right / seen:.3f}")
if accelerator.is_main_process:
    torch.save(accelerator.unwrap_model(model).state_dict(), "model.pt")
accelerator.end_training()
