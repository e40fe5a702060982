"""8x8 images of handwritten digits, shipped with the package: 1797 of them, in 46 KB.

They are the test part of "Optical Recognition of Handwritten Digits" by E. Alpaydin and C. Kaynak (1998), UCI Machine
Learning Repository, https://doi.org/10.24432/C50P49, licensed CC BY 4.0; here in one fixed shuffled order.
"""

from __future__ import annotations

from importlib import resources

import numpy as np
import torch
from torch.utils.data import TensorDataset

TRAIN_SIZE = 1437
"""Images of the training split; the other 360 are for validation."""


def digits(split: str = "train") -> TensorDataset:
    """Return (images, labels): float32 of shape [1, 8, 8] from 0 to 1, and int64 from 0 to 9."""
    with resources.files("phalanx.data.sets").joinpath("digits.npz").open("rb") as file, np.load(file) as arrays:
        images, labels = arrays["images"], arrays["labels"]
    part = slice(TRAIN_SIZE) if split == "train" else slice(TRAIN_SIZE, None)
    scaled = torch.from_numpy(images[part]).unsqueeze(1).float() / 16
    return TensorDataset(scaled, torch.from_numpy(labels[part]).long())
