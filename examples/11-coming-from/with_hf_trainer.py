"""Digits on two ranks, with the Hugging Face Trainer.

torchrun --nproc-per-node 2 with_hf_trainer.py
phalanx train --script with_hf_trainer.py --num-workers 2 --device cpu      # unchanged
"""

import torch
from parts import make_model, train_data, val_data
from torch.nn.functional import cross_entropy
from transformers import Trainer, TrainingArguments


class Digits(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.model = make_model()

    def forward(self, images, labels):
        logits = self.model(images)
        return {"loss": cross_entropy(logits, labels), "logits": logits}


def collate(samples):
    images, labels = zip(*samples, strict=True)
    return {"images": torch.stack(images), "labels": torch.as_tensor(labels)}


def accuracy(prediction):
    right = prediction.predictions.argmax(1) == prediction.label_ids
    return {"accuracy": right.mean()}


module = Digits()
arguments = TrainingArguments(
    output_dir="out",
    use_cpu=True,
    per_device_train_batch_size=32,
    num_train_epochs=3,
    learning_rate=3e-3,
    lr_scheduler_type="constant",
    max_grad_norm=1.0,
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
)
trainer = Trainer(
    module,
    arguments,
    data_collator=collate,
    train_dataset=train_data,
    eval_dataset=val_data,
    compute_metrics=accuracy,
)
trainer.train()
metrics = trainer.evaluate()
if trainer.is_world_process_zero():
    print(f"accuracy {metrics['eval_accuracy']:.3f}")
    torch.save(module.model.state_dict(), "model.pt")
