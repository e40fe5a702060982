"""TensorBoard reads what we write, MLflow keeps what we report, clocks leave out pauses, histories read well."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
from curves import accumulator, scalars

import phalanx
from phalanx import PyTorchDDPTrainer
from phalanx.errors import UsageError
from phalanx.host.gpus import GpuSensor
from phalanx.observe import events
from phalanx.observe.history import EpochRecord, History
from phalanx.observe.step_clock import StepClock
from phalanx.trackers.histograms import histogram_of
from phalanx.trackers.mlflow import MlflowSink
from phalanx.trackers.tensorboard import TensorBoardSink


def step(number: int, **changes) -> events.StepDone:
    return events.StepDone(number, 1, **{"loss": 1 / number, "learning_rate": 0.5, "memory_bytes": 1024, **changes})


def test_a_gpu_that_is_not_there_has_no_utilisation():
    assert GpuSensor("ffff:ff:1f.0").read() == (None, None, None, None)


def test_tensorboard_reads_what_was_written(tmp_path):
    sink = TensorBoardSink(tmp_path)
    sink.handle(step(1, grad_norm=2.0, samples_per_second=64.0, gpu_utilization=0.75, speedup=1.5))
    sink.handle(step(2, loss=math.inf))
    sink.handle(events.MetricsReported(2, 1, "val", {"accuracy": 0.75}))
    before_closing = scalars(tmp_path)
    sink.close()
    assert scalars(tmp_path) == before_closing
    assert before_closing["train/loss"] == [(1, 1.0), (2, math.inf)]
    assert before_closing["val/accuracy"] == [(2, 0.75)]
    assert before_closing["train/grad_norm"] == [(1, 2.0)]
    assert before_closing["train/learning_rate"] == [(1, 0.5), (2, 0.5)]
    assert before_closing["perf/samples_per_second"] == [(1, 64.0), (2, 0.0)]
    assert (before_closing["system/gpu_utilization"], before_closing["perf/speedup"]) == ([(1, 0.75)], [(1, 1.5)])
    assert before_closing["system/memory_bytes"] == [(1, 1024.0), (2, 1024.0)]


def started(first_step: int = 0) -> events.RunStarted:
    return events.RunStarted("digits", "runs/1", 2, "cpu", "ddp", "bf16", 10, 32, 1, 64, first_step=first_step)


def test_a_resumed_run_continues_its_curves_without_duplicates(tmp_path):
    first, second = TensorBoardSink(tmp_path), TensorBoardSink(tmp_path)
    for sink, resumed_at, steps in ((first, 0, (1, 2, 3, 4)), (second, 2, (3, 4, 5))):
        sink.handle(started(resumed_at))
        for number in steps:
            sink.handle(step(number, loss=number + resumed_at))
        sink.close()
    assert scalars(tmp_path)["train/loss"] == [(1, 1.0), (2, 2.0), (3, 5.0), (4, 6.0), (5, 7.0)]


def test_tensorboard_has_the_settings_as_text_and_hyperparameters(tmp_path):
    from tensorboard.plugins.hparams import plugin_data_pb2

    sink = TensorBoardSink(tmp_path, {"learning_rate": 0.5, "optimizer": "sgd", "compile": True}, "seed = 7")
    sink.handle(started())
    sink.handle(events.RunEnded("finished", 2, 1.0, 64.0))
    sink.close()
    reader = accumulator(tmp_path)
    (text,) = reader.Tensors("config/text_summary")
    assert text.tensor_proto.string_val[0] == b"```toml\nseed = 7\n```"
    kept = plugin_data_pb2.HParamsPluginData.FromString(
        reader.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    )
    found = kept.session_start_info.hparams
    assert (found["learning_rate"].number_value, found["optimizer"].string_value) == (0.5, "sgd")
    assert found["compile"].bool_value
    ended = reader.SummaryMetadata("_hparams_/session_end_info").plugin_data.content
    assert plugin_data_pb2.HParamsPluginData.FromString(ended).session_end_info.status == 1


def test_histograms_count_every_finite_value(tmp_path):
    values = torch.tensor([0.0, 1.0, 1.0, 4.0, math.nan])
    sink = TensorBoardSink(tmp_path)
    sink.histograms(3, {"weights/a": histogram_of(values), "weights/same": histogram_of(torch.ones(5))})
    sink.close()
    reader = accumulator(tmp_path)
    (first,), (same,) = reader.Histograms("weights/a"), reader.Histograms("weights/same")
    kept = first.histogram_value
    assert (first.step, kept.min, kept.max, kept.num, kept.sum, kept.sum_squares) == (3, 0.0, 4.0, 4, 6.0, 18.0)
    assert (sum(kept.bucket), sum(same.histogram_value.bucket)) == (4, 5)
    assert histogram_of(torch.tensor([math.inf])) is None


def test_weights_and_gradients_are_written_every_n_epochs(tmp_path):
    data = torch.utils.data.TensorDataset(torch.randn(8, 4), torch.arange(8) % 2)
    trainer = PyTorchDDPTrainer(torch.nn.Linear(4, 2), num_workers=1, device="cpu", batch_size=4, epochs=4,
                                loss_fn=torch.nn.CrossEntropyLoss(), run_dir=str(tmp_path), verbosity="quiet",
                                tensorboard_histograms=2)  # fmt: skip
    trainer.fit(data)
    reader = accumulator(tmp_path)
    assert [item.step for item in reader.Histograms("weights/weight")] == [4, 8]
    assert [item.step for item in reader.Histograms("gradients/bias")] == [1, 5]


WITHOUT = """
import torch
from phalanx import Trainer

data = torch.utils.data.TensorDataset(torch.randn(8, 4), torch.arange(8) % 2)
trainer = Trainer(torch.nn.Linear(4, 2), num_workers=1, device="cpu", batch_size=4, epochs=1, run_dir="run",
                  loss_fn=torch.nn.CrossEntropyLoss(), tensorboard=True, tensorboard_histograms=1)
trainer.fit(data)
"""


def test_a_run_without_tensorboard_goes_on_with_one_line(tmp_path):
    """The packages of this environment but one, as links: `-S` leaves the environment's own folder out."""
    packages = tmp_path / "packages"
    packages.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not path.name.startswith("tensorboard"):
            (packages / path.name).symlink_to(path)
    environment = {**os.environ, "PYTHONPATH": f"{packages}:{Path(phalanx.__file__).parents[1]}"}
    command = [sys.executable, "-S", "-c", WITHOUT]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    text = done.stdout + done.stderr
    assert text.count("tensorboard: not installed") == 1, text
    assert "pip install 'phalanx[tensorboard]'" in text
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [event["tensorboard_dir"] for event in events if event["event"] == "run_started"] == [None]
    assert [event["status"] for event in events if event["event"] == "run_ended"] == ["finished"]


def test_tensorflow_is_never_imported(tmp_path):
    """An importable package named tensorflow, as on a machine that has it, must not be touched."""
    (tmp_path / "tensorflow.py").write_text("raise SystemExit('tensorflow was imported')")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from phalanx.trackers.tensorboard import TensorBoardSink\n"
        "from phalanx.observe.events import StepDone\n"
        "sink = TensorBoardSink(sys.argv[1]); sink.handle(StepDone(1, 1, 0.5, 0.1)); sink.close()\n"
        "print([name for name in ('tensorflow', 'torch', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.fixture
def mlflow(tmp_path, monkeypatch):
    module = pytest.importorskip("mlflow", reason="MLflow is not installed: pip install 'phalanx[mlflow]'")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    module.set_tracking_uri(None)
    yield module
    module.end_run()
    module.set_tracking_uri(None)


def test_mlflow_keeps_parameters_metrics_and_configuration(tmp_path, mlflow):
    sink = MlflowSink("digits", "first", {"learning_rate": 0.5})
    sink.handle(events.RunStarted("digits", "runs/1", 2, "cpu", "ddp", "bf16", 10, 32, 1, 64))
    sink.handle(step(1))
    sink.handle(step(2))
    sink.handle(events.MetricsReported(2, 1, "val", {"accuracy": 0.75}))
    sink.handle(events.RunEnded("finished", 2, 1.0, 64.0, {"accuracy": 0.75}))
    sink.close()
    assert (tmp_path / "mlflow.db").exists()
    run = mlflow.get_run(sink.run_id)
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "first"
    assert run.data.params["learning_rate"] == "0.5"
    assert run.data.params["strategy"] == "ddp"
    assert run.data.metrics["val/accuracy"] == 0.75
    history = mlflow.MlflowClient().get_metric_history(sink.run_id, "train/loss")
    assert sorted((item.step, item.value) for item in history) == [(1, 1.0), (2, 0.5)]
    assert mlflow.artifacts.load_dict(f"runs:/{sink.run_id}/config.json") == {"learning_rate": 0.5}
    assert mlflow.active_run() is None


def test_a_resumed_run_continues_its_mlflow_run_where_the_server_has_it(tmp_path, mlflow):
    first = MlflowSink("digits", "first", {"learning_rate": 0.5}, tmp_path)
    first.handle(step(1, samples_per_second=64.0, speedup=2.0))
    first.close()
    again = MlflowSink("digits", "first", {"learning_rate": 0.5}, tmp_path, resumes=True)
    again.handle(step(2, samples_per_second=32.0))
    again.handle(events.RunEnded("finished", 2, 1.0, 64.0))
    again.close()
    assert again.run_id == first.run_id
    run = mlflow.get_run(first.run_id)
    assert run.info.status == "FINISHED"
    assert (run.data.metrics["throughput"], run.data.metrics["perf/samples_per_second"]) == (32.0, 32.0)
    assert (run.data.metrics["speedup"], run.data.metrics["perf/speedup"]) == (2.0, 2.0)
    fresh = MlflowSink("digits", "first", None, tmp_path)
    fresh.close()
    assert fresh.run_id != first.run_id, "a run that was not resumed is a run of its own"
    mlflow.set_tracking_uri("sqlite:///other.db")
    elsewhere = MlflowSink("digits", "first", None, tmp_path, resumes=True)
    elsewhere.close()
    assert elsewhere.run_id not in (first.run_id, fresh.run_id)


def test_mlflow_joins_an_active_run_and_leaves_it_open(mlflow):
    mlflow.set_tracking_uri("sqlite:///theirs.db")
    with mlflow.start_run() as theirs:
        mlflow.log_param("strategy", "mine")
        sink = MlflowSink("digits", "first")
        sink.handle(events.RunStarted("digits", "runs/1", 2, "cpu", "ddp", "bf16", 10, 32, 1, 64))
        sink.handle(events.RunEnded("failed", 2, 1.0, 64.0))
        sink.close()
        assert sink.run_id == theirs.info.run_id == mlflow.active_run().info.run_id
    params = mlflow.get_run(sink.run_id).data.params
    assert (params["strategy"], params["precision"]) == ("mine", "bf16")


def test_without_mlflow_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(UsageError, match=r"pip install 'phalanx\[mlflow\]'"):
        MlflowSink()


def test_pauses_do_not_count():
    now = [0.0]
    watch = StepClock(lambda: now[0])
    now[0] = 2.0
    with watch.paused("evaluate"), watch.paused("checkpoint"):
        now[0] = 7.0
        assert watch.seconds == 2.0
    now[0] = 8.0
    assert (watch.seconds, watch.pauses) == (3.0, {"evaluate": 5.0})


def test_throughput_is_that_of_training_time():
    now = [0.0]
    meter = StepClock(lambda: now[0])
    assert (meter.average, meter.lap()) == (0.0, (0.0, 0.0))
    meter.step_done(64)
    meter.step_done(64)
    now[0] = 2.0
    assert meter.lap() == (64.0, 1.0)
    with meter.paused("evaluate"):
        now[0] = 100.0
    meter.step_done(32)
    now[0] = 102.0
    assert meter.lap() == (16.0, 2.0)
    assert meter.average == 40.0


def test_the_average_leaves_the_first_steps_out():
    now = [0.0]
    meter = StepClock(lambda: now[0])
    meter.step_done(64)
    now[0] = 60.0
    meter.warmed_up()
    assert meter.average == 64 / 60  # there is nothing else yet
    meter.step_done(64)
    now[0] = 61.0
    assert (meter.average, meter.warm_up.seconds) == (64.0, 60.0)


def test_slow_laps_are_counted_and_stay_in_the_average():
    now = [0.0]
    meter = StepClock(lambda: now[0])
    for seconds in (60.0, 10.0, 9.0, 45.0, 11.0):  # the first lap is the warm-up
        for _ in range(10):
            meter.step_done(8)
        now[0] += seconds
        meter.warmed_up() if now[0] == 60.0 else None
        meter.lap()
    assert meter.slow_laps == (45.0, 1, 4)
    assert meter.average == 320 / 75
    now[0] += 30.0
    assert meter.average == 320 / 75, "what follows the last step is not training"
    meter.step_done(8)
    assert meter.average == 328 / 105


def test_laps_that_only_compiled_are_not_slow_and_compilation_is_not_in_the_average():
    now = [0.0]
    meter = StepClock(lambda: now[0])
    for compiled in (0.0, 0.0, 40.0, 0.0):
        meter.enter("forward")
        now[0] += compiled
        meter.leave_out("compile", compiled)
        now[0] += 10.0
        meter.enter("other")
        meter.step_done(80)
        meter.lap()
    assert (meter.average, meter.slow_laps, meter.pauses["compile"]) == (8.0, (0.0, 0, 4), 40.0)
    assert meter.phase_seconds["forward"] == 40.0
    with meter.paused("evaluate"):
        now[0] += 5.0
        meter.leave_out("compile", 5.0)
    assert meter.pauses == {"compile": 40.0, "evaluate": 5.0}


def test_with_few_laps_none_is_slow():
    now = [0.0]
    meter = StepClock(lambda: now[0])
    for seconds in (1.0, 9.0):
        meter.step_done(5)
        now[0] += seconds
        meter.lap()
    assert (meter.average, meter.slow_laps) == (1.0, (0.0, 0, 2))


HISTORY = History(
    epochs=[
        EpochRecord(1, 10, 0.9, {"loss": 0.8, "accuracy": 0.5}, 1e-3, 2.0, 320.0),
        EpochRecord(2, 20, 0.7, {"loss": 0.6, "accuracy": 0.75}, 1e-3, 2.0, 320.0),
        EpochRecord(3, 30, 0.6, {"loss": math.nan, "accuracy": 0.7}, 1e-3, 2.0, 320.0),
    ],
    steps=[{"step": 30, "loss": 0.55}],
    status="finished",
    total_time=6.5,
    throughput=320.0,
)


def test_history_knows_the_best_and_the_last():
    assert (HISTORY.best_accuracy, HISTORY.best_loss, HISTORY.final_loss) == (0.75, 0.6, 0.6)
    assert repr(HISTORY) == (
        "History(finished, 3 epochs, 6.5 s, best accuracy 0.7500, best loss 0.6000, 320 samples/s)"
    )
    empty = History(steps=[{"loss": 0.5}])
    assert (empty.best_accuracy, empty.best_loss, empty.final_loss) == (None, None, 0.5)
    assert History(epochs=[EpochRecord(1, 1, 0.9)]).best_loss == 0.9
    diverged = History(epochs=[EpochRecord(1, 1, 0.9, {"loss": math.nan})])
    assert diverged.best_loss is None, "a training loss is not the best of validation losses"


def test_history_survives_json():
    again = History.from_dict(json.loads(json.dumps(HISTORY.to_dict())))
    assert repr(again) == repr(HISTORY)
    assert again.epochs[:2] == HISTORY.epochs[:2]
    assert again.steps == HISTORY.steps


def test_history_becomes_a_data_frame():
    pytest.importorskip("pandas")
    frame = HISTORY.to_dataframe()
    assert list(frame.columns) == [
        "epoch", "step", "train_loss", "learning_rate", "seconds", "samples_per_second", "val_loss", "val_accuracy",
    ]  # fmt: skip
    assert frame["val_accuracy"].tolist() == [0.5, 0.75, 0.7]
    assert list(History().to_dataframe().columns)[:3] == ["epoch", "step", "train_loss"]


def test_without_pandas_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UsageError, match=r"pip install 'phalanx\[pandas\]'"):
        HISTORY.to_dataframe()
