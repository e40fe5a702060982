"""BERT: equal logits and files with transformers, padding that is not seen, losses of its tasks, training."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from long_proofs import long_proof
from torch.utils.data import TensorDataset

from phalanx import PyTorchDDPTrainer
from phalanx.errors import ModelError
from phalanx.zoo.models import build, load_pretrained, save_pretrained
from phalanx.zoo.models.bert import PRESETS, TASKS


@pytest.fixture(autouse=True)
def _quiet(monkeypatch, tmp_path):
    """Tensors on the meta device make torch import its compiler, which sets the first variable for good."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # a progress bar would leave its thread behind


def made(task: str) -> torch.nn.Module:
    """Return a model none of whose parameters, biases and norms included, has a value that hides a mistake."""
    torch.manual_seed(0)
    model = build("bert", task=task, classes=3 if task == "classify" else 2, dropout=0.1)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tokens, segments, and a mask that is False for padding."""
    torch.manual_seed(1)
    lengths = torch.tensor([48, 31])
    return torch.randint(256, (2, 48)), torch.randint(2, (2, 48)), torch.arange(48) < lengths[:, None]


@pytest.mark.parametrize("task", TASKS)
@torch.no_grad()
def test_transformers_and_phalanx_load_each_others_files(task, tmp_path):
    transformers = pytest.importorskip("transformers")
    ours, (tokens, segments, mask) = made(task), batch()
    save_pretrained(ours, tmp_path / "ours")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "ours")
    theirs = getattr(transformers, config.architectures[0]).from_pretrained(tmp_path / "ours").eval().double()
    exact = ours.double()
    given = {"input_ids": tokens, "token_type_ids": segments, "attention_mask": mask.long()}
    for names in (("input_ids",), tuple(given)):
        found = theirs(**{name: given[name] for name in names})
        expected = torch.stack([found.start_logits, found.end_logits], -1) if task == "qa" else found.logits
        logits = exact(**{name: given[name] for name in names})
        counted = ... if task in ("classify", "regress") else mask if len(names) > 1 else torch.ones_like(mask)
        torch.testing.assert_close(logits[counted], expected[counted], rtol=0, atol=1e-9)
    theirs.float().save_pretrained(tmp_path / "theirs")
    back = load_pretrained(tmp_path / "theirs")
    assert back.config == ours.config
    mine, again = made(task).state_dict(), back.state_dict()
    assert mine.keys() == again.keys()
    assert all(torch.equal(mine[name], again[name]) for name in mine)


@torch.no_grad()
def test_padding_is_not_seen():
    model, (tokens, segments, mask) = made("mlm").double(), batch()
    alone = model(tokens[1:, :31], token_type_ids=segments[1:, :31])
    padded = model(tokens, token_type_ids=segments, attention_mask=mask)[1:, :31]
    torch.testing.assert_close(padded, alone, rtol=0, atol=1e-12)


def test_the_loss_of_an_answer_is_the_mean_of_its_first_and_last_token():
    model, (tokens, *_) = made("qa").double(), batch()
    answers = torch.tensor([[3, 7], [0, 0]])
    loss, logits = model(tokens, answers)
    expected = (F.cross_entropy(logits[..., 0], answers[:, 0]) + F.cross_entropy(logits[..., 1], answers[:, 1])) / 2
    torch.testing.assert_close(loss, expected)


def test_wrong_tasks_and_long_texts_are_refused():
    with pytest.raises(ModelError, match=r"task 'mlmm' of a BERT.*Did you mean 'mlm'"):
        build("bert", task="mlmm")
    with pytest.raises(ModelError, match="a sequence of 65 tokens given to a BERT of seq_len=64"):
        build("bert")(torch.zeros(1, 65, dtype=torch.long))


def test_the_sizes_are_those_of_the_published_models():
    with torch.device("meta"):
        sizes = {name: build("bert", preset=name).num_parameters() for name in PRESETS}
    assert sizes["base"] == 109_514_298  # BertForMaskedLM of transformers for bert-base-uncased
    assert sizes["large"] == 335_174_458


@long_proof
def test_masked_tokens_are_learned(tmp_path):
    torch.manual_seed(0)
    tokens = (torch.arange(32)[None, :] + torch.randint(64, (256, 1))) % 64
    targets = torch.full_like(tokens, -100)
    masked = torch.rand(tokens.shape) < 0.15
    targets[masked] = tokens[masked]
    data = TensorDataset(tokens.masked_fill(masked, 255), targets)
    trainer = PyTorchDDPTrainer(build("bert", seq_len=32), device="cpu", batch_size=32, epochs=40, learning_rate=3e-3)
    history = trainer.fit(data, run_dir=tmp_path / "run")
    assert history.epochs[-1].train_loss < 0.5 < 3 < history.epochs[0].train_loss
