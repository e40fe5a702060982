"""Evaluation inside an epoch and before the first step, fast_dev_run and load_best_at_end, on one rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

import phalanx
from phalanx import Callback, PyTorchDDPTrainer, Trainer
from phalanx.config import DistributedConfig
from phalanx.errors import ConfigError, ModelError, UsageError
from phalanx.launch.error_file import users_traceback
from phalanx.observe.goodput import read_events
from phalanx.observe.history import History

torch.manual_seed(0)
INPUTS = torch.randn(32, 4)
DATA = TensorDataset(INPUTS, (INPUTS.sum(1) > 0).long())
"""Eight steps of four samples."""


@pytest.fixture(autouse=True)
def _in_own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 2))


def fit(model: nn.Module | None = None, train=DATA, val=DATA, **settings) -> History:
    silent = {"verbosity": "quiet", "progress": False}
    given = {"device": "cpu", "batch_size": 4, "learning_rate": 0.05, "epochs": 2, **silent, **settings}
    return Trainer(net() if model is None else model, **given).fit(train, val)


def measured(history: History) -> list[int]:
    return [each["step"] for each in history.evaluations]


@pytest.mark.parametrize(
    ("every", "within", "after"),
    [
        ("3 steps", [3, 6, 9, 12, 15], [16]),
        ("8 steps", [], [8, 16]),
        (0.25, [2, 4, 6, 10, 12, 14], [8, 16]),
        ("25%", [2, 4, 6, 10, 12, 14], [8, 16]),
        (0.3, [3, 6, 11, 14], [8, 16]),  # three times: a whole number of evaluations is in an epoch
        (1.0, [], [8, 16]),
        ("2 epochs", [], [16]),
        (0, [], []),
    ],
)
def test_when_it_is_evaluated(every, within, after):
    history = fit(eval_every=every)
    assert measured(history) == within
    assert [record.step for record in history.epochs if record.val] == after
    events = list(read_events(next(Path("runs").iterdir()) / "events.jsonl"))
    values = [event for event in events if event["event"] == "metrics" and event["split"] == "val"]
    assert [event["step"] for event in values] == sorted(within + after)
    assert [event["step"] for event in values if event.get("ends_epoch")] == after
    assert History.from_events(events).evaluations == history.evaluations


@pytest.mark.parametrize("given", [1.5, "0 steps", "150%", "soon", True, None, -1])
def test_other_spellings_are_refused(given):
    with pytest.raises(ConfigError, match="eval_every"):
        DistributedConfig(eval_every=given)


class Draws:
    """A metric that draws random numbers and remembers its calls."""

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.total = torch.zeros(())

    def __call__(self, output, target):
        self.calls.append(len(target))
        self.total += 1
        return torch.rand(len(target))


@pytest.mark.parametrize("settings", [{"eval_every": "3 steps"}, {"eval_every": 0.25, "sanity_val_batches": 0}])
def test_training_is_the_same_to_the_bit(settings):
    plain, often = net(), net()
    fit(plain, eval_every=0, metrics={"draws": Draws()})
    fit(often, metrics={"draws": Draws()}, **settings)
    for name, value in plain.state_dict().items():
        assert torch.equal(value, often.state_dict()[name]), name


@pytest.mark.parametrize("step", [5, 6, 8])
@pytest.mark.parametrize("every", ["3 steps", 0.25])
def test_a_resumption_neither_repeats_nor_leaves_out_an_evaluation(step, every):
    settings = {"eval_every": every, "checkpoint_dir": "kept", "checkpoint_frequency": "1 steps", "keep_last": None}
    whole = fit(**settings)
    again = fit(**settings, resume_from_checkpoint=f"kept/step-{step:08}")
    assert again.evaluations == whole.evaluations
    assert [record.val for record in again.epochs] == [record.val for record in whole.epochs]


class Sets(Callback):
    """Sets the only weight, which is the loss, after each step."""

    def __init__(self, values: list[float]) -> None:
        self.values = values

    def on_step_end(self, trainer, info):
        with torch.no_grad():
            trainer.formation.unwrap(trainer.model).weight.fill_(self.values[info.step - 1])


class Weight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, inputs):
        return self.weight * inputs


ONES = TensorDataset(torch.ones(32, 1), torch.zeros(32, 1))


def fit_weight(values: list[float], model: nn.Module | None = None, **settings) -> History:
    chosen = {"loss_fn": "l1", "callbacks": [Sets(values)], "learning_rate": 1e-9, "eval_every": "2 steps", **settings}
    return fit(Weight() if model is None else model, ONES, ONES, **chosen)


def test_early_stopping_and_the_best_checkpoint_act_inside_an_epoch():
    history = fit_weight(
        [9, 5, 9, 4, 9, 6, 9, 7, *[9] * 8], early_stopping="val/loss", patience=2, keep_best="val/loss"
    )
    assert history.reason == "early stopping, val/loss has not improved for 2 evaluations"
    assert (history.best_step, history.best_value) == (4, 4.0)
    assert history.best_checkpoint is not None
    assert history.best_checkpoint.endswith("step-00000004")
    history = fit_weight([9, 5, 9, 6, 9, 7, *[9] * 10], early_stopping="val/loss", patience=2)
    assert [(record.epoch, record.step, record.val) for record in history.epochs] == [(1, 6, {"loss": 7.0})]
    assert measured(history) == [2, 4, 6]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(zip(*DATA.tensors, strict=True))


def test_a_stream_without_a_length_takes_steps_and_no_share():
    assert measured(fit(train=Stream(), eval_every="3 steps")) == [3, 6, 9, 12, 15]
    with pytest.raises(UsageError, match=r"(?s)a share of an epoch, but .* no length.*eval_every='500 steps'"):
        fit(train=Stream(), eval_every=0.5)


def test_evaluations_without_validation_data_are_announced(capsys):
    fit(val=None, eval_every="2 steps", verbosity="normal", progress=True)
    assert "eval_every = '2 steps': there is no validation data, so nothing is evaluated" in capsys.readouterr().out
    fit(val=None, verbosity="normal", progress=True)
    assert "no validation data" not in capsys.readouterr().out


def test_a_metric_that_raises_is_named():
    def mine(output, target):
        raise ValueError("boom")

    with pytest.raises(ValueError, match="boom") as caught:
        fit(metrics={"mine": mine})
    assert caught.value.__notes__[0] == "It was raised by the metric 'mine'."
    assert users_traceback(caught.value)[1].endswith(", in test_a_metric_that_raises_is_named")
    caught.value.__traceback__ = caught.value.__traceback__.tb_next.tb_next  # after this file's own frames
    assert users_traceback(caught.value)[1].endswith(", in mine")


class Fails(Callback):
    def on_step_end(self, trainer, info):
        raise AssertionError("a step was taken")


def broken(output, target):
    return torch.zeros(len(target) + 1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"metrics": {"broken": broken}}, "the metric 'broken' returned values of shape"),
        ({"val": TensorDataset(torch.randn(8, 5), torch.zeros(8).long())}, r"got float32 \[4, 5\]"),
    ],
)
def test_what_is_wrong_with_evaluation_is_found_before_the_first_step(settings, message):
    with pytest.raises(ModelError, match=message):
        fit(callbacks=[Fails()], **settings)
    assert not Path("runs").exists()


def test_a_checkpoint_folder_that_cannot_be_written_is_found_before_the_first_step():
    Path("kept").write_text("a file")
    with pytest.raises(phalanx.PhalanxError, match="kept"):
        fit(callbacks=[Fails()], checkpoint_dir="kept")


def test_nothing_of_the_first_batches_stays():
    metric, model = Draws(), net()
    before = {name: value.clone() for name, value in model.state_dict().items()}

    class Looks(Callback):
        def on_fit_start(self, trainer):
            state = trainer.formation.unwrap(trainer.model).state_dict()
            assert all(torch.equal(value, state[name]) for name, value in before.items())
            assert trainer.formation.unwrap(trainer.model).training
            assert (metric.calls, float(metric.total)) == ([], 0.0)

    history = fit(model, metrics={"draws": metric}, callbacks=[Looks()], epochs=1)
    assert len(metric.calls) == 8
    assert history.evaluations == []


class Counts(TensorDataset):
    reads = 0

    def __getitem__(self, index):
        type(self).reads += 1
        return super().__getitem__(index)


@pytest.mark.parametrize(("batches", "reads"), [(0, 0), (1, 4), (2, 8)])
def test_how_many_batches_are_tried(batches, reads):
    class StopsAtOnce(Callback):
        def on_fit_start(self, trainer):
            assert Counts.reads == reads
            trainer.request_stop("seen")

    Counts.reads = 0
    fit(val=Counts(*DATA.tensors), sanity_val_batches=batches, callbacks=[StopsAtOnce()])


class OneClassIsTooFew:
    def __call__(self, output, target):
        return torch.stack([output[:, 1], target], dim=1)

    def combine(self, rows, samples):
        if len(rows[:, 1].unique()) < 2:
            raise ValueError("only one class")
        return {"area": 0.5}


def test_a_metric_that_two_batches_are_too_few_for_is_no_mistake():
    val = TensorDataset(INPUTS, torch.arange(32) // 16)
    history = fit(val=val, metrics={"rank": OneClassIsTooFew()}, keep_best="max:val/area", epochs=1)
    assert history.epochs[0].val["area"] == 0.5
    with pytest.raises(UsageError, match=r"unknown metric 'val/rank'.* Allowed: train/loss, val/area, val/loss"):
        fit(metrics={"rank": OneClassIsTooFew()}, keep_best="max:val/rank", callbacks=[Fails()])


def test_a_fast_dev_run_leaves_nothing(capsys):
    metric = Draws()
    settings = {"checkpoint_dir": "kept", "tensorboard": True, "run_dir": "there", "verbosity": "normal"}
    history = fit(fast_dev_run=3, metrics={"draws": metric}, epochs=50, **settings)
    assert [record.step for record in history.epochs] == [3]
    assert metric.calls == [4, 4, 4]
    assert history.checkpoint is None
    assert list(Path().iterdir()) == []
    said = "Training finished: fast_dev_run, at most 3 batches of training and of evaluation per rank; nothing is kept"
    assert said in capsys.readouterr().err
    assert [record.step for record in fit(fast_dev_run=True).epochs] == [1]
    with pytest.raises(ConfigError, match="fast_dev_run = True with resume_from_checkpoint"):
        fit(fast_dev_run=True, resume_from_checkpoint="kept")


@pytest.mark.parametrize(
    ("values", "averaged"),
    [([9, 5, 9, 4, 9, 6], {}), ([5, 9, 4, 9, 6, 9], {"ema_decay": 1e-9})],  # the average is that before the callback
)
def test_the_model_has_the_best_weights_at_the_end(values, averaged, capsys):
    model = Weight()
    history = fit_weight([*values, *[9] * 10], model, load_best_at_end=True, verbosity="normal", **averaged)
    assert (model.weight.item(), history.best_step, history.loaded_best) == (pytest.approx(4.0), 4, True)
    assert history.epochs[-1].step == 16
    assert "step-00000004 (val/loss 4.0000): the model has its weights" in capsys.readouterr().err
    last = fit_weight([*values, *[9] * 10], model)
    assert (model.weight.item(), last.loaded_best) == (pytest.approx(9.0), False)


def test_the_best_weights_need_an_evaluation():
    with pytest.raises(ConfigError, match="load_best_at_end = True with keep_best = false"):
        DistributedConfig(load_best_at_end=True, keep_best=False)
    with pytest.raises(ConfigError, match="load_best_at_end = True with eval_every = 0"):
        DistributedConfig(load_best_at_end=True, eval_every=0)
    with pytest.raises(UsageError, match=r"(?s)no validation data.*keep_best='train/loss'"):
        fit(val=None, load_best_at_end=True)
    assert fit(val=None, load_best_at_end=True, keep_best="train/loss").loaded_best


def test_a_fit_that_would_train_nothing_is_refused():
    first = fit(checkpoint_dir="kept")
    for given in ("kept", first.checkpoint):
        with pytest.raises(UsageError, match=r"(?s)has nothing left to train: epochs = 2.*Train on with epochs=4"):
            fit(resume_from_checkpoint=given)
    assert len(list(Path("runs").iterdir())) == 1
    assert fit(resume_from_checkpoint="kept", epochs=3).epochs[-1].step == 24


def test_one_line_says_what_a_fit_that_ended_early_has_left(capsys):
    class Stops(Callback):
        def on_step_end(self, trainer, info):
            if info.step == 3:
                trainer.request_stop("enough")

    def stopped(**settings) -> str:
        fit(callbacks=[Stops()], **settings)
        return capsys.readouterr().err.splitlines()[-1]

    assert stopped() == (
        "phalanx: enough after step 3: no checkpoint was saved, because no checkpoint_dir was set; the trained "
        "state is in the model"
    )
    assert stopped(checkpoint_dir="kept").endswith(
        "after step 3: checkpoint kept/step-00000003; the trained state is in the model"
    )


def test_the_plain_name_is_the_same_class():
    assert PyTorchDDPTrainer is Trainer
    assert Trainer.__name__ == "Trainer"
