"""Hidden words: whole ones, as many as asked for, by sample and epoch alone; and the recipe that learns them."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import TensorDataset

from phalanx.data.loader import shard_loader
from phalanx.errors import DataError, UsageError
from phalanx.zoo.data import load
from phalanx.zoo.data.masked import MaskedTokens, byte_words, masked, tokenizer_words

TEXT = b"def first_name(x1, y): return x1  "


def windows(text: bytes = TEXT, samples: int = 300) -> TensorDataset:
    return TensorDataset(torch.tensor(list(text)).repeat(samples, 1))


def made(rate: float = 0.15, **options) -> MaskedTokens:
    return MaskedTokens(windows(), byte_words(), rate=rate, **{"seed": 3, "is_fixed": False, **options})


def test_words_are_hidden_whole_and_everything_else_stays():
    data = made()
    tokens, targets = data.gather(torch.arange(len(data)))
    original = torch.tensor(list(TEXT)).expand_as(tokens)
    hidden = targets != -100
    assert torch.equal(tokens[~hidden], original[~hidden])
    assert torch.equal(targets[hidden], original[hidden])
    words = byte_words().starts(original[:1]).cumsum(1)[0]
    assert [TEXT[words.tolist().index(n) :][: (words == n).sum()] for n in (1, 3, 5)] == [b"def", b"first_name", b"x1"]
    for sample in hidden:
        assert all(sample[words == word].all() or not sample[words == word].any() for word in words.unique())
    assert hidden.any(1).all(), "a sample without a hidden word has no loss"


def test_shares_are_those_of_bert():
    data = MaskedTokens(windows(b"a " * 64, 200), byte_words(), rate=0.15, seed=0, is_fixed=False)
    tokens, targets = data.gather(torch.arange(200))
    hidden = targets != -100
    assert hidden.float().mean().item() == pytest.approx(0.15, abs=0.01)
    assert (tokens[hidden] == 256).float().mean().item() == pytest.approx(0.8, abs=0.02)
    assert (tokens[hidden] == targets[hidden]).float().mean().item() == pytest.approx(0.1, abs=0.02)


def test_what_is_hidden_is_a_function_of_seed_epoch_and_sample():
    data, again, other = made(), made(), made(seed=4)
    index = torch.arange(40)
    first = data.gather(index)[1]
    assert torch.equal(first, again.gather(index)[1])
    assert torch.equal(first[7:9], data.gather(index[7:9])[1]), "whatever the batch"
    assert not torch.equal(first, other.gather(index)[1])
    data.set_epoch(1)
    assert not torch.equal(first, data.gather(index)[1])
    fixed = made(is_fixed=True)
    before = fixed.gather(index)[1]
    fixed.set_epoch(5)
    assert torch.equal(before, fixed.gather(index)[1])


def test_ranks_see_the_samples_of_one_process():
    def epoch(ranks: int, number: int) -> list[tuple[int, ...]]:
        found = []
        for rank in range(ranks):
            loader = shard_loader(made(), batch_size=8 // ranks, dp_rank=rank, dp_size=ranks, seed=5)
            loader.set_epoch(number)
            found += [tuple(row) for _, targets in loader for row in targets.tolist()]
        return sorted(found)

    assert epoch(1, 0) == epoch(2, 0)
    assert epoch(1, 1) == epoch(2, 1) != epoch(1, 0)


class Tokenizer:
    """As much of a tokenizer of transformers as masking reads."""

    mask_token_id = 4
    all_special_ids = (0, 4)

    def __init__(self, *pieces: str) -> None:
        self.pieces = pieces

    def __len__(self) -> int:
        return len(self.pieces)

    def convert_ids_to_tokens(self, numbers: list[int]) -> list[str]:
        return [self.pieces[number] for number in numbers]


@pytest.mark.parametrize("pieces", [("[CLS]", "play", "##ing", ".", "[MASK]"), ("<s>", "Ġplay", "ing", ".", "<mask>")])
def test_pieces_of_a_word_belong_together(pieces):
    words = tokenizer_words(Tokenizer(*pieces), "folder")
    tokens = torch.tensor([[0, 1, 2, 3, 1]])
    assert words.starts(tokens).tolist() == [[True, True, False, True, True]]
    data = MaskedTokens(TensorDataset(tokens.repeat(50, 1)), words, rate=0.5, seed=0, is_fixed=False)
    assert (data.gather(torch.arange(50))[1][:, 0] == -100).all(), "special tokens are never hidden"


def test_bad_options_are_said(tmp_path):
    with pytest.raises(UsageError, match=r"rate = 1.5: must be below 1"):
        masked(rate=1.5)
    with pytest.raises(UsageError, match="tokenizer is for your own texts"):
        masked(tokenizer="folder")
    nothing = Tokenizer("a")
    nothing.mask_token_id = None
    with pytest.raises(DataError, match="the tokenizer in folder has no mask token"):
        tokenizer_words(nothing, "folder")


def test_texts_of_ones_own(tmp_path):
    (tmp_path / "a.txt").write_text("one two three " * 200)
    data = load("masked", root=tmp_path, seq_len=16)
    assert (data.vocab_size, data.seq_len) == (257, 16)
    tokens, targets = data[0]
    assert tokens.shape == targets.shape == (16,)
