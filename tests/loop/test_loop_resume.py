"""What a resumed run restores: changed rates, what a user's loop saved, new and shared optimizers."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, SequentialLR, StepLR
from torch.utils.data import TensorDataset

from phalanx import Callback, PyTorchDDPTrainer
from phalanx.errors import CheckpointError, UsageError
from phalanx.loop.formation import Formation

DATA = TensorDataset(torch.linspace(0, 1, 16).view(8, 2), torch.ones(8, 1))


class DivideRate(Callback):
    """Steers a constant schedule: a tenth after every epoch."""

    def on_epoch_end(self, trainer, epoch, metrics) -> None:
        for group in trainer.optimizer.param_groups:
            group["lr"] /= 10


def fit(folder, epochs: int, **settings) -> list[float]:
    defaults = {"learning_rate": 0.1, "optimizer": "sgd", "callbacks": [DivideRate()]}
    trainer = PyTorchDDPTrainer(
        nn.Linear(2, 1), device="cpu", batch_size=4, epochs=epochs, progress=False, run_dir=str(folder / "run"),
        checkpoint_dir=str(folder / "kept"), log_every_n_steps=1, **{**defaults, **settings},
    )  # fmt: skip
    history = trainer.fit(DATA)
    return [round(step["learning_rate"], 9) for step in history.steps[-2:]]


def test_a_rate_that_a_callback_sets_survives_a_resume(tmp_path):
    assert fit(tmp_path, 3) == [0.001] * 2
    fit(tmp_path / "cut", 2)
    assert fit(tmp_path / "cut", 3, resume_from_checkpoint=True) == [0.001] * 2


def test_a_rate_that_the_user_changes_counts_from_the_resume_on(tmp_path):
    fit(tmp_path, 1, callbacks=[])
    assert fit(tmp_path, 2, resume_from_checkpoint=True, learning_rate=0.02, callbacks=[]) == [0.02] * 2


SCHEDULES = {
    "lr_scaling": {"lr_scaling": "linear", "base_batch_size": 2},
    "lr_schedule": {"lr_schedule": "cosine", "warmup": 1, "max_steps": 12},
    "scheduler": {"scheduler": lambda optimizer: StepLR(optimizer, 3, gamma=0.5), "scheduler_interval": "step"},
}


def rates_of(trainer, **settings) -> list[float]:
    return [round(step["learning_rate"], 9) for step in trainer.fit(DATA, **settings).steps]


def own_trainer(folder, scheduler=None, **settings) -> PyTorchDDPTrainer:
    """A trainer with an optimizer object, and with a scheduler object where a function makes one."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made = None if scheduler is None else scheduler(optimizer)
    return PyTorchDDPTrainer(
        model, optimizer, scheduler=made, device="cpu", batch_size=4, progress=False, log_every_n_steps=1,
        run_dir=str(folder / "run"), checkpoint_dir=str(folder / "kept"), **settings,
    )  # fmt: skip


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_same_objects_resume_with_the_right_rates(tmp_path, schedule):
    whole = rates_of(own_trainer(tmp_path / "whole", **SCHEDULES[schedule]), epochs=6)
    trainer = own_trainer(tmp_path / "cut", callbacks=[StopsOnce(5)], **SCHEDULES[schedule])
    trainer.fit(DATA, epochs=6)  # stopped after half of it: the length of the run is part of a schedule
    assert rates_of(trainer, epochs=6, resume_from_checkpoint=True) == whole


class StopsOnce(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, trainer, info) -> None:
        if info.step == self.step:
            trainer.request_stop()


@pytest.mark.parametrize("schedule", ["lr_scaling", "lr_schedule"])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_second_fit_begins_with_the_optimizers_own_rates(tmp_path, schedule, workers, fork_server):
    trainer = own_trainer(tmp_path, num_workers=workers, epochs=4, **SCHEDULES[schedule])
    first = rates_of(trainer)
    assert len(set(first)) > 1 or schedule == "lr_scaling"
    assert rates_of(trainer) == first
    assert rates_of(trainer) == first


def test_a_rate_that_a_callback_has_set_stays_for_the_next_fit(tmp_path):
    trainer = own_trainer(tmp_path, epochs=2, callbacks=[DivideRate()])
    assert rates_of(trainer) == [0.1] * 2 + [0.01] * 2
    assert rates_of(trainer) == [0.001] * 2 + [0.0001] * 2


class Counts(Callback):
    def __init__(self) -> None:
        self.steps = 0

    def on_step_end(self, trainer, info) -> None:
        self.steps += 1

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state) -> None:
        self.steps = state["steps"]


def test_a_callback_continues_from_its_state(tmp_path):
    fit(tmp_path, 2, callbacks=[Counts()])
    counts = Counts()
    fit(tmp_path, 3, resume_from_checkpoint=True, callbacks=[counts])
    assert counts.steps == 6


def test_a_callbacks_state_that_cannot_be_stored_is_refused_before_the_first_step(tmp_path):
    class Keeps(Callback):
        def state_dict(self):
            return {"mean": torch.ones(2)}

        def on_step_end(self, trainer, info) -> None:
            raise AssertionError("a step was taken")

    with pytest.raises(UsageError, match=r"Keeps\.state_dict\(\)\['mean'\] .* it is a torch.Tensor"):
        fit(tmp_path, 1, callbacks=[Keeps()])


def test_a_resume_without_a_group_that_was_added_is_refused_by_name(tmp_path):
    class Unfreezes(Callback):
        def on_epoch_end(self, trainer, epoch, metrics) -> None:
            if epoch == 0:
                trainer.model[1].requires_grad_(True)
                trainer.optimizer.add_param_group({"params": trainer.model[1].parameters()})

    def trainer(**settings):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        model[1].requires_grad_(False)
        optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9)
        return PyTorchDDPTrainer(
            model, optimizer, device="cpu", batch_size=4, progress=False, run_dir=str(tmp_path / "run"),
            checkpoint_dir=str(tmp_path / "kept"), **settings,
        )  # fmt: skip

    trainer(callbacks=[Unfreezes()]).fit(DATA, epochs=2, max_steps=3)
    with pytest.raises(CheckpointError, match=r"2 groups of parameters, with 1\.weight, 1\.bias, and this one has 1"):
        trainer().fit(DATA, epochs=3, resume_from_checkpoint=True)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ({}, {"optimizer": "adamw"}, "the saved optimizer has no step, exp_avg, exp_avg_sq"),
        (
            {"optimizer": "adamw"},
            {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1)},  # it keeps no states
            "the saved optimizer is of another kind: it has no momentum, dampening, nesterov",
        ),
        ({}, {"scheduler": lambda o: StepLR(o, 3)}, "scheduler is StepLR, and the checkpoint has none"),
        (
            {"scheduler": lambda o: StepLR(o, 3)},
            {"scheduler": lambda o: SequentialLR(o, [StepLR(o, 3), ExponentialLR(o, 0.9)], [2])},
            "scheduler is SequentialLR, and the checkpoint has StepLR",
        ),
    ],
)
def test_a_resume_with_other_kinds_of_objects_is_refused_by_name(tmp_path, before, after, message):
    fit(tmp_path, 1, callbacks=[], **before)
    with pytest.raises(CheckpointError, match=message):
        fit(tmp_path, 2, callbacks=[], resume_from_checkpoint=True, **after)


def test_an_optimizer_with_more_options_than_the_saved_one_keeps_them(tmp_path):
    """As that of a newer torch has."""

    class Newer(torch.optim.SGD):
        def __init__(self, parameters, clip, **options) -> None:
            super().__init__(parameters, **options)
            self.defaults["clip"] = self.param_groups[0]["clip"] = clip

    def run(kind, *, load, **options):
        with Formation(device="cpu", batch_size=4) as formation:
            plain = nn.Linear(2, 1)
            model, optimizer, loader = formation.prepare(plain, kind(plain.parameters(), **options), DATA)
            if load:
                formation.load(tmp_path / "kept")
            step_over(formation, model, [optimizer], loader)
            formation.save(tmp_path / "kept")
            return optimizer.param_groups[0]

    run(torch.optim.SGD, load=False, lr=0.1, momentum=0.9)
    group = run(Newer, load=True, lr=0.3, momentum=0.5, clip=7.0)
    assert (group["lr"], group["momentum"], group["clip"]) == (0.1, 0.9, 7.0)


def test_fit_resumes_from_what_a_users_loop_saved(tmp_path):
    with Formation(device="cpu", batch_size=4) as formation:
        model = nn.Linear(2, 1)
        model, optimizer, loader = formation.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), DATA
        )
        step_over(formation, model, [optimizer], loader)
        formation.save(tmp_path / "kept")
    assert len(fit(tmp_path, 2, resume_from_checkpoint=True)) == 2


def step_over(formation, model, optimizers, loader) -> None:
    for inputs, targets in loader:
        formation.backward(nn.functional.mse_loss(model(inputs), targets))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.NAdam, lambda p: torch.optim.SGD(p, momentum=0.9)])
def test_saving_before_the_first_step_changes_nothing(tmp_path, make):
    def train(folder=None, load=False):
        torch.manual_seed(0)
        with Formation(device="cpu", batch_size=4) as formation:
            plain = nn.Linear(2, 1)
            model, optimizer, loader = formation.prepare(plain, make(plain.parameters()), DATA)
            if load:
                formation.load(folder)
            elif folder is not None:
                formation.save(folder)
            step_over(formation, model, [optimizer], loader)
            return plain.weight.tolist(), [float(held.get("step", 0)) for held in optimizer.state.values()]

    assert train(tmp_path) == train()
    assert train(tmp_path, load=True) == train()


def two_models(folder, *, load=False, steps=1, **settings):
    torch.manual_seed(0)
    with Formation(device="cpu", batch_size=4, timeout=30, **settings) as formation:
        encoder, decoder = nn.Linear(2, 3), nn.Linear(3, 1)
        groups = [{"params": [*encoder.parameters(), decoder.bias], "lr": 0.1}, {"params": [decoder.weight], "lr": 0.2}]
        optimizer = torch.optim.Adam(groups)
        encode, decode, optimizer, loader = formation.prepare(encoder, decoder, optimizer, DATA)
        if load:
            formation.load(folder)
        for _ in range(steps):
            step_over(formation, nn.Sequential(encode, decode), [optimizer], loader)
        if not load:
            formation.save(folder)
        rates = [group["lr"] for group in optimizer.param_groups]
        counts = [len(group["params"]) for group in optimizer.param_groups]
        return [value.tolist() for value in (*encoder.parameters(), *decoder.parameters())], rates, counts


def test_one_optimizer_over_two_models_is_saved_and_resumed(tmp_path):
    whole = two_models(tmp_path / "whole", steps=2)
    two_models(tmp_path / "half", steps=1)
    assert two_models(tmp_path / "half", steps=1, load=True) == whole
    assert whole[1:] == ([0.1, 0.2], [3, 1])


def test_a_parameter_outside_the_model_is_refused_before_it_is_trained():
    with Formation(device="cpu", batch_size=4) as formation:
        plain, temperature = nn.Linear(2, 1), nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([*plain.parameters(), temperature], lr=0.1)
        model, optimizer, loader = formation.prepare(plain, optimizer, DATA)
        with pytest.raises(UsageError, match=r"a parameter of shape \[1\] .* belongs to no prepared model"):
            step_over(formation, lambda inputs: model(inputs) * temperature, [optimizer], loader)


class HalfUsed(nn.Module):
    """A model with a layer that no forward pass uses."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x):
        return self.used(x)


def test_a_parameter_that_never_had_a_gradient_does_not_hinder_a_resumption(tmp_path):
    settings = {"device": "cpu", "batch_size": 8, "progress": False, "find_unused_parameters": True}
    place = {"checkpoint_dir": str(tmp_path / "kept"), "run_dir": str(tmp_path / "run"), "resume_from_checkpoint": True}
    inputs = torch.randn(24, 4)
    data = TensorDataset(inputs, inputs[:, :3].argmax(1))
    weights = []
    for epochs in (1, 2):
        torch.manual_seed(3)
        trainer = PyTorchDDPTrainer(HalfUsed(), epochs=epochs, **settings, **place)
        assert len(trainer.fit(data).epochs) == epochs
        weights.append(trainer.model.state_dict())
    assert not torch.equal(weights[0]["used.weight"], weights[1]["used.weight"])
    assert torch.equal(weights[0]["unused.weight"], weights[1]["unused.weight"])
