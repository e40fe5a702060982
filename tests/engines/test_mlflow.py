"""MLflow: a real tracking server, the command line's runs and a script's, logged by rank 0 alone."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from command import clean_environment, finish, start

if TYPE_CHECKING:
    from collections.abc import Iterator

mlflow = pytest.importorskip("mlflow", reason="MLflow is not installed: pip install 'phalanx[mlflow]'")

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A tracking server on a SQLite file, without the workers it starts for other purposes."""
    folder = tmp_path_factory.mktemp("mlflow")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = f"mlflow server --workers 1 --host 127.0.0.1 --port {port} --backend-store-uri sqlite:///store.db"
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", *words.split(), "--artifacts-destination", str(folder / "artifacts")],
            cwd=folder,
            env=clean_environment(MLFLOW_SERVER_ENABLE_JOB_EXECUTION="false"),
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    address = f"http://127.0.0.1:{port}"
    try:
        _wait_until_it_answers(address, process)
        yield address
    finally:
        os.killpg(process.pid, 15)
        process.wait(20)


def _wait_until_it_answers(address: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=1):
                return
        except OSError:
            time.sleep(0.1)
    pytest.fail("the MLflow server did not come up")


def test_a_run_of_two_ranks_is_one_run_on_the_server(server, tmp_path):
    words = "train digits --num-workers 2 --epochs 2 --mlflow-experiment digits --checkpoint-frequency 1 --name first"
    done = finish(start(*words.split(), cwd=tmp_path, MLFLOW_TRACKING_URI=server), 150)
    assert done.code == 0, done.text
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


def test_a_script_joins_the_run_it_opened(server, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import mlflow, phalanx, torch\n"
        "model = torch.nn.Linear(4, 2)\n"
        "data = [(torch.randn(4), torch.tensor(n % 2)) for n in range(32)]\n"
        "mlflow.set_experiment('scripts')\n"
        "with mlflow.start_run(run_name='mine') as run:\n"
        "    trainer = phalanx.PyTorchDDPTrainer(model, mlflow_tracking=True, num_workers=2, batch_size=8,\n"
        "                                        loss_fn=torch.nn.CrossEntropyLoss(), progress=False, device='cpu')\n"
        "    trainer.fit(data)\n"
        "    mlflow.log_metric('own', 7)\n"
    )
    environment = clean_environment(MLFLOW_TRACKING_URI=server)
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    client = mlflow.MlflowClient(server)
    (run,) = client.search_runs([client.get_experiment_by_name("scripts").experiment_id])
    assert (run.info.run_name, run.info.status) == ("mine", "FINISHED")
    assert run.data.metrics["own"] == 7
    assert "train/epoch_loss" in run.data.metrics


def test_a_server_that_does_not_answer_is_named_before_training(tmp_path):
    with socket.socket() as probe:  # bound, not listening: nobody answers, at once
        probe.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{probe.getsockname()[1]}"
        quick = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
        done = finish(start("train", "digits", "--mlflow-tracking", cwd=tmp_path, MLFLOW_TRACKING_URI=address, **quick))
    assert done.code == 2, done.text
    assert f"MLflow at {address} took no run" in done.err
    assert "Traceback" not in done.text
