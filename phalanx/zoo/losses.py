"""Losses that torch does not have."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.config.option import limited
from phalanx.errors import ModelError, UsageError

_TWO = 2


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
        is_label = target.shape == output.shape[:1] and not target.is_floating_point()
        if output.ndim != _TWO or not (is_label or target.shape == output.shape):
            raise ModelError(
                f"ClassBCE takes scores [samples, classes] with labels or shares, and got {list(output.shape)} and "
                f"{list(target.shape)}"
            )
        classes = output.shape[1]
        if self._threshold is not None and self._threshold < self._smoothing / classes:
            raise ModelError(
                f"ClassBCE: every class is above a target_threshold of {self._threshold} with a label_smoothing of "
                f"{self._smoothing} over {classes} classes"
            )
        scores = output.to(torch.promote_types(output.dtype, torch.float32))
        shares = target if target.ndim == output.ndim else F.one_hot(target.long(), classes)
        shares = shares.to(scores.dtype) * (1 - self._smoothing) + self._smoothing / classes
        if self._threshold is not None:
            shares = (shares > self._threshold).to(scores.dtype)
        losses = F.binary_cross_entropy_with_logits(scores, shares, reduction="none")
        return (losses.sum(1) if self._sums_classes else losses.mean(1)).mean()
