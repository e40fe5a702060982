"""strategy = "auto": fsdp where copies do not fit, and no change where they do or where the user has chosen."""

import pytest
import torch

from phalanx import PyTorchDDPTrainer
from phalanx.config import DistributedConfig
from phalanx.host.gpus import gpu_memory
from phalanx.host.processes import host_memory
from phalanx.run import auto_strategy
from phalanx.run.auto_strategy import StrategyChoice, settle_here, settle_strategy
from phalanx.world.env import RankEnv, rank_environment
from phalanx.zoo.models.llama import llama

GIB = 2**30


def settled(memory_gib: float, monkeypatch, ranks: int = 8, preset: str = "1b", **settings: object) -> StrategyChoice:
    monkeypatch.setattr(auto_strategy, "rank_bytes", lambda *_: round(memory_gib * GIB))
    with torch.device("meta"):
        model = llama(preset)
    config = DistributedConfig(num_workers=ranks, **{"batch_size": 1, "mixed_precision": "bf16", **settings})
    return settle_strategy(config, model, None, "cuda", ranks, ranks)


def test_the_first_layout_that_fits_is_chosen(monkeypatch):
    """1.24 billion parameters: 18.5 GiB of states in every copy, 2.3 GiB of shards."""
    assert settled(80, monkeypatch).note == ""
    assert settled(40, monkeypatch).config.strategy == "auto"
    found = settled(16, monkeypatch)
    assert (found.config.strategy, found.config.sharding) == ("fsdp", "grad-op")
    assert found.note.startswith("strategy auto: strategy = 'fsdp', sharding = 'grad-op', because ddp would need ")
    assert "of 16 GiB per rank" in found.note
    less = [settled(size, monkeypatch).config for size in (9, 7)]
    assert all(config.resolved_strategy == "fsdp" and config.resolved_sharding == "full" for config in less)
    short = settled(1, monkeypatch)
    assert short.config.recompute is not None
    assert "; even so a rank needs " in short.note


def test_weights_that_are_sharded_are_contiguous(monkeypatch):
    assert settled(80, monkeypatch, channels_last=True).config.channels_last is True
    found = settled(16, monkeypatch, channels_last=True)
    assert (found.config.resolved_strategy, found.config.channels_last) == ("fsdp", False)
    assert "channels_last = False, because ddp would need" in found.note


def test_what_the_user_has_chosen_stays(monkeypatch):
    for settings in (
        {"strategy": "ddp"},
        {"tensor_parallel": 2},
        {"zero_stage": 2},
        {"lora_rank": 8},
        {"compression": "fp16"},
        {"backend": "pytorch-fsdp"},
    ):
        found = settled(4, monkeypatch, **settings)
        assert found.note == ""
        assert found.config.given() | settings == found.config.given()


def test_one_rank_and_small_models_are_not_looked_at(monkeypatch):
    assert settled(4, monkeypatch, ranks=1).note == ""
    fail = lambda _: pytest.fail("asked the planner about a small model")  # noqa: E731
    monkeypatch.setattr("phalanx.run.auto_strategy.feature", fail)
    assert settled(80, monkeypatch, preset="debug").note == ""


def test_a_model_that_cannot_be_traced_counts_by_its_parameters(monkeypatch):
    class Odd(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.empty(1 << 28, device="meta"))

        def forward(self, values: dict) -> torch.Tensor:
            return values["x"] * self.weight

    monkeypatch.setattr(auto_strategy, "rank_bytes", lambda *_: 2 * GIB)
    found = settle_strategy(DistributedConfig(num_workers=4), Odd(), None, "cuda", 4, 4)
    assert found.config.resolved_strategy == "fsdp"


def test_a_trainer_shards_what_does_not_fit_and_says_so(monkeypatch, tmp_path, capfd):
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Linear(64, 2))
    monkeypatch.setattr(auto_strategy, "rank_bytes", lambda *_: 1 << 15)
    data = torch.utils.data.TensorDataset(torch.randn(32, 16), torch.zeros(32, dtype=torch.long))
    before = model[0].weight.detach().clone()
    trainer = PyTorchDDPTrainer(
        model, num_workers=2, device="cpu", batch_size=4, epochs=1, run_dir=str(tmp_path / "run")
    )
    trainer.fit(data)
    assert not torch.equal(before, model[0].weight)
    shown = "".join(capfd.readouterr())
    assert "strategy auto: strategy = 'fsdp'" in shown
    assert '"strategy": "fsdp"' in (tmp_path / "run" / "run.json").read_text()


def test_ranks_of_a_launcher_decide_from_the_same_facts(monkeypatch):
    monkeypatch.setattr(auto_strategy, "rank_bytes", lambda _, here: 64 * GIB // here)
    with torch.device("meta"):
        model = llama("1b")
    config = DistributedConfig(device="cpu", batch_size=1)
    found = []
    for rank in (0, 3):
        env = RankEnv(rank, rank, 4, 4, 0, "127.0.0.1", 29500, started_by="torchrun")
        with rank_environment(env):
            found.append(settle_here(config, model, None))
    assert found[0].config.resolved_strategy == "fsdp"
    assert found[0].note == found[1].note
    assert settle_here(config, model, None).note == ""  # not a rank


def test_the_memory_of_this_machine():
    assert host_memory() > GIB
    assert gpu_memory() >= 0
