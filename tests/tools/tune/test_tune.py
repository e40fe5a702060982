"""Searches on this machine: real trials, stopped, repeated, interrupted, resumed and failing."""

from __future__ import annotations

import json
import os
import signal
import tomllib
from pathlib import Path

import pytest
from command import finish, phalanx, start
from long_proofs import long_proof
from packages import require
from tune_parts import curve, ends_badly, returns_accuracy, train_line
from waiting import until

from phalanx.errors import PhalanxError, SearchFailedError, UsageError
from phalanx.tools.tune import DistributedTuner, choice, quniform, uniform
from phalanx.tools.tune.record import Record
from phalanx.tools.tune.trial import State

require("optuna", "optuna is not installed: pip install 'phalanx[tune]'")


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch, fork_server):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PHALANX_DEVICE", "cpu")


def told(tuner):
    """Return the part of a search that must be the same when it is repeated."""
    return [(t.number, t.params, str(t.state), t.reports) for t in tuner.results.trials]


def test_asha_saves_the_steps_of_bad_trials():
    space = {"rate": choice([0.1, 1e-5, 3e-4, 2e-5])}
    tuner = DistributedTuner(train_line, space, metric="val/loss", search="grid", scheduler="asha", parallel=2)
    assert tuner.tune() == {"rate": 0.1}
    states = [str(trial.state) for trial in tuner.results.trials]
    assert states == ["finished", "stopped", "stopped", "stopped"]
    steps = {trial.number: last_step(trial.folder) for trial in tuner.results.trials}
    assert steps == {0: 18, 1: 2, 2: 2, 3: 2}, "two steps per epoch, nine epochs, and one for those stopped"
    assert [trial.steps for trial in tuner.results.trials] == [18, 2, 2, 2]
    assert not tuner.results.trials[1].checkpoints.exists(), "weights of a stopped trial are removed"


def last_step(folder):
    lines = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    return max(line["step"] for line in lines if line["event"] in ("step", "run_ended"))


@pytest.mark.parametrize("scheduler", ["asha", "median"])
def test_a_search_is_repeated_whichever_trial_is_faster(scheduler, monkeypatch):
    def search(slow):
        monkeypatch.setenv("SLOW", slow)
        tuner = DistributedTuner(curve, {"x": uniform(-3, 3)}, scheduler=scheduler, search="optuna", parallel=2, seed=4)
        best = tuner.tune(num_samples=7)
        return best, told(tuner)

    first, second = search("True"), search("False")
    assert first == second
    stopped = [state for _, _, state, _ in first[1] if state == "stopped"]
    assert 0 < len(stopped) < 7
    shown = {number: reports for number, _, state, reports in first[1] if state == "stopped"}
    assert all(len(reports) < 9 for reports in shown.values())


def test_another_seed_is_another_search_and_a_search_can_be_made_longer():
    def search(seed, samples, **more):
        space = {"x": uniform(-1, 1)}
        tuner = DistributedTuner(lambda config: config["x"] ** 2, space, seed=seed, parallel=2, **more)
        tuner.tune(num_samples=samples)
        return [trial.params for trial in tuner.results.trials]

    first = search(0, 2, study_dir="study")
    assert search(1, 2) != first
    events = Path("study/trials/0000/events.jsonl").read_text()
    more = search(0, 3, study_dir="study", resume=True)
    assert more[:2] == first
    assert len(more) == 3
    assert Path("study/trials/0000/events.jsonl").read_text() == events, "what was done is not done again"


def test_a_trial_that_fails_is_recorded_with_its_cause_and_stops_nothing():
    space = {"how": choice(["crash", "memory", "killed", "nan", "well", "other"])}
    tuner = DistributedTuner(ends_badly, space, search="grid", parallel=2, study_dir="study")
    assert tuner.tune() == {"how": "well"}
    causes = {trial.params["how"]: trial.cause for trial in tuner.results.failed}
    assert causes["crash"] == "RuntimeError: the disk is on fire"
    assert causes["memory"] == "out of memory: 1 TB asked for"
    assert causes["killed"].startswith("out of memory, or killed")
    assert causes["nan"] == "loss became NaN at iteration 1"
    assert causes["other"] == "the trial reported no 'loss'. It reported: accuracy."
    import optuna

    study = optuna.load_study(study_name="phalanx", storage="sqlite:///study/study.db")
    assert [trial.state.name for trial in study.trials] == ["FAIL", "FAIL", "FAIL", "FAIL", "COMPLETE", "FAIL"]
    assert study.best_params == {"how": "well"}


def test_when_all_fail_the_common_cause_is_reported():
    tuner = DistributedTuner(ends_badly, {"how": choice(["crash"]), "x": uniform(0, 1)}, parallel=2)
    with pytest.raises(SearchFailedError, match="all 3 trials failed; all of them: RuntimeError: the disk is on fire"):
        tuner.tune(num_samples=3)


def test_the_only_metric_that_is_returned_is_taken(capsys):
    space = {"x": choice([0.1, 0.9, 0.5, 0.3])}
    tuner = DistributedTuner(returns_accuracy, space, search="grid", parallel=2, study_dir="study")
    assert tuner.tune(num_samples=3) == {"x": 0.9}
    assert "metric: accuracy, the only one returned; more is better" in capsys.readouterr().out
    assert (tuner.results.objective.metric, tuner.results.best_value) == ("accuracy", 0.9)
    import optuna

    study = optuna.load_study(study_name="phalanx", storage="sqlite:///study/study.db")
    assert (study.direction.name, study.best_params) == ("MAXIMIZE", {"x": 0.9})
    again = DistributedTuner(returns_accuracy, space, search="grid", study_dir="study", resume=True)
    again.tune(num_samples=4)
    assert (len(again.results.trials), again.results.best_params) == (4, {"x": 0.9})


def test_a_metric_that_is_not_returned_lists_those_that_are():
    space = {"how": choice(["well", "well"])}
    tuner = DistributedTuner(ends_badly, space, metric="acuracy", mode="max")
    with pytest.raises(
        UsageError, match=r"reported no 'acuracy'\. Did you mean 'accuracy'\? It reported: accuracy, loss"
    ):
        tuner.tune(num_samples=2)


SCRIPT = """
import argparse, sys
import torch
from phalanx import PyTorchDDPTrainer, tune

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int)
width = parser.parse_args().width
inputs = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Linear(width, 1))
PyTorchDDPTrainer(model, loss_fn=torch.nn.MSELoss(){more}).fit(data, data)
"""
SPACE = """
learning_rate = { choice = [0.05, 1e-6] }
width = { choice = [3, 5] }
"""


@long_proof
def test_a_script_on_two_ranks_gets_settings_and_arguments(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT.replace("{more}", ""))
    (tmp_path / "space.toml").write_text(SPACE)
    answer = phalanx(
        "tune", "--script", "train.py", "--space", "space.toml", "--search", "grid", "--num-workers", 2,
        "--parallel", 1, "--epochs", 3, "--batch-size", 4, "--study-dir", "study", "--threads-per-rank", 1,
    )  # fmt: skip
    assert answer.code == 0, answer.text
    assert "4 trials of train, 1 trial at once" in answer.out
    trials = json.loads((tmp_path / "study/trials.json").read_text())
    best = min(trials, key=lambda trial: trial["metrics"]["val/loss"])
    assert best["params"]["learning_rate"] == 0.05
    starts = [json.loads(line) for line in (Path(best["folder"]) / "events.jsonl").open()]
    assert starts[0]["world_size"] == 2
    assert starts[0]["parameters"] == 4 * best["params"]["width"] + 2 * best["params"]["width"] + 1
    settings = tomllib.loads((tmp_path / "study/best.toml").read_text())
    assert settings == {"learning_rate": 0.05}, "the tuned values alone"
    width = best["params"]["width"]
    assert f"# width = {width}  (an argument of the program)" in (tmp_path / "study/best.toml").read_text()
    command = answer.out.rpartition("next:\n")[2].split()
    assert command[:6] == ["phalanx", "train", "--script", "train.py", "--config", "study/best.toml"]
    assert {"--epochs=3", "--num-workers=2", f"--width={width}"} <= set(command)
    again = phalanx(*command[1:])
    assert again.code == 0, again.text


def test_the_best_values_of_a_recipe_are_a_recipe_and_the_next_command_trains_it(tmp_path):
    (tmp_path / "space.toml").write_text(
        'learning_rate = { choice = [0.001, 0.01] }\nbatch_size = 128\n"model.width" = { choice = [4] }\n'
    )
    words = ("--search", "grid", "--parallel", 1, "--max-steps", 4, "--num-workers", 1, "--study-dir", "study")
    answer = phalanx("tune", "digits", "--space", "space.toml", *words)
    assert answer.code == 0, answer.text
    document = tomllib.loads((tmp_path / "study/best.toml").read_text())
    assert document["recipe"] == "digits"
    assert set(document["settings"]) == {"learning_rate", "batch_size"}
    assert document["model"] == {"width": 4}
    table = answer.out[answer.out.index("trial  state") :]
    assert "batch_size" not in table.splitlines()[0], "fixed values have no column"
    assert "2 of 2 done" in answer.out
    best = answer.out.partition("best checkpoint: ")[2].split()[0]
    assert best.startswith("study/trials/")
    assert phalanx("evaluate", best).code == 0, "its model and data are known"
    again = phalanx(*answer.out.rpartition("next:\n")[2].split()[1:])
    assert again.code == 0, again.text


def test_a_script_that_sets_what_is_searched_is_an_error(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT.replace("{more}", ", learning_rate=0.1"))
    (tmp_path / "space.toml").write_text(SPACE)
    answer = phalanx("tune", "--script", "train.py", "--space", "space.toml", "--epochs", 1, "--trials", 1)
    assert answer.code == 2
    assert "the script sets learning_rate (it was 0.1) itself, and that wins" in answer.err


def test_an_interrupted_search_resumes_and_ends_as_if_it_had_not_been(tmp_path):
    (tmp_path / "slow.py").write_text(
        "import sys, time\nfrom phalanx import tune\nx = float(sys.argv[-1].partition('=')[2])\n"
        "for step in range(1, 7):\n    time.sleep(0.15 if x == 3 else 0)\n"
        "    tune.report({'loss': x / step}, step=step)\n"
    )
    (tmp_path / "space.toml").write_text("x = { choice = [1.0, 2.0, 3.0, 4.0, 0.5] }\n")
    words = ("tune", "--script", "slow.py", "--space", "space.toml", "--metric", "loss", "--search", "grid",
             "--scheduler", "median", "--parallel", 1)  # fmt: skip
    process = start(*words, "--study-dir", "study", cwd=tmp_path, PHALANX_DEVICE="cpu")
    third = tmp_path / "study/trials/0002/events.jsonl"
    until(third.exists)
    os.kill(process.pid, signal.SIGINT)
    stopped = finish(process)
    assert stopped.code == 130, stopped.text
    assert "stopped after 2 of 5 trials" in stopped.text
    finished = (tmp_path / "study/trials/0000/events.jsonl").read_text()
    refused = phalanx(*words, "--study-dir", "study")
    assert refused.code == 2
    assert "holds a search already" in refused.err
    changed = phalanx(*words[:-2], "--mode", "max", "--study-dir", "study", "--resume")
    assert 'mode: "min" then, "max" now' in changed.err
    resumed = phalanx(*words, "--study-dir", "study", "--resume")
    assert resumed.code == 0, resumed.text
    assert "2 of them are done already" in resumed.out
    assert (tmp_path / "study/trials/0000/events.jsonl").read_text() == finished
    whole = phalanx(*words, "--study-dir", "whole")
    assert whole.code == 0, whole.text
    assert outline(tmp_path / "study") == outline(tmp_path / "whole")


def outline(folder):
    trials = json.loads((folder / "trials.json").read_text())
    return [(trial["number"], trial["params"], trial["state"], trial["metrics"]) for trial in trials]


def test_bad_requests_are_refused_before_anything_starts(tmp_path):
    (tmp_path / "space.toml").write_text("learning_rate = { uniform = [0.1, 0.01] }\nhiden = { choice = [] }\n")
    answer = phalanx("tune", "digits", "--space", "space.toml")
    assert answer.code == 2
    assert "2 mistakes in space.toml" in answer.err
    (tmp_path / "space.toml").write_text("learning_rat = { uniform = [0.01, 0.1] }\n")
    assert (
        "unknown setting 'learning_rat'. Did you mean 'learning_rate'?"
        in phalanx("tune", "digits", "--space", "space.toml").err
    )
    (tmp_path / "space.toml").write_text("learning_rate = { uniform = [0.01, 0.1] }\n")
    answer = phalanx("tune", "digits", "--space", "space.toml", "--scheduler", "hyperban", "--search", "optna")
    assert "scheduler = 'hyperban': not one of 'asha', 'pbt'" in answer.err
    assert "search = 'optna': not one of 'random', 'grid', 'optuna'. Did you mean 'optuna'?" in answer.err
    assert (
        "checkpoint_dir: every trial has its own"
        in phalanx("tune", "digits", "--space", "space.toml", "--checkpoint-dir", "x").err
    )
    assert "nothing to tune was named" in phalanx("tune", "--space", "space.toml").err
    assert "holds no search" in phalanx("tune", "digits", "--space", "space.toml", "--study-dir", "y", "--resume").err
    assert not (tmp_path / "runs").exists()


def test_values_that_are_neither_number_nor_text_come_back_from_the_record(tmp_path):
    from phalanx.tools.tune.space import SearchSpace
    from phalanx.tools.tune.trial import Objective

    space = SearchSpace({"layers": choice([(64, 64), (128,)]), "rate": quniform(0, 1, 0.5)})
    record = Record(tmp_path, space, Objective("loss", "min"), {})
    trial = record.open_trial({"layers": (128,), "rate": 0.5})
    trial.state = State.FINISHED
    trial.reports = {1: {"loss": 2.0}}
    record.close_trial(trial)
    record.close()
    again = Record(tmp_path, space, Objective("loss", "min"), {})
    assert [(one.params, one.state) for one in again.trials()] == [({"layers": (128,), "rate": 0.5}, State.FINISHED)]
    again.close()


def test_a_function_is_needed():
    with pytest.raises(PhalanxError, match="nothing or several"):
        DistributedTuner(search_space={"x": uniform(0, 1)})


def test_the_page(tmp_path):
    space = {"x": uniform(-3, 3), "kind": choice(["a", "b"]), "y": uniform(0, 1, when={"kind": "a"})}
    tuner = DistributedTuner(curve, space, scheduler="asha", parallel=2, study_dir="study")
    tuner.tune(num_samples=4)
    page = (tmp_path / "study/study.html").read_text()
    best = tuner.results.best
    assert f"trial {best.number}, loss <b>" in page
    for part in ("History", "Each hyperparameter", "All hyperparameters", "Learning curves", "Trials"):
        assert f"<h2>{part}</h2>" in page
    assert page.count('class="grid"') > 20
    assert "best so far" in page
    assert 'href="trials/0000/logs"' in page
    assert "<dt>seed</dt><dd>0</dd>" in page
    assert "http" not in page, "one file that needs nothing else"
    for trial in tuner.results.trials:
        assert f"<title>trial {trial.number}: x {trial.params['x']:.4g}" in page
