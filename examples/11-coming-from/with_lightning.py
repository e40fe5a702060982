"""Digits on two ranks, with Lightning.

python with_lightning.py
"""

import lightning
import torch
from parts import make_model, train_data, val_data
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader


class Digits(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = make_model()

    def training_step(self, batch, index):
        images, labels = batch
        loss = cross_entropy(self.model(images), labels)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch, index):
        images, labels = batch
        right = self.model(images).argmax(1) == labels
        self.log("val/accuracy", right.float().mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


trainer = lightning.Trainer(
    accelerator="cpu",
    devices=2,
    strategy="ddp",
    max_epochs=3,
    gradient_clip_val=1.0,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
module = Digits()
trainer.fit(
    module,
    DataLoader(train_data, batch_size=32, shuffle=True),
    DataLoader(val_data, batch_size=32),
)
if trainer.is_global_zero:
    print(f"accuracy {trainer.callback_metrics['val/accuracy']:.3f}")
    torch.save(module.model.state_dict(), "model.pt")
