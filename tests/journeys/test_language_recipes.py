"""`phalanx train gpt|llama|moe --preset NAME`: tokens per second, a sample at the end, presets that do not exist."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from command import phalanx

from phalanx import load_run
from phalanx.recipes import load_recipe
from phalanx.run.weights import load_weights
from phalanx.zoo.models import build, presets

SHORT = ("--preset", "debug", "--device", "cpu", "--max-steps", 2, "--batch-size", 64, "--run-dir", "run")


@pytest.fixture(autouse=True)
def _in_own_folder(tmp_path, monkeypatch, fork_server):
    monkeypatch.chdir(tmp_path)


def events(kind: str) -> list[dict]:
    lines = Path("run/events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


@pytest.mark.parametrize(("name", "more"), [("gpt", ["--strategy", "fsdp"]), ("moe", ["--num-workers", 1])])
def test_a_recipe_tells_tokens_a_second_and_samples_text(name, more):
    answer = phalanx("train", name, *SHORT, *more)
    assert answer.code == 0, answer.text
    assert "tokens/s" in answer.out
    assert "MFU" not in answer.out  # a CPU's peak is not known
    (step, *_), (ended,) = events("step"), events("run_ended")
    assert step["tokens_per_second"] == pytest.approx(64 * step["samples_per_second"])
    assert ended["tokens_per_second"] > 0
    assert ended["mfu"] is None
    (sample,) = events("sample")
    assert sample["step"] == ended["step"]
    assert sample["text"].startswith("def ")
    assert f"sample:\n{sample['text'].splitlines()[0]}" in answer.out


@pytest.mark.parametrize("name", ["gpt", "llama", "moe"])
def test_the_recipes_know_every_preset_of_their_model(name):
    assert list(load_recipe(name).presets) == list(presets(name))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gpt", "--preset", "smal"], "unknown preset 'smal' of the recipe 'gpt'. Did you mean 'small'?"),
        (["digits", "--preset", "small"], "the recipe 'digits' names no presets"),
        (["--script", "train.py", "--preset", "small"], "--preset is for recipes"),
    ],
)
def test_presets_that_do_not_exist_are_refused_before_anything_starts(words, message):
    answer = phalanx("train", *words)
    assert answer.code == 2
    assert message in answer.text
    assert not list(Path().iterdir())


def test_own_texts_fit_the_model_and_a_lora_run_is_evaluated_and_exported_merged(tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("a text of my own. " * 400)
    words = ("train", "gpt", "--data", "./texts", "--lora-rank", 2, "--learning-rate", 0.5, "--warmup", 0)
    more = ("--max-steps", 2, "--checkpoint-frequency", 1, "--num-workers", 1, "--device", "cpu", "--no-progress")
    trained = phalanx(*words, *more)
    assert trained.code == 0, trained.text
    assert phalanx("evaluate", "last", "--limit-val-batches", 1).code == 0
    assert phalanx("predict", "last", "--prompt", "").code == 2
    exported = phalanx("export", "last", "-o", "merged.safetensors")
    assert exported.code == 0, exported.text
    adapted, plain = load_run("last").model, build("gpt", preset="debug")
    load_weights(plain, tmp_path / "merged.safetensors")
    tokens = torch.arange(32)[None]
    torch.testing.assert_close(plain.eval()(tokens), adapted(tokens), rtol=1e-4, atol=1e-4)
    assert not torch.equal(plain.layers[0].attention.qkv.weight, adapted.layers[0].attention.qkv.weight)
