"""From texts to a trained model: `phalanx data tokenize`, then `phalanx train gpt --data` on its shards."""

from __future__ import annotations

import json
import re
import sysconfig
from dataclasses import replace
from pathlib import Path

import pytest
from command import completions, phalanx

from phalanx import load_run
from phalanx.errors import UsageError
from phalanx.recipes import load_recipe
from phalanx.zoo.recipe_parts import recipe_parts
from phalanx.zoo.token_data import fitted_to_tokens

SHORT = ("--device", "cpu", "--batch-size", 4, "--num-workers", 1, "--set", "model.seq_len=16")

NETS = """
from types import SimpleNamespace

from torch import nn

class Net(nn.Module):
    def __init__(self, known):
        super().__init__()
        self.config = SimpleNamespace(vocab_size=known)
        self.embed = nn.Embedding(known, 8)

    def forward(self, tokens):
        return self.embed(tokens)
"""
MIXED = """
[model]
name = "gpt"

[data]
name = "tokens"
seq_len = 16
packing = "documents"
sources = [{path = "shards", weight = 3}, {path = "more", weight = 1}]

[settings]
batch_size = 4
"""


@pytest.fixture(autouse=True)
def _in_own_folder(tmp_path, monkeypatch, fork_server):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def shards(tmp_path) -> Path:
    """Token shards of some modules of Python's library."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-c]*.py"))
    sources = [path.read_text() for path in files if path.stat().st_size < 8000][:12]
    Path("code.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in sources))
    answer = phalanx("data", "tokenize", "code.jsonl", "--out", "shards", "--train-bpe", 757, "--workers", 1)
    assert answer.code == 0, answer.text
    return tmp_path / "shards"


def said(run: str = "run") -> list[dict]:
    return [json.loads(line) for line in Path(run, "events.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("packing", ["windows", "documents"])
def test_a_model_is_trained_on_shards_and_writes_with_their_tokenizer(shards, packing):
    words = ("train", "gpt", "--data", "./shards", *SHORT, "--set", f"data.packing={packing}", "--run-dir", "run")
    answer = phalanx(*words, "--max-steps", 6)
    assert answer.code == 0, answer.text
    assert "tokens/s" in answer.out
    run = load_run("run")
    assert run.recipe.model["vocab_size"] == run.model.config.vocab_size == 757
    assert run.recipe.data["root"] == str(shards)
    (sample,) = [event for event in said() if event["event"] == "sample"]
    assert sample["text"].startswith("def ")
    cut = [event["text"] for event in said() if "cut because they are longer" in event.get("text", "")]
    assert bool(cut) == (packing == "documents")
    continued = phalanx("predict", "run", "--prompt", "import ", "--max-tokens", 4, "--temperature", 0)
    assert continued.out.startswith("import ")
    measured = phalanx("evaluate", "run", "--json")
    assert json.loads(measured.out)["metrics"]["loss"] > 0


def test_a_run_on_a_mixture_is_continued_to_the_same_bits(shards):
    made = phalanx("data", "tokenize", "code.jsonl", "--out", "more", "--tokenizer", "shards", "--workers", 1)
    assert made.code == 0, made.text
    Path("mixed.toml").write_text(MIXED)
    words = ("train", "./mixed.toml", "--device", "cpu", "--checkpoint-frequency", "3 steps")
    whole = phalanx(*words, "--max-steps", 6, "--run-dir", "whole")
    assert whole.code == 0, whole.text
    assert "sequences of an epoch:" in whole.out
    assert phalanx(*words, "--max-steps", 3, "--run-dir", "half").code == 0
    resumed = phalanx("train", "--resume", "half", "--max-steps", 6)
    assert resumed.code == 0, resumed.text
    expected, found = (load_run(run, checkpoint="last").model.state_dict() for run in ("whole", "half"))
    assert all(expected[name].equal(found[name]) for name in expected)


def test_what_does_not_fit_is_refused_before_training(shards):
    small = phalanx("train", "gpt", "--data", "./shards", *SHORT, "--set", "model.vocab_size=300")
    assert small.code == 2
    assert "model.vocab_size = 300, but the tokenizer of" in small.text
    Path("other.json").write_text("{}")
    other = phalanx("train", "gpt", "--data", "./shards", *SHORT, "--set", "data.tokenizer=other.json")
    assert other.code != 0
    assert re.search(r"were made with another tokenizer than \S*other\.json", other.text)
    wrong = phalanx("train", "gpt", "--data", "tokens", *SHORT, "--set", "data.sources=[1]")
    assert wrong.code == 2
    assert "expected a list of tables with path and weight" in wrong.text
    none = phalanx("train", "gpt", "--data", "tokens", *SHORT)
    assert "needs a folder of token shards, or several sources" in none.text


def test_a_model_of_ones_own_must_know_the_tokens_and_the_documents(shards):
    Path("nets.py").write_text(NETS)

    def parts(**data):
        recipe = (
            load_recipe("gpt")
            .with_parts("nets:Net", {"name": str(shards)})
            .with_values({"model.known": data.pop("known")})
        )
        return recipe_parts(replace(recipe, data={**recipe.data, "seq_len": 8, **data}))

    with pytest.raises(UsageError, match="the model knows 700 tokens, and the data have 757"):
        parts(known=700)
    with pytest.raises(UsageError, match=r"packed documents need a model .* and Net does not"):
        parts(known=757, packing="documents")
    assert parts(known=757)[1].vocab_size == 757


def test_a_larger_vocabulary_of_the_model_stays(shards):
    recipe = load_recipe("gpt").with_parts(None, {"name": str(shards)}).with_values({"model.vocab_size": 1024})
    assert recipe.fitted().model["vocab_size"] == 1024
    assert fitted_to_tokens(recipe.fitted()) == recipe.fitted()
    texts = load_recipe("gpt").with_parts(None, {"name": str(shards.parent / "code.jsonl")})
    assert texts.fitted() == texts


def test_a_shell_completes_the_actions_and_flags():
    assert "tokenize" in completions("phalanx data ")
    assert "--train-bpe" in completions("phalanx data tokenize --tr")
