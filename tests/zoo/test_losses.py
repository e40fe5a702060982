"""Losses of the applications: binary cross-entropy of classes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from phalanx.errors import ModelError, UsageError
from phalanx.zoo.losses import ClassBCE


def test_classes_are_scored_one_by_one():
    torch.manual_seed(0)
    output, labels = torch.randn(6, 4), torch.tensor([0, 1, 2, 3, 0, 1])
    shares = F.one_hot(labels, 4).float()
    expected = F.binary_cross_entropy_with_logits(output, shares)
    torch.testing.assert_close(ClassBCE()(output, labels), expected)
    torch.testing.assert_close(ClassBCE()(output, shares), expected)
    torch.testing.assert_close(ClassBCE(sums_classes=True)(output, labels), 4 * expected)
    smooth = torch.where(shares == 1, 0.9 + 0.1 / 4, 0.1 / 4)
    torch.testing.assert_close(
        ClassBCE(label_smoothing=0.1)(output, labels), F.binary_cross_entropy_with_logits(output, smooth)
    )


def test_half_precision_keeps_the_smoothing():
    output, labels = torch.randn(6, 4).bfloat16(), torch.tensor([0, 1, 2, 3, 0, 1], dtype=torch.int32)
    loss = ClassBCE(label_smoothing=1e-4, sums_classes=True)
    torch.testing.assert_close(loss(output, labels), loss(output.float(), labels))


def test_a_threshold_makes_shares_of_mixed_images_labels():
    output, shares = torch.randn(2, 3), torch.tensor([[0.7, 0.3, 0.0], [0.1, 0.0, 0.9]])
    expected = F.binary_cross_entropy_with_logits(output, torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 1.0]]))
    torch.testing.assert_close(ClassBCE(target_threshold=0.2)(output, shares), expected)


def test_wrong_options_and_shapes_are_refused():
    with pytest.raises(UsageError, match="label_smoothing = 1"):
        ClassBCE(label_smoothing=1.0)
    with pytest.raises(UsageError, match=r"no label is above a target_threshold of 0\.95"):
        ClassBCE(label_smoothing=0.1, target_threshold=0.95)
    with pytest.raises(ModelError, match=r"every class is above a target_threshold of 0\.01"):
        ClassBCE(label_smoothing=0.1, target_threshold=0.01)(torch.randn(2, 3), torch.tensor([0, 1]))
    with pytest.raises(ModelError, match=r"got \[2, 3\] and \[2\]"):
        ClassBCE()(torch.randn(2, 3), torch.randn(2))
    with pytest.raises(ModelError, match=r"got \[2, 3\] and \[3\]"):
        ClassBCE()(torch.randn(2, 3), torch.tensor([0, 1, 2]))
