"""Population-based training: weights are copied, settings are perturbed, and a repetition gives the same."""

from __future__ import annotations

import pytest
import torch
from packages import require
from tune_parts import count_on, train

from phalanx.tools.tune import DistributedTuner, choice, loguniform

require("optuna", "optuna is not installed: pip install 'phalanx[tune]'")


SPACE = {"rate": loguniform(1e-6, 0.05), "decay": choice([0.0, 0.001, 0.01])}


@pytest.fixture(scope="module")
def searched(tmp_path_factory, fork_server):
    """The same search twice."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PHALANX_DEVICE", "cpu")
        for name in ("one", "two"):
            folder = tmp_path_factory.mktemp(name) / "study"
            tuner = DistributedTuner(
                train, SPACE, metric="val/loss", scheduler="pbt", parallel=2, study_dir=str(folder), seed=3
            )
            tuner.tune(num_samples=4)
            found.append(tuner.results)
    return found


def test_an_exploit_copies_the_weights_of_a_better_trial(searched):
    results = searched[0]
    taken = [(trial, entry) for trial in results.trials for entry in trial.lineage]
    assert len(taken) == 2, "one of four, at each of two boundaries"
    for loser, entry in taken:
        winner = results.trials[entry["from"]]
        epoch = entry["iteration"]
        then, own = load(loser, f"first-{epoch}"), load(loser, f"last-{epoch}")
        best = load(winner, f"last-{epoch}")
        assert all(torch.equal(then[name], best[name]) for name in best)
        assert not all(torch.equal(then[name], own[name]) for name in own)
        before, after = loser.reports[epoch]["val/loss"], loser.reports[epoch + 1]["val/loss"]
        assert after < before


def load(trial, name):
    return torch.load(trial.folder / f"{name}.pt", weights_only=True)


def test_settings_are_perturbed_and_take_effect(searched):
    for trial in searched[0].trials:
        for entry in trial.lineage:
            epoch = entry["iteration"]
            rate, decay = map(float, (trial.folder / f"used-{epoch + 1}").read_text().split())
            assert rate == pytest.approx(entry["params"]["rate"])
            assert decay == entry["params"]["decay"], "a loaded optimizer state does not bring the old one back"
            source = searched[0].trials[entry["from"]]
            assert entry["params"] != dict(source.params)


def test_members_that_are_not_replaced_continue_from_their_own_weights(searched):
    untouched = [trial for trial in searched[0].trials if not trial.lineage]
    assert untouched
    for trial in untouched:
        for epoch in (1, 2):
            then, before = load(trial, f"first-{epoch}"), load(trial, f"last-{epoch}")
            assert all(torch.equal(then[name], before[name]) for name in before)


def test_the_same_seed_gives_the_same_population(searched):
    first, second = ([(t.params, t.lineage, t.reports) for t in results.trials] for results in searched)
    assert first == second
    assert all(trial.iteration == 3 and str(trial.state) == "finished" for trial in searched[0].trials)


def test_reports_without_a_step_count_on_from_generation_to_generation(tmp_path, monkeypatch, fork_server):
    monkeypatch.setenv("PHALANX_DEVICE", "cpu")
    tuner = DistributedTuner(
        count_on, {"rate": choice([1.0, 2.0])}, metric="loss", scheduler="pbt", search="grid", parallel=2, interval=2,
        study_dir=str(tmp_path / "study"),
    )  # fmt: skip
    tuner.tune()
    for trial in tuner.results.trials:
        assert {number: values["epoch"] for number, values in trial.reports.items()} == {1: 1, 2: 2, 3: 3, 4: 4}
