"""On a GPU: mixed precision, compilation, no waiting for the device between logging steps, ranks sharing one GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from phalanx import Formation, PyTorchDDPTrainer
from phalanx.config import DistributedConfig
from phalanx.loop.hooks import Callback
from phalanx.loop.task import TrainTask
from phalanx.run.job import Job
from phalanx.strategies.base import local

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))


def make_data(samples: int = 512) -> TensorDataset:
    torch.manual_seed(1)
    x = torch.randn(samples, 16)
    return TensorDataset(x, (x[:, :4]).argmax(1))


class SyncAlarm(Callback):
    """Makes torch raise when anything waits for the device, except in the steps that log."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.watched = 0

    def on_step_end(self, trainer, info) -> None:
        next_is_quiet = info.step >= 8 and (info.step + 1) % self.every != 0  # the first losses are read, too
        self.watched += next_is_quiet
        torch.cuda.set_sync_debug_mode("error" if next_is_quiet else "default")

    def on_fit_end(self, trainer) -> None:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("precision", [False, "bf16", "fp16"])
def test_no_step_waits_for_the_device(tmp_path, precision):
    alarm = SyncAlarm(every=10)
    trainer = PyTorchDDPTrainer(
        make_model(),
        num_gpus=1,
        batch_size=16,
        max_steps=60,
        log_every_n_steps=10,
        gradient_clipping=1.0,
        lr_schedule="cosine",
        warmup=5,
        mixed_precision=precision,
        learning_rate=1e-2,
        progress=False,
        run_dir=str(tmp_path / "run"),
        callbacks=[alarm],
    )
    loader = DataLoader(make_data(1024), batch_size=16, shuffle=True, pin_memory=True)
    try:
        if precision == "fp16":  # GradScaler itself reads found_inf once per step, unless the optimizer takes it
            trainer.optimizer = lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True)
        history = trainer.fit(loader)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert alarm.watched > 30
    assert history.steps[-1]["loss"] < history.steps[0]["loss"]


@pytest.mark.parametrize("precision", ["bf16", "fp16", True])
def test_mixed_precision_learns(tmp_path, precision):
    trainer = PyTorchDDPTrainer(
        make_model(),
        num_gpus=1,
        batch_size=32,
        epochs=10,
        learning_rate=1e-2,
        mixed_precision=precision,
        progress=False,
        run_dir=str(tmp_path / "run"),
    )
    assert trainer.fit(make_data(), make_data()).best_accuracy > 0.9


def test_compiled_equals_eager(tmp_path, monkeypatch):
    monkeypatch.setattr("torch._inductor.config.compile_threads", 1)  # no pool of compilers that outlives the test

    def final(compile_it: bool) -> torch.Tensor:
        model = make_model()
        PyTorchDDPTrainer(
            model,
            num_gpus=1,
            batch_size=32,
            max_steps=20,
            compile=compile_it,
            progress=False,
            run_dir=str(tmp_path / "run"),
        ).fit(make_data())
        return model[0].weight.detach().cpu()

    torch.testing.assert_close(final(True), final(False), rtol=1e-3, atol=1e-5)


def test_stop_and_resume_gives_the_same_bits(tmp_path):
    def final(**settings) -> dict:
        model = nn.Sequential(make_model(), nn.Dropout(0.2), nn.Linear(4, 4))
        torch.manual_seed(2)
        PyTorchDDPTrainer(
            model,
            num_gpus=1,
            batch_size=32,
            progress=False,
            run_dir=str(tmp_path / "run"),
            deterministic=False,
            **settings,
        ).fit(DataLoader(make_data(), shuffle=True))
        return {name: value.cpu() for name, value in model.state_dict().items()}

    torch.manual_seed(5)
    whole = final(epochs=2)
    torch.manual_seed(5)
    final(max_steps=21, checkpoint_dir=str(tmp_path / "ckpt"))
    rest = final(epochs=2, checkpoint_dir=str(tmp_path / "ckpt"), resume_from_checkpoint=True)
    assert all(torch.equal(whole[name], rest[name]) for name in whole)


def train_shared(folder: str, strategy: str) -> torch.Tensor:
    model = make_model()
    config = DistributedConfig(
        device="cuda",
        communication_backend="gloo",
        strategy=strategy,
        batch_size=16,
        max_steps=10,
        optimizer="sgd",
        progress=False,
    )
    task = TrainTask(model, DataLoader(make_data()), loss_fn=nn.CrossEntropyLoss())
    Job("fit", task, config, Path(folder)).run()
    return local(model[0].weight.detach()).cpu()


def test_two_gloo_ranks_share_one_gpu(ranks, tmp_path):
    first, second = ranks(train_shared, str(tmp_path), "ddp", world_size=2)
    assert torch.equal(first, second)
    parts = ranks(train_shared, str(tmp_path), "fsdp", world_size=2)
    torch.testing.assert_close(torch.cat(parts), first, rtol=1e-5, atol=1e-6)


def test_nccl_at_world_size_one_and_formation(tmp_path):
    formation = Formation(device="cuda", batch_size=16, gradient_accumulation_steps=2)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = formation.prepare(model, optimizer, DataLoader(make_data(64)))
    for x, y in loader:
        assert x.is_cuda
        formation.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    assert formation.step == 2
    formation.close()
