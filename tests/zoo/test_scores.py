"""F1, Matthews' correlation, Pearson's and Spearman's: values of other libraries, edges, names, wrong inputs."""

from __future__ import annotations

import math

import pytest
import torch

from phalanx.errors import ModelError, UsageError
from phalanx.zoo.scores import F1, METRICS, MacroF1, Matthews, Pearson, Spearman, find_metric


def value(metric, output, target) -> float:
    rows = metric(output, target).double()
    return float(metric.combine(rows, torch.arange(len(rows))))


def scores_of(*classes: int) -> torch.Tensor:
    """Return scores whose highest is that of each class."""
    return torch.nn.functional.one_hot(torch.tensor(classes)).float()


@pytest.mark.parametrize("classes", [2, 4])
def test_scores_of_classes_are_those_of_scikit_learn(classes):
    metrics = pytest.importorskip("sklearn.metrics")
    generator = torch.Generator().manual_seed(classes)
    output, target = torch.randn(300, classes, generator=generator), torch.randint(classes, (300,), generator=generator)
    guesses = output.argmax(1)
    assert value(Matthews(), output, target) == pytest.approx(metrics.matthews_corrcoef(target, guesses))
    for average in ("macro", "micro"):
        expected = metrics.f1_score(target, guesses, average=average)
        assert value(F1(average=average), output, target) == pytest.approx(expected)
    assert value(MacroF1(), output, target) == value(F1(average="macro"), output, target)
    if classes == 2:
        assert value(F1(), output, target) == pytest.approx(metrics.f1_score(target, guesses))
        assert value(F1(positive=0), output, target) == pytest.approx(metrics.f1_score(target, guesses, pos_label=0))


def test_correlations_are_those_of_scipy_with_equal_numbers_too():
    stats = pytest.importorskip("scipy.stats")
    generator = torch.Generator().manual_seed(0)
    output = torch.randint(12, (200, 1), generator=generator).double()
    target = output[:, 0] + torch.randint(20, (200,), generator=generator)
    assert value(Pearson(), output, target) == pytest.approx(stats.pearsonr(output[:, 0], target)[0], abs=1e-12)
    assert value(Spearman(), output, target) == pytest.approx(stats.spearmanr(output[:, 0], target)[0], abs=1e-12)
    assert value(Spearman(), output.exp(), target) == value(Spearman(), output, target), "only the order counts"


def test_values_where_nothing_varies():
    labels = torch.tensor([0, 1, 1])
    assert value(F1(), scores_of(0, 1, 0), labels) == pytest.approx(2 / 3)
    assert value(F1(), scores_of(0, 0, 0, 1)[:3], labels) == 0.0
    assert value(Matthews(), scores_of(0, 0, 0, 1)[:3], labels) == 0.0
    assert value(Matthews(), scores_of(1, 0, 0), labels) == -1.0
    assert math.isnan(value(Pearson(), torch.ones(3, 1), torch.tensor([1.0, 2.0, 3.0])))


def test_names_are_known_and_others_refused():
    assert {name for name in METRICS if find_metric(name, name) is not None} == set(METRICS)
    assert isinstance(find_metric("mcc", "score"), Matthews)
    assert find_metric("phalanx.loop.metrics:accuracy", "accuracy") is METRICS["accuracy"]
    with pytest.raises(UsageError, match=r"metrics\.s: unknown metric 'spearmann'\. Did you mean 'spearman'"):
        find_metric("spearmann", "s")
    with pytest.raises(UsageError, match=r"unknown average 'macros' of F1\. Did you mean 'macro'"):
        F1(average="macros")
    with pytest.raises(UsageError, match="positive = -1: must be 0 or more"):
        F1(positive=-1)


def test_what_has_no_such_score_is_refused():
    with pytest.raises(UsageError, match="f1 scores one of two classes, and the model has 3"):
        value(F1(), scores_of(0, 1, 2), torch.tensor([0, 1, 1]))
    assert value(F1(positive=2), scores_of(0, 1, 2), torch.tensor([0, 1, 2])) == 1.0
    with pytest.raises(ModelError, match="'spearman' takes a number and a target per sample"):
        value(Spearman(), torch.randn(4, 3), torch.randn(4, 3))
    with pytest.raises(ModelError, match=r"'mcc' takes scores \[samples, classes\]"):
        value(Matthews(), torch.randn(3, 1), torch.randn(3))
    with pytest.raises(ModelError, match=r"'pearson' takes a number .* torch.float32 \[3, 2\] and torch.float32 \[3\]"):
        value(Pearson(), torch.randn(3, 2), torch.randn(3))
