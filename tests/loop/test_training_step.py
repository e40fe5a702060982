"""A step of the user's own inside the trainer: two optimizers, compared with a loop of torch alone."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from torch.utils.data import DataLoader, TensorDataset

import phalanx
from phalanx.errors import UsageError

ROWS, BATCH, EPOCHS = 48, 8, 2


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 6))
        self.critic = nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))


def optimizers(model: Gan) -> dict[str, torch.optim.Optimizer]:
    return {
        "critic": torch.optim.Adam(model.critic.parameters(), lr=1e-2),
        "generator": torch.optim.SGD(model.generator.parameters(), lr=1e-1, momentum=0.9),
    }


def rows() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(ROWS, 6, generator=generator) + 1.0, torch.randn(ROWS, 4, generator=generator))


def losses(model, real, noise):
    """The noise is a part of the data: the order of random numbers on ranks is not what is compared here."""
    ones = torch.ones(len(real), 1)
    fake = model.generator(noise)
    yield bce(model.critic(real), ones)
    yield bce(model.critic(fake.detach()), torch.zeros_like(ones))
    yield bce(model.critic(fake), ones)


def gan_step(step, batch):
    critic, generator = step.optimizers["critic"], step.optimizers["generator"]
    found = losses(step.model, *batch)
    step.backward(next(found))
    step.backward(next(found))
    step.clip_grad_norm(1.0, "critic")
    critic.step()
    critic.zero_grad()
    loss = next(found)
    step.backward(loss)
    generator.step()
    generator.zero_grad()
    critic.zero_grad()
    return loss


def by_torch_alone(parts: int = 1) -> tuple[Gan, list[dict]]:
    """Accumulate gradients over `parts` micro-batches: the critic steps before the last one's third loss."""
    model = Gan()
    critic, generator = (made := optimizers(model)).values()
    data, size = rows(), BATCH // parts
    for _ in range(EPOCHS):
        for first in range(0, ROWS, size):
            ends = (first + size) % BATCH == 0
            found = losses(model, *(tensor[first : first + size] for tensor in data.tensors))
            add(model.critic, (next(found) + next(found)) / parts)
            if ends:
                nn.utils.clip_grad_norm_(model.critic.parameters(), 1.0)
                critic.step()
                critic.zero_grad()
            add(model.generator, next(found) / parts)
            if ends:
                generator.step()
                generator.zero_grad()
    return model, [optimizer.state_dict() for optimizer in made.values()]


def add(part: nn.Module, loss: torch.Tensor) -> None:
    """Add a loss's gradient to one part alone."""
    for parameter, gradient in zip(part.parameters(), torch.autograd.grad(loss, list(part.parameters())), strict=True):
        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


def train(model: Gan, folder: Path, ranks: int, made=None, callbacks=(), **settings):
    chosen = {"accumulation": 1, "epochs": EPOCHS, **settings}
    accumulation = chosen.pop("accumulation")
    trainer = phalanx.PyTorchDDPTrainer(
        model=model,
        optimizer=optimizers(model) if made is None else made,
        training_step=gan_step,
        callbacks=list(callbacks),
        num_workers=ranks,
        device="cpu",
        gradient_accumulation_steps=accumulation,
        run_dir=str(folder / "run"),
        progress=False,
        **chosen,
    )
    return trainer, trainer.fit(DataLoader(rows(), batch_size=BATCH // ranks // accumulation))


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [(1, {}), (2, {}), (2, {"accumulation": 2}), (2, {"strategy": "fsdp"}), (2, {"strategy": "ring"})],
    ids=["1", "2-ddp", "2-accumulated", "2-fsdp", "2-ring"],
)
def test_two_optimizers_train_as_in_torch(tmp_path, ranks, settings):
    expected, states = by_torch_alone(settings.get("accumulation", 1))
    model = Gan()
    trainer, history = train(model, tmp_path, ranks, **settings)
    torch.testing.assert_close(weights(model), weights(expected), rtol=1e-4, atol=1e-6)
    for (name, optimizer), state in zip(trainer.optimizer.items(), states, strict=True):
        returned = optimizer.state_dict()["state"]
        assert returned.keys() == state["state"].keys(), name
        for key, own in state["state"].items():
            for item, value in own.items():
                torch.testing.assert_close(returned[key][item], value, rtol=1e-4, atol=1e-6)
    assert history.epochs[-1].step == EPOCHS * ROWS // BATCH


@pytest.mark.parametrize("settings", [{}, {"strategy": "fsdp"}], ids=["ddp", "fsdp"])
def test_a_resumed_run_and_its_checkpoint_are_those_of_the_whole_model(tmp_path, settings):
    whole, half, resumed = Gan(), Gan(), Gan()
    scheduled = {"lr_schedule": "cosine", "ema_decay": 0.9, **settings}
    train(whole, tmp_path / "a", 2, **scheduled)
    folder = str(tmp_path / "checkpoints")
    train(half, tmp_path / "b", 2, max_steps=5, checkpoint_dir=folder, **settings)
    trainer, _ = train(resumed, tmp_path / "c", 2, resume_from_checkpoint=folder, **settings)
    expected, _ = by_torch_alone()
    torch.testing.assert_close(weights(resumed), weights(expected), rtol=1e-4, atol=1e-6)
    assert not torch.allclose(weights(whole), weights(expected), rtol=1e-2)  # the schedule and the average act
    trainer.load(folder)
    torch.testing.assert_close(weights(trainer.model), weights(half))


class Kill(phalanx.Callback):
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def on_step_end(self, trainer, info) -> None:
        if trainer.formation.rank == 1 and info.step == 6 and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def test_a_lost_rank_is_replaced(tmp_path):
    expected, _ = by_torch_alone()
    model = Gan()
    train(model, tmp_path, 2, callbacks=[Kill(tmp_path / "lost")], max_restarts=2)
    assert (tmp_path / "lost").exists()
    torch.testing.assert_close(weights(model), weights(expected), rtol=1e-4, atol=1e-6)


def outside() -> Gan:
    model = Gan()
    model.scale = nn.Parameter(torch.ones(1))
    return model


def fit(model=None, step=gan_step, made=None, **settings):
    model = model or Gan()
    given = optimizers(model) if made is None else made
    phalanx.PyTorchDDPTrainer(model=model, optimizer=given, training_step=step, batch_size=8, **settings).fit(rows())


def test_what_cannot_be_stepped_is_refused_with_what_to_write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    whole = Gan()
    cases = {
        "goes with the optimizers of the model's parts": {
            "made": torch.optim.SGD(whole.parameters(), 0.1),
            "model": whole,
        },
        "Did you mean 'critic'": {"made": {"critik": torch.optim.SGD(whole.critic.parameters(), 0.1)}, "model": whole},
        "parameters that are not of model.critic": {
            "made": {"critic": torch.optim.SGD(whole.parameters(), 0.1)},
            "model": whole,
        },
        "'generator.0.weight' of Gan belongs to no part": {
            "made": {"critic": torch.optim.SGD(whole.critic.parameters(), 0.1)},
            "model": whole,
        },
        "'scale' of Gan belongs to no part": {"model": outside()},
        "step.clip_grad_norm": {"gradient_clipping": 1.0},
        "returned None, not the loss": {"step": lambda step, batch: None},
        "took 0 steps of the optimizer 'critic'": {"step": lambda step, batch: torch.zeros(())},
        "expected a function": {"step": 3},
        "takes its steps itself": {"pipeline_parallel": 2, "num_workers": 2, "device": "cpu"},
    }
    for text, given in cases.items():
        with pytest.raises(UsageError) as caught:
            fit(**given)
        assert text in str(caught.value), (text, str(caught.value))
    with pytest.raises(UsageError, match="no training_step"):
        phalanx.PyTorchDDPTrainer(model=whole, optimizer=optimizers(whole)).fit(rows())


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Linear(2, 1)


def test_validation_data_need_a_forward(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = Bare()
    given = {"critic": torch.optim.SGD(model.parameters(), 0.1)}
    trainer = phalanx.Trainer(model, optimizer=given, training_step=gan_step, batch_size=8)
    with pytest.raises(UsageError, match="Bare has no forward, by which validation data are evaluated"):
        trainer.fit(rows(), rows())
