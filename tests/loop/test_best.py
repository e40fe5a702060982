"""keep_best, early_stopping, eval_every=0, limit_val_batches and max_time, on one rank."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from phalanx import Callback, PyTorchDDPTrainer
from phalanx.checkpoint import find_best, list_checkpoints, read_tensors
from phalanx.config import DistributedConfig
from phalanx.config.settings import parse_metric
from phalanx.errors import ConfigError, UsageError
from phalanx.loop.best import MetricWatch
from phalanx.loop.stopping import TimeLimit


class Weight(nn.Module):
    """One weight, which is the loss on ones."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, inputs):
        return self.weight * inputs


class Script(Callback):
    """Sets the weight after each epoch's steps to a value, before the evaluation."""

    def __init__(self, values: list[float]) -> None:
        self.values = values

    def on_step_end(self, trainer, info):
        with torch.no_grad():
            trainer.formation.unwrap(trainer.model).weight.fill_(self.values[info.epoch])


def error(output, target):
    return (output - target).abs().mean()


DATA = TensorDataset(torch.ones(4, 1), torch.zeros(4, 1))


def fit(tmp_path: Path, values: list[float], callbacks: tuple = (), train=DATA, val=DATA, **settings):
    trainer = PyTorchDDPTrainer(
        Weight(),
        device="cpu",
        batch_size=4,
        learning_rate=1e-9,
        progress=False,
        run_dir=str(tmp_path / "run"),
        loss_fn=error,
        callbacks=[Script(values), *callbacks],
        **{"epochs": len(values), **settings},
    )
    return trainer.fit(train, val)


def saved_weight(path) -> float:
    found = {one.path.name: one for one in list_checkpoints(Path(path).parent)}[Path(path).name]
    state = {"model": {"weight": torch.zeros(1)}}
    read_tensors(found, state)
    return float(state["model"]["weight"])


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_the_time_that_was_spent_counts_on_when_the_ranks_change():
    limit = TimeLimit(10.0)
    assert limit.spent == 0.0
    limit.begin(spent=9.0)
    assert not limit.is_over
    assert 9.0 <= limit.spent < 9.9
    limit.begin(spent=limit.spent + 1.0)
    assert limit.is_over


def test_the_best_checkpoint_stays_next_to_the_last_ones(tmp_path):
    kept = tmp_path / "kept"
    history = fit(tmp_path, [3.0, 1.0, 2.0, 4.0, 5.0], checkpoint_dir=str(kept), keep_last=2)
    assert names(kept) == ["step-00000002", "step-00000004", "step-00000005"]
    assert history.best_checkpoint == str(kept / "step-00000002")
    assert (history.best_metric, history.best_value, history.best_step) == ("val/loss", 1.0, 2)
    assert saved_weight(history.best_checkpoint) == pytest.approx(1.0)
    best = find_best(kept)
    assert (best.path, best.metric, best.mode, best.value) == (kept / "step-00000002", "val/loss", "min", 1.0)


def test_a_new_best_is_saved_where_no_checkpoint_was_due(tmp_path):
    kept = tmp_path / "kept"
    history = fit(tmp_path, [3.0, 1.0, 2.0, 4.0], checkpoint_dir=str(kept), checkpoint_frequency=4)
    assert names(kept) == ["step-00000001", "step-00000002", "step-00000004"]
    assert history.best_checkpoint == str(kept / "step-00000002")


def test_a_step_is_written_once(tmp_path):
    class Saves(Callback):
        def __init__(self) -> None:
            self.paths: list[str] = []

        def on_checkpoint(self, trainer, path):
            self.paths.append(path)

    saves = Saves()
    fit(tmp_path, [3.0, 2.0], (saves,), checkpoint_dir=str(tmp_path / "kept"), checkpoint_frequency="1 steps")
    assert [Path(path).name for path in saves.paths] == ["step-00000001", "step-00000002"]


def test_keep_best_can_be_turned_off_or_follow_another_metric(tmp_path):
    settings = {"checkpoint_dir": str(tmp_path / "off"), "keep_last": 1}
    history = fit(tmp_path, [1.0, 2.0, 3.0], keep_best=False, **settings)
    assert (names(tmp_path / "off"), history.best_checkpoint) == (["step-00000003"], None)
    assert find_best(tmp_path / "off") is None
    settings["checkpoint_dir"] = str(tmp_path / "max")
    history = fit(tmp_path, [1.0, 3.0, 2.0], keep_best="max:val/loss", **settings)
    assert (history.best_step, names(tmp_path / "max")) == (2, ["step-00000002", "step-00000003"])


def test_a_metric_of_its_own_writes_checkpoints_without_checkpoint_dir(tmp_path):
    history = fit(tmp_path, [1.0, 2.0], keep_best="train/loss", val=None)
    assert history.best_step == 1  # the loss of epoch 1 was measured before the weight was set to 1
    assert Path(history.best_checkpoint).parent == tmp_path / "run/checkpoints"


def test_an_evaluation_within_an_epoch_counts(tmp_path):
    class Evaluates(Callback):
        def on_step_end(self, trainer, info):
            if info.step == 2:
                trainer.evaluate()

    data = TensorDataset(torch.ones(16, 1), torch.zeros(16, 1))
    history = fit(tmp_path, [1.0], (Evaluates(),), train=data, checkpoint_dir=str(tmp_path / "kept"))
    assert names(tmp_path / "kept") == ["step-00000002", "step-00000004"]
    assert history.best_step == 2


def test_the_best_so_far_survives_a_resumption_and_other_runs_keep_theirs(tmp_path):
    kept = {"checkpoint_dir": str(tmp_path / "kept"), "keep_last": 1}
    first = fit(tmp_path, [2.0, 1.0, 3.0], **kept)
    more = fit(tmp_path, [0.0, 0.0, 0.0, 4.0, 5.0], resume_from_checkpoint=True, **kept)
    assert more.best_checkpoint == first.best_checkpoint
    assert names(tmp_path / "kept") == ["step-00000002", "step-00000005"]
    better = fit(tmp_path, [0.0] * 5 + [0.5, 6.0], resume_from_checkpoint=True, **kept)
    assert better.best_step == 6
    assert find_best(tmp_path / "kept").step == 6


def test_a_resumed_run_that_watches_another_metric_begins_anew(tmp_path):
    kept = {"checkpoint_dir": str(tmp_path / "kept")}
    fit(tmp_path, [2.0, 1.0, 3.0], keep_best="max:val/loss", **kept)
    more = fit(tmp_path, [0.0, 0.0, 0.0, 1.5], resume_from_checkpoint=True, **kept)
    assert (more.best_step, more.best_value) == (4, 1.5)


def test_a_best_checkpoint_that_was_removed_is_not_named_after_a_resumption(tmp_path):
    kept = {"checkpoint_dir": str(tmp_path / "kept"), "keep_last": 1}
    first = fit(tmp_path, [1.0, 3.0], **kept)
    shutil.rmtree(first.best_checkpoint)
    more = fit(tmp_path, [0.0, 0.0, 2.0], resume_from_checkpoint=True, **kept)
    assert (more.best_step, more.best_value) == (3, 2.0)


def test_a_metric_of_validation_data_needs_such_data(tmp_path):
    with pytest.raises(UsageError, match="there is no validation data"):
        fit(tmp_path, [1.0], early_stopping="val/loss", val=None)


def test_training_stops_when_the_metric_no_longer_improves(tmp_path):
    history = fit(tmp_path, [5.0, 4.0, 4.5, 3.95, 9.0, 9.0], early_stopping="val/loss", patience=2, min_delta=0.1)
    assert len(history.epochs) == 4  # 3.95 is less than 0.1 below 4
    assert history.status == "finished"
    assert history.reason == "early stopping, val/loss has not improved for 2 evaluations"


def test_a_metric_that_is_nan_is_named_and_the_first_evaluation_does_not_count(tmp_path):
    nan = {"metrics": {"m": lambda output, target: torch.tensor(float("nan"))}}
    history = fit(tmp_path, [1.0] * 4, early_stopping="max:val/m", patience=1, keep_best="max:val/m", **nan)
    assert len(history.epochs) == 2
    assert history.reason == "early stopping, val/m is nan"
    assert "val/m is nan, which is no improvement" in (tmp_path / "run/events.jsonl").read_text()


def test_patience_continues_after_a_resumption(tmp_path):
    settings = {"early_stopping": "val/loss", "patience": 3, "checkpoint_dir": str(tmp_path / "kept")}
    fit(tmp_path, [1.0, 2.0, 2.0], **settings)
    history = fit(tmp_path, [0.0, 0.0, 0.0, 2.0, 2.0, 2.0], resume_from_checkpoint=True, **settings)
    assert len(history.epochs) == 4


def test_no_evaluation_with_eval_every_zero(tmp_path):
    history = fit(tmp_path, [1.0, 2.0], eval_every=0)
    assert [record.val for record in history.epochs] == [{}, {}]


@pytest.mark.parametrize(("limit", "value"), [(1, 1.0), (2, 1.5), (0.25, 1.0), (1.0, 2.5), (None, 2.5)])
def test_evaluation_may_use_the_first_batches_only(tmp_path, limit, value):
    inputs = torch.tensor([1.0, 2.0, 3.0, 4.0]).repeat_interleave(4)[:, None]
    val = TensorDataset(inputs, torch.zeros(16, 1))
    history = fit(tmp_path, [1.0, 1.0], val=val, limit_val_batches=limit)
    assert [record.val["loss"] for record in history.epochs] == pytest.approx([value, value])


def test_training_ends_when_its_time_is_over_and_is_saved(tmp_path):
    class Slow(Callback):
        def on_step_end(self, trainer, info):
            time.sleep(0.05)

    kept = str(tmp_path / "kept")
    history = fit(tmp_path, [1.0] * 100, (Slow(),), max_time=0.4, checkpoint_dir=kept, keep_last=1, keep_best=False)
    assert 2 <= len(history.epochs) < 15
    assert (history.status, history.reason) == ("finished", "max_time of 0.4 s reached")
    assert history.checkpoint is not None
    again = fit(
        tmp_path, [1.0] * (len(history.epochs) + 1), max_time="1m", checkpoint_dir=kept, resume_from_checkpoint=True
    )
    assert (again.reason, len(again.epochs)) == ("", len(history.epochs) + 1)


def test_a_run_that_ends_by_time_within_an_epoch_is_measured_and_saved_as_the_best(tmp_path):
    class Slow(Callback):
        def on_step_end(self, trainer, info):
            time.sleep(0.02)

    train = TensorDataset(torch.ones(4000, 1), torch.zeros(4000, 1))
    history = fit(tmp_path, [1.0], (Slow(),), train=train, max_time=0.2, checkpoint_dir=str(tmp_path / "kept"))
    assert [record.val["loss"] for record in history.epochs] == pytest.approx([1.0])
    assert find_best(tmp_path / "kept").step == history.best_step == history.epochs[0].step < 1000


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"keep_best": "val_loss"}, "write val/loss"),
        ({"keep_best": "val/margin"}, "write min:val/margin or max:val/margin"),
        ({"keep_best": "val/acuracy"}, "Or did you mean val/accuracy"),
        ({"early_stopping": "best:val/loss"}, "'best' is neither min nor max"),
        ({"early_stopping": "val/loss", "eval_every": 0}, "which never measures it"),
        ({"patience": 5}, "without early_stopping"),
        ({"max_time": "soon"}, "expected a duration above 0"),
        ({"limit_val_batches": 2.5}, "a share is up to 1.0"),
        ({"ema_decay": 1.0}, "must be below 1"),
        ({"ema_decay": 0.9, "strategy": "local-sgd"}, "write strategy = 'ddp', 'ring', 'fsdp'"),
        ({"ema_decay": 0.9, "pipeline_parallel": 2}, "stages are not averaged"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_the_start(settings, message):
    with pytest.raises(ConfigError, match=message):
        DistributedConfig(**settings)


@pytest.mark.parametrize(
    ("given", "seconds"), [("30m", 1800), ("2h", 7200), ("1:30:00", 5400), ("1h30m", 5400), ("90", 90), (1.5, 1.5)]
)
def test_durations(given, seconds):
    assert DistributedConfig(max_time=given).max_seconds == seconds


@pytest.mark.parametrize(
    ("given", "mode"),
    [
        ("val/loss", "min"),
        ("val/word_error", "min"),
        ("val/perplexity", "min"),
        ("val/accuracy", "max"),
        ("val/f1", "max"),
    ],
)
def test_the_name_of_a_metric_says_what_is_better(given, mode):
    assert DistributedConfig(keep_best=given).best_metric == (given, mode)


def test_an_evaluation_that_is_repeated_counts_once():
    """A callback that evaluates again, or the end of an epoch that a lost rank broke off."""
    watch = MetricWatch("early_stopping", parse_metric("val/loss"))
    for step, loss in ((1, 1.0), (2, 2.0), (2, 2.0), (3, 3.0)):
        watch.judge({"val/loss": loss}, step)
    assert watch.since == 2
    other = MetricWatch("early_stopping", parse_metric("val/loss"))
    other.load_state_dict(watch.state_dict())
    other.judge({"val/loss": 3.0}, 3)
    assert other.since == 2


@pytest.mark.parametrize("setting", ["early_stopping", "keep_best"])
@pytest.mark.parametrize(
    ("given", "metrics", "allowed"),
    [
        ("max:val/acc", None, "train/loss, val/loss"),
        ("max:val/accuracy", {"f1": error}, "train/loss, val/f1, val/loss"),
    ],
)
def test_an_unknown_metric_is_refused_before_the_first_step(tmp_path, monkeypatch, setting, given, metrics, allowed):
    monkeypatch.chdir(tmp_path)
    trainer = PyTorchDDPTrainer(
        Weight(), device="cpu", batch_size=4, loss_fn=error, metrics=metrics, callbacks=[Fails()]
    )
    with pytest.raises(UsageError, match=rf"{setting}: unknown metric '{given[4:]}'.* Allowed: {allowed}\."):
        trainer.fit(DATA, DATA, epochs=1, **{setting: given})
    assert not Path("runs").exists()


class Fails(Callback):
    def on_step_end(self, trainer, info):
        raise AssertionError("a step was taken")


def test_the_best_checkpoint_follows_early_stopping_unless_it_is_given(tmp_path):
    settings = {"metrics": {"far": lambda output, target: 1 - error(output, target)}, "checkpoint_frequency": 1}
    stop = {"early_stopping": "min:val/far", "patience": 9}
    best = fit(tmp_path, [0.3, 0.9, 0.5], **settings, **stop)
    assert (best.best_metric, best.best_step) == ("val/far", 2)
    given = fit(tmp_path / "given", [0.3, 0.9, 0.5], keep_best="val/loss", **settings, **stop)
    assert (given.best_metric, given.best_step) == ("val/loss", 1)
