"""Settings of the loop on one rank, in this process: what each of them changes, and that nothing else changes."""

from __future__ import annotations

import shutil

import pytest
import torch
import torch._dynamo.utils
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from phalanx import Callback, Formation, PyTorchDDPTrainer
from phalanx.errors import NonFiniteLossError
from phalanx.zoo.models import build


@pytest.fixture(autouse=True)
def _in_own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def make_data(samples: int = 20) -> TensorDataset:
    x = torch.randn(samples, 4, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, (x.sum(1) > 0).long())


def make_model() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def fit(model: nn.Module | None = None, *, data=None, callbacks=(), **settings):
    defaults = {"device": "cpu", "num_workers": 1, "batch_size": 4, "progress": False, "log_every_n_steps": 1}
    trainer = PyTorchDDPTrainer(model or make_model(), callbacks=list(callbacks), **{**defaults, **settings})
    return trainer, trainer.fit(make_data() if data is None else data)


class Rates(Callback):
    def __init__(self):
        self.seen = []

    def on_step_end(self, trainer, info):
        self.seen.append(info.learning_rate)


def test_schedule_warm_up_and_scaling_reach_the_optimizer():
    rates = Rates()
    fit(callbacks=[rates], learning_rate=0.1, lr_schedule="linear", warmup=2, lr_scaling="linear", base_batch_size=2)
    assert rates.seen == pytest.approx([0.1, 0.2, 0.2, 0.2 * 2 / 3, 0.2 / 3])


class Samples(Callback):
    def __init__(self):
        self.seen = []

    def on_step_end(self, trainer, info):
        self.seen.append(info.samples)


@pytest.mark.parametrize(("drop_last", "expected"), [(None, [6, 6, 6, 2]), (True, [6, 6, 6]), (False, [6, 6, 6, 2])])
def test_drop_last_drops_the_incomplete_batch_only_when_asked(drop_last, expected):
    samples = Samples()
    fit(callbacks=[samples], batch_size=3, gradient_accumulation_steps=2, drop_last=drop_last)
    assert samples.seen == expected


def test_drop_last_follows_the_loader_unless_set():
    followed, overruled = Samples(), Samples()
    loader = DataLoader(make_data(), batch_size=6, drop_last=True)
    fit(data=loader, callbacks=[followed], batch_size=None)
    fit(data=loader, callbacks=[overruled], batch_size=None, drop_last=False)
    assert (followed.seen, overruled.seen) == ([6, 6, 6], [6, 6, 6, 2])


def test_bf16_computes_in_bf16_and_keeps_weights_in_fp32():
    seen = []
    model = make_model()
    model[0].register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    _, history = fit(model, mixed_precision="bf16", epochs=8, learning_rate=0.05)
    assert set(seen) == {torch.bfloat16}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert history.epochs[-1].train_loss < 0.7 * history.epochs[0].train_loss


def gradients_of_gpt(**settings) -> tuple[dict[str, torch.Tensor], int]:
    torch.manual_seed(0)
    model = build("gpt", preset="debug")
    calls = []
    name, block = next((n, m) for n, m in model.named_modules() if n.endswith(".0") and list(m.children()))
    inner = block.forward
    block.forward = lambda *a, **k: (calls.append(name), inner(*a, **k))[1]
    tokens = torch.randint(0, 50, (2, 12), generator=torch.Generator().manual_seed(3))
    with Formation(device="cpu", **settings) as formation:
        wrapped = formation.prepare(model)
        result = wrapped(tokens)
        logits = getattr(result, "logits", result)
        logits = logits[0] if isinstance(logits, tuple) else logits
        formation.backward(F.cross_entropy(logits.flatten(0, -2), tokens.flatten()))
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, len(calls)


def test_activation_checkpointing_recomputes_blocks_and_gives_equal_gradients():
    plain, plain_calls = gradients_of_gpt()
    recomputed, calls = gradients_of_gpt(activation_checkpointing=True)
    assert (plain_calls, calls) == (1, 2)
    torch.testing.assert_close(recomputed, plain, rtol=0, atol=0)


def compare_compiled() -> tuple[int, int, float]:
    """Train compiled and plain; return the frames compiled, those compiled afterwards, and the difference."""
    counters = torch._dynamo.utils.counters
    compiled, _ = fit(compile=True, data=make_data(32), max_steps=3, num_workers=None)
    frames = counters["frames"]["ok"]
    compiled.model(torch.zeros(3, 4))
    plain, _ = fit(data=make_data(32), max_steps=3, num_workers=None)
    pairs = zip(compiled.model.parameters(), plain.model.parameters(), strict=True)
    difference = max((left - right).abs().max().item() for left, right in pairs)
    return frames, counters["frames"]["total"] - frames, difference


def test_a_compiled_model_is_one_graph_and_trains_the_same(ranks):
    """Under DDP, and a bare nn.Sequential, whose calls torch by itself never compiles."""
    if shutil.which("c++") is None and shutil.which("g++") is None:
        pytest.skip("torch.compile on the CPU needs a C++ compiler")
    for frames, after, difference in ranks(compare_compiled, world_size=2):
        assert (frames, after) == (1, 0)
        assert difference < 1e-6


def test_the_same_seed_gives_the_same_weights_and_another_seed_others():
    def trained(seed: int) -> torch.Tensor:
        model = make_model()
        fit(model, data=DataLoader(make_data(), shuffle=True), seed=seed)
        return model[0].weight.clone()

    assert torch.equal(trained(1), trained(1))
    assert not torch.equal(trained(1), trained(2))


class Infinite(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x):
        return self.layer(x) * float("inf")


def test_an_error_leaves_the_users_objects_as_they_were():
    model = Infinite()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = PyTorchDDPTrainer(model, optimizer=optimizer, device="cpu", num_workers=1, batch_size=4, progress=False)
    with pytest.raises(NonFiniteLossError, match="at step 1; there is no checkpoint before it"):
        trainer.fit(make_data())
    assert not {"step", "zero_grad"} & optimizer.__dict__.keys()


class OwnScheduler(Callback):
    """What a user with a torch scheduler of their own would write: made before the optimizer is prepared, or after."""

    def __init__(self, optimizer=None):
        self.scheduler = None if optimizer is None else torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def on_fit_start(self, trainer):
        self.scheduler = self.scheduler or torch.optim.lr_scheduler.ExponentialLR(trainer.optimizer, 0.5)

    def on_step_end(self, trainer, info):
        self.scheduler.step()


@pytest.mark.filterwarnings("error:.*optimizer.step:UserWarning")
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_callback_may_set_the_rate_of_a_constant_schedule(when):
    model, rates = make_model(), Rates()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.8)
    own = OwnScheduler(optimizer if when == "before" else None)
    fit(model, optimizer=optimizer, callbacks=[rates, own], max_steps=4)
    assert rates.seen == pytest.approx([0.8, 0.4, 0.2, 0.1])
