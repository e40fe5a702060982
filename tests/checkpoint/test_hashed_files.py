"""The hash of a file is the same however its bytes arrive, and changes with every bit."""

from __future__ import annotations

import random

import pytest

from phalanx.checkpoint import hashed_files
from phalanx.checkpoint.hashed_files import TreeHash, hash_bytes, hash_file, hashing_threads
from phalanx.host.files import replacing


@pytest.fixture(autouse=True)
def small_leaves(monkeypatch):
    monkeypatch.setattr(hashed_files, "LEAF_BYTES", 1000)
    monkeypatch.setattr(hashed_files, "_THREADED_BYTES", 100)


def hash_in_pieces(data: bytes, sizes: list[int]) -> str:
    with hashing_threads() as threads:
        tree = TreeHash(threads)
        view = memoryview(data)
        start = 0
        for size in [*sizes, len(data)]:
            for part in tree.begin(view[start : start + size]):
                part.result()
            start += size
        return tree.record(len(data)).hash


@pytest.mark.parametrize("length", [0, 1, 999, 1000, 1001, 2000, 5432])
def test_the_hash_does_not_depend_on_the_pieces(tmp_path, length):
    data = random.Random(length).randbytes(length)
    (tmp_path / "file").write_bytes(data)
    whole = hash_file(tmp_path / "file")
    assert hash_bytes(data) == whole
    for sizes in ([], [1, 50, 1000, 3], [2500, 10], [999, 1, 1000]):
        assert hash_in_pieces(data, sizes) == whole


def test_every_change_changes_the_hash(tmp_path):
    data = random.Random(0).randbytes(3500)
    changed = bytearray(data)
    changed[1700] ^= 1
    swapped = data[1000:2000] + data[:1000] + data[2000:]
    variants = [data, bytes(changed), data[:-1], data + b"\0", swapped, b""]
    assert len({hash_in_pieces(variant, []) for variant in variants}) == len(variants)


def test_two_writers_of_one_file_do_not_share_a_temporary_one(tmp_path):
    with replacing(tmp_path / "chunk") as first, replacing(tmp_path / "chunk") as second:  # equal process ids
        first.write(b"same")
        second.write(b"same")
    assert [path.name for path in tmp_path.iterdir()] == ["chunk"]
    assert (tmp_path / "chunk").read_bytes() == b"same"
