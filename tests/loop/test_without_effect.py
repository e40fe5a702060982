"""A setting has an effect, or it is refused or named with what to write."""

from __future__ import annotations

import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from phalanx import DistributedConfig, Formation, Trainer
from phalanx.errors import UsageError

DATA = TensorDataset(torch.ones(8, 2), torch.zeros(8, 1))


def made_by(optimizer, **settings) -> tuple[dict, list[str]]:
    """Train a step; return the options of the optimizer's group, and what was warned of."""
    seen = {}

    def look(trainer, info=None):
        seen.update(trainer.optimizer.param_groups[0])

    from phalanx import Callback

    class Look(Callback):
        def on_fit_start(self, trainer):
            look(trainer)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = Trainer(
            nn.Linear(2, 1),
            optimizer=optimizer,
            device="cpu",
            verbosity="quiet",
            progress=False,
            batch_size=4,
            callbacks=[Look()],
            **settings,
        )
        trainer.fit(DATA)
    return seen, [str(each.message) for each in caught]


def test_an_optimizers_class_gets_the_settings(tmp_path):
    group, said = made_by(torch.optim.SGD, learning_rate=0.7, weight_decay=0.3, momentum=0.5, run_dir=str(tmp_path))
    assert (group["lr"], group["weight_decay"], group["momentum"]) == (0.7, 0.3, 0.5)
    assert not said


def test_a_setting_that_an_optimizers_class_does_not_take_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"momentum = 0\.5 is not an argument of AdamW"):
        made_by(torch.optim.AdamW, momentum=0.5, run_dir=str(tmp_path))


@pytest.mark.parametrize(
    "make",
    [lambda parameters: torch.optim.SGD(parameters, lr=0.1), partial(torch.optim.SGD, lr=0.1)],
    ids=["function", "partial"],
)
def test_settings_that_a_factory_does_not_see_are_named(tmp_path, make):
    _, said = made_by(make, learning_rate=0.7, weight_decay=0.3, run_dir=str(tmp_path))
    assert any(
        "learning_rate = 0.7, weight_decay = 0.3 have no effect on the optimizer that the given function" in text
        for text in said
    )


def test_a_shared_config_is_named_once(capfd):
    config = DistributedConfig(device="cpu", batch_size=4, gradient_clipping=1.0, warmup=10)
    with Formation(config) as f:
        model = nn.Linear(2, 1)
        model, optimizer, loader = f.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), DATA)
        for inputs, targets in loader:
            f.backward((model(inputs) - targets).square().mean())
            optimizer.step()
    error = capfd.readouterr().err
    assert error.count("not used by your own loop: ") == 1
    assert "gradient_clipping = 1.0: call f.clip_grad_norm(1.0)" in error
    assert "warmup = 10: make a torch scheduler" in error


def test_the_best_checkpoint_leaves_the_optimizer_its_own_rate(tmp_path):
    """The validation loss gets worse: the first epoch is the best."""
    inputs = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    targets = inputs.sum(1, keepdim=True)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    trainer = Trainer(
        model,
        optimizer=optimizer,
        loss_fn="mse",
        device="cpu",
        batch_size=8,
        epochs=3,
        verbosity="quiet",
        progress=False,
        lr_schedule="linear",
        load_best_at_end=True,
        keep_best=True,
        checkpoint_dir=str(tmp_path / "c"),
        run_dir=str(tmp_path / "run"),
    )
    history = trainer.fit((inputs, targets), (inputs, -targets))
    assert history.loaded_best
    assert history.best_step == 4
    assert optimizer.param_groups[0]["lr"] == 0.05


class Shifted(nn.Module):
    def __init__(self, shift: float) -> None:
        super().__init__()
        self.shift = shift

    def forward(self, output, target):
        return (output - target).square().mean() + self.shift


def test_a_sweep_of_rates_does_not_depend_on_the_zero_of_the_loss():
    inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    found = []
    for shift in (10.0, -0.5):
        torch.manual_seed(0)
        trainer = Trainer(
            nn.Linear(4, 1), loss_fn=Shifted(shift), device="cpu", batch_size=8, optimizer="sgd", momentum=0.0
        )
        found.append(trainer.find_lr(data, low=1e-5, high=0.1, steps=40))
    assert [len(each.rates) for each in found] == [40, 40]
    assert found[0].suggestion == found[1].suggestion
