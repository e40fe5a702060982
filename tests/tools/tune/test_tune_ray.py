"""Searches on Ray: a real local Ray in a separate network namespace, with trials in its workers."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import textwrap
from importlib.util import find_spec

import pytest
from command import ROOT, clean_environment
from long_proofs import ALL, long_proof
from packages import require

from phalanx.errors import ConfigError
from phalanx.tools.tune.space import SearchSpace

require("optuna", "optuna is not installed: pip install 'phalanx[tune]'")

_SCRIPT = """
import json
import os
import signal
import threading
import time
from importlib.util import find_spec
from pathlib import Path

from long_proofs import ALL
from test_tune_population import train as fit

from phalanx import DistributedTuner, tune
from phalanx.engines.ray.cluster import open_cluster


def curve(config):
    if config["x"] == "bad":
        raise RuntimeError("the disk is on fire")
    for step in range(1, 5):
        tune.report(loss=config["x"] + 1 / step, step=step)


def dies(config):
    if config["x"] == 1:
        actor = os.getppid()
        while "TrialActor" not in Path(f"/proc/{actor}/cmdline").read_text():
            actor = int(Path(f"/proc/{actor}/stat").read_text().split()[3])
        os.kill(actor, signal.SIGKILL)
        time.sleep(60)
    return 0.5


def uneven(config):
    for step in range(1, 5):
        if config["x"] == 3:
            time.sleep(0.4)  # the first trial comes last to every point
        tune.report(loss=config["x"] + 1 / step, step=step)


def told(tuner):
    return [[t.number, str(t.state), t.cause, t.params, t.reports] for t in tuner.results.trials]


def halving(**more):
    tuner = DistributedTuner(curve, {"x": tune.choice([1, 4, "bad"])}, search="grid", scheduler="asha", parallel=1,
                             engine="ray", study_dir="asha", **more)
    tuner.tune()
    return told(tuner)


def race(engine, folder, parallel=2, **more):
    tuner = DistributedTuner(uneven, {"x": tune.choice([3, 1, 2])}, search="grid", scheduler="asha", eta=2,
                             parallel=parallel, engine=engine, study_dir=folder, **more)
    tuner.tune()
    return told(tuner)


def interrupt(file):
    while not file.exists():
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGINT)


def rest_of_race():
    file = Path("broken-off/trials/0000/events.jsonl")
    threading.Thread(target=interrupt, args=(file,)).start()
    try:
        race("ray", "broken-off")
    except KeyboardInterrupt:
        before = file.read_text().count("loss")
        return [before, race("ray", "broken-off", parallel=1, resume=True), file.read_text().count("loss")]


def lost():
    space = {"x": tune.choice([1, 2])}
    tuner = DistributedTuner(dies, space, search="grid", parallel=1, engine="ray", study_dir="lost")
    tuner.tune()
    return told(tuner)


def learnt(engine):
    space = {"x": tune.uniform(0, 1), "shape": tune.choice([(1, 2), (3, 4)])}
    tuner = DistributedTuner(lambda config: config["x"] + config["shape"][0], space, search="optuna", parallel=2,
                             engine=engine, study_dir=f"learnt-{engine}")
    tuner.tune(num_samples=3)
    return told(tuner)


def population():
    space = {"rate": tune.loguniform(1e-6, 0.05), "decay": tune.choice([0.0, 0.001, 0.01])}
    tracked = {"mlflow_experiment": "population"} if find_spec("mlflow") else {}
    tuner = DistributedTuner(fit, space, metric="val/loss", scheduler="pbt", engine="ray", seed=3, study_dir="pbt",
                             interval=2, **tracked)
    tuner.tune(num_samples=2)
    return told(tuner)


def tracked_runs():
    import mlflow

    client = mlflow.MlflowClient("sqlite:///mlflow.db")
    runs = client.search_runs([client.get_experiment_by_name("population").experiment_id])
    return {run.info.run_id: [run.info.run_name, run.info.status, run.data.tags.get("mlflow.parentRunId"),
                              sorted(run.data.metrics)] for run in runs}


def modes():
    import ray

    rays = ray.get_runtime_context().get_temp_dir()
    addresses = {node["NodeManagerAddress"] for node in ray.nodes()}
    return [os.stat(os.path.dirname(rays)).st_mode & 0o777, sorted(addresses), len(os.environ["RAY_AUTH_TOKEN"])]


found, before = {}, dict(os.environ)
with open_cluster(num_cpus=2):
    found["modes"] = modes()
    found["asha"] = halving()
    found["again"] = halving(resume=True)
    found["race"] = [race("ray", "race-ray"), race("local", "race-local")]
    found["lost"] = lost()
    if ALL:
        found["learnt"] = [learnt("ray"), learnt("local")]
        found["rest"] = rest_of_race()
        found["pbt"] = population()
        found["mlflow"] = tracked_runs() if find_spec("mlflow") else None
    try:
        DistributedTuner(curve, {"x": 1}, engine="ray", num_workers=64, study_dir="big").tune(num_samples=1)
    except Exception as error:
        found["big"] = str(error)
found["changed"] = sorted(name for name in set(before) | set(os.environ) if before.get(name) != os.environ.get(name))
with open("found.json", "w") as file:
    json.dump(found, file)
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Everything on one Ray, since starting it takes longest."""
    return _run(tmp_path_factory.mktemp("ray"), _SCRIPT)


def _run(folder, script):
    if find_spec("ray") is None:  # not imported here: it takes seconds, and sets variables
        pytest.skip("ray is not installed: pip install 'phalanx[ray]'")
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-n", "true"], check=False).returncode:
        pytest.skip("Ray listens on all interfaces, and no network namespace of its own can be made for it here")
    (folder / "search.py").write_text(textwrap.dedent(script))
    path = f"{ROOT}:{ROOT / 'tests/helpers'}:{ROOT / 'tests/tools/tune'}"
    env = {**clean_environment(PHALANX_DEVICE="cpu", OMP_NUM_THREADS="1"), "PYTHONPATH": path, "TMPDIR": "/tmp"}
    env["PHALANX_ALL_TESTS"] = str(int(ALL))
    words = ["unshare", "-n", "sh", "-c", 'ip link set lo up && exec "$0" search.py', sys.executable]
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=560, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, json.loads((folder / "found.json").read_text()), done.stdout


def test_bad_trials_are_stopped_and_failures_have_causes(found):
    _, told, _ = found
    states = [(number, state, cause) for number, state, cause, _, _ in told["asha"]]
    assert states == [(0, "finished", ""), (1, "stopped", ""), (2, "failed", "RuntimeError: the disk is on fire")]
    reports = [sorted(map(int, reports)) for *_, reports in told["asha"]]
    assert reports == [[1, 2, 3, 4], [1], []]


def test_a_local_ray_is_for_this_user_and_this_machine_only(found):
    mode, addresses, token = found[1]["modes"]
    assert (mode, addresses, token) == (0o700, ["127.0.0.1"], 64)
    assert [name for name in found[1]["changed"] if name.startswith("RAY_")] == [], "nothing of it stays"


def test_a_trial_whose_worker_is_killed_has_failed_and_stops_nothing(found):
    states = [(number, state, cause) for number, state, cause, _, _ in found[1]["lost"]]
    assert [state for _, state, _ in states] == ["failed", "finished"]
    assert states[0][2].startswith("its worker was lost: its process was killed")


def test_verdicts_are_those_of_the_local_engine_in_any_order_of_reports(found):
    on_ray, here = found[1]["race"]
    assert on_ray == here
    assert {state for _, state, *_ in on_ray} == {"finished", "stopped"}


def test_a_restored_search_has_every_trial_and_runs_none_again(found):
    folder, told, shown = found
    assert told["again"] == told["asha"]
    assert len((folder / "asha/trials/0000/events.jsonl").read_text().splitlines()) == 4
    assert "best: trial 0, loss 1.25" in shown


@long_proof
def test_an_interrupted_search_continues_on_fewer_slots_and_comes_to_the_same(found):
    before, rest, after = found[1]["rest"]
    assert rest == found[1]["race"][0]
    assert "stopped after" in found[2]
    assert 0 < before < 4
    assert after == before + 4, "without a checkpoint it begins anew"


@long_proof
def test_optuna_on_ray_learns_what_it_learns_here(found):
    on_ray, here = found[1]["learnt"]
    assert on_ray == here
    assert [state for _, state, *_ in on_ray] == ["finished"] * 3


@long_proof
def test_an_exploit_on_ray_copies_weights_and_perturbs(found):
    import torch

    folder, told, _ = found
    first = [reports["2"]["val/loss"] for *_, reports in told["pbt"]]
    loser, winner = (0, 1) if first[0] > first[1] else (1, 0)
    then, own, best = (
        torch.load(folder / f"pbt/trials/{number:04d}/{name}.pt", weights_only=True)
        for number, name in ((loser, "first-2"), (loser, "last-2"), (winner, "last-2"))
    )
    assert all(torch.equal(then[name], best[name]) for name in best)
    assert not all(torch.equal(then[name], own[name]) for name in own)
    assert told["pbt"][loser][3] != told["pbt"][winner][3]
    assert [state for _, state, *_ in told["pbt"]] == ["finished", "finished"]


@long_proof
def test_mlflow_shows_trials_on_ray_below_their_search(found):
    runs = found[1]["mlflow"]
    if runs is None:
        pytest.skip("mlflow is not installed")
    (parent,) = [run for run, told in runs.items() if told[2] is None]
    assert runs[parent][1] == "FINISHED"
    children = sorted(told for run, told in runs.items() if run != parent)
    assert [told[:3] for told in children] == [[f"trial-{n}", "FINISHED", parent] for n in range(2)]
    assert all("val/loss" in told[3] for told in children)


def test_a_trial_that_fits_nowhere_is_refused(found):
    _, told, _ = found
    assert "1 trials with 64 CPU each do not fit" in told["big"]


def test_rays_own_domains(monkeypatch):
    monkeypatch.setenv("RAY_CLIENT_MODE", "0")  # Ray sets it itself when it is imported
    ray_tune = pytest.importorskip("ray.tune", reason="ray is not installed")
    space = SearchSpace(
        {
            "a": ray_tune.choice([1, 2]),
            "b": ray_tune.loguniform(1e-3, 1),
            "c": ray_tune.randint(1, 5),
            "d": ray_tune.quniform(0, 1, 0.25),
            "e": ray_tune.qrandint(2, 8, 2),
            "f": ray_tune.grid_search([True, False]),
        }
    )
    assert space.to_plain() == {
        "a": {"choice": [1, 2]},
        "b": {"loguniform": [1e-3, 1]},
        "c": {"randint": [1, 4]},
        "d": {"quniform": [0, 1, 0.25]},
        "e": {"qrandint": [2, 8, 2]},
        "f": {"choice": [True, False]},
    }
    with pytest.raises(ConfigError, match="has no word here"):
        SearchSpace({"a": ray_tune.randn(0, 1)})
