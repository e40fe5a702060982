"""Hugging Face models without a plan are split by the names of their modules, and equal one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from packages import on_first_use
from torch import nn
from torch.utils.data import DataLoader, Dataset

from phalanx.config import DistributedConfig
from phalanx.errors import UsageError
from phalanx.loop.formation import Formation
from phalanx.loop.task import TrainTask
from phalanx.run.job import Job
from phalanx.strategies.base import local, whole
from phalanx.strategies.tensor_parallel import FusedColumns, known_plan

transformers = on_first_use("transformers")

IMPORTED_BY_RANKS = tuple(f"transformers.models.{name}.modeling_{name}" for name in ("gpt2", "llama", "qwen2"))
VOCABULARY = 61  # cannot be cut evenly
LLAMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
}
GPT2 = {"vocab_size": VOCABULARY, "n_positions": 16, "n_embd": 24, "n_layer": 2, "n_head": 4}
GPT2 |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)


def build(name: str, **changes) -> nn.Module:
    """A small model with random weights and biases."""
    import transformers

    torch.manual_seed(3)
    sizes = {**(GPT2 if name == "GPT2LMHead" else LLAMA), **changes}
    config = getattr(transformers, f"{name.removesuffix('LMHead')}Config")(**sizes)
    kind = f"{name}Model" if name == "GPT2LMHead" else f"{name}ForCausalLM"
    model = getattr(transformers, kind)(config)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("bias"):
                parameter.normal_(std=0.1)
    for path, module in list(model.named_modules()):
        if type(module).__name__.endswith("RMSNorm"):  # theirs computes in float32, which hides digits
            model.set_submodule(path, nn.RMSNorm(module.weight.shape, eps=module.variance_epsilon))
    return model.double()


class Tokens(Dataset):
    def __init__(self) -> None:
        self.tokens = torch.randint(VOCABULARY, (24, 9), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        labels = self.tokens[place].clone()
        labels[: 1 + place % 4] = -100  # they shift labels, so that the first never counts
        return {"input_ids": self.tokens[place], "labels": labels}


def shifted_loss(output, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Their own loss, but not rounded to float32."""
    return F.cross_entropy(output.logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def train(folder: str, name: str, **settings):
    """Train on this rank; return the whole weights, the last evaluation, and this rank's number of parameters."""
    model = build(name)
    defaults = {
        "device": "cpu",
        "progress": False,
        "learning_rate": 1e-2,
        "batch_size": 8,
        "loss_weighting": "tokens",
        "epochs": 1,
    }
    config = DistributedConfig(**{**defaults, "gradient_clipping": 0.1, **settings})
    data = DataLoader(Tokens(), shuffle=True)
    task = TrainTask(model, data, data, loss_fn=shifted_loss)
    result = Job("fit", task, config, Path(folder)).run()
    weights = {key: whole(value.detach()).clone() for key, value in model.state_dict().items()}
    assert result.history is not None
    return weights, result.history.epochs[-1].val, sum(local(p).numel() for p in model.parameters())


def train_all(folder: str, names: tuple[str, ...], **settings) -> dict[str, tuple]:
    """One start of the ranks for several models: importing transformers takes longer than all of them."""
    return {name: train(f"{folder}/{name}", name, **settings) for name in names}


def test_tensor_parallel_equals_one_process(ranks, tmp_path):
    """Whole weights are compared, so that columns of a fused layer must be where they were."""
    names = ("Llama", "Qwen2", "GPT2LMHead")
    one = ranks(train_all, str(tmp_path / "one"), names, world_size=1)[0]

    def split(names: tuple[str, ...], batch_size: int):
        return train_all(str(tmp_path / "split"), names, batch_size=batch_size, tensor_parallel=2, strategy="fsdp")

    for names, world_size in ((("Qwen2",), 2), (("Llama", "GPT2LMHead"), 4)):
        for found in ranks(split, names, 16 // world_size, world_size=world_size):
            for name, (ours, measured, held) in found.items():
                weights, metrics, total = one[name]
                assert_same(ours, weights)
                assert measured == pytest.approx(metrics, rel=1e-10)
                assert held < 1.2 * total / world_size  # norms are whole on both tensor ranks


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        assert (ours[key] - value).abs().max() <= 1e-10, key


def refusals() -> list[str]:
    narrow, extra = build("Llama", num_key_value_heads=1), build("Llama")
    extra.model.extra = nn.Linear(2, 2)
    messages = []
    with Formation(device="cpu", tensor_parallel=2) as formation:
        for model in (narrow, extra):
            try:
                formation.prepare(model)
            except UsageError as error:
                messages.append(str(error))
    return messages


def test_modules_with_unknown_names_are_refused(ranks):
    """Heads that cannot be split, and modules next to the known ones."""
    heads, module = ranks(refusals, world_size=2)[0]
    assert "num_key_value_heads = 1" in heads
    assert "tensor_parallel can be: 1" in heads
    assert "does not name model.extra.weight" in module


def test_only_known_names_have_a_plan():
    assert known_plan(nn.Sequential(nn.Linear(2, 2))) is None
    plan = known_plan(build("GPT2LMHead"))
    assert plan is not None
    assert isinstance(plan["transformer.h.0.attn"], FusedColumns)
