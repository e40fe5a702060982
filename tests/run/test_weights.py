"""Sharded models: weights are gathered on the ranks that keep them, and loaded into the shards."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from phalanx.config import DistributedConfig
from phalanx.errors import CheckpointError
from phalanx.loop.formation import Formation
from phalanx.loop.task import TrainTask
from phalanx.run import weights
from phalanx.run.job import Job
from phalanx.run.trainer import PyTorchDDPTrainer
from phalanx.run.weights import whole_weights
from phalanx.zoo.models.gpt import gpt

SHAPE = {"layers": 2, "vocab_size": 61, "seq_len": 16}  # 61 tokens cannot be cut evenly
PARTS = {
    "fsdp 2": (2, {"strategy": "fsdp"}),
    "tensor 2": (2, {"tensor_parallel": 2}),
    "pipeline 2": (2, {"pipeline_parallel": 2}),
    "pipeline 2 x fsdp 2": (4, {"pipeline_parallel": 2, "strategy": "fsdp"}),
    "fsdp 2 x tensor 2": (4, {"strategy": "fsdp", "tensor_parallel": 2}),
}


def weights_now(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in whole_weights(model).items()}


@pytest.mark.parametrize("layout", PARTS)
def test_a_trainer_reads_what_it_wrote_into_the_parts(ranks, tmp_path, layout):
    """After a fit on started ranks the model stays laid over them; the weights come from a file or a checkpoint."""
    world_size, settings = PARTS[layout]

    def run() -> list[bool]:
        torch.manual_seed(3)
        tokens = torch.randint(61, (8, 8))
        common = {"device": "cpu", "progress": False, "epochs": 1, "batch_size": 4, "run_dir": str(tmp_path / "run")}
        trainer = PyTorchDDPTrainer(gpt(**SHAPE), checkpoint_dir=str(tmp_path / "ckpt"), **common, **settings)
        trainer.fit(TensorDataset(tokens, tokens))
        expected = weights_now(trainer.model)
        trainer.save(tmp_path / "weights.safetensors")
        trainer.save(tmp_path / "weights.pt")
        dist.barrier()
        equal = []
        for source in ("weights.safetensors", "weights.pt", "ckpt"):
            with torch.no_grad():
                for parameter in trainer.model.parameters():
                    parameter.zero_()
            trainer.load(tmp_path / source)
            found = weights_now(trainer.model)
            equal.append(found.keys() == expected.keys() and all(torch.equal(found[n], expected[n]) for n in expected))
        return equal

    assert ranks(run, world_size=world_size) == [[True, True, True]] * world_size


@pytest.mark.parametrize("layout", ["fsdp 2", "pipeline 2"])
def test_weights_of_another_model_are_refused_by_every_part(ranks, tmp_path, layout):
    path = tmp_path / "other.pt"
    torch.save(gpt(**{**SHAPE, "vocab_size": 60}).state_dict(), path)

    def run() -> str:
        trainer = PyTorchDDPTrainer(gpt(**SHAPE), device="cpu", **PARTS[layout][1])
        with Formation(trainer.config) as formation:
            formation.prepare(trainer.model)
            with pytest.raises(CheckpointError) as caught:
                trainer.load(path)
        return str(caught.value)

    for message in ranks(run, world_size=2):
        assert "'embed.tokens.weight' is [60," in message


def bytes_held() -> int:
    """Add up the memory of all tensors of this process."""
    tensors = [item for item in gc.get_objects() if type(item) in (torch.Tensor, nn.Parameter)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.parametrize("layout", ["fsdp 2", "pipeline 2", "pipeline 2 x fsdp 2"])
def test_ranks_that_keep_no_weights_hold_one_tensor_at_a_time(ranks, layout):
    layers, width = 8, 64
    one = width * width * 4

    def run() -> tuple[int, set[str] | None]:
        model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width, bias=False)) for _ in range(layers)))
        with Formation(device="cpu", **PARTS[layout][1]) as formation:
            formation.prepare(model)
            model.state_dict()
            before, most = bytes_held(), 0

            def watched(inner):
                def call(*args, **settings):
                    nonlocal most
                    result = inner(*args, **settings)
                    most = max(most, bytes_held() - before)
                    return result

                return call

            weights.whole, dist.broadcast = watched(weights.whole), watched(dist.broadcast)
            found = whole_weights(model, keep=formation.is_main)
        return most, None if found is None else set(found)

    (_, names), *others = ranks(run, world_size=PARTS[layout][0])
    assert names == {f"{number}.0.weight" for number in range(layers)}
    for most, kept in others:
        assert kept is None
        assert 0 < most <= 3 * one


@pytest.mark.parametrize("own", [True, False])
def test_only_the_rank_that_keeps_them_returns_weights_and_optimizer(ranks, tmp_path, own):
    """The state of an optimizer that the user did not make is not returned."""

    def run() -> tuple[bool, list[int] | None]:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        optimizer = torch.optim.Adam(model.parameters()) if own else None
        data = TensorDataset(torch.randn(8, 4), torch.randn(8, 2))
        config = DistributedConfig(device="cpu", progress=False, strategy="fsdp", epochs=1, batch_size=4)
        task = TrainTask(model, data, None, nn.MSELoss(), optimizer)
        result = Job("fit", task, config, tmp_path, sends_back=True).run()
        kept = [each["state"]["state"] for each in result.optimizers if each["state"] is not None]
        return result.weights is not None, list(kept[0][0]["exp_avg"].shape) if kept else None

    assert ranks(run, world_size=2) == [(True, [4, 4] if own else None), (False, None)]
