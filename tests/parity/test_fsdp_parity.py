"""fsdp beyond the matrix: what each stage shards, optimizers, checkpoints across layouts, models on the meta device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from layouts import assert_same
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from phalanx.config import DistributedConfig
from phalanx.errors import UsageError
from phalanx.loop.formation import Formation
from phalanx.loop.task import TrainTask
from phalanx.run.job import Job
from phalanx.run.trainer import PyTorchDDPTrainer
from phalanx.strategies.base import local, whole
from phalanx.zoo.models.gpt import gpt
from phalanx.zoo.models.llama import llama


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.wide = nn.Linear(6, 10)
        self.narrow = nn.Linear(10, 6)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.narrow(torch.tanh(self.wide(x))))


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(dropout) for _ in range(3))
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    def init_weights(self) -> None:
        for parameter in self.parameters():
            nn.init.constant_(parameter, 0.1)


def make_data(samples: int, dtype: torch.dtype) -> TensorDataset:
    x = torch.randn(samples, 6, generator=torch.Generator().manual_seed(1), dtype=dtype)
    return TensorDataset(x, (x.sum(1) > 0).long() + (x[:, 0] > 1).long())


def train(
    folder: str, *, samples: int = 67, dtype: str = "float64", dropout: float = 0.0, given: bool = False, **settings
):
    """Train on this rank and return the whole weights."""
    torch.manual_seed(3)
    kind = getattr(torch, dtype)
    model = Net(dropout).to(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True) if given else None
    config = DistributedConfig(device="cpu", progress=False, learning_rate=1e-2, gradient_clipping=0.5, **settings)
    data = DataLoader(make_data(samples, kind), shuffle=True)
    task = TrainTask(model, data, data, loss_fn=nn.CrossEntropyLoss(), optimizer=optimizer)
    result = Job("fit", task, config, Path(folder)).run()
    weights = {name: whole(value.detach()).clone() for name, value in model.state_dict().items()}
    return weights, result.history.epochs[-1].val


def elements(tensors) -> int:
    return sum(local(tensor).numel() for tensor in tensors if tensor is not None)


def accumulate_by_hand(**settings) -> tuple[dict, dict]:
    """Two steps of two micro-batches in a loop of the user's own; how much a rank holds after the first micro-batch."""
    torch.manual_seed(3)
    model = Net().double()
    held = {}
    with Formation(device="cpu", gradient_accumulation_steps=2, **settings) as formation:
        prepared, optimizer = formation.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        x, y = make_data(32, torch.float64).tensors
        mine = torch.arange(32) % formation.world_size == formation.rank
        for micro, (inputs, targets) in enumerate(zip(x[mine].chunk(4), y[mine].chunk(4), strict=True)):
            formation.backward(nn.functional.cross_entropy(prepared(inputs), targets))
            if micro == 0:
                trained = optimizer.param_groups[0]["params"]
                gradients = {id(p.grad): p.grad for p in (*model.parameters(), *trained)}
                held |= {"parameters": elements(model.parameters()), "gradients": elements(gradients.values())}
            optimizer.step()
            optimizer.zero_grad()
        held["states"] = elements(state["exp_avg"] for state in optimizer.state.values())
    return {name: whole(value.detach()).clone() for name, value in model.state_dict().items()}, held


@pytest.mark.parametrize("settings", [{"zero_stage": 1}, {"zero_stage": 2}, {"zero_stage": 3}, {"strategy": "ddp"}])
def test_a_custom_loop_accumulates(ranks, settings):
    """Each stage shards what it says, between the micro-batches of one step too."""
    expected, _ = ranks(accumulate_by_hand, world_size=1)[0]
    results = ranks(lambda: accumulate_by_hand(**settings), world_size=2)
    for weights, _ in results:
        assert_same(weights, expected, 1e-10)
    total, stage = elements(Net().parameters()), settings.get("zero_stage", 0)
    sharded = {name for name, count in results[0][1].items() if count < 0.7 * total}
    assert sharded == [set(), {"states"}, {"states", "gradients"}, {"states", "gradients", "parameters"}][stage]


def test_ranks_with_different_weights_start_from_those_of_rank_0(ranks):
    """A script without a seed: each rank would shard a different model."""

    def build():
        torch.manual_seed(torch.distributed.get_rank())
        model = Net()
        drawn = {name: value.clone() for name, value in model.state_dict().items()}
        with Formation(device="cpu", strategy="fsdp") as formation:
            formation.prepare(model)
        return drawn, {name: whole(value).clone() for name, value in model.state_dict().items()}

    (first, ours), (_, theirs) = ranks(build, world_size=2)
    assert_same(ours, first, 0.0)
    assert_same(theirs, first, 0.0)


def test_an_optimizer_created_before_sharding_trains_the_shards(ranks, tmp_path):
    expected, _ = ranks(lambda: train(str(tmp_path / "a"), batch_size=16, max_steps=4, given=True), world_size=1)[0]

    def run():
        return train(str(tmp_path / "b"), batch_size=8, max_steps=4, given=True, strategy="fsdp")

    assert_same(ranks(run, world_size=2)[0][0], expected, 1e-10)


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rmsprop"])
def test_optimizers_by_name_train_the_shards(ranks, tmp_path, optimizer):
    common = {"max_steps": 4, "optimizer": optimizer}
    expected, _ = ranks(lambda: train(str(tmp_path / "a"), batch_size=16, **common), world_size=1)[0]
    ours = ranks(lambda: train(str(tmp_path / "b"), batch_size=8, strategy="fsdp", **common), world_size=2)[0][0]
    assert_same(ours, expected, 1e-10)


@pytest.mark.parametrize("sharding", ["full", "grad-op"])
def test_stop_and_resume_gives_the_same_bits(ranks, tmp_path, sharding):
    """Saved after an evaluation, which leaves parameters whole that are so during a step."""
    common = {"batch_size": 4, "strategy": "fsdp", "sharding": sharding, "dropout": 0.2, "samples": 40}
    common["lr_schedule"] = "inverse-sqrt"
    place = {"checkpoint_dir": str(tmp_path / "ckpt")}
    whole_run = ranks(lambda: train(str(tmp_path / "a"), epochs=2, **common), world_size=2)
    ranks(lambda: train(str(tmp_path / "b"), max_steps=7, **common, **place), world_size=2)
    rest = ranks(
        lambda: train(str(tmp_path / "c"), epochs=2, resume_from_checkpoint=True, **common, **place), world_size=2
    )
    for ours, theirs in zip(rest, whole_run, strict=True):
        assert_same(ours[0], theirs[0], 0.0)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("fsdp", 4), ("fsdp", 2)),
        (("fsdp", 2), ("ddp", 1)),
        (("ddp", 2), ("fsdp", 4)),
    ],
)
def test_checkpoints_load_at_another_layout(ranks, tmp_path, first, second):
    """Saved mid-run on one layout and finished on another: as if it had never moved."""
    place = {"checkpoint_dir": str(tmp_path / "ckpt")}

    def run(layout, **settings):
        strategy, world_size = layout
        return ranks(
            lambda: train(str(tmp_path / "run"), strategy=strategy, batch_size=8 // world_size, **settings),
            world_size=world_size,
        )[0][0]

    expected = run(("ddp", 1), max_steps=10)
    run(first, max_steps=5, **place)
    assert_same(run(second, max_steps=10, resume_from_checkpoint=True, **place), expected, 1e-10)


def build_without_memory(folder: str) -> tuple[int, bool]:
    with torch.device("meta"):
        model = Net()
    config = DistributedConfig(device="cpu", progress=False, strategy="fsdp", batch_size=4, max_steps=2)
    task = TrainTask(model, make_data(16, torch.float32), loss_fn=nn.CrossEntropyLoss())
    Job("fit", task, config, Path(folder)).run()
    local = sum(parameter.to_local().numel() for parameter in model.parameters())
    return local, all(bool(torch.isfinite(whole(p.detach())).all()) for p in model.parameters())


def test_a_model_built_on_the_meta_device_gets_only_its_shards(ranks, tmp_path):
    total = sum(parameter.numel() for parameter in Net().parameters())
    shards = ranks(build_without_memory, str(tmp_path), world_size=2)
    assert sum(local for local, _ in shards) == total
    assert max(local for local, _ in shards) < 0.7 * total
    assert all(finite for _, finite in shards)


def build_without_weights() -> None:
    with Formation(device="cpu", strategy="fsdp") as formation:
        formation.prepare(nn.Linear(4, 4, device="meta"))


def first_weights(**settings) -> dict:
    with torch.device("meta"):
        model = llama(layers=1)
    with Formation(device="cpu", **settings) as formation:
        formation.prepare(model)
    return {name: whole(value.detach()).clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(
    ("world_size", "settings"),
    [
        (4, {"strategy": "fsdp", "sharding": "hybrid", "shard_size": 2}),
        (2, {"strategy": "ddp"}),
        (1, {"strategy": "fsdp"}),
    ],
)
def test_a_model_from_the_meta_device_starts_equal_on_all_replicas(ranks, world_size, settings):
    first, *others = ranks(lambda: first_weights(**settings), world_size=world_size)
    assert first["embed.weight"].std() == pytest.approx(0.02, rel=0.1)
    for other in others:
        assert_same(other, first, 0.0)


def test_trained_weights_are_returned_to_a_model_on_the_meta_device(tmp_path, monkeypatch, fork_server):
    """The weights of gpt are tied, and must be so in the model that comes back."""
    monkeypatch.chdir(tmp_path)
    with torch.device("meta"):
        model = gpt(layers=1)
    before = torch.random.get_rng_state()
    tokens = torch.randint(256, (8, 9), generator=torch.Generator().manual_seed(1))
    data = TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    trainer = PyTorchDDPTrainer(
        model, num_workers=2, device="cpu", strategy="fsdp", batch_size=4, max_steps=1, progress=False
    )
    history = trainer.fit(data, data)
    assert model.head.weight is model.embed.tokens.weight
    assert trainer.evaluate(data)["loss"] == pytest.approx(history.epochs[-1].val["loss"], rel=1e-5)
    assert torch.equal(torch.random.get_rng_state(), before), "the user's random state must not change"


def test_bad_input_is_refused(ranks, tmp_path):
    with pytest.raises(UsageError, match="Did you mean 'Block'"):
        ranks(lambda: train(str(tmp_path), strategy="fsdp", batch_size=4, max_steps=1, wrap_class="Blok"), world_size=2)
    with pytest.raises(UsageError, match=r"Linear was built on the meta device and has no init_weights\(\)"):
        ranks(build_without_weights, world_size=2)
    with pytest.raises(UsageError, match="groups of shard_size = 3"):
        ranks(
            lambda: train(str(tmp_path), strategy="fsdp", batch_size=4, max_steps=1, sharding="hybrid", shard_size=3),
            world_size=2,
        )
