"""MLflow: a real tracking server, the command line's runs and a script's, logged by rank 0 alone."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
import torch
from command import clean_environment, phalanx
from long_proofs import long_proof
from tune_parts import train_line
from waiting import until

from phalanx import PyTorchDDPTrainer
from phalanx.tools.tune import DistributedTuner, choice

if TYPE_CHECKING:
    from collections.abc import Iterator

if importlib.util.find_spec("mlflow") is None:  # importing it takes seconds, which collecting tests need not
    pytest.skip("MLflow is not installed: pip install 'phalanx[mlflow]'", allow_module_level=True)


@pytest.fixture(scope="module", autouse=True)
def starting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A tracking server on a SQLite file, without the workers it starts for other purposes; it takes long to start.

    Not a child of this process: it starts workers while tests run, and those are not leaks.
    """
    folder = tmp_path_factory.mktemp("mlflow")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = f"mlflow server --workers 1 --host 127.0.0.1 --port {port} --backend-store-uri sqlite:///store.db"
    with (folder / "log").open("w") as log:
        subprocess.run(
            ["setsid", "--fork", "sh", "-c", 'echo $$ > pid; exec "$@"', "sh", sys.executable, "-m", *words.split(),
             "--artifacts-destination", str(folder / "artifacts")],
            cwd=folder,
            env=clean_environment(MLFLOW_SERVER_ENABLE_JOB_EXECUTION="false"),
            stdout=log,
            stderr=log,
            check=True,
        )  # fmt: skip
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        leader = int((folder / "pid").read_text())
        os.killpg(leader, signal.SIGTERM)
        until(lambda: not psutil.pid_exists(leader))


@pytest.fixture
def server(starting: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of the server, which answers; runs go there."""
    until(lambda: _answers(starting))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", starting)
    return starting


def _answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=1):
            return True
    except OSError:
        return False


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fork_server: None) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PHALANX_DEVICE", "cpu")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def test_a_server_that_does_not_answer_is_named_before_training(monkeypatch):
    """First, while the server starts."""
    with socket.socket() as probe:  # bound, not listening: connections are refused at once
        probe.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{probe.getsockname()[1]}"
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        done = phalanx("train", "digits", "--mlflow-tracking")
    assert done.code == 2, done.text
    assert f"MLflow at {address} took no run" in done.err
    assert "Traceback" not in done.text


@long_proof
def test_trials_are_shown_below_their_search_in_a_local_store(tmp_path):
    pytest.importorskip("optuna", reason="optuna is not installed: pip install 'phalanx[tune]'")
    import mlflow

    tuner = DistributedTuner(train_line, {"rate": choice([0.1, 0.01])}, metric="val/loss", search="grid", parallel=2,
                             mlflow_experiment="tuning", scheduler="asha")  # fmt: skip
    tuner.tune()
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
    experiment = client.get_experiment_by_name("tuning")
    runs = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    assert set(runs) == {"tune-train_line", "trial-0", "trial-1"}
    parent = runs["tune-train_line"]
    for number in (0, 1):
        child = runs[f"trial-{number}"]
        assert child.data.tags["mlflow.parentRunId"] == parent.info.run_id
        assert child.info.status == "FINISHED"
        assert float(child.data.params["rate"]) == (0.1, 0.01)[number]
    history = client.get_metric_history(runs["trial-0"].info.run_id, "val/loss")
    assert len(history) == 9
    assert parent.data.metrics["best/val/loss"] == tuner.results.best_value
    assert parent.info.status == "FINISHED"


def test_a_run_of_two_ranks_is_one_run_on_the_server(server, tmp_path):
    words = "train digits --num-workers 2 --epochs 2 --mlflow-experiment digits --checkpoint-frequency 1 --name first"
    done = phalanx(*words.split())
    assert done.code == 0, done.text
    import mlflow

    client = mlflow.MlflowClient(server)
    experiment = client.get_experiment_by_name("digits")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == "first"
    assert run.info.status == "FINISHED"
    assert (run.data.params["world_size"], run.data.params["epochs"]) == ("2", "2")
    assert 0 < run.data.metrics["val/accuracy"] <= 1
    assert run.data.metrics["best/accuracy"] >= run.data.metrics["val/accuracy"]
    assert len(client.get_metric_history(run.info.run_id, "val/loss")) == 2
    assert {file.path for file in client.list_artifacts(run.info.run_id)} == {
        "config.json",
        "config.toml",
        "events.jsonl",
    }
    assert "step-" in run.data.tags["phalanx.checkpoint"]
    kept = client.download_artifacts(run.info.run_id, "config.toml", str(tmp_path))
    assert "num_workers = 2" in Path(kept).read_text()


def test_a_trainer_joins_the_run_that_was_opened_around_it(server):
    import mlflow

    client = mlflow.MlflowClient(server)
    experiment = client.create_experiment("scripts")
    data = [(torch.randn(4), torch.tensor(n % 2)) for n in range(32)]
    with mlflow.start_run(run_name="mine", experiment_id=experiment):
        trainer = PyTorchDDPTrainer(torch.nn.Linear(4, 2), mlflow_tracking=True, num_workers=2, batch_size=8,
                                    reference_throughput=1.0, loss_fn=torch.nn.CrossEntropyLoss(),
                                    progress=False)  # fmt: skip
        trainer.fit(data)
        mlflow.log_metric("own", 7)
        mlflow.log_param("num_gpus", 8)  # what was not set is the user's to log
    (run,) = client.search_runs([experiment])
    assert (run.info.run_name, run.info.status) == ("mine", "FINISHED")
    assert run.data.metrics["own"] == 7
    assert run.data.params["num_gpus"] == "8"
    assert "None" not in run.data.params.values()
    assert run.data.metrics["throughput"] > 0
    assert run.data.metrics["speedup"] == pytest.approx(trainer.history.throughput)
    assert "train/epoch_loss" in run.data.metrics
