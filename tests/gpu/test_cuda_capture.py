"""On a GPU: a training step as one CUDA graph gives the bits of the eager step, and says where it is not possible."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from command import phalanx
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from phalanx import Callback, PyTorchDDPTrainer
from phalanx.data.ahead import fetch_ahead
from phalanx.zoo.models.gpt import gpt
from phalanx.zoo.models.resnet import resnet

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

RECORDED = "steps are launched as one CUDA graph"


class Messages:
    """A sink that keeps what the run says."""

    next_commands = ()

    def __init__(self) -> None:
        self.texts: list[str] = []

    def handle(self, event) -> None:
        if hasattr(event, "text"):
            self.texts.append(event.text)

    def close(self) -> None:
        """Do nothing."""

    def about(self, words: str) -> list[str]:
        return [text for text in self.texts if words in text]


def make_mlp(dropout: float = 0.1) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, 64), nn.ReLU(), nn.Dropout(dropout), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)
    )


def make_data(samples: int = 512) -> TensorDataset:
    torch.manual_seed(1)
    inputs = torch.randn(samples, 16)
    return TensorDataset(inputs, inputs[:, :4].argmax(1))


def train(folder: Path, model: nn.Module, capture: bool | None, data: Any = None, **settings: Any):
    """Return the state of the model after a run on one GPU, its history, and what it said."""
    messages = Messages()
    callbacks = [messages, *settings.pop("callbacks", [])]
    defaults: dict[str, Any] = {"batch_size": 16, "max_steps": 50, "learning_rate": 1e-2, "log_every_n_steps": 10}
    trainer = PyTorchDDPTrainer(
        model,
        **{**defaults, **settings},
        num_gpus=1,
        capture=capture,
        callbacks=callbacks,
        progress=False,
        run_dir=str(folder / f"run-{capture}"),
    )
    torch.manual_seed(7)
    history = trainer.fit(make_data() if data is None else data)
    return {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}, history, messages


def assert_equal(captured, eager) -> None:
    """Compare weights and buffers to the bit, and what was logged."""
    for name, value in eager[0].items():
        assert torch.equal(captured[0][name], value), f"{name} differs by {(captured[0][name] - value).abs().max()}"
    for field in ("loss", "grad_norm", "learning_rate"):
        assert [step[field] for step in captured[1].steps] == [step[field] for step in eager[1].steps], field


def assert_same_bits(folder: Path, make, **settings: Any) -> None:
    captured = train(folder, make(), True, **settings)
    assert captured[2].about(RECORDED), captured[2].texts
    eager = train(folder, make(), False, **settings)
    assert not eager[2].about(RECORDED)
    assert_equal(captured, eager)


CASES: dict[str, dict[str, Any]] = {
    "adamw": {},
    "clipping, cosine, averaged weights": {
        "gradient_clipping": 0.5,
        "lr_schedule": "cosine",
        "warmup": 5,
        "ema_decay": 0.99,
        "weight_decay": 0.1,
    },
    "sgd": {"optimizer": "sgd", "learning_rate": 0.1, "lr_schedule": "linear"},
    "accumulation": {"gradient_accumulation_steps": 4, "batch_size": 4, "gradient_clipping": 1.0},
    "ragged epochs": {"epochs": 5, "max_steps": None, "data": make_data(7 * 16 + 5)},
    "bf16": {"mixed_precision": "bf16"},
    "fp16": {"mixed_precision": "fp16", "gradient_clipping": 1.0},
    # A scale so large that the first steps overflow, and one that grows while steps are replayed.
    "fp16 with overflows": {
        "mixed_precision": "fp16",
        "scaler_init_scale": 2.0**40,
        "scaler_growth_interval": 4,
    },
    # The last batch of an epoch runs eagerly, and the scale that it leaves is used by the next graph.
    "fp16 with ragged epochs": {
        "mixed_precision": "fp16",
        "scaler_init_scale": 2.0**20,
        "scaler_growth_interval": 2,
        "epochs": 8,
        "max_steps": None,
        "data": make_data(5 * 16 + 5),
    },
    "accumulation with ragged epochs": {
        "gradient_accumulation_steps": 3,
        "batch_size": 4,
        "epochs": 5,
        "max_steps": None,
        "data": make_data(7 * 12 + 5),
    },
    "inverse-sqrt": {"lr_schedule": "inverse-sqrt", "warmup": 4, "seed": 3},
}


@pytest.mark.parametrize("case", CASES)
def test_bits_of_the_eager_step(tmp_path, case):
    assert_same_bits(tmp_path, make_mlp, **CASES[case])


def test_the_default_captures(tmp_path):
    _, _, messages = train(tmp_path, make_mlp(), None)
    assert messages.about(RECORDED)


def test_gpt_in_bf16(tmp_path):
    torch.manual_seed(1)
    tokens = torch.randint(256, (256, 65))
    data = TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    torch.backends.cuda.enable_flash_sdp(False)  # its backward pass adds in any order
    torch.backends.cuda.enable_mem_efficient_sdp(False)

    def make() -> nn.Module:
        torch.manual_seed(0)
        return gpt("debug", seq_len=64)

    try:
        assert_same_bits(tmp_path, make, data=data, mixed_precision="bf16", batch_size=8, gradient_clipping=1.0)
    finally:
        torch.backends.cuda.enable_flash_sdp(True)
        torch.backends.cuda.enable_mem_efficient_sdp(True)


def test_resnet_with_batch_norm(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(128, 3, 64, 64), torch.randint(10, (128,)))

    def make() -> nn.Module:
        torch.manual_seed(0)
        return resnet("resnet18")

    assert_same_bits(tmp_path, make, data=data, batch_size=8, optimizer="sgd", learning_rate=0.01, max_steps=30)


def test_a_checkpoint_in_the_middle_and_resume(tmp_path):
    whole = train(tmp_path, make_mlp(), True)[0]
    folder = {"checkpoint_dir": str(tmp_path / "ckpt"), "checkpoint_frequency": "7 steps"}
    train(tmp_path, make_mlp(), True, max_steps=21, **folder)
    rest = train(tmp_path, make_mlp(), True, resume_from_checkpoint=True, **folder)[0]
    assert all(torch.equal(whole[name], rest[name]) for name in whole)


def test_a_replay_comes_after_what_the_capture_has_queued(tmp_path, monkeypatch):
    """The seed of dropout among it: a busy device executed it after the first replay had begun."""
    begin = torch.cuda.CUDAGraph.capture_begin

    def begin_late(graph: torch.cuda.CUDAGraph, *given: Any, **options: Any) -> None:
        torch.cuda._sleep(10**8)  # on the stream of the capture
        begin(graph, *given, **options)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", begin_late)
    assert_same_bits(tmp_path, make_mlp)


def test_an_optimizer_and_a_scheduler_of_the_user(tmp_path):
    def run(capture: bool):
        model = make_mlp().cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=2.0**-7, fused=True)
        # Halves, which single precision has exactly: a captured step reads the rate from the device.
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 ** (step // 10))
        done = train(tmp_path, model, capture, optimizer=optimizer, scheduler=scheduler, scheduler_interval="step")
        assert all("capturable" not in group or not group["capturable"] for group in optimizer.param_groups)
        assert all(isinstance(group["lr"], float) for group in optimizer.param_groups)
        return done

    captured, eager = run(True), run(False)
    assert captured[2].about(RECORDED), captured[2].texts
    assert_equal(captured, eager)


def test_an_optimizer_that_counts_on_the_host(tmp_path):
    def run(capture: bool):
        model = make_mlp().cuda()
        return train(tmp_path, model, capture, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2))

    captured = run(True)
    assert captured[2].about("write fused=True in it"), captured[2].texts
    assert_equal(captured, run(False))


class ReadsTheHost(nn.Module):
    """Looks at a value of the device in every forward pass."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner, self.kind = make_mlp(), kind

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output = self.inner(inputs)
        if self.kind == "item" and output.abs().max().item() > 1e6:
            output = output / 2
        elif self.kind == "host tensor":
            output = output + torch.zeros(4).to(output.device)
        elif self.kind == "shape":
            output = output + 0 * inputs[inputs > 0].sum()
        elif self.kind == "raises" and torch.cuda.is_current_stream_capturing():
            output.sum().item()  # as an operation does that was not seen before: CUDA ends the capture
        return output


@pytest.mark.parametrize("kind", ["item", "host tensor", "shape", "raises"])
def test_a_model_that_reads_the_host(tmp_path, kind):
    captured = train(tmp_path, ReadsTheHost(kind), True)
    assert not captured[2].about(RECORDED)
    said = captured[2].about("CUDA graph capture is off")
    assert said, captured[2].texts
    if kind != "raises":
        assert "test_cuda_capture.py" in said[0]
    assert_equal(captured, train(tmp_path, ReadsTheHost(kind), False))


class Changes(Callback):
    """Changes settings that are part of a recording."""

    def on_step_end(self, trainer, info) -> None:
        model = trainer.formation.unwrap(trainer.model)
        if info.step == 12:
            trainer.optimizer.param_groups[0]["lr"] = 2.0**-8
        if info.step == 20:
            model[2].p = 0.5
        if info.step == 30:
            model[0].requires_grad_(False)


def test_callbacks_that_change_the_step(tmp_path):
    assert_same_bits(tmp_path, make_mlp, callbacks=[Changes()])


def test_compiled(tmp_path, monkeypatch):
    monkeypatch.setattr("torch._inductor.config.compile_threads", 1)
    captured = train(tmp_path, make_mlp(0.0), True, compile=True)
    assert captured[2].about(RECORDED), captured[2].texts
    assert_equal(captured, train(tmp_path, make_mlp(0.0), False, compile=True))


class Plain(Dataset):
    """A length and a `__getitem__`, which draws random numbers."""

    def __init__(self, tensors: TensorDataset) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors)

    def __getitem__(self, index: int):
        inputs, target = self.tensors[index]
        return inputs + 0.1 * torch.randn(16), target


def test_batches_that_are_fetched_ahead(tmp_path, monkeypatch):
    began: list[int] = []

    def counted(*given):
        began.append(1)
        return fetch_ahead(*given)

    monkeypatch.setattr("phalanx.data.mapped._WORTH_WORKERS", 100)
    monkeypatch.setattr("phalanx.loop.loader._MEASURED_BATCHES", 32)
    monkeypatch.setattr("phalanx.data.mapped.fetch_ahead", counted)
    monkeypatch.setattr("phalanx.data.mapped.worker_count", lambda ranks_here: 2)
    data = Plain(make_data(16 * 400))
    captured = train(tmp_path, make_mlp(), True, data=data, max_steps=600)
    assert began, "the device waits for a data set that is read sample by sample"
    assert_equal(captured, train(tmp_path, make_mlp(), False, data=data, max_steps=600))


def test_two_ranks_over_nccl(tmp_path, monkeypatch, fork_server):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    words = ("digits", "--deterministic", "--num-workers", 2, "--max-steps", 40, "--share-gpus", "--seed", 3)
    losses: dict[str, list[float]] = {}
    for flag in ("--capture", "--no-capture"):
        answer = phalanx("train", *words, flag, "--log-every-n-steps", 5, "--run-dir", flag.strip("-"))
        assert answer.code == 0, answer.text
        events = list(map(json.loads, Path(flag.strip("-"), "events.jsonl").read_text().splitlines()))
        losses[flag] = [event["loss"] for event in events if event["event"] == "step"]
        recorded = [event for event in events if RECORDED in str(event.get("text"))]
        assert bool(recorded) == (flag == "--capture"), [event.get("text") for event in events]
    assert losses["--capture"] == losses["--no-capture"]
