"""Hidden spans and pairs of texts for T5: what is hidden can be put back, lengths, bytes and tokenizers, bad input."""

from __future__ import annotations

import json

import pytest
import torch
from torch.utils.data import TensorDataset

from phalanx.errors import DataError, UsageError
from phalanx.zoo.data.masked import CorruptedSpans, byte_sentinels, spans, window_length
from phalanx.zoo.data.pairs import pairs


def restored(tokens: torch.Tensor, targets: torch.Tensor) -> list[int]:
    """Return a window of bytes from its shown part and its hidden spans."""
    hidden: dict[int, list[int]] = {}
    for token in targets.tolist():
        if token >= 259:
            hidden[token] = []
            last = hidden[token]
        elif token > 2:
            last.append(token - 3)
    found: list[int] = []
    for token in tokens.tolist():
        found += hidden.pop(token) if token >= 259 else [token - 3] * (token > 2)
    assert not hidden, "each span is named in the text"
    return found


def made(samples: int = 50, seq_len: int = 64, **options) -> tuple[torch.Tensor, CorruptedSpans]:
    windows = torch.randint(
        256, (samples, window_length(seq_len, 0.15, 3.0)), generator=torch.Generator().manual_seed(0)
    )
    options = {"rate": 0.15, "mean_length": 3.0, "seed": 3, "is_fixed": False, **options}
    return windows, CorruptedSpans(TensorDataset(windows), byte_sentinels(), seq_len=seq_len, **options)


def test_a_text_and_its_targets_are_the_whole_text():
    windows, data = made()
    tokens, targets = data.gather(torch.arange(50))
    assert tokens.shape == (50, 64)
    assert targets.shape[1] % 8 == 0
    for row, shown, written in zip(windows, tokens, targets, strict=True):
        assert restored(shown, written) == row.tolist()
    counted = targets[targets >= 0]
    assert (counted >= 259).sum() == 50 * 3, "spans of three on average: 10 of 69 tokens"
    assert ((targets == 1).sum(1) == 1).all()
    assert (targets[:, 0] == 259).all()


@pytest.mark.parametrize("mean_length", [1.0, 1.5, 3.0])
@pytest.mark.parametrize("rate", [0.01, 0.15, 0.5, 0.9])
def test_short_windows_fit_with_their_end(rate, mean_length):
    for seq_len in range(3, 40):
        windows = torch.zeros(4, window_length(seq_len, rate, mean_length), dtype=torch.long)
        options = {"rate": rate, "mean_length": mean_length, "seed": 0, "is_fixed": True}
        tokens, _ = CorruptedSpans(TensorDataset(windows), byte_sentinels(), seq_len=seq_len, **options)[0]
        assert len(tokens) == seq_len
        assert (tokens == 1).sum() == 1, "the end is not cut"
    with pytest.raises(UsageError, match="seq_len = 2 is too short"):
        window_length(2, rate, mean_length)


def test_pairs_without_one_of_their_texts_are_skipped_and_named(tmp_path):
    rows = [{"input": "a", "target": "b"}, {"input": None, "target": "c"}, {"input": "d"}, {"input": "", "target": ""}]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "val.jsonl").write_text(json.dumps({"input": "a", "target": None}))
    data = pairs(root=tmp_path, seq_len=8)
    assert [data[number][1][0].item() for number in range(len(data))] == [ord("b") + 3, 1]
    assert data.notes == ("2 pairs (rows 1, 2) skipped: no input, or no target",)
    with pytest.raises(DataError, match=r"holds no pairs\. 1 pair \(row 0\) skipped"):
        pairs("val", root=tmp_path)
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"input": "a", "target": n or None}) for n in range(30)))
    held = pairs("val", root=tmp_path / "rows.jsonl", seq_len=4)
    assert [bytes(token - 3 for token in row[1].tolist() if token > 1) for row in held] == [b"9", b"19", b"29"]
    assert "1 pair (row 0) skipped" in pairs(root=tmp_path / "rows.jsonl").notes[0]


def test_spans_are_a_function_of_seed_epoch_and_sample():
    (_, data), (_, other) = made(), made(seed=4)
    first = data.gather(torch.arange(50))[0]
    assert torch.equal(first[7:9], data.gather(torch.tensor([7, 8]))[0]), "whatever the batch"
    assert not torch.equal(first, other.gather(torch.arange(50))[0])
    data.set_epoch(1)
    assert not torch.equal(first, data.gather(torch.arange(50))[0])
    places = torch.cat([data.gather(torch.arange(50))[0].ge(259), first.ge(259)]).float().mean(0)
    assert (places[1:60] > 0).float().mean() > 0.7, "at any place"


def test_spans_of_the_words_of_a_tokenizer(tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = ["<pad>", "</s>", "<unk>", *"abcdefgh", *(f"<extra_id_{number}>" for number in range(9))]
    inner = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>")
    )
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    known = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    folder = tmp_path / "tokenizer"
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **known).save_pretrained(folder)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("a b c d e f g h " * 60)
    data = spans(root=tmp_path / "texts", tokenizer=str(folder), seq_len=24)
    tokens, targets = data[0]
    assert data.vocab_size == len(words)
    assert {11} <= set(tokens.tolist()) | set(targets.tolist()) <= set(range(len(words))) | {-100}
    (tmp_path / "rows.jsonl").write_text('{"input": "a b", "target": "h"}\n{"input": "c", "target": "g f"}\n' * 10)
    rows = pairs(root=tmp_path / "rows.jsonl", tokenizer=str(folder), seq_len=4)
    assert [field.tolist() for field in rows[0]] == [[3, 4, 1, 0], [10, 1, -100, -100]]


def test_pairs_are_rows_of_files_or_drawn(tmp_path):
    rows = [{"question": f"{n} + 1", "answer": n + 1} for n in range(20)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "val.jsonl").write_text(json.dumps({"question": "x" * 99, "answer": 3}))
    options = {"source": "question", "target": "answer", "prefix": "add: ", "seq_len": 16, "target_len": 4}
    data = pairs(root=tmp_path, **options)
    tokens, targets = data[2]
    assert bytes(token - 3 for token in tokens.tolist() if token > 1) == b"add: 2 + 1"
    assert targets.tolist() == [ord("3") + 3, 1, -100, -100]
    assert pairs("val", root=tmp_path, **options)[0][0].tolist()[-2:] == [ord("x") + 3, 1], "cut, and ended"
    drawn, held = pairs(count=500), pairs("val", count=500)
    assert (
        "1 of the first 1 given texts are longer than seq_len=16, and cut"
        in pairs("val", root=tmp_path, **options).notes[0]
    )

    def text(data, number):
        return bytes(token - 3 for token in data[number][0].tolist() if token > 1).decode()

    assert text(drawn, 1).removeprefix("sort: ") == text(drawn, 0).removeprefix("copy: ")
    assert not {text(held, n) for n in range(len(held))} & {text(drawn, n) for n in range(len(drawn))}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tasks": ["sortt"]}, "task 'sortt' of drawn pairs.*Did you mean 'sort'"),
        ({"seq_len": 1}, "seq_len = 1"),
        ({"tokenizer": "somewhere"}, "tokenizer is for your own texts"),
    ],
)
def test_wrong_options_of_pairs(options, said):
    with pytest.raises(UsageError, match=said):
        pairs(**options)


def test_wrong_options_of_spans_and_files_without_the_columns(tmp_path):
    with pytest.raises(UsageError, match=r"rate = 1.5: must be below 1"):
        spans(rate=1.5)
    with pytest.raises(UsageError, match=r"mean_length = 0.5"):
        spans(mean_length=0.5)
    with pytest.raises(UsageError, match="tokens for hidden spans, and the tokenizer has 125"):
        made(seq_len=2300)
    (tmp_path / "rows.csv").write_text("inputs,target\na,b\n")
    with pytest.raises(UsageError, match=r"column 'input' of .*rows.csv.*Did you mean 'inputs'"):
        pairs(root=tmp_path / "rows.csv")
    (tmp_path / "text.txt").write_text("nothing")
    with pytest.raises(DataError, match="holds no table files"):
        pairs(root=tmp_path / "text.txt")
