"""Noise on embeddings: only in training, of the size that the paper says, in reference models and transformers'."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from phalanx.config import DistributedConfig
from phalanx.errors import UsageError
from phalanx.recipes import load_recipe
from phalanx.zoo.models import build
from phalanx.zoo.models.neftune import neftune
from phalanx.zoo.recipe import recipe_task

TOKENS = torch.arange(16)[None]


def their_model() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=32, n_embd=32, n_layer=1, n_head=2))


@pytest.mark.parametrize(
    "make", [lambda: build("gpt"), lambda: build("llama"), their_model], ids=["gpt", "llama", "hf"]
)
def test_embeddings_get_noise_in_training_alone(make):
    model = make().train()
    owner = model.token_embedding if hasattr(model, "token_embedding") else model.get_input_embeddings
    embedding = owner()
    with torch.no_grad():
        plain = embedding(TOKENS)
        neftune(model, 5.0)
        noise = embedding(TOKENS) - plain
        model.eval()
        assert torch.equal(embedding(TOKENS), plain)
    most = 5.0 / (16 * plain.shape[-1]) ** 0.5
    assert 0.9 * most < noise.abs().max() <= most * 1.001
    assert abs(noise.mean()) < 0.1 * most


def test_a_recipe_takes_it_as_an_option_of_its_model(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 20)
    recipe = load_recipe("sft").with_parts(
        None, {"name": "chats", "root": str(tmp_path / "a.jsonl"), "template": "plain"}
    )
    model = recipe_task(recipe.with_values({"model.neftune": 5.0}), DistributedConfig(device="cpu")).model
    first, second = (model.train().token_embedding()(TOKENS) for _ in range(2))
    assert not torch.equal(first, second)
    with pytest.raises(UsageError, match="neftune = 'much': expected a number"):
        recipe_task(recipe.with_values({"model.neftune": "much"}), DistributedConfig(device="cpu"))


def test_wrong_strengths_and_models_without_tokens_are_refused():
    with pytest.raises(UsageError, match=r"model\.neftune = 0\.0: expected a number above 0"):
        neftune(build("gpt"), 0.0)
    with pytest.raises(UsageError, match="a ConvNet names none"):
        neftune(build("convnet"), 5.0)
