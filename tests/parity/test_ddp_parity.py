"""What the loop trains equals plain PyTorch: bit for bit where the order of additions is the same."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, TensorDataset

from phalanx.config import DistributedConfig
from phalanx.loop.task import TrainTask
from phalanx.run.job import Job
from phalanx.run.weights import whole_weights


def make_model(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 3)).double()


def make_data(samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x, (x.sum(1) > 0).long() + (x[:, 0] > 1).long())


def train(folder: str, *, samples: int, shuffle: bool = False, dropout: float = 0.0, **settings) -> dict:
    """Train a small model on this rank and return its weights."""
    model = make_model(dropout)
    config = DistributedConfig(device="cpu", progress=False, optimizer="sgd", momentum=0.9, **settings)
    task = TrainTask(model, DataLoader(make_data(samples), shuffle=shuffle), loss_fn=nn.CrossEntropyLoss())
    Job("fit", task, config, Path(folder)).run()
    return {name: value.clone() for name, value in model.state_dict().items()}


def train_with_torch_ddp(samples: int, batch_size: int, epochs: int) -> dict:
    """The loop that a PyTorch tutorial would write, over the same samples in the same order."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    model = make_model()
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, fused=True)
    data = make_data(samples)
    for _ in range(epochs):
        for start in range(0, samples, batch_size * world):
            x, y = data[start + rank * batch_size : start + (rank + 1) * batch_size]
            optimizer.zero_grad()
            nn.functional.cross_entropy(wrapped(x), y).backward()
            optimizer.step()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    del wrapped
    return state


def assert_same(ours: dict, theirs: dict, *, tolerance: float = 0.0) -> None:
    for name, value in theirs.items():
        difference = (ours[name] - value).abs().max().item()
        assert difference <= tolerance, f"{name} differs by {difference}"


def test_weights_have_the_same_bits_as_torch_ddp(ranks, tmp_path):
    ours = ranks(lambda: train(str(tmp_path), samples=48, batch_size=4, epochs=3), world_size=2)
    theirs = ranks(lambda: train_with_torch_ddp(48, 4, 3), world_size=2)
    assert_same(ours[0], theirs[0])
    assert_same(ours[0], ours[1])


class Centred(nn.Module):
    """A model whose training reads a buffer that each rank moves by its own batches, as codebooks and queues are."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("centre", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.centre.mul_(0.5).add_(x.detach().mean(0), alpha=0.5)
        return self.layer(x - self.centre)


def test_buffers_are_rank_0s_as_in_ddp(ranks, tmp_path):
    def learn(strategy: str) -> list[float]:
        torch.manual_seed(0)
        model = Centred().double()
        config = DistributedConfig(
            device="cpu", progress=False, strategy=strategy, optimizer="sgd", batch_size=4, epochs=2
        )
        task = TrainTask(model, DataLoader(make_data(48)), loss_fn=nn.CrossEntropyLoss())
        Job("fit", task, config, Path(tmp_path)).run()
        return model.layer.weight.flatten().tolist()

    assert ranks(learn, "auto", world_size=2) == ranks(learn, "ddp", world_size=2)


WHOLE: dict[int, dict] = {}
"""What one process learns from the whole batches, by number of samples: trained once, compared with every split."""


@pytest.mark.parametrize("samples", [64, 50, 67])
@pytest.mark.parametrize(
    ("world_size", "batch_size", "accumulation"), [(2, 8, 1), (2, 4, 2), (4, 4, 1), (4, 2, 2), (1, 4, 4)]
)
def test_every_split_of_a_global_batch_trains_the_same(ranks, tmp_path, samples, world_size, batch_size, accumulation):
    """64 divides evenly; 50 leaves a ragged last batch; 67 leaves three samples for up to four ranks."""

    def split() -> dict:
        return train(
            str(tmp_path / "split"),
            samples=samples,
            batch_size=batch_size,
            gradient_accumulation_steps=accumulation,
            gradient_clipping=0.5,
            epochs=2,
            shuffle=True,
        )

    def whole() -> dict:
        return train(
            str(tmp_path / "whole"), samples=samples, batch_size=16, gradient_clipping=0.5, epochs=2, shuffle=True
        )

    if samples not in WHOLE:
        WHOLE[samples] = ranks(whole, world_size=1)[0]
    expected = WHOLE[samples]
    for state in ranks(split, world_size=world_size):
        assert_same(state, expected, tolerance=1e-12)


def test_weighting_by_tokens_equals_the_whole_batch(ranks, tmp_path):
    """With ignored labels spread unevenly, only weighting by labels gives the gradient of the whole batch."""

    def run(batch_size: int, accumulation: int, weighting: str, folder: str) -> dict:
        generator = torch.Generator().manual_seed(3)
        tokens = torch.randint(0, 11, (24, 5), generator=generator)
        labels = tokens.roll(-1, 1).clone()
        labels[torch.rand(24, 5, generator=generator) < torch.linspace(0, 0.9, 24)[:, None]] = -100
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11)).double()
        config = DistributedConfig(
            device="cpu",
            progress=False,
            optimizer="sgd",
            learning_rate=0.1,
            batch_size=batch_size,
            gradient_accumulation_steps=accumulation,
            loss_weighting=weighting,
        )
        task = TrainTask(model, DataLoader(TensorDataset(tokens, labels)))
        Job("fit", task, config, Path(folder)).run()
        return copy.deepcopy(model.state_dict())

    whole = ranks(run, 12, 1, "auto", str(tmp_path / "a"), world_size=1)[0]
    for weighting in ("tokens", "auto"):
        split = ranks(run, 3, 2, weighting, str(tmp_path / weighting), world_size=2)[0]
        assert_same(split, whole, tolerance=1e-12)


@pytest.mark.parametrize("world_size", [1, 2])
def test_stop_and_resume_gives_the_same_bits(ranks, tmp_path, world_size):
    """Interrupted in the middle of the second epoch, with dropout, shuffling and an adaptive optimizer."""
    common = {"samples": 40, "batch_size": 4, "epochs": 3, "shuffle": True, "dropout": 0.3}
    common |= {"lr_schedule": "inverse-sqrt", "warmup": 4}
    steps = 40 // (4 * world_size)
    stop = steps + steps // 2

    def uninterrupted() -> dict:
        return train(str(tmp_path / "whole"), checkpoint_dir=str(tmp_path / "unused"), **common)

    def interrupted() -> dict:
        return train(
            str(tmp_path / "part"), checkpoint_dir=str(tmp_path / "ckpt"), **{**common, "epochs": None}, max_steps=stop
        )

    def resumed() -> dict:
        return train(
            str(tmp_path / "rest"), checkpoint_dir=str(tmp_path / "ckpt"), resume_from_checkpoint=True, **common
        )

    expected = ranks(uninterrupted, world_size=world_size)
    half = ranks(interrupted, world_size=world_size)
    assert any(not torch.equal(half[0][name], expected[0][name]) for name in half[0])
    for ours, theirs in zip(ranks(resumed, world_size=world_size), expected, strict=True):
        assert_same(ours, theirs)


def test_resume_at_another_number_of_ranks_reads_the_same_samples(ranks, tmp_path):
    """Saved mid-epoch by two ranks, continued by one with the same global batch: equal to rounding."""

    def run(folder: str, **settings) -> dict:
        return train(str(tmp_path / folder), samples=48, shuffle=True, **settings)

    whole = ranks(lambda: run("whole", batch_size=8, epochs=2), world_size=1)[0]
    ranks(lambda: run("a", batch_size=4, max_steps=9, checkpoint_dir=str(tmp_path / "ckpt")), world_size=2)
    rest = ranks(
        lambda: run("b", batch_size=8, epochs=2, checkpoint_dir=str(tmp_path / "ckpt"), resume_from_checkpoint=True),
        world_size=1,
    )[0]
    assert_same(rest, whole, tolerance=1e-12)


class Masked(nn.Module):
    """A model of tokens as Hugging Face's are called: it takes the labels, and returns a mean over those that count."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(9, 4), nn.Linear(4, 9)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.table(input_ids))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class Tokens(Dataset):
    """Sequences of which one to six tokens have a label."""

    def __len__(self) -> int:
        return 21

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(9, (6,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens.masked_fill(torch.arange(6) > index * 5 % 6, -100)}


def losses_over_labels(folder: str, batch_size: int, **layout) -> list[dict]:
    """Train with each loss whose mean is not over samples; return the weights, and the loss of an evaluation."""
    found = []
    weighted = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 0.2], dtype=torch.float64))
    for loss in (weighted, nn.CrossEntropyLoss(ignore_index=0), None):
        if loss is None and "pipeline_parallel" in layout:
            continue  # it needs the loss apart from the model
        torch.manual_seed(7)
        model, data = (make_model(), make_data(21)) if loss else (Masked().double(), Tokens())
        if loss:
            model = nn.Sequential(*model[:2], model[3])
        settings = {"batch_size": batch_size, "optimizer": "sgd", "learning_rate": 0.1, **layout}
        config = DistributedConfig(device="cpu", progress=False, epochs=1, **settings)
        task = TrainTask(model, DataLoader(data), DataLoader(data), loss_fn=loss)
        result = Job("fit", task, config, Path(folder)).run()
        weights = {name: value.clone() for name, value in whole_weights(model).items()}
        found.append({**weights, "loss": torch.tensor(result.history.epochs[-1].val["loss"])})
    return found


LABEL_LAYOUTS = {"ranks": {"batch_size": 4}, "pipeline": {"batch_size": 8, "pipeline_parallel": 2, "microbatches": 2}}


@pytest.mark.parametrize("name", LABEL_LAYOUTS)
def test_losses_over_labels_do_not_depend_on_the_split(ranks, tmp_path, name):
    """Class weights, a padding label of one's own, and a model that averages over its labels."""
    expected = ranks(lambda: losses_over_labels(str(tmp_path / "one"), 8), world_size=1)[0]
    for found in ranks(lambda: losses_over_labels(str(tmp_path / name), **LABEL_LAYOUTS[name]), world_size=2):
        for ours, theirs in zip(found, expected, strict=False):
            assert_same(ours, theirs, tolerance=1e-12)
