"""Numbers of the user's: what `log` takes, how values are reported, and what they decide in a trainer, on one rank."""

from __future__ import annotations

import json
import sys
import threading

import numpy as np
import programs
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import phalanx
from phalanx import Callback, Formation, Trainer
from phalanx.config import DistributedConfig
from phalanx.config.settings import parse_metric
from phalanx.errors import UsageError
from phalanx.loop.best import check_metrics
from phalanx.loop.script import ScriptRecord
from phalanx.loop.values import OWN_CURVES, ValueLog, checked, never_logged
from phalanx.observe.events import LOGGED, MetricsReported, StepDone, from_json
from phalanx.observe.history import History
from phalanx.run.stored import StoredRun, last_values
from phalanx.tools.tune.trial import Trial

DATA = TensorDataset(torch.ones(24, 1), torch.zeros(24, 1))


def events_of(folder) -> list:
    return [from_json(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def logged(folder) -> list[tuple[int, dict[str, float]]]:
    return [(e.step, e.values) for e in events_of(folder) if isinstance(e, MetricsReported) and e.split == LOGGED]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"a": torch.zeros(4)}, ["'a' = a Tensor of shape [4]", "value.mean()"]),
        ({"a": np.zeros(3)}, ["'a' = a ndarray of shape [3]"]),
        ({"gan/": 1.0}, ["'gan/'", "log({'gan': ...})"]),
        ({"": 1.0}, ["''"]),
        ({"a/../b": 1.0}, ["'a/../b'", "log({'a/b': ...})"]),
        ({"x" * 300: 1.0}, ["a name of 300 characters"]),
        ({"a\n": 1.0}, ["'a\\n'"]),
        ({"phase": "warm-up"}, ["'phase' = 'warm-up', which is a text"]),
        ({"a": None}, ["'a' = a NoneType"]),
        ({3: 1.0}, ["the name 3"]),
        ([1.0], ["list [1.0]", 'log({"critic": critic_loss})']),
        ({"train/loss": 1.0}, ["'train/loss' is a curve that Phalanx draws by itself", "'my/loss'"]),
        ({"perf/mfu": 1.0}, ["'perf/mfu' is a curve"]),
        ({"a": 10**400}, ["'a' = a number too large"]),
        ({"a": b"1"}, ["'a' = b'1', which is a text"]),
        ({"a": torch.zeros((), device="meta")}, ["'a' = a tensor on the device meta, which has no value"]),
        ({"a": torch.tensor(1j)}, ["'a' = a tensor of torch.complex64"]),
    ],
)
def test_what_log_refuses(values, words):
    with pytest.raises(UsageError) as refused:
        checked(values, reserved=OWN_CURVES)
    text = f"{refused.value.message} {refused.value.hint}"
    assert all(word in text for word in words), text
    assert "\n" not in refused.value.message


def test_what_log_takes():
    given = {"int": 1, "bool": True, "tensor": torch.tensor([2.0]), "numpy": np.float32(0.5), "gan/critic": 0.25}
    assert checked(given) == {"int": 1.0, "bool": 1.0, "tensor": 2.0, "numpy": 0.5, "gan/critic": 0.25}
    assert checked("critic", 3) == {"critic": 3.0}
    assert checked({"array": np.ones((1, 1)), "sparse": torch.ones(1).to_sparse()}) == {"array": 1.0, "sparse": 1.0}


@pytest.mark.parametrize("step", ["x", 1.5, -1])
def test_a_step_that_is_none_is_refused(tmp_path, step):
    f = Formation(batch_size=4, device="cpu", run_dir=str(tmp_path / "run"))
    with pytest.raises(UsageError, match=r"log got step = .*, which does not number a step"):
        f.log({"a": 1}, step=step)
    with pytest.raises(UsageError, match="log got step"):
        ScriptRecord(tmp_path).log({"a": 1}, step=step)
    f.close()


def test_what_a_script_may_not_log(tmp_path):
    record = ScriptRecord(tmp_path)
    with pytest.raises(UsageError, match="unknown op 'avg'"):
        record.log({"a": 1}, reduce="avg")
    with pytest.raises(UsageError, match="'perf/step_seconds' is a curve"):
        record.log({"perf/step_seconds": 1})
    record.log({}, reduce="mean")


def test_values_logged_behind_the_report_are_averaged_too():
    log = ValueLog()
    for step in range(6, 10):  # the report of step 10 comes before its value
        log.add(step, {"each": float(step)})
    assert log.read(5) == [(9, {"each": 7.5})]
    for step in range(30):  # steps of the user's, of which none is to be lost
        log.add(step, {"own": float(step)})
    assert len(log.read(5)) == 30


def test_a_thread_may_log_while_values_are_read():
    log, seen = ValueLog(), []
    writer = threading.Thread(target=lambda: [log.add(step, {"a": 1.0}) for step in range(20_000)])
    writer.start()
    while writer.is_alive() or log:
        seen += [step for step, _ in log.read(0)]
    assert sorted(seen) == list(range(20_000))


def test_a_tensor_that_changes_later_keeps_its_value():
    total = torch.tensor(1.0)
    log = ValueLog()
    log.add(1, checked({"total": total}))
    total += 5
    assert log.read(1) == [(1, {"total": 1.0})]


def test_each_steps_values_are_reported_as_their_mean_and_others_at_their_steps():
    log = ValueLog()
    for step in range(1, 11):
        log.add(step, {"each": float(step)})
    log.add(4, {"rare": 1.0})
    log.add(8, {"rare": 3.0})
    log.add(8, {"rare": 5.0})  # a second micro-batch
    assert log.read(10) == [(4, {"rare": 1.0}), (8, {"rare": 4.0}), (10, {"each": 5.5})]
    assert not log
    assert log.read(10) == []


class Logs(Callback):
    """Logs in each hook."""

    def __init__(self, fid: list[float]) -> None:
        self.fid = fid

    def on_step_end(self, trainer, info):
        trainer.log({"twice": 2 * info.step})

    def on_epoch_end(self, trainer, epoch, metrics):
        phalanx.log({"fid": self.fid[epoch], "val/mine": epoch})

    def on_fit_end(self, trainer):
        trainer.log("last", 7)


def fit(folder, callbacks, **settings) -> History:
    given = {"epochs": 3, "batch_size": 4, "log_every_n_steps": 4, "verbosity": "quiet", **settings}
    return Trainer(nn.Linear(1, 1), run_dir=str(folder), device="cpu", callbacks=callbacks, **given).fit(DATA)


def test_callbacks_log_to_events_and_history(tmp_path):
    history = fit(tmp_path / "run", [Logs([3, 2, 1])])
    points = logged(tmp_path / "run")
    assert [(step, values["fid"]) for step, values in points if "fid" in values] == [(6, 3.0), (12, 2.0), (18, 1.0)]
    assert points[0] == (3, {"twice": 4.0})  # the mean of the steps before the first report
    assert {"last": 7.0} in [values for _, values in points]
    assert history.logged == [{"step": step, "values": values} for step, values in points]
    assert History.from_events(json.loads(e.to_json()) for e in events_of(tmp_path / "run")).logged == history.logged
    assert [(each["step"], each["val"]) for each in history.evaluations] == [
        (6, {"mine": 0}),
        (12, {"mine": 1}),
        (18, {"mine": 2}),
    ]
    assert last_values(StoredRun(tmp_path / "run")) | {"fid": 1.0, "val/mine": 2.0, "last": 7.0} == last_values(
        StoredRun(tmp_path / "run")
    )


def test_a_logged_value_chooses_the_best_checkpoint_and_stops(tmp_path):
    history = fit(tmp_path / "run", [Logs([3, 1, 2, 4])], epochs=4, keep_best="min:fid", checkpoint_frequency=1)
    assert (history.best_metric, history.best_value, history.best_step) == ("fid", 1.0, 12)
    assert StoredRun(tmp_path / "run").best == ("fid", 1.0)
    stopped = fit(tmp_path / "stop", [Logs([3, 1, 2, 4, 5, 6])], epochs=6, early_stopping="min:fid", patience=2)
    assert len(stopped.epochs) == 4
    assert "fid" in stopped.reason


def test_a_worker_of_a_loader_may_not_log(monkeypatch):
    monkeypatch.setattr("phalanx.loop.script.get_worker_info", object)
    with pytest.raises(UsageError, match="worker process of a DataLoader, from which no number reaches the run"):
        phalanx.log("item", 1)


def test_a_name_that_is_never_logged_is_reported_after_the_first_epoch(tmp_path):
    fit(tmp_path / "run", [Logs([3, 2, 1])], keep_best="max:fdi")
    texts = [e.text for e in events_of(tmp_path / "run") if e.kind == "message"]
    assert (
        "keep_best: 'fdi' was not logged in the first epoch; logged so far: fid, twice, val/mine. Did you mean 'fid'?"
        in texts
    )
    assert "nothing was logged" in never_logged("keep_best", "a", [])
    assert "Did you mean 'val/accuracy'?" in never_logged("keep_best", "accuracy", ["fid"], ["accuracy", "loss"])
    assert parse_metric("min: fid ") == ("fid", "min")
    with pytest.raises(UsageError, match=r"log it as 'fid', and write keep_best='min:fid'"):
        check_metrics(DistributedConfig(keep_best="min:val/fid"), has_val=True, names=["val/loss"])


def test_an_error_keeps_what_was_logged_until_then(tmp_path):
    class Fails(Callback):
        def on_step_end(self, trainer, info):
            trainer.log({"each": info.step})
            trainer.log({"ahead": 1.0}, step=info.step + 1)  # of a step that is not taken
            if info.step == 3:
                raise RuntimeError

    with pytest.raises(RuntimeError):
        fit(tmp_path / "run", [Fails()])
    found = [e for e in events_of(tmp_path / "run") if isinstance(e, MetricsReported)]
    assert [(e.step, e.epoch, e.values) for e in found] == [(3, 1, {"each": 2.0, "ahead": 1.0})]


def step_with_two_numbers(step, batch):
    inputs, targets = batch
    loss = (step.model.net(inputs) - targets).square().mean()
    step.backward(loss)
    step.optimizers["net"].step()
    step.optimizers["net"].zero_grad()
    step.log("from_log", step.number)
    return {"loss": loss, "critic": loss.detach() * 2}


class Parts(nn.Module):
    """A model of one part."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1)


def fit_step(folder, run, **settings):
    make = {"net": lambda parameters: torch.optim.SGD(parameters, lr=0.1)}
    trainer = Trainer(
        Parts(),
        optimizer=make,
        training_step=run,
        run_dir=str(folder),
        device="cpu",
        verbosity="quiet",
        batch_size=4,
        **settings,
    )
    return trainer.fit(DATA)


def test_training_step_returns_a_dict(tmp_path):
    fit_step(tmp_path / "run", step_with_two_numbers, log_every_n_steps=1)
    losses = {e.step: e.loss for e in events_of(tmp_path / "run") if isinstance(e, StepDone)}
    points = dict(logged(tmp_path / "run"))
    assert points.keys() == losses.keys() == set(range(1, 7))
    assert all(points[step]["critic"] == pytest.approx(2 * losses[step]) for step in losses)
    assert [points[step]["from_log"] for step in points] == [1, 2, 3, 4, 5, 6]


def test_training_step_without_a_loss_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"a dict without 'loss'.*it has 'critic'"):
        fit_step(tmp_path / "run", lambda step, batch: {"critic": torch.zeros(())})


def own_loop(folder, epochs: int = 2, **settings) -> Formation:
    f = Formation(batch_size=4, device="cpu", run_dir=str(folder), log_every_n_steps=3, **settings)
    model = nn.Linear(1, 1)
    model, optimizer, loader = f.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), DATA)
    for epoch in range(epochs):
        for inputs, targets in loader:
            loss = (model(inputs) - targets).square().mean()
            f.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            f.log({"doubled": 2 * loss})
        phalanx.log("val/accuracy", epoch / 2)
    return f


def test_a_loop_with_formation_is_recorded(tmp_path):
    own_loop(tmp_path / "run").close()
    run = StoredRun(tmp_path / "run")
    assert run.steps == (12, None)
    assert run.ended["status"] == "finished"
    assert run.best == ("val/accuracy", 0.5)
    history = History.from_events(run.events())
    assert [(e.epoch, e.step, e.val) for e in history.epochs] == [(1, 6, {"accuracy": 0.0}), (2, 12, {"accuracy": 0.5})]
    assert [each["step"] for each in history.steps] == [1, 3, 6, 9, 12]
    assert all(each["samples_per_second"] > 0 and each["learning_rate"] == 0.1 for each in history.steps)
    assert history.throughput > 0


def test_the_last_step_of_a_loop_is_reported(tmp_path):
    own_loop(tmp_path / "run", epochs=1, seed=3).close()
    with Formation(batch_size=4, device="cpu", run_dir=str(tmp_path / "short"), log_every_n_steps=100) as f:
        model = nn.Linear(1, 1)
        model, optimizer = f.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(5):
            f.backward(model(torch.ones(4, 1)).mean())
            optimizer.step()
    steps = [[e.step for e in events_of(tmp_path / name) if isinstance(e, StepDone)] for name in ("run", "short")]
    assert steps == [[1, 3, 6], [1, 5]]


def test_a_run_is_judged_by_what_is_logged_of_the_validation_data(tmp_path):
    fit(tmp_path / "run", [Logs([3, 2, 1])])
    assert StoredRun(tmp_path / "run").best == ("val/mine", 2.0), "not val/loss, which nothing has measured"


def test_a_loop_that_is_not_closed_keeps_what_it_logged(tmp_path):
    script = "from test_values import own_loop\nfrom pathlib import Path\nimport sys\nf = own_loop(Path(sys.argv[1]))\n"
    programs.run([sys.executable, "-c", script, tmp_path / "run"], check=True, cwd=__file__.rpartition("/")[0])
    steps, values = zip(*logged(tmp_path / "run"), strict=True)
    assert max(steps) == 12
    assert all(value.keys() == {"doubled"} for value in values)


def test_losses_of_several_passes_add_up(tmp_path):
    f = Formation(batch_size=4, device="cpu", run_dir=str(tmp_path / "run"), log_every_n_steps=1)
    model = nn.Linear(1, 1)
    model, optimizer, loader = f.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0), DATA)
    for inputs, _ in loader:
        f.backward(model(inputs).sum() * 0 + 1)
        f.backward(model(inputs).sum() * 0 + 2)
        optimizer.step()
        optimizer.zero_grad()
    f.close()
    assert {e.loss for e in events_of(tmp_path / "run") if isinstance(e, StepDone)} == {3.0}


def test_without_a_place_nothing_is_recorded_and_one_line_says_so(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    f = Formation(batch_size=4, device="cpu")
    f.log({"a": 1})
    phalanx.log({"a": 2})
    f.close()
    assert capfd.readouterr().err.count("log: nothing is recorded.") == 1
    assert list(tmp_path.iterdir()) == []


def test_after_close_one_line_says_that_nothing_is_recorded(tmp_path, capfd):
    f = own_loop(tmp_path / "run")
    f.close()
    f.log({"late": 1})
    assert capfd.readouterr().err.count("log: the Formation is closed") == 1


def test_trials_take_logged_values_with_the_epoch_that_ends(tmp_path):
    own_loop(tmp_path / "run").close()
    trial = Trial(number=1, params={}, folder=tmp_path / "run")
    trial.read_events()
    assert sorted(trial.reports) == [1, 2]
    assert trial.reports[2].keys() == {"train/loss", "val/accuracy", "doubled"}


def test_gather_for_metrics_on_one_rank(tmp_path):
    f = Formation(batch_size=10, device="cpu")
    rows = 0
    for inputs, _ in f.prepare_loader(DATA, training=False):
        rows += len(f.gather_for_metrics(inputs))
    assert rows == 24
    with pytest.raises(UsageError, match="got 7 rows for a batch of 4 samples"):
        f.gather_for_metrics(torch.zeros(7))
    with pytest.raises(UsageError, match="gather got a str"):
        f.gather("text")
    f.close()
    with pytest.raises(UsageError, match="no prepared loader was read"):
        Formation(batch_size=4, device="cpu").gather_for_metrics(torch.zeros(4))
