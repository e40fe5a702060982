"""Which gradients count and are cleared: parameters outside the optimizer, one model of several, interrupted epochs."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from phalanx.errors import ModelError, UsageError
from phalanx.loop.formation import Formation
from phalanx.loop.precision import LossScale

DATA = TensorDataset(torch.linspace(-1, 1, 16).view(8, 2), torch.ones(8, 1))


@pytest.mark.parametrize(
    ("loss_of", "error", "words"),
    [
        (lambda loss: loss.detach(), ModelError, "the loss has no gradient: it does not depend on a trained parameter"),
        (lambda loss: loss.item(), UsageError, r"backward\(\) got a float"),
    ],
)
def test_a_loss_without_a_gradient_is_refused(loss_of, error, words):
    with Formation(device="cpu", batch_size=8) as formation:
        model = formation.prepare(nn.Linear(2, 1))
        with pytest.raises(error, match=words):
            formation.backward(loss_of(model(DATA.tensors[0]).square().mean()))


@pytest.mark.parametrize("norm", [0.0, -1.0])
def test_a_norm_that_would_remove_or_turn_the_gradient_is_refused(norm):
    with Formation(device="cpu", batch_size=8) as formation:
        model = formation.prepare(nn.Linear(2, 1))
        formation.backward(model(DATA.tensors[0]).square().mean())
        gradient = model.weight.grad.clone()
        with pytest.raises(UsageError, match=rf"clip_grad_norm\({norm:g}\): the norm must be greater than 0"):
            formation.clip_grad_norm(norm)
        assert torch.equal(model.weight.grad, gradient)


def test_parameters_outside_the_optimizer_do_not_count_and_are_cleared():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    with Formation(device="cpu", batch_size=8) as formation:
        wrapped, optimizer = formation.prepare(model, torch.optim.SGD(model[1].parameters(), lr=0.0))
        norms = []
        for _ in range(3):
            formation.backward(wrapped(DATA.tensors[0]).square().mean())
            norms.append(float(formation.clip_grad_norm(1e9)))
            optimizer.step()
            optimizer.zero_grad()
            assert all(parameter.grad is None for parameter in model.parameters())
    head = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    head.load_state_dict(model.state_dict())
    head(DATA.tensors[0]).square().mean().backward()
    expected = nn.utils.get_total_norm([parameter.grad for parameter in head[1].parameters()])
    assert norms == pytest.approx([float(expected)] * 3)


def test_a_layer_that_joins_later_counts_from_then_on():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    with Formation(device="cpu", batch_size=8) as formation:
        wrapped, optimizer = formation.prepare(model, torch.optim.SGD(model[1].parameters(), lr=0.0))
        formation.backward(wrapped(DATA.tensors[0]).square().mean())
        before = float(formation.grad_norm())
        optimizer.add_param_group({"params": list(model[0].parameters())})
        assert float(formation.grad_norm()) > before


def test_gradients_are_clipped_per_model_or_optimizer():
    torch.manual_seed(0)
    one, other = nn.Linear(2, 1), nn.Linear(2, 1)
    with Formation(device="cpu", batch_size=8) as formation:
        first, second, sgd = formation.prepare(one, other, torch.optim.SGD(one.parameters(), lr=0.1))
        adam = formation.prepare(torch.optim.Adam(other.parameters()))
        inputs = 100 * DATA.tensors[0]
        formation.backward(first(inputs).square().mean() + second(inputs).square().mean())
        untouched = other.weight.grad.clone()
        norm = formation.clip_grad_norm(1.0, sgd)
        clipped = nn.utils.get_total_norm([p.grad for p in one.parameters()])
        assert float(clipped) == pytest.approx(1.0, rel=1e-4)
        assert float(norm) > 1.0
        torch.testing.assert_close(other.weight.grad, untouched, rtol=0, atol=0)
        formation.clip_grad_norm(0.5, second)
        assert float(nn.utils.get_total_norm([p.grad for p in other.parameters()])) == pytest.approx(0.5, rel=1e-4)
        adam.step()


def test_an_epoch_interrupted_between_boundaries_leaves_no_gradients():
    """The next epoch's first step is that of its own micro-batches alone."""

    def weights(break_off: bool):
        torch.manual_seed(0)
        plain = nn.Linear(2, 1)
        with Formation(device="cpu", batch_size=2, gradient_accumulation_steps=2, seed=1) as formation:
            model, optimizer, loader = formation.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1), DATA)
            if break_off:
                for inputs, targets in loader:
                    formation.backward(nn.functional.mse_loss(model(inputs), targets))
                    break
            loader.sharded.set_epoch(1)
            for inputs, targets in loader:
                formation.backward(nn.functional.mse_loss(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()
        return plain.weight.tolist()

    assert weights(True) == weights(False)


def test_the_loss_scale_that_is_saved_is_that_of_the_last_complete_step():
    """A step that lost ranks interrupt has unscaled its gradients, and is done again: it must not count twice."""
    with Formation(device="cpu", batch_size=2) as formation:
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)  # fp16's, which needs a GPU
        scale = formation.gradients.scale = LossScale(scaler, formation.device, agree=False)
        model = nn.Linear(2, 1)
        model, optimizer = formation.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        formation.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()
        scale.settle(formation.gradients.steps)
        assert scaler.get_scale() == 8
        optimizer.zero_grad()
        formation.backward(model(torch.ones(1, 2)).sum())
        formation.clip_grad_norm(1.0)
        scale.settle(formation.gradients.steps)
        assert scaler.get_scale() == 8, "the second step was not taken"


def adversaries(*, passes: int = 1, spoil: bool = False, **settings) -> list[float]:
    """Train two models whose losses meet, with an optimizer each; return their weights after a few steps."""
    one, other = nn.Linear(2, 1, bias=False), nn.Linear(1, 1, bias=False)
    for model in (one, other):
        nn.init.ones_(model.weight)
    made = [torch.optim.SGD(model.parameters(), lr=0.01) for model in (one, other)]
    with Formation(device="cpu", **settings) as formation:
        first, second, *made, loader = formation.prepare(one, other, *made, TensorDataset(DATA.tensors[0]))
        for (x,) in loader:
            for _ in range(passes):
                formation.backward(second(x[:, :1]).square().mean())
                made[1].step()
                made[1].zero_grad()
            formation.backward(second(first(x)).square().mean())
            if spoil:
                other.weight.grad.fill_(torch.nan)
            made[0].step()
            made[0].zero_grad()
            made[1].zero_grad()
        return [*one.weight.flatten().tolist(), *other.weight.flatten().tolist()]


def test_the_scale_of_fp16_stays_while_an_optimizer_waits_for_its_step(monkeypatch):
    """A growth after every step: micro-batches before and after another optimizer's step need one scale."""
    monkeypatch.setattr("phalanx.world.world.check_device", lambda config, device: None)  # fp16 needs a GPU otherwise
    split = {"batch_size": 2, "gradient_accumulation_steps": 2}
    scaled = adversaries(**split, mixed_precision="fp16", scaler_growth_interval=1, scaler_init_scale=8.0)
    assert scaled == pytest.approx(adversaries(**split), rel=1e-5)
    with pytest.raises(UsageError, match=r"stepped twice.*\n.*bf16"):
        adversaries(**split, passes=2, mixed_precision="fp16")


def test_what_another_optimizer_has_left_does_not_skip_a_step():
    assert adversaries(batch_size=4, on_nonfinite="skip", spoil=True) == adversaries(batch_size=4)
