"""The data set `tokens`: windows, packed documents, mixtures; each deterministic and resumed exactly."""

from __future__ import annotations

import pickle
import time
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from token_folders import make_documents, write_folder

from phalanx.data.loader import shard_loader
from phalanx.errors import DataError, UsageError
from phalanx.zoo.data import load
from phalanx.zoo.data.tokens import pack_lengths


def all_of(dataset):
    return dataset.gather(torch.arange(len(dataset)))


def test_windows_follow_the_stream_over_the_borders_of_shards(tmp_path):
    documents = make_documents(30)
    write_folder(tmp_path, [documents[:3], [], documents[3:4], documents[4:]])
    stream = np.concatenate(documents)
    windows = load(str(tmp_path), seq_len=7, val_fraction=0)
    tokens, targets = all_of(windows)
    count = (len(stream) - 1) // 7
    assert len(windows) == count
    assert tokens.flatten().tolist() == stream[: 7 * count].tolist()
    assert targets.flatten().tolist() == stream[1 : 7 * count + 1].tolist()
    assert [field.tolist() for field in windows[3]] == [tokens[3].tolist(), targets[3].tolist()]
    again = pickle.loads(pickle.dumps(windows))  # worker processes that are not forked
    assert torch.equal(all_of(again)[0], tokens)


def test_the_last_documents_are_held_out_whole_and_shards_for_validation_win(tmp_path):
    documents = make_documents(40)
    write_folder(tmp_path / "one", [documents[:20], documents[20:]])
    options = {"root": tmp_path / "one", "seq_len": 4, "val_fraction": 0.25}
    train, val = (load("tokens", split, **options) for split in ("train", "val"))
    assert train.num_tokens + val.num_tokens == sum(map(len, documents))
    assert 0.5 < val.num_tokens / (0.25 * sum(map(len, documents))) <= 1
    ends = np.cumsum([len(each) for each in documents])
    assert train.num_tokens in ends  # no document is in both
    assert len(load("tokens", "val", root=tmp_path / "one", seq_len=4, val_fraction=0)) == 0
    write_folder(tmp_path / "two", [documents[:30], documents[30:]], splits=["train", "val"])
    train, val = (load("tokens", split, root=tmp_path / "two", seq_len=4) for split in ("train", "val"))
    assert (train.num_tokens, val.num_tokens) == (ends[29], ends[-1] - ends[29])


def test_packed_documents_give_every_target_once_and_are_kept_apart(tmp_path):
    documents = [*make_documents(50), [9, 0], [0]]  # the last has nothing to predict
    write_folder(tmp_path, [documents[:20], documents[20:]])
    packed = load(str(tmp_path), seq_len=16, packing="documents", val_fraction=0)
    batch = all_of(packed)
    assert set(batch) == {"tokens", "targets", "positions", "documents"}
    wanted = Counter((a, b) for each in documents for a, b in pairwise(each))
    counts = batch["targets"] != -100
    assert Counter(zip(batch["tokens"][counts].tolist(), batch["targets"][counts].tolist(), strict=True)) == wanted
    assert torch.equal(counts, batch["documents"] >= 0)
    pieces = Counter()
    for tokens, targets, positions, numbers in zip(*batch.values(), strict=True):
        for number in range(int(numbers.max()) + 1):
            mine = numbers == number
            assert positions[mine].tolist() == list(range(int(mine.sum())))
            assert tokens[mine][1:].tolist() == targets[mine][:-1].tolist()
            pieces[(*tokens[mine].tolist(), int(targets[mine][-1]))] += 1
    whole = Counter(tuple(each) for each in documents if 2 <= len(each) <= 17)
    assert whole <= pieces
    cut = sum(len(each) > 17 for each in documents)
    assert f"52 documents, {cut} of them cut because they are longer" in packed.notes[0]
    one = packed[0]
    assert torch.equal(one["tokens"], batch["tokens"][0])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 30), max_size=80), st.integers(30, 50))
def test_packing_fits_and_wastes_little(lengths, capacity):
    lengths = np.asarray(lengths, dtype=np.int64)
    owners = pack_lengths(lengths, capacity)
    filled = np.bincount(owners, weights=lengths) if len(lengths) else np.zeros(0)
    assert (filled > 0).all()
    assert (filled <= capacity).all()
    # The least: the sum over the capacity, and one for each length above half of it. Best fit: 11/9 of that plus 4.
    least = max(-(-int(lengths.sum()) // capacity), int((lengths > capacity / 2).sum()))
    assert len(filled) <= 11 / 9 * least + 4
    assert (pack_lengths(lengths, capacity) == owners).all()


def test_packing_takes_millions_of_documents():
    lengths = np.minimum(np.random.default_rng(0).lognormal(5.5, 1.2, 1_000_000).astype(np.int64) + 1, 2048)
    began = time.process_time()
    owners = pack_lengths(lengths, 2048)
    assert time.process_time() - began < 10
    assert lengths.sum() / (2048 * (owners.max() + 1)) > 0.99


def test_a_mixture_takes_its_shares_and_goes_on_in_the_next_epoch(tmp_path):
    for number, (name, count) in enumerate([("a", 901), ("b", 201)]):
        write_folder(tmp_path / name, [[[number * 30 + place % 30 for place in range(count)]]])
    sources = [{"path": str(tmp_path / "a"), "weight": 3}, {"path": str(tmp_path / "b"), "weight": 1}]
    mixed = load("tokens", sources=sources, seq_len=1, val_fraction=0)
    assert len(mixed) == 800
    assert "600 of 900 from" in mixed.notes[-1]
    seen: Counter = Counter()
    for epoch in range(3):
        mixed.set_epoch(epoch)
        tokens = all_of(mixed)[0].flatten()
        assert int((tokens < 30).sum()) == 600
        places = mixed._samples(0, np.arange(600))
        assert len(set(places.tolist())) == 600
        assert np.diff(np.sort(places)).max() <= 4  # spread over the corpus
        seen.update(places.tolist())
    assert set(seen.values()) == {2}  # 1800 uses of 900 sequences: each before one is used again
    again = load("tokens", sources=sources, seq_len=1, val_fraction=0)
    again.set_epoch(2)
    assert torch.equal(all_of(again)[0], all_of(mixed)[0])
    other = load("tokens", sources=sources, seq_len=1, val_fraction=0, seed=1)
    assert not np.array_equal(other._samples(0, np.arange(600)), again._samples(0, np.arange(600)))
    val = load("tokens", "val", sources=sources, seq_len=1, val_fraction=0)
    assert len(val) == 0


@pytest.mark.parametrize("packing", ["windows", "documents"])
def test_a_mixture_is_resumed_in_mid_epoch_at_any_number_of_ranks(tmp_path, packing):
    for name, seed in (("a", 1), ("b", 2)):
        write_folder(tmp_path / name, [make_documents(60, seed)])
    sources = [{"path": str(tmp_path / "a"), "weight": 2}, {"path": str(tmp_path / "b")}]
    mixed = load("tokens", sources=sources, seq_len=12, packing=packing)

    def read(ranks: int, rank: int, state=None, stop=None):
        loader = shard_loader(mixed, batch_size=4 // ranks, seed=5, dp_rank=rank, dp_size=ranks)
        if state is not None:
            loader.load_state_dict(state)
        loader.set_epoch(1)
        rows = []
        for batch in loader:
            fields = batch.values() if isinstance(batch, dict) else batch
            real = loader.current.samples  # at the end of an epoch a rank without one gets a sample that does not count
            rows.append([tuple(row.tolist()) for row in next(iter(fields))[:real]])
            if len(rows) == stop:
                break
        return rows, loader.state_dict()

    expected, _ = read(1, 0)
    first, state = read(1, 0, stop=3)
    assert first == expected[:3]
    parts = [read(2, rank, state)[0] for rank in range(2)]
    resumed = [left + right for left, right in zip(*parts, strict=True)]
    assert resumed == expected[state["samples"] // 4 :]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"packing": "dokuments"}, UsageError, "Did you mean 'documents'"),
        ({"seq_len": 10_000}, DataError, "too few for seq_len = 10000"),
        ({"tokenizer": "missing.json"}, UsageError, "there is no tokenizer.json"),
        ({"val_fraction": 1.0}, UsageError, "val_fraction"),
        ({"sources": [{"path": "a", "weight": 0}], "root": None}, UsageError, "weight above 0"),
        ({"sources": [{"path": "a", "share": 1}], "root": None}, UsageError, "a path and a weight"),
        ({"root": None}, UsageError, "needs a folder of token shards"),
    ],
)
def test_wrong_options_are_named(tmp_path, options, error, message):
    write_folder(tmp_path, [make_documents(10)])
    with pytest.raises(error, match=message):
        load("tokens", **{"root": tmp_path, "seq_len": 8, **options})


def test_shards_that_do_not_belong_together_are_refused(tmp_path):
    write_folder(tmp_path / "a", [make_documents(10)])
    write_folder(tmp_path / "b", [make_documents(10)], tokenizer="b")
    with pytest.raises(DataError, match="different tokenizers"):
        load("tokens", sources=[{"path": str(tmp_path / name)} for name in "ab"], seq_len=4)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="made with another tokenizer than"):
        load("tokens", root=tmp_path / "a", seq_len=4, tokenizer=str(tmp_path))
    path = tmp_path / "a" / "train-00000.bin"
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(DataError, match=r"train-00000.bin has \d+ bytes, and the manifest says"):
        load(str(tmp_path / "a"), seq_len=4)
    path.unlink()
    with pytest.raises(DataError, match="is missing"):
        load(str(tmp_path / "a"), seq_len=4)
    with pytest.raises(DataError, match="is not a folder of token shards"):
        load("tokens", root=tmp_path, seq_len=4)
