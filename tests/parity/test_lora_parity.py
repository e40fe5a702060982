"""LoRA under ddp and fsdp equals one process; the base stays as it was, and runs stop and resume exactly."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import phalanx
from phalanx.config import DistributedConfig
from phalanx.loop.task import TrainTask
from phalanx.run.job import Job
from phalanx.strategies.base import local, whole
from phalanx.zoo.models import build
from phalanx.zoo.models.lora import adapters
from phalanx.zoo.models.lora.nf4 import quantise_base


def make_data(samples: int) -> TensorDataset:
    tokens = torch.randint(61, (samples, 9), generator=torch.Generator().manual_seed(1))
    return TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def make_model(dtype: torch.dtype = torch.float64) -> torch.nn.Module:
    torch.manual_seed(3)
    return build("llama", layers=2, vocab_size=61, seq_len=16).to(dtype)


def train(folder: str, *, dtype: str = "float64", **settings) -> dict[str, torch.Tensor]:
    """Train on this rank and return the whole state."""
    model = make_model(getattr(torch, dtype))
    common = {"device": "cpu", "progress": False, "learning_rate": 1e-2, "gradient_clipping": 0.5, "lora_rank": 4}
    config = DistributedConfig(**{**common, **settings})
    data = DataLoader(make_data(27), shuffle=True)
    Job("fit", TrainTask(model, data, data), config, Path(folder)).run()
    return {name: whole(value.detach()).clone() for name, value in model.state_dict().items()}


ONE: dict[str, dict[str, torch.Tensor]] = {}
LAYOUTS = {
    "ddp": {"strategy": "ddp"},
    "fsdp": {"strategy": "fsdp"},
    "fsdp, recomputed": {"strategy": "fsdp", "sharding": "grad-op", "activation_checkpointing": "selective"},
    "ddp, 4 bits": {"strategy": "ddp", "lora_base": "nf4"},
    "fsdp, 4 bits": {"strategy": "fsdp", "lora_base": "nf4"},
    "fsdp, 4 bits, recomputed": {"strategy": "fsdp", "lora_base": "nf4", "activation_checkpointing": "full"},
}


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_equals_one_process(ranks, tmp_path, layout, accumulation):
    """27 samples in global batches of 4 leave a ragged end; one norm of the adapters' gradients for clipping."""
    kind = LAYOUTS[layout].get("lora_base")
    if str(kind) not in ONE:
        alone = {"batch_size": 4, "epochs": 1, "lora_base": kind}
        ONE[str(kind)] = ranks(lambda: train(str(tmp_path / "one"), **alone), world_size=1)[0]
    split = {"batch_size": 2 // accumulation, "gradient_accumulation_steps": accumulation, "epochs": 1}
    model = make_model()
    if kind is not None:
        quantise_base(model, model.layers)
    base = model.state_dict()
    for state in ranks(lambda: train(str(tmp_path / "two"), **split, **LAYOUTS[layout]), world_size=2):
        for name, expected in ONE[str(kind)].items():
            assert (state[name] - expected).abs().max() < 1e-10, name
            if name in base:
                assert torch.equal(state[name], base[name]), name
            else:
                assert state[name].abs().max() > 1e-4, name


def held() -> tuple[int, int, int]:
    """Return how many elements this rank holds of base and adapters, and how many its optimizer keeps states of."""
    with phalanx.Formation(device="cpu", strategy="fsdp", lora_rank=4) as formation:
        model = formation.prepare(phalanx.lora(make_model(), 4))
        optimizer = formation.prepare(torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]))
        tokens = make_data(2).tensors
        formation.backward(model(*tokens).loss)
        optimizer.step()
        sizes = dict.fromkeys((True, False), 0)
        for parameter in model.parameters():
            sizes[not parameter.requires_grad] += local(parameter).numel()
        return sizes[True], sizes[False], sum(local(s["exp_avg"]).numel() for s in optimizer.state.values())


def test_the_frozen_base_is_sharded_and_only_adapters_have_states(ranks):
    model = phalanx.lora(make_model(), 4)
    small = sum(p.numel() for p in model.parameters() if p.requires_grad)
    base = sum(p.numel() for p in model.parameters()) - small
    found = ranks(held, world_size=2)
    assert sum(frozen for frozen, _, _ in found) == base
    assert max(frozen for frozen, _, _ in found) < 0.6 * base
    assert sum(trained for _, trained, _ in found) == small
    assert [states for _, _, states in found] == [trained for _, trained, _ in found]


@pytest.mark.parametrize(("strategy", "base"), [("ddp", None), ("fsdp", None), ("fsdp", "nf4")])
def test_stop_and_resume_gives_the_same_bits(ranks, tmp_path, strategy, base):
    common = {"batch_size": 2, "strategy": strategy, "lora_dropout": 0.2, "lora_targets": "query,value,up"}
    common |= {"lora_base": base}
    place = {"checkpoint_dir": str(tmp_path / "ckpt")}
    whole_run = ranks(lambda: train(str(tmp_path / "a"), epochs=1, **common), world_size=2)
    ranks(lambda: train(str(tmp_path / "b"), max_steps=3, **common, **place), world_size=2)
    rest = ranks(
        lambda: train(str(tmp_path / "c"), epochs=1, resume_from_checkpoint=True, **common, **place), world_size=2
    )
    for ours, theirs in zip(rest, whole_run, strict=True):
        assert all(torch.equal(ours[name], value) for name, value in theirs.items())


def save_from_ranks(folder: str) -> dict[str, torch.Tensor]:
    """With a bfloat16 base: its adapters are float32 and in the same groups of parameters."""
    model = make_model(torch.bfloat16)
    config = DistributedConfig(
        device="cpu", progress=False, strategy="fsdp", lora_rank=2, batch_size=2, max_steps=2, learning_rate=1e-2
    )
    Job("fit", TrainTask(model, make_data(8)), config, Path(folder) / "run").run()
    phalanx.save_adapter(model, Path(folder) / "adapter")
    return {name: whole(adapter.B.detach()) for name, adapter in adapters(model).items()}


def test_sharded_adapters_are_saved_whole(ranks, tmp_path):
    trained = ranks(save_from_ranks, str(tmp_path), world_size=2)[0]
    model = make_model(torch.bfloat16)
    phalanx.load_adapter(model, tmp_path / "adapter")
    for name, adapter in adapters(model).items():
        assert adapter.B.dtype == torch.float32
        assert torch.equal(adapter.B, trained[name])
        assert adapter.B.abs().max() > 0


def build_without_memory() -> tuple[bool, bool]:
    with torch.device("meta"):
        model = phalanx.lora(build("llama", layers=2), 4)
    with phalanx.Formation(device="cpu", strategy="fsdp") as formation:
        formation.prepare(model)
        found = adapters(model).values()
        drawn = [whole(adapter.A.detach()) for adapter in found]
        bounded = all(0 < a.abs().max() <= 1 / a.shape[1] ** 0.5 for a in drawn)
        return bounded, all(not whole(adapter.B.detach()).any() for adapter in found)


def test_an_adapted_model_on_the_meta_device_gets_new_adapters(ranks):
    assert ranks(build_without_memory, world_size=2) == [(True, True)] * 2


def test_the_trainer_returns_the_adapters(tmp_path):
    """From a plain process: ranks are started, and the trained adapters are in the caller's model afterwards."""
    model = make_model(torch.float32)
    base = {name: value.clone() for name, value in model.state_dict().items()}
    trainer = phalanx.PyTorchDDPTrainer(
        model,
        num_workers=2,
        device="cpu",
        strategy="fsdp",
        lora_rank=2,
        batch_size=2,
        max_steps=3,
        learning_rate=1e-2,
        progress=False,
        run_dir=str(tmp_path / "run"),
    )
    trainer.fit(make_data(12))
    assert all(adapter.B.abs().max() > 0 for adapter in adapters(model).values())
    assert all(torch.equal(model.state_dict()[name], value) for name, value in base.items())
