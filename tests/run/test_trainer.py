"""`PyTorchDDPTrainer` as a user calls it: two ranks from a plain Python process, every optional part, results back."""

from __future__ import annotations

import json
import os
import pickle
import sys
from pathlib import Path

import programs
import pytest
import torch
from api_parts import (
    Diary,
    DictData,
    HoldsLock,
    HuggingFaceStyle,
    RaggedBatches,
    ReturnsLoss,
    ShardedStream,
    StopAfter,
    Stream,
    SumOfSamples,
    cross_entropy,
    failing_loss,
    make_data,
    make_model,
    make_normed,
    make_sgd,
    mean_margin,
    top_two,
)
from ranks import warm_pid
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.utils.data import DataLoader, TensorDataset

from phalanx import HorovodTrainer, PyTorchDDPTrainer, RayTrainer
from phalanx.errors import CheckpointError, ConfigError, DataError, UsageError


@pytest.fixture(autouse=True)
def _in_own_folder(tmp_path, monkeypatch, fork_server):
    monkeypatch.chdir(tmp_path)


def make_trainer(model: nn.Module | None = None, **settings) -> PyTorchDDPTrainer:
    defaults = {"num_workers": 2, "device": "cpu", "batch_size": 4, "progress": False, "learning_rate": 0.05}
    return PyTorchDDPTrainer(model or make_model(), **{**defaults, **settings})


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    torch.testing.assert_close(left, right, rtol=0, atol=0)


# --- construction ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [PyTorchDDPTrainer, HorovodTrainer, RayTrainer])
def test_an_optimizer_may_be_the_second_argument(kind):
    model = make_model()
    optimizer = make_sgd(model.parameters())
    trainer = kind(model, optimizer, epochs=2)
    assert trainer.optimizer is optimizer
    assert (trainer.config.backend, trainer.config.epochs) == (kind.backend, 2)
    with pytest.raises(UsageError, match="two optimizers"):
        kind(model, optimizer, optimizer="sgd")
    with pytest.raises(UsageError, match=r"is a function: expected a DistributedConfig or an optimizer"):
        kind(model, cross_entropy)


def test_weights_are_not_saved_to_a_folder_named_like_a_url():
    with pytest.raises(UsageError, match="not to a URL"):
        make_trainer().save("s3://bucket/model.safetensors")


# --- schedulers -------------------------------------------------------------------------------------------------------


def warmed_up(optimizer):
    parts = [LinearLR(optimizer, start_factor=0.1, total_iters=2), CosineAnnealingLR(optimizer, T_max=4)]
    return SequentialLR(optimizer, schedulers=parts, milestones=[2])


def rates_by_hand(steps: int) -> list[float]:
    optimizer = make_sgd(make_model().parameters())
    scheduler, seen = warmed_up(optimizer), []
    for _ in range(steps):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return seen


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_scheduler_of_torch_is_stepped_once_per_epoch_and_kept_in_checkpoints(ranks):
    def trainer(**more):
        model = make_model()
        optimizer = make_sgd(model.parameters())
        return make_trainer(model, optimizer=optimizer, scheduler=warmed_up(optimizer), num_workers=ranks, **more)

    whole = trainer(epochs=5, checkpoint_dir="a").fit(make_data())
    assert [epoch.learning_rate for epoch in whole.epochs] == pytest.approx(rates_by_hand(5))
    part = trainer(epochs=3, checkpoint_dir="b")
    part.fit(make_data())
    assert part.scheduler.last_epoch == part.config.epochs, "as in a loop of torch, stepped after the last epoch too"
    resumed = trainer(epochs=5, checkpoint_dir="b", resume_from_checkpoint=True).fit(make_data())
    assert [(e.learning_rate, e.train_loss) for e in resumed.epochs] == [
        (e.learning_rate, e.train_loss) for e in whole.epochs
    ]


def test_a_scheduler_goes_on_over_several_short_fits():
    model = make_model()
    optimizer = make_sgd(model.parameters())
    trainer = make_trainer(model, optimizer=optimizer, scheduler=warmed_up(optimizer), num_workers=2, epochs=1)
    rates = [trainer.fit(make_data()).epochs[-1].learning_rate for _ in range(5)]
    assert rates == pytest.approx(rates_by_hand(5))


def test_a_function_makes_a_scheduler_that_is_stepped_with_every_step():
    trainer = make_trainer(scheduler=warmed_up, scheduler_interval="step", max_steps=5, optimizer=make_sgd,
                           log_every_n_steps=1)  # fmt: skip
    history = trainer.fit(make_data())
    assert [step["learning_rate"] for step in history.steps] == pytest.approx(rates_by_hand(5))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"scheduler": warmed_up, "lr_schedule": "cosine"}, "lr_schedule = 'cosine' both set the learning rate"),
        ({"scheduler": warmed_up, "scheduler_interval": "batch"}, "not one of 'epoch', 'step'"),
        ({"scheduler": warmed_up(make_sgd(make_model().parameters()))}, "not the one that was given to the trainer"),
        ({"scheduler": "cosine"}, "expected a torch LRScheduler"),
    ],
)
def test_schedulers_that_cannot_be_followed_are_refused(given, said):
    with pytest.raises(UsageError, match=said):
        make_trainer(**given).fit(make_data())


# --- fit --------------------------------------------------------------------------------------------------------


def test_fit_returns_a_history_and_leaves_the_trained_weights_in_the_callers_model(tmp_path):
    trainer = make_trainer(epochs=3)
    before = weights(trainer.model)
    history = trainer.fit(DataLoader(make_data(), batch_size=4), make_data(9), checkpoint_dir="ckpt")
    assert history.status == "finished"
    assert history.total_time > 0
    assert history.throughput > 0
    assert 0 <= history.best_accuracy <= 1
    frame = history.to_dataframe()
    assert list(frame["epoch"]) == [1, 2, 3]
    assert list(frame["val_accuracy"]) == [record.val["accuracy"] for record in history.epochs]
    assert history.best_accuracy == max(frame["val_accuracy"])
    after = weights(trainer.model)
    assert not torch.equal(after["weight"], before["weight"])
    saved = make_trainer()
    saved.load(history.checkpoint)
    assert_equal(weights(saved.model), after)


def test_running_statistics_are_one_set_everywhere():
    """In the caller's model, in the checkpoint and in evaluation, though each rank saw other samples."""
    trainer = make_trainer(make_normed(), epochs=2)
    history = trainer.fit(make_data(16), make_data(9), checkpoint_dir="ckpt")
    saved = make_trainer(make_normed())
    saved.load(history.checkpoint)
    assert_equal(weights(saved.model), weights(trainer.model))
    trainer.model.eval()
    x, y = make_data(9).tensors
    with torch.no_grad():
        expected = F.cross_entropy(trainer.model(x), y).item()
    assert history.epochs[-1].val["loss"] == pytest.approx(expected, rel=1e-6)


def test_a_resumed_run_has_the_running_statistics_of_an_uninterrupted_one():
    whole, part, rest = (make_trainer(make_normed(), checkpoint_dir="ckpt") for _ in range(3))
    whole.fit(make_data(), max_steps=6, checkpoint_dir="other")
    part.fit(make_data(), max_steps=4)
    rest.fit(make_data(), max_steps=6, resume_from_checkpoint=True)
    assert_equal(weights(rest.model), weights(whole.model))


def test_the_ranks_of_a_second_fit_come_from_the_same_fork_server():
    """It has imported torch: that makes a second `fit` start at once."""
    for folder in ("first", "second"):
        told = [lambda info, folder=folder: Path(f"{folder}-{info.step}").write_text(str(os.getppid()))]
        make_trainer(callbacks=told).fit(make_data(8), max_steps=1, run_dir=folder)
    assert Path("first-1").read_text() == Path("second-1").read_text() == str(warm_pid())


def test_two_ranks_train_the_same_as_one():
    one, two = make_trainer(num_workers=1, batch_size=8, epochs=2), make_trainer(num_workers=2, batch_size=4, epochs=2)
    for trainer in (one, two):
        trainer.fit(make_data(20))
    torch.testing.assert_close(weights(one.model), weights(two.model), rtol=0, atol=1e-6)


def test_settings_of_fit_win_over_the_constructors():
    history = make_trainer(epochs=5).fit(make_data(), epochs=1)
    assert len(history.epochs) == 1


def test_batch_size_wins_over_the_loaders_and_is_reported_once():
    make_trainer(run_dir="run", epochs=2).fit(DataLoader(make_data(), batch_size=7))
    said = [json.loads(line).get("text", "") for line in Path("run/events.jsonl").read_text().splitlines()]
    assert said.count("batch_size=4 per rank replaces the DataLoader's 7.") == 1


# --- optimizers -------------------------------------------------------------------------------------------------


def test_an_optimizer_may_be_an_instance_a_class_a_factory_or_a_name():
    results = []
    for kind in ("instance", "class", "factory", "name"):
        model = make_model()
        given = {
            "instance": torch.optim.SGD(model.parameters(), lr=0.05),
            "class": torch.optim.SGD,
            "factory": make_sgd,
            "name": "sgd",
        }[kind]
        make_trainer(model, optimizer=given, momentum=0.0, epochs=2).fit(make_data())
        results.append(weights(model))
    for other in results[1:]:
        torch.testing.assert_close(results[0], other, rtol=0, atol=1e-7)


def test_an_optimizer_instance_gets_its_state_back_and_continues_from_it():
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    trainer = make_trainer(model, optimizer=optimizer, epochs=1)
    trainer.fit(make_data(16))
    assert optimizer.state[model.weight]["step"] == 2
    trainer.fit(make_data(16))
    assert optimizer.state[model.weight]["step"] == 4


def test_another_models_optimizer_is_refused():
    optimizer = torch.optim.SGD(make_model().parameters(), lr=0.1)
    with pytest.raises(UsageError, match="2 of the optimizer's parameters do not belong to the model"):
        make_trainer(optimizer=optimizer).fit(make_data())


# --- losses and batches -----------------------------------------------------------------------------------------


def test_every_way_to_a_loss_trains_the_same():
    implied, given = make_trainer(epochs=2), make_trainer(epochs=2, loss_fn=cross_entropy)
    returned, styled = make_trainer(ReturnsLoss(), epochs=2), make_trainer(HuggingFaceStyle(), epochs=2)
    for trainer in (implied, given, returned):
        trainer.fit(make_data())
    styled.fit(DictData())
    expected = list(weights(implied.model).values())
    for trainer in (given, returned, styled):
        torch.testing.assert_close(list(weights(trainer.model).values()), expected, rtol=0, atol=0)


def test_hugging_face_style_is_evaluated_and_predicted_without_a_loss_fn():
    trainer = make_trainer(HuggingFaceStyle())
    measured = trainer.evaluate(DictData(11))
    x, y = make_data(11).tensors
    with torch.no_grad():
        logits = trainer.model(x).logits
    assert measured["accuracy"] == pytest.approx((logits.argmax(1) == y).double().mean().item())
    torch.testing.assert_close(trainer.predict(DictData(11)), logits)


# --- metrics, callbacks, hooks ----------------------------------------------------------------------------------


def test_metrics_per_sample_and_as_batch_means_cover_every_sample_once():
    trainer = make_trainer(metrics={"top2": top_two, "margin": mean_margin}, loss_fn=cross_entropy)
    for samples in (1, 2, 7, 13):
        x, y = make_data(samples).tensors
        with torch.no_grad():
            output = trainer.model(x)
        measured = trainer.evaluate(make_data(samples))
        assert measured["top2"] == pytest.approx(top_two(output, y).mean().item()), samples
        assert measured["margin"] == pytest.approx(mean_margin(output, y).item(), rel=1e-6), samples
        assert measured["loss"] == pytest.approx(F.cross_entropy(output, y).item(), rel=1e-6), samples


def test_callbacks_and_hooks_are_called_at_their_events(tmp_path):
    every_step, every_second = tmp_path / "every", tmp_path / "second"

    def note(info):
        with every_step.open("a") as file:
            file.write(f"{info.step}\n")

    def note_second(info):
        with every_second.open("a") as file:
            file.write(f"{info.step}\n")

    callbacks = [Diary(str(tmp_path / "diary")), note]
    # In the background a save is reported when it is published, which may be some steps later.
    trainer = make_trainer(callbacks=callbacks, hooks=[(note_second, 2)], epochs=2, async_checkpoint=False)
    trainer.fit(make_data(10), make_data(3), checkpoint_dir="ckpt")
    assert (tmp_path / "diary").read_text().splitlines() == [
        "start",
        "step 1 epoch 0 samples 8 True",
        "step 2 epoch 0 samples 2 True",
        "epoch 0 ['accuracy', 'loss']",
        "saved step-00000002",
        "step 3 epoch 1 samples 8 True",
        "step 4 epoch 1 samples 2 True",
        "epoch 1 ['accuracy', 'loss']",
        "saved step-00000004",
        "end",
    ]
    assert sorted(every_step.read_text().split()) == ["1", "1", "2", "2", "3", "3", "4", "4"]
    assert sorted(every_second.read_text().split()) == ["2", "2", "4", "4"]


def test_a_callback_can_stop_early():
    history = make_trainer(callbacks=[StopAfter(2)], epochs=5, log_every_n_steps=1).fit(make_data())
    assert history.steps[-1]["step"] == 2


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"callbacks": [3]}, "3 is not a callback"),
        ({"hooks": [(print, 0)]}, "a hook every 0 steps"),
        ({"metrics": [top_two]}, "metrics is a list"),
        ({"tensorboard_dir": "/proc/nowhere"}, "TensorBoard files cannot be written to /proc/nowhere"),
    ],
)
def test_what_cannot_be_used_is_refused_with_a_message(given, said):
    with pytest.raises(UsageError, match=said):
        make_trainer(**given).fit(make_data())


def test_an_iterator_is_refused_because_it_can_be_read_only_once():
    with pytest.raises(DataError, match="can be read only once"):
        make_trainer().fit(iter(DataLoader(make_data())))


# --- prediction, data, files ------------------------------------------------------------------------------------


@pytest.mark.parametrize("samples", [1, 5, 16, 19])
def test_predict_keeps_the_order_of_the_data(samples):
    trainer = make_trainer(nn.Identity())
    data = TensorDataset(torch.arange(samples, dtype=torch.float32)[:, None], torch.zeros(samples))
    assert trainer.predict(DataLoader(data, batch_size=3)).flatten().tolist() == list(range(samples))


@pytest.mark.parametrize("workers", [0, 2])
def test_predict_keeps_the_order_of_data_that_shard_themselves(workers):
    """Two ranks, and worker processes: a stream with shard(), and whole batches by index of unequal size."""
    trainer = make_trainer(nn.Identity())
    stream = trainer.predict(DataLoader(ShardedStream(11), batch_size=2, num_workers=workers))
    assert stream.flatten().tolist() == list(range(11))
    batches = trainer.predict(DataLoader(RaggedBatches(), batch_size=None, num_workers=workers))
    assert batches.flatten().tolist() == [0, 1, 1, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 4]


@pytest.mark.parametrize("samples", [9, 13])
def test_a_stream_of_uneven_length_neither_hangs_nor_drops(samples, tmp_path):
    counter = SumOfSamples(str(tmp_path / "samples"))
    trainer = make_trainer(callbacks=[counter], epochs=2)
    history = trainer.fit(Stream(samples), Stream(samples))
    assert (tmp_path / "samples").read_text() == str(2 * samples)
    one = make_trainer(num_workers=1, batch_size=8, epochs=2)
    one.fit(Stream(samples))
    torch.testing.assert_close(weights(trainer.model), weights(one.model), rtol=0, atol=1e-6)
    assert history.epochs[-1].val["loss"] == pytest.approx(trainer.evaluate(make_data(samples))["loss"], rel=1e-5)


def test_epochs_limit_a_stream_even_where_max_steps_would_allow_more():
    history = make_trainer(epochs=1, max_steps=50, log_every_n_steps=1).fit(Stream(16))
    assert history.steps[-1]["step"] == 2


def test_a_data_loader_with_worker_processes_trains_the_same():
    plain, fetched = make_trainer(epochs=2), make_trainer(epochs=2)
    plain.fit(DataLoader(make_data(), shuffle=True))
    fetched.fit(DataLoader(make_data(), shuffle=True, num_workers=1, persistent_workers=True))
    assert_equal(weights(plain.model), weights(fetched.model))


def test_data_that_cannot_be_pickled_is_refused_with_a_message(tmp_path):
    with pytest.raises(UsageError, match=r"the job cannot be sent to the ranks: cannot pickle '_thread\.lock' object"):
        make_trainer().fit(DataLoader(HoldsLock(), batch_size=4))


def test_code_of_the_script_may_name_modules_of_other_types(tmp_path):
    """torch.backends is not a plain module, and pickling by value takes the modules that a function names."""
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, torch\n"
        "from pathlib import Path\n"
        "from phalanx.run.start import write_payload\n"
        "def precise():\n"
        "    torch.backends.cuda.matmul.allow_tf32 = False\n"
        "    return torch.backends.cudnn.allow_tf32\n"
        "write_payload(precise, Path(sys.argv[1]))\n"
    )
    programs.run([sys.executable, str(script), str(tmp_path / "payload")], check=True)
    precise = pickle.loads((tmp_path / "payload").read_bytes())
    assert precise() is torch.backends.cudnn.allow_tf32


@pytest.mark.parametrize("name", ["weights.pt", "weights.safetensors", "weights.pth"])
def test_saved_weights_load_again(name):
    trainer, other = make_trainer(), make_trainer(nn.Linear(4, 3))
    path = trainer.save(name)
    other.load(path)
    assert_equal(weights(other.model), weights(trainer.model))
    assert [entry.name for entry in path.parent.iterdir() if entry.is_file()] == [path.name]


@pytest.mark.parametrize("ending", ["safetensors", "pt", "onnx"])
def test_weights_are_not_saved_to_a_missing_folder(ending, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=f"save\\('absent/x.{ending}'\\): there is no folder absent"):
        make_trainer().save(f"absent/x.{ending}")
    assert not Path("absent").exists()


def test_weights_of_another_shape_name_the_parameter(tmp_path):
    history = make_trainer(epochs=1).fit(make_data(8), checkpoint_dir="ckpt")
    make_trainer().save("weights.pt")
    for path in (history.checkpoint, "weights.pt"):
        with pytest.raises(CheckpointError, match=r"'?weight'? is \[3, 4\] .* \[5, 4\]"):
            make_trainer(nn.Linear(4, 5)).load(path)
    with pytest.raises(CheckpointError, match=r"no weights at absent\.pt"):
        make_trainer().load("absent.pt")


def test_a_misspelt_setting_is_answered_with_the_right_one():
    with pytest.raises(ConfigError, match=r"unknown setting 'batchsize'\. Did you mean 'batch_size'\?"):
        make_trainer(batchsize=3)


def test_an_error_in_a_rank_reaches_the_caller_with_its_cause():
    with pytest.raises(Exception, match=r"rank \d .*raised ValueError: no loss today"):
        make_trainer(loss_fn=failing_loss).fit(make_data())


@pytest.mark.parametrize("given", [{"loss_fn": lambda output: output}, {"metrics": {"m": lambda a, b, c: a}}])
def test_a_function_with_other_arguments_is_refused_before_the_start(given):
    with pytest.raises(UsageError, match=r"(loss_fn|metrics\['m'\]) cannot be called as function\(output, target\)"):
        make_trainer(**given).fit(make_data())


def test_a_rate_beside_an_optimizer_with_its_own_is_named():
    model = make_model()
    trainer = make_trainer(model, optimizer=make_sgd(model.parameters()), learning_rate=0.7, epochs=1)
    with pytest.warns(UserWarning, match=r"learning_rate = 0\.7 has no effect on the SGD that was given"):
        trainer.fit(make_data())
