"""On a GPU: each trick that makes training faster or smaller gives the numbers of the plain way."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from phalanx import PyTorchDDPTrainer
from phalanx.speed import fp8
from phalanx.speed.adamw8bit import AdamW8bit
from phalanx.zoo.models.gpt import gpt
from phalanx.zoo.models.llama import llama
from phalanx.zoo.models.loss import LMHead, token_loss

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
needs_fp8 = pytest.mark.skipif(
    not torch.cuda.is_available() or bool(fp8.why_no_fp8(torch.device("cuda"))), reason="needs a GPU with fp8"
)


@pytest.fixture(autouse=True)
def _compile_here(monkeypatch):
    """Compile in this process: Inductor's worker processes outlive a test."""
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    monkeypatch.setattr("torch._inductor.config.compile_threads", 1)


def closeness(found: torch.Tensor, expected: torch.Tensor) -> float:
    return F.cosine_similarity(found.double().flatten(), expected.double().flatten(), dim=0).item()


@pytest.mark.parametrize("vocabulary", [100, 5000, 50257], ids=str)
def test_the_loss_kernel_gives_loss_and_gradient_of_cross_entropy(vocabulary):
    from phalanx.speed.kernels import cross_entropy_

    torch.manual_seed(0)
    width = -(-vocabulary // 64) * 64
    logits = torch.randn(64, width, device="cuda", dtype=torch.bfloat16) * 4
    targets = torch.randint(vocabulary, (64,), device="cuda")
    targets[5] = -100
    precise = logits[:, :vocabulary].double().requires_grad_()
    expected = F.cross_entropy(precise, targets, reduction="none")
    expected.sum().backward()
    losses = cross_entropy_(logits, targets, vocabulary)
    torch.testing.assert_close(losses.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits[:, :vocabulary].double(), precise.grad, rtol=8e-3, atol=1e-6)
    assert not logits[:, vocabulary:].any()
    assert not logits[5].any()


@needs_fp8
def test_the_gradient_of_the_loss_in_8_bits():
    from phalanx.speed.kernels import E5M2, GRADIENT_SCALE, cross_entropy_gradient

    torch.manual_seed(0)
    logits = torch.randn(200, 5056, device="cuda", dtype=torch.bfloat16) * 4
    targets = torch.randint(5000, (200,), device="cuda")
    targets[5] = -100
    precise = logits[:, :5000].double().requires_grad_()
    expected = F.cross_entropy(precise, targets, reduction="none")
    expected.sum().backward()
    rows = torch.empty(200, 5056, device="cuda", dtype=E5M2)
    columns = torch.zeros(5056, 240, device="cuda").to(E5M2)
    losses = cross_entropy_gradient(logits, targets, 5000, rows, columns[:, 16:216])
    torch.testing.assert_close(losses.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    found = rows.double() / GRADIENT_SCALE
    torch.testing.assert_close(found[:, :5000], precise.grad, rtol=0.13, atol=2.0**-29)
    assert not found[:, 5000:].any()
    assert not found[5].any()
    assert torch.equal(columns[:, 16:216].t().float(), rows.float())
    assert not columns[:, :16].float().any()
    assert not columns[:, 216:].float().any()


@needs_fp8
@pytest.mark.parametrize("held_logits", [2**31, 2**21], ids=["at once", "in parts"])
def test_head_in_8_bits_is_close_to_whole_logits(monkeypatch, held_logits):
    monkeypatch.setattr("phalanx.zoo.models.loss._CHUNK_LOGITS", 2**20)
    monkeypatch.setattr("phalanx.zoo.models.loss._HELD_LOGITS", held_logits)
    torch.manual_seed(0)
    head = LMHead(256, 1003, bias=False).cuda()
    head.fp8 = True
    hidden = torch.randn(4, 2000, 256, device="cuda", requires_grad=True)
    targets = torch.randint(1003, (4, 2000), device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        ours = head(hidden, targets)
    theirs = token_loss(F.linear(hidden.double(), head.weight.double()), targets)
    torch.testing.assert_close(ours.double(), theirs, rtol=5e-3, atol=5e-3)
    for found, expected in zip(
        *(torch.autograd.grad(each, [hidden, head.weight]) for each in (ours, theirs)), strict=True
    ):
        assert closeness(found, expected) > 0.995


@pytest.mark.parametrize("chunk_logits", [2**29, 2**20], ids=["one chunk", "chunks"])
def test_head_in_bf16_equals_whole_logits(monkeypatch, chunk_logits):
    monkeypatch.setattr("phalanx.zoo.models.loss._CHUNK_LOGITS", chunk_logits)
    torch.manual_seed(0)
    head = LMHead(256, 1003, bias=False).cuda()
    hidden = torch.randn(4, 1000, 256, device="cuda", requires_grad=True)
    targets = torch.randint(1003, (4, 1000), device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        ours = head(hidden, targets)
    theirs = token_loss(F.linear(hidden.double(), head.weight.double()), targets)
    torch.testing.assert_close(ours.double(), theirs, rtol=2e-3, atol=2e-3)
    for found, expected in zip(
        *(torch.autograd.grad(each, [hidden, head.weight]) for each in (ours, theirs)), strict=True
    ):
        assert found.dtype is torch.float32
        assert closeness(found, expected) > 0.9995


@needs_fp8
def test_rounding_keeps_rows_and_transposes():
    from phalanx.speed.kernels import round_rows, round_transposed

    torch.manual_seed(0)
    values = (
        torch.randn(300, 1040, device="cuda", dtype=torch.bfloat16) * torch.logspace(-6, 6, 300, device="cuda")[:, None]
    )
    rounded, scales = round_rows(values)
    back = rounded.float() * scales
    assert ((back - values.float()).abs().amax(1) <= values.float().abs().amax(1) * 0.037).all()
    scale = values.abs().amax().float() / 448
    transposed = round_transposed(values, scale, False)
    assert transposed.shape == (1040, 300)
    expected = (values.float() / scale).to(torch.float8_e4m3fn).t()
    assert torch.equal(transposed.float(), expected.float())


@needs_fp8
@pytest.mark.parametrize(("inputs", "outputs"), [(768, 3072), (3072, 768), (2048, 8192)])
def test_a_linear_layer_in_fp8_is_close_to_bf16(inputs, outputs):
    torch.manual_seed(0)
    plain = nn.Linear(inputs, outputs).cuda()
    eight = copy.deepcopy(plain)
    layers, undo = fp8.use_fp8(nn.Sequential(eight), [nn.Sequential(eight)])
    assert layers == 1
    batch = torch.randn(8, 256, inputs, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    other = batch.detach().clone().requires_grad_()
    weight = torch.randn(8, 256, outputs, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        expected, found = plain(batch), eight(other)
    (expected * weight).sum().backward()
    (found * weight).sum().backward()
    assert closeness(found, expected) > 0.998
    assert closeness(other.grad, batch.grad) > 0.998
    assert closeness(eight.weight.grad, plain.weight.grad) > 0.995
    assert closeness(eight.bias.grad, plain.bias.grad) > 0.9999
    undo()
    assert type(eight) is nn.Linear


@needs_fp8
@pytest.mark.parametrize(
    "make",
    [lambda: gpt("small", hidden=1536, heads=12), lambda: llama("small", hidden=1536, heads=12, ffn_hidden=4096)],
    ids=["gpt", "llama"],
)
def test_fp8_learns_like_bf16(make, tmp_path):
    losses = {}
    tokens = torch.randint(64, (64, 257), generator=torch.Generator().manual_seed(0)).cumsum(1) % 64
    data = TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    for precision in ("bf16", "fp8"):
        torch.manual_seed(0)
        trainer = PyTorchDDPTrainer(
            make(), device="cuda", mixed_precision=precision, compile=True, learning_rate=3e-4, max_steps=60
        )
        history = trainer.fit(DataLoader(data, batch_size=16), run_dir=tmp_path / precision)
        losses[precision] = history.epochs[-1].train_loss
    assert losses["fp8"] == pytest.approx(losses["bf16"], rel=0.02)


def test_adamw_with_8_bit_states_learns_like_adamw():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64)).cuda()
    inputs = torch.randn(512, 64, device="cuda")
    targets = torch.sin(inputs @ torch.randn(64, 64, device="cuda") / 4)
    last = []
    for kind in (torch.optim.AdamW, AdamW8bit):
        copied = copy.deepcopy(model)
        optimizer = kind(copied.parameters(), lr=2e-3)
        for _ in range(100):
            loss = F.mse_loss(copied(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        last.append(loss.item())
    assert last[1] == pytest.approx(last[0], rel=0.15)
    assert optimizer.state[copied[0].weight]["exp_avg_level"].dtype is torch.int8


def test_a_budget_for_activations_saves_memory_and_changes_nothing(tmp_path):
    peaks, losses = [], []
    tokens = torch.randint(256, (8, 257))
    data = TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    for budget in (False, "budget 0.2"):
        torch.manual_seed(0)
        torch._dynamo.reset()
        torch.cuda.reset_peak_memory_stats()
        trainer = PyTorchDDPTrainer(
            gpt("small"),
            device="cuda",
            mixed_precision="bf16",
            compile=True,
            activation_checkpointing=budget,
            max_steps=4,
        )
        history = trainer.fit(DataLoader(data, batch_size=8), run_dir=tmp_path / str(budget))
        peaks.append(torch.cuda.max_memory_allocated())
        losses.append(history.epochs[-1].train_loss)
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    assert peaks[1] < peaks[0]


def test_fp8_on_a_device_without_it_computes_in_bf16(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    with warnings.catch_warnings():
        trainer = PyTorchDDPTrainer(gpt("debug"), device="cuda", mixed_precision="fp8", max_steps=2, batch_size=4)
        tokens = torch.randint(256, (8, 65))
        trainer.fit(TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()), run_dir=tmp_path)
    assert "computes in bf16" in (tmp_path / "events.jsonl").read_text()
