"""Losses of the applications that torch has no function for."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from phalanx.config.option import limited
from phalanx.errors import ModelError, UsageError


class ClassBCE:
    """Binary cross-entropy of every class by itself, as timm trains ImageNet: of labels, or of mixup's shares.

    `label_smoothing` moves a part of a label to the other classes. With a `target_threshold` every share above it
    counts as 1 and all others as 0. The loss is the mean over samples of the sum over classes if `sums_classes`, else
    the mean over both.
    """

    @limited(label_smoothing={"minimum": 0, "below": 1}, target_threshold={"minimum": 0, "below": 1})
    def __init__(
        self, *, label_smoothing: float = 0.0, target_threshold: float | None = None, sums_classes: bool = False
    ) -> None:
        if label_smoothing and target_threshold is not None and target_threshold >= 1 - label_smoothing:
            raise UsageError(
                f"ClassBCE: no label is above a target_threshold of {target_threshold} with a label_smoothing of "
                f"{label_smoothing}"
            )
        self._smoothing, self._threshold, self._sums_classes = label_smoothing, target_threshold, sums_classes

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean loss of scores [samples, classes] and labels [samples], or shares [samples, classes]."""
        if output.ndim != 2 or target.shape not in (output.shape, output.shape[:1]):
            raise ModelError(
                f"ClassBCE takes scores [samples, classes] with labels or shares, and got {list(output.shape)} and "
                f"{list(target.shape)}"
            )
        classes = output.shape[1]
        shares = target if target.ndim == 2 else F.one_hot(target, classes)
        shares = shares.to(output.dtype) * (1 - self._smoothing) + self._smoothing / classes
        if self._threshold is not None:
            shares = (shares > self._threshold).to(output.dtype)
        losses = F.binary_cross_entropy_with_logits(output, shares, reduction="none")
        return (losses.sum(1) if self._sums_classes else losses.mean(1)).mean()
