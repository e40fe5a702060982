"""DPO under ddp and fsdp equals one process, with a frozen copy as its reference and with adapters; runs resume."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.data import Dataset

from phalanx.config import DistributedConfig
from phalanx.loop.task import TrainTask
from phalanx.run.job import Job
from phalanx.strategies.base import whole
from phalanx.zoo.models import build
from phalanx.zoo.models.preference import DPO, reward_accuracy, reward_margin


class Pairs(Dataset):
    deterministic = True

    def __init__(self) -> None:
        self.tokens = torch.randint(61, (11, 2, 9), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = self.tokens[index]
        answers = tokens[:, 1:].clone()
        answers[:, : 3 + index % 4] = -100  # answers differ in length, and pairs count alike
        return {"tokens": tokens[:, :-1], "answers": answers}


def train(folder: str, **settings) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Train on this rank; return the whole state and the last measures."""
    torch.manual_seed(3)
    model = DPO(build("llama", layers=2, vocab_size=61, seq_len=16).double(), beta=0.5)
    common = {"device": "cpu", "progress": False, "learning_rate": 1e-2, "gradient_clipping": 0.5}
    config = DistributedConfig(**{**common, **settings})
    metrics = {"accuracy": reward_accuracy, "margin": reward_margin}
    task = TrainTask(model, Pairs(), Pairs(), metrics=metrics)
    result = Job("fit", task, config, Path(folder)).run()
    state = {name: whole(value.detach()).clone() for name, value in model.state_dict().items()}
    return state, result.history.epochs[-1].val


LORA = {"lora_rank": 4, "lora_targets": "query,up"}


@pytest.mark.parametrize("more", [{}, LORA, {**LORA, "lora_base": "nf4"}], ids=["copy", "adapters", "4 bits"])
def test_two_ranks_equal_one_process(ranks, tmp_path, more):
    """11 pairs in global batches of 4 leave a ragged end."""
    alone = {"batch_size": 4, "epochs": 1, **more}
    one, measured = ranks(lambda: train(str(tmp_path / "one"), **alone), world_size=1)[0]
    assert measured["margin"] > 0.01  # 0 at the start
    for strategy in ("ddp", "fsdp"):
        split = {**alone, "batch_size": 2, "strategy": strategy}
        for state, found in ranks(lambda split=split: train(str(tmp_path / split["strategy"]), **split), world_size=2):
            assert found == pytest.approx(measured, abs=1e-9)
            assert state.keys() == one.keys()
            for name, expected in one.items():
                assert (state[name] - expected).abs().max() < 1e-10, name
    assert any(name.startswith("reference.") for name in one) == (not more)


def test_stop_and_resume_gives_the_same_bits(ranks, tmp_path):
    """The reference is that of the start, not of the step where the run was stopped."""
    common = {"batch_size": 2, "strategy": "fsdp", "checkpoint_dir": str(tmp_path / "ckpt")}
    whole_run = ranks(lambda: train(str(tmp_path / "a"), epochs=1, batch_size=2, strategy="fsdp"), world_size=2)
    ranks(lambda: train(str(tmp_path / "b"), max_steps=2, **common), world_size=2)
    rest = ranks(lambda: train(str(tmp_path / "c"), epochs=1, resume_from_checkpoint=True, **common), world_size=2)
    for (ours, _), (theirs, _) in zip(rest, whole_run, strict=True):
        assert all(torch.equal(ours[name], value) for name, value in theirs.items())
