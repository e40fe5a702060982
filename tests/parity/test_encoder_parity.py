"""T5 and BERT over ranks equal one process: split by heads and features, sharded, and both."""

from __future__ import annotations

import pytest
import torch
from layouts import assert_same, train
from long_proofs import long_proof

from phalanx.zoo.models.bert import Bert, BertConfig
from phalanx.zoo.models.t5 import t5

COMMON = {"epochs": 1, "gradient_clipping": 0.5, "loss_weighting": "tokens", "optimizer": "sgd"}


@pytest.mark.parametrize(
    ("settings", "world_size", "tied"),
    [
        ({"tensor_parallel": 2, "batch_size": 8}, 2, False),
        pytest.param({"strategy": "fsdp", "tensor_parallel": 2, "batch_size": 4}, 4, True, marks=long_proof),
    ],
)
def test_layouts_equal_one_process(ranks, tmp_path, settings, world_size, tied):
    def run(**layout):
        torch.manual_seed(3)
        sizes = {"activation": "relu"} if tied else {}
        model = t5(vocab_size=61, seq_len=16, heads=2, head_dim=8, hidden=16, ffn_hidden=24, tie_weights=tied, **sizes)
        return train(str(tmp_path / "t5"), model=model.double(), **COMMON, **layout)

    expected, evaluated, norms = ranks(lambda: run(batch_size=8), world_size=1)[0]
    for weights, val, measured in ranks(lambda: run(**settings), world_size=world_size):
        assert_same(weights, expected, 1e-10)
        assert val == pytest.approx(evaluated, rel=1e-9)
        assert measured == pytest.approx(norms, rel=1e-9) or not measured


class Asked(Bert):
    """A BERT whose labels may be tokens: for answers they become places in texts of eight tokens."""

    def loss_from_output(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return super().loss_from_output(output, target % 8 if self.config.task == "qa" else target)


@pytest.mark.parametrize(
    ("task", "settings", "world_size"),
    [
        ("mlm", {"tensor_parallel": 2}, 2),
        pytest.param("mlm", {"strategy": "fsdp", "tensor_parallel": 2, "batch_size": 4}, 4, marks=long_proof),
        ("qa", {"tensor_parallel": 2}, 2),
    ],
)
def test_bert_over_ranks_equals_one_process(ranks, tmp_path, task, settings, world_size):
    def run(**layout):
        torch.manual_seed(3)
        sizes = {"vocab_size": 61, "seq_len": 16, "hidden": 16, "ffn_hidden": 24, "heads": 2}
        model = Asked(BertConfig(task=task, **sizes)).double()
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.1)
        weighting = "samples" if task == "qa" else "tokens"
        common = {**COMMON, "loss_weighting": weighting, "batch_size": 8}
        return train(str(tmp_path / "bert"), model=model, **{**common, **layout})

    expected, evaluated, _ = ranks(run, world_size=1)[0]
    for weights, val, _ in ranks(lambda: run(**settings), world_size=world_size):
        assert_same(weights, expected, 1e-10)
        assert val == pytest.approx(evaluated, rel=1e-9)
