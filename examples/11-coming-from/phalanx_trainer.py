"""Digits on two ranks: the trainer.

python phalanx_trainer.py
"""

import torch
from parts import make_model, train_data, val_data

from phalanx import Trainer

model = make_model()
trainer = Trainer(
    model,
    optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3),
    loss_fn=torch.nn.CrossEntropyLoss(),
    device="cpu",
    num_workers=2,
    batch_size=32,
    epochs=3,
    gradient_clipping=1.0,
)
history = trainer.fit(train_data, val_data)
print(f"accuracy {history.epochs[-1].val['accuracy']:.3f}")
torch.save(model.state_dict(), "model.pt")
