"""From texts to a fine-tuned BERT with F1 on the command line; classes of texts; multiple choice and perplexity."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch
from command import phalanx
from long_proofs import long_proof

from phalanx import load_run
from phalanx.zoo.recipe_parts import recipe_parts

SHORT = ("--device", "cpu", "--batch-size", 8, "--checkpoint-frequency", 1)


@pytest.fixture(autouse=True)
def _in_own_folder(tmp_path, monkeypatch, fork_server):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # a progress bar would leave its thread behind


def succeeded(*words: object) -> str:
    answer = phalanx(*words)
    assert answer.code == 0, answer.text
    return answer.text


def metrics(*words: object) -> dict[str, float]:
    answer = phalanx("evaluate", *words, "--json")
    assert answer.code == 0, answer.text
    return json.loads(answer.out)["metrics"]


def test_a_masked_run_becomes_an_exported_model_of_answers(tmp_path):
    transformers = pytest.importorskip("transformers")
    told = succeeded("data", "make", "questions", "--out", "set", "--count", 120)
    assert "train.json (120 questions), dev.json (12 questions)" in told
    masked = ("--data", "set/texts", "--set", "data.tokenizer=set/tokenizer", "--set", "model.vocab_size=1024")
    succeeded("train", "bert", *masked, "--max-steps", 2, *SHORT, "--name", "masked")
    tuned = ("--data", "set", "--set", "model.pretrained=last", "--max-steps", 2, *SHORT)
    said = succeeded("train", "bert-qa", *tuned, "--name", "tuned")
    assert re.search(
        r"weights of \S+masked\S+: 37 tensors; new: head.weight, head.bias; left out: head.transform", said
    )
    assert re.search(r"val exact 0\.\d+ · val f1 0\.\d+", said)
    own = metrics("last")
    assert set(own) == {"exact", "f1", "loss"}
    assert load_run("last").history.epochs[-1].val["f1"] == pytest.approx(own["f1"])
    assert metrics("last", "--data", "./set/dev.json") == pytest.approx(own), "with the tokenizer of the run"
    rows = json.loads(phalanx("predict", "last", "--num-workers", 1, "--json").out)["rows"]
    asked = json.loads(Path("set/dev.json").read_text())["data"]
    texts = {part["context"] for article in asked for part in article["paragraphs"]}
    assert len(rows) == 12
    assert all(any(row["answer"] in text for text in texts) for row in rows), "an answer is a part of a context"
    Path("other").mkdir()
    Path("other/dev.json").write_text(Path("set/dev.json").read_text())
    Path("other/train.json").write_text(Path("set/dev.json").read_text())
    assert metrics("last", "--data", "other", "--num-workers", 1) == pytest.approx(own)

    succeeded("export", "last", "--format", "hf", "-o", "exported")
    theirs = transformers.BertForQuestionAnswering.from_pretrained("exported").eval()
    assert transformers.AutoTokenizer.from_pretrained("exported").mask_token == "[MASK]"
    run = load_run("last")
    batch = run.data()[1].gather(torch.arange(4))
    labels = batch.pop("labels")
    with torch.no_grad():
        found, ours = theirs(**batch), run.model(**batch)
    torch.testing.assert_close(ours, torch.stack([found.start_logits, found.end_logits], -1), rtol=0, atol=1e-5)
    assert labels.shape == (4, 4)
    recipe = run.recipe.with_values({"model.pretrained": str(tmp_path / "exported")})
    again, _, val, _ = recipe_parts(recipe)
    assert "; new" not in again.weights_note
    assert torch.equal(again.head.weight, run.model.head.weight)
    assert val.tokenizer == str(tmp_path / "exported"), "its tokens are those of the folder"


@pytest.mark.parametrize("labels", [("good", "bad", "odd"), pytest.param((0, 1, 2), marks=long_proof)])
def test_texts_are_classified_by_names_or_numbers(labels):
    pytest.importorskip("datasets")
    rows = [json.dumps({"text": f"text {number} " * 3, "label": labels[number % 3]}) for number in range(60)]
    Path("texts").mkdir()
    Path("texts/train.jsonl").write_text("\n".join(rows))
    Path("texts/val.jsonl").write_text("\n".join(rows[:10]))
    said = succeeded("train", "bert-classify", "--data", "texts", "--epochs", 1, *SHORT)
    assert "val accuracy" in said
    assert load_run("last").model.config.classes == 3


def test_numbers_for_pairs_of_texts_are_learned_and_measured_by_their_order():
    pytest.importorskip("datasets")
    Path("pairs").mkdir()
    for split, count in (("train", 240), ("val", 40)):
        lines = [f"{'a' * (number % 6)}b,{'c' * 3},{number % 6}.0" for number in range(count)]
        Path(f"pairs/{split}.csv").write_text("\n".join(["one,two,score", *lines]))
    words = ["--set", 'data.text=["one", "two"]', "--set", "data.target=score", "--set", "data.seq_len=16"]
    succeeded("train", "bert-regress", "--data", "pairs", *words, "--epochs", 6, "--learning-rate", 5e-3, *SHORT)
    measured = metrics("last")
    assert set(measured) == {"loss", "pearson", "spearman"}
    assert measured["spearman"] > 0.9
    assert metrics("last", "--num-workers", 1) == pytest.approx(measured, rel=1e-5), "ranks change nothing"
    Path("new.csv").write_text("one,two\nb,ccc\naaaaab,ccc\n")
    predicted = phalanx("predict", "last", "new.csv", "--json")
    assert predicted.code == 0, predicted.text
    low, high = (row["output"][0] for row in json.loads(predicted.out)["rows"])
    assert low < 2 < 3 < high
    refused = phalanx("train", "bert-classify", "--data", "pairs", *words, *SHORT)
    assert refused.code == 2
    assert "the labels are fractions" in refused.text
    assert "bert-regress" in refused.text


def test_a_language_model_chooses_endings_and_has_a_perplexity():
    succeeded("train", "gpt", "--preset", "debug", "--max-steps", 2, *SHORT, "--num-workers", 1)
    few = metrics("last", "--limit-val-batches", 1)
    assert few["perplexity"] == pytest.approx(math.exp(few["loss"]))
    item = {"ctx": "def main", "endings": ["(): pass", "zzz"], "label": 0}
    Path("choices.jsonl").write_text(f"{json.dumps(item)}\n" * 3)
    found = metrics("last", "--data", "./choices.jsonl")
    assert set(found) == {"accuracy", "accuracy_norm", "loss"}
    assert found["accuracy"] in (0.0, 1.0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("train", "bert-qa"), "the recipe 'bert-qa' needs your files"),
        (("train", "bert-qa", "--data", ".", "--set", "model.pretrained=nope"), "nope"),
        (("data", "make", "question", "--out", "x"), "Did you mean 'questions'?"),
        (("data", "make", "questions", "--out", "x", "--count", 1), "count is 10 or more"),
        (("data", "make", "questions", "--out", "x", "--images", 5), "--images"),
    ],
)
def test_mistakes_are_answered(words, message):
    answer = phalanx(*words)
    assert answer.code == 2
    assert message in answer.text
