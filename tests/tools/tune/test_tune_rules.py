"""Rules without processes: verdicts, population exchanges, names of metrics, and how many trials run at once."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from phalanx.config import DistributedConfig
from phalanx.errors import UsageError
from phalanx.observe.trial_control import CONTROL, TrialControl
from phalanx.tools.tune import trial as trial_module
from phalanx.tools.tune import uniform
from phalanx.tools.tune.engine import IndependentTrials
from phalanx.tools.tune.executor import plan_slots
from phalanx.tools.tune.population import exploits
from phalanx.tools.tune.results import LiveTable
from phalanx.tools.tune.schedulers import Asha, Median, Points, decide, make_scheduler
from phalanx.tools.tune.search import SearchRequest
from phalanx.tools.tune.space import SearchSpace
from phalanx.tools.tune.trial import Objective, State, Trial

LOSS = Objective("loss", "min")


def trial(number, *losses, state=State.RUNNING):
    reports = {place + 1: {"loss": loss} for place, loss in enumerate(losses)}
    return Trial(number, {}, Path("/nowhere"), state, reports)


def test_asha_keeps_the_best_third():
    asha = Asha(eta=3, grace=1)
    assert asha.points.at[:4] == (1, 3, 9, 27)
    others = [trial(number, loss) for number, loss in enumerate((5.0, 4.0, 6.0, 7.0, 8.0))]
    assert asha.verdict(trial(0, 5.0), 1, [], LOSS) is True, "the first has nothing to compare with"
    assert asha.verdict(trial(1, 6.0), 1, others[:1], LOSS) is False
    assert asha.verdict(trial(5, 4.5), 1, others, LOSS) is True, "second of six"
    assert asha.verdict(trial(5, 5.5), 1, others, LOSS) is False, "third of six"
    assert asha.verdict(trial(5, float("nan")), 1, others, LOSS) is False


def test_a_verdict_waits_for_lower_numbers_only():
    asha = Asha(eta=2)
    behind, gone = trial(0, 1.0), trial(1, 9.0, state=State.STOPPED)
    late = trial(2, 2.0, 2.0)
    assert asha.verdict(late, 2, [behind, gone], LOSS) is None
    behind.reports[2] = {"loss": 3.0}
    assert asha.verdict(late, 2, [behind, gone], LOSS) is True
    behind.state = State.FAILED
    del behind.reports[2]
    assert asha.verdict(late, 2, [behind, gone], LOSS) is True


def test_median_stops_what_is_worse_than_most():
    median = Median(grace=2)
    others = [trial(number, 0, loss) for number, loss in enumerate((1.0, 2.0, 3.0))]
    assert median.points == Points(None, 2)
    assert median.verdict(trial(3, 0, 2.0), 2, others, LOSS) is True
    assert median.verdict(trial(3, 0, 2.1), 2, others, LOSS) is False
    assert median.verdict(trial(2, 0, 9.9), 2, others[:2], LOSS) is True, "too few to judge by"


def test_reports_beyond_a_point_count_from_the_first():
    sparse = Trial(0, {}, Path("/nowhere"), State.RUNNING, {10: {"loss": 4.0}, 20: {"loss": 2.0}})
    assert sparse.value_from(3, LOSS) == 4.0
    assert sparse.value_from(11, LOSS) == 2.0
    assert sparse.value_from(21, LOSS) is None


LATE = {1: {"other": 1.0}, 2: {"loss": 2.5}, 3: {"loss": 2.3}}


def test_a_stopped_trial_keeps_the_report_that_was_judged():
    better = trial(0, 1.0, state=State.FINISHED)
    late = Trial(1, {}, Path("/nowhere"), State.RUNNING, dict(LATE))
    assert decide(late, [better], Asha(eta=3), LOSS) is False
    assert (late.stopped_at, sorted(late.reports), late.value(LOSS)) == (2, [1, 2], 2.5)


def test_a_verdict_does_not_count_what_others_reported_after_they_were_stopped():
    first, mine = trial(0, 1.0, 1.0, 1.0), trial(2, 0.5, 0.5, 1.5)
    late = Trial(1, {}, Path("/nowhere"), State.RUNNING, dict(LATE))
    assert decide(mine, [first, late], Asha(eta=3), LOSS) is None, "the second has a third report, but no verdict"
    for other, lower in ((first, []), (late, [first])):
        decide(other, lower, Asha(eta=3), LOSS)
    assert late.stopped_at == 2
    assert decide(mine, [first, late], Asha(eta=3), LOSS) is None
    assert mine.passed == {1}, "the second may not have a third report: its end is waited for"
    late.state = State.STOPPED
    assert decide(mine, [first, late], Asha(eta=3), LOSS) is False
    assert mine.stopped_at == 3, "one of two that reached it, and not the best"


def test_the_worst_quarter_continues_from_the_best():
    members = [trial(number, float(loss)) for number, loss in enumerate((3, 1, 8, 2, 7, 4, 5, 6))]
    found = exploits(members, 1, LOSS, seed=0)
    assert [loser.number for loser, _, _ in found] == [2, 4]
    assert {winner.number for _, winner, _ in found} <= {1, 3}
    again = exploits(members, 1, LOSS, seed=0)
    drawn = [[(winner.number, rng.random()) for _, winner, rng in each] for each in (found, again)]
    assert drawn[0] == drawn[1]
    assert len(exploits(members[:3], 1, LOSS, seed=0)) == 1
    assert exploits(members[:1], 1, LOSS, seed=0) == []


def test_modes_by_name_and_metrics_by_their_short_name():
    assert Objective.of("val/accuracy").mode == "max"
    assert Objective.of("train/loss").mode == "min"
    with pytest.raises(UsageError, match="whether more or less of 'wer'"):
        Objective.of("wer")
    assert Objective.of("accuracy").value({"val/accuracy": 0.5}) == 0.5
    assert Objective.of("accuracy").value({"val/accuracy": 0.5, "accuracy": 0.7}) == 0.7
    error = Objective.of("accurracy", "max").missing(["accuracy", "loss"], "trial 0")
    assert "Did you mean 'accuracy'? It reported: accuracy, loss." in str(error)


def test_trial_control_waits_at_its_points_and_after_a_jump(tmp_path):
    gate = TrialControl(tmp_path / "gate", (1, 3, 9))
    assert [number for number in range(1, 11) if gate.is_due(number)] == [1, 3, 9]
    jumping = TrialControl(tmp_path / "gate", (1, 3, 9))
    jumping.start_after(1)
    assert [number for number in (2, 5, 7, 20) if jumping.is_due(number)] == [5, 20]
    every = TrialControl(tmp_path / "gate", None, first=2, every=2)
    assert [number for number in range(1, 8) if every.is_due(number)] == [2, 4, 6]
    assert TrialControl.from_environment({"PHALANX_TRIAL_CONTROL": gate.to_text()}).to_text() == gate.to_text()


def test_the_verdict_in_the_control_file(tmp_path):
    gate = TrialControl(tmp_path / "gate")
    assert gate.wait(3, given_up=lambda: True) is True, "a run that ends for another reason needs no verdict"
    gate.let_through(3)
    assert gate.wait(3) is True
    gate.stop_at(4)
    assert [gate.wait(3), gate.wait(4), gate.wait(5)] == [True, False, False]


def test_the_live_table_draws_and_leaves_the_best_first(capsys):
    table = LiveTable(LOSS)
    table.show([trial(0, 2.0), trial(1, 1.0)])
    table.notice("a word [above]")
    first, second = trial(0, 2.0, state=State.FINISHED), trial(1, 1.0, state=State.FINISHED)
    table.close([first, second])
    lines = capsys.readouterr().out.splitlines()
    assert any("a word [above]" in line for line in lines)
    rows = [line for line in lines if "finished" in line]
    assert [row.split()[1] for row in rows] == ["1", "0"]


def test_a_population_of_one_is_refused():
    with pytest.raises(UsageError, match="a population has 2 members or more"):
        SearchRequest(metric="loss", scheduler="pbt", trials=1).check(SearchSpace({"x": uniform(0, 1)}))


def test_gpus_are_divided_among_slots(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    two_ranks = DistributedConfig(num_workers=2)
    slots = plan_slots(two_ranks, num_gpus=4, gpus_here=8)
    assert [slot.gpus for slot in slots.slots] == [(0, 1), (2, 3)]
    shared = plan_slots(DistributedConfig(num_workers=1), trials_per_gpu=2, gpus_here=2)
    assert [slot.gpus for slot in shared.slots] == [(0,), (1,), (0,), (1,)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    assert shared.slots[1].environment() == {"CUDA_VISIBLE_DEVICES": "7"}
    with pytest.raises(UsageError, match="num_gpus = 32, but this machine has 4 GPUs"):
        plan_slots(two_ranks, num_gpus=32, gpus_here=4)
    with pytest.raises(UsageError, match="trials_per_gpu=2"):
        plan_slots(two_ranks, parallel=4, gpus_here=4)
    assert "no GPU was found" in plan_slots(two_ranks, num_gpus=32, gpus_here=0, parallel=1).summary


def test_a_trial_without_the_metric_ends_the_search_only_while_no_other_measures_it():
    def is_measured(*others):
        ended = Trial(0, {}, Path("/nowhere"), State.FINISHED, {1: {"accuracy": 1.0}})
        plan = SimpleNamespace(objective=LOSS, executor=SimpleNamespace(slots=(0, 1)))
        record = SimpleNamespace(trials=lambda: [ended, *others])
        return IndependentTrials(plan, record, None, make_scheduler("none", eta=3, grace=1))._is_measured(ending=ended)

    assert not is_measured(), "the only one"
    assert not is_measured(trial(1, state=State.FAILED)), "the other came to nothing"
    assert is_measured(trial(1, 0.5, state=State.FINISHED))
    assert is_measured(trial(1)), "it began at the same time, and may still measure it"
    assert not is_measured(trial(1, state=State.FAILED), trial(2)), "the search would never end, one after the other"


def test_reports_count_on_from_where_the_trial_resumes(tmp_path, monkeypatch):
    again = Trial(0, {}, tmp_path, State.PAUSED, {2: {"loss": 1.0}})
    assert again.resumes_after == 0, "nothing was saved: it starts from the beginning"
    again.checkpoints.mkdir()
    assert again.resumes_after == 0
    (again.checkpoints / "model.pt").touch()
    assert again.resumes_after == 2
    monkeypatch.setenv("PHALANX_RUN_DIR", str(tmp_path))
    monkeypatch.setenv(trial_module.RESUMES_AFTER, str(again.resumes_after))
    gate = TrialControl(tmp_path / "control.json", at=(2, 4))
    gate.stop_at(4)
    monkeypatch.setenv(CONTROL, gate.to_text())
    monkeypatch.setattr(trial_module, "_reporter", None)
    trial_module.report(loss=0.5)
    with pytest.raises(trial_module.TrialStopped):
        trial_module.report(loss=0.25)
    again.read_events()
    assert again.reports == {2: {"loss": 1.0}, 3: {"loss": 0.5}, 4: {"loss": 0.25}}
