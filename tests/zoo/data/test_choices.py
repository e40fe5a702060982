"""Multiple choice: contexts with endings as samples, both accuracies, bad lines; perplexity of language models."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch.nn import functional as F

from phalanx.errors import DataError, UsageError
from phalanx.zoo.data import load
from phalanx.zoo.models import build

ITEMS = [
    {"ctx": "The cat sat", "endings": ["on the mat.", "in.", "over the moon and far away."], "label": 0},
    {"ctx_a": "He opens", "ctx_b": "the", "endings": ["door.", "sky."], "label": "1"},
]


def written(path, items):
    path.write_text("\n".join(item if isinstance(item, str) else json.dumps(item) for item in items) + "\n")
    return path


@pytest.fixture
def data(tmp_path):
    return load(str(written(tmp_path / "val.jsonl", ITEMS)), "val", seq_len=40)


def test_a_sample_is_a_context_with_one_ending(data):
    assert (len(data), data.vocab_size) == (5, 256)
    tokens, targets = data[2]
    text = b"The cat sat over the moon and far away."
    assert bytes(tokens[: len(text) - 1].tolist()) == text[:-1]
    assert bytes(targets[targets >= 0].tolist()) == b" over the moon and far away."
    at = int((targets >= 0).nonzero()[0])
    assert targets[at] == ord(" ") == text[at + 1]
    assert bytes(data[3][0][:11].tolist()) == b"He opens th"


def test_the_end_of_a_long_context_is_kept_and_counted(tmp_path):
    data = load("choices", "val", root=written(tmp_path / "a.jsonl", ITEMS), seq_len=30)
    tokens, targets = data[2]
    assert bytes(tokens.tolist()) == b"The cat sat over the moon and far away."[-31:-1]
    assert (targets >= 0).sum() == len(" over the moon and far away.")
    assert data.notes == ("warning: of 1 contexts only the end fits into seq_len = 30",)


def test_likelihoods_are_summed_or_divided_by_letters(data):
    """Of item 0 the short ending wins by sum, the right one by letters; of item 1 the right one wins both."""
    metric = data.metrics["choices"]
    likelihoods = torch.tensor([[-11.0], [-6.0], [-60.0], [-9.0], [-3.0]])
    assert metric.combine(likelihoods, torch.arange(5)) == {"accuracy": 0.5, "accuracy_norm": 1.0}
    assert metric.combine(likelihoods[:4], torch.arange(4)) == {"accuracy": 0.0, "accuracy_norm": 1.0}
    assert all(math.isnan(value) for value in metric.combine(likelihoods[:2], torch.arange(2)).values())


@pytest.mark.parametrize("trims", [True, False])
def test_a_context_and_its_ending_are_tokenized_together(tmp_path, trims):
    """ " d" is one token, the context's last letter merges with nothing, and the tokenizer's begin is there."""
    tokenizers = pytest.importorskip("tokenizers")
    from tokenizers import models, pre_tokenizers, processors

    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġd", "<s>"]
    code = tokenizers.Tokenizer(models.BPE({piece: number for number, piece in enumerate(pieces)}, [("Ġ", "d")]))
    code.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    code.add_special_tokens(["<s>"])
    begin = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", code.token_to_id("<s>"))])
    code.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=trims), begin])
    code.save(str(tmp_path / "tokenizer.json"))
    items = [{"ctx": "the ", "endings": ["do", "so"], "label": 0}]
    options = {"tokenizer": str(tmp_path / "tokenizer.json"), "seq_len": 12}
    data = load("choices", "val", root=written(tmp_path / "a.jsonl", items), **options)
    tokens, targets = data[0]
    assert [code.id_to_token(token) for token in tokens[:6].tolist()] == ["<s>", "Ġ", "t", "h", "e", "Ġd"]
    assert [code.id_to_token(token) for token in targets[targets >= 0].tolist()] == ["Ġd", "o"]
    assert [code.id_to_token(token) for token in data[1][1][4:7].tolist()] == ["Ġ", "s", "o"]


def test_the_likelihood_is_that_of_the_ending_alone(data):
    torch.manual_seed(0)
    model = build("gpt", vocab_size=257).eval()
    tokens, targets = data.gather(torch.arange(5))
    with torch.no_grad():
        logits = model(tokens)
    found = data.metrics["choices"](logits, targets)[:, 0]
    for row in range(5):
        picked = F.log_softmax(logits[row].double(), -1).gather(1, targets[row].clamp(min=0)[:, None])[:, 0]
        torch.testing.assert_close(found[row], picked[targets[row] >= 0].sum(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"endings": ["a", "b"], "label": 0}, "line 1 has neither ctx nor ctx_a and ctx_b"),
        ({"ctx": "a", "endings": ["b"], "label": 0}, r"endings = \['b'\], expected a list of two or more"),
        ({"ctx": "a", "endings": ["b", "c"], "label": 2}, "label = 2, expected 0 to 1"),
        ({"ctx": "a", "endings": ["b", "c"], "label": ""}, "label = '', expected 0 to 1"),
        ({"ctx": "", "endings": ["b", "c"], "label": 0}, r"line 1: the context is \[''\], expected a text"),
        ({"ctx_a": "a", "ctx_b": None, "endings": ["b", "c"], "label": 0}, r"the context is \['a', None\]"),
        ("\n\n[]", "line 3 has neither ctx"),
        ('\n{"ctx": ', "line 2 cannot be read"),
        ("", "is empty"),
    ],
)
def test_bad_lines_are_named(tmp_path, item, message):
    with pytest.raises(DataError, match=message):
        load("choices", "val", root=written(tmp_path / "a.jsonl", [item]))


def test_bad_options_are_said(tmp_path):
    with pytest.raises(UsageError, match="choices are read from a file"):
        load("choices", "val", root=tmp_path)
    with pytest.raises(DataError, match="an ending has 28 tokens, more than seq_len = 20"):
        load("choices", "val", root=written(tmp_path / "a.jsonl", ITEMS), seq_len=20)
