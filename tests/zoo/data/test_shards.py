"""Images in shards: the samples of the files, on any number of ranks, resumed; and what may be wrong with files."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
import warnings

import numpy as np
import pytest
import torch
from PIL import Image

from phalanx.data.loader import shard_loader
from phalanx.data.order import grouped_order
from phalanx.errors import DataError, OrderError, UsageError
from phalanx.zoo.data import load, load_splits
from phalanx.zoo.data.image_files import UndecodableImage, decode
from phalanx.zoo.data.shard_index import ShardList, index_path
from phalanx.zoo.pack.pack import FolderSource
from phalanx.zoo.pack.write import damaged_shards, write_folder

IMAGES = {"train": 23, "val": 6}


def encoded(number: int, kind: str = "png") -> bytes:
    """A grey image whose value is its number."""
    file = io.BytesIO()
    Image.new("RGB", (12, 10), (number, number, number)).save(file, kind)
    return file.getvalue()


def class_folders(root, lengths=IMAGES):
    """Images 0, 1, ... of each split; the label of a number is its remainder by 3."""
    for split, length in lengths.items():
        for number in range(length):
            file = root / split / f"class-{number % 3}" / f"image-{number}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(encoded(number))
    return root


def quiet(record, how):
    """A report that shows nothing."""


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    root = tmp_path_factory.mktemp("images")
    write_folder(root / "shards", FolderSource(class_folders(root / "files")), 4, quiet)
    return root / "shards"


def values(dataset):
    return [(int(pixels[0, 0, 0]), label) for pixels, label in (dataset[index] for index in range(len(dataset)))]


def test_shards_hold_the_images_of_class_folders_and_their_labels(packed):
    train, val = load_splits("shards", root=packed, size=8, workers=0)
    assert [len(train), len(val)] == [23, 6]
    assert train.classes == ["class-0", "class-1", "class-2"]
    assert sorted(values(train)) == [(number, number % 3) for number in range(23)]
    assert sorted(values(val)) == [(number, number % 3) for number in range(6)]
    assert values(train) != sorted(values(train))  # classes are mixed over the shards
    pixels, _ = train[0]
    assert (pixels.shape, pixels.dtype) == ((3, 8, 8), torch.uint8)
    unpacked = load("shards", root=packed.parent / "files", size=8, workers=0)
    assert sorted(values(unpacked)) == sorted(values(train))


def test_shards_of_different_lengths_are_read_whole(packed):
    lengths = [record.samples for record in ShardList.read(packed).splits["train"]]
    assert sorted(lengths) == [5, 6, 6, 6]


def test_the_tars_are_in_webdatasets_layout(packed):
    with tarfile.open(packed / "train-00001.tar") as tar:
        names = tar.getnames()
        assert names[:2] == ["000005.png", "000005.cls"]
        label = tar.extractfile("000005.cls").read()
        number = np.asarray(Image.open(tar.extractfile("000005.png")))[0, 0, 0]
    assert int(label) == number % 3


def epoch_of(dataset, ranks, **options):
    """Read an epoch on all ranks in lockstep; return the images' numbers, step by step."""
    loaders = [
        shard_loader(dataset, dp_rank=rank, dp_size=ranks, batch_size=4 // ranks, seed=3, **options)
        for rank in range(ranks)
    ]
    steps = []
    for batches in zip(*loaders, strict=True):
        pairs = zip(loaders, batches, strict=True)
        seen = [batch[0][:, 0, 0, 0].tolist() if loader.current.samples else [] for loader, batch in pairs]
        steps.append([number for part in seen for number in part])
    for loader in loaders:
        loader.close()
    return steps


@pytest.mark.parametrize("shuffle", ["samples", "shards"])
def test_an_epoch_is_the_same_on_any_number_of_ranks_and_workers(packed, shuffle):
    def dataset(workers):
        return load("shards", root=packed, size=4, workers=workers, shuffle=shuffle, window=2)

    expected = epoch_of(dataset(0), 1)
    assert sorted(number for step in expected for number in step) == list(range(23))
    for ranks, workers in [(2, 0), (4, 0), (1, 2), (2, 2)]:
        assert epoch_of(dataset(workers), ranks) == expected, (ranks, workers)


@pytest.mark.parametrize(("shuffle", "workers"), [("samples", 0), ("samples", 2), ("shards", 0)])
def test_an_epoch_that_was_stopped_goes_on_with_the_remaining_samples(packed, shuffle, workers):
    def loader(ranks=1, rank=0):
        dataset = load("shards", root=packed, size=4, workers=workers, shuffle=shuffle, window=2)
        return shard_loader(dataset, dp_rank=rank, dp_size=ranks, batch_size=4 // ranks, seed=3)

    whole = [batch[0][:, 0, 0, 0].tolist() for batch in loader()]
    stopped = loader()
    for _ in zip(range(2), stopped, strict=False):
        pass
    state = json.loads(json.dumps(stopped.state_dict()))
    stopped.close()
    resumed = [loader(2, rank) for rank in range(2)]
    for each in resumed:
        each.load_state_dict(state)
    rest = [
        [number for batch in step for number in batch[0][:, 0, 0, 0].tolist()] for step in zip(*resumed, strict=True)
    ]
    assert rest == whole[2:]


def test_an_epoch_by_shards_cannot_go_on_with_another_window(packed):
    def loader(window):
        dataset = load("shards", root=packed, size=4, workers=0, shuffle="shards", window=window)
        return shard_loader(dataset, batch_size=4)

    begun = loader(2)
    next(iter(begun))
    with pytest.raises(OrderError, match=r"epoch 1 was begun in another order .*\n  Resume with the same data"):
        loader(1).load_state_dict(begun.state_dict())
    plain = shard_loader(load("shards", root=packed, size=4, workers=0), batch_size=4)
    with pytest.raises(OrderError, match="was begun in another order"):
        plain.load_state_dict(begun.state_dict())
    next(iter(plain))
    with pytest.raises(OrderError, match="was begun in another order"):
        loader(2).load_state_dict(plain.state_dict())


def test_an_order_by_groups_uses_few_groups_at_a_time():
    groups = [3, 1, 4, 2, 5, 3]
    order = grouped_order(groups, 2, seed=0, epoch=1)
    assert sorted(order) == list(range(18))
    assert order.tolist() != grouped_order(groups, 2, seed=0, epoch=2).tolist()
    group_of = np.repeat(np.arange(6), groups)[order]
    at = 0
    while at < len(order):
        pair = list(dict.fromkeys(group_of[at:].tolist()))[:2]
        length = groups[pair[0]] + groups[pair[1]]
        assert set(group_of[at : at + length]) == set(pair)
        at += length


def test_tars_of_other_programs_are_indexed_once(tmp_path, capsys):
    (tmp_path / "some").mkdir()
    for name, numbers in [("train-a", range(4)), ("train-b", range(4, 11)), ("val", range(3))]:
        with tarfile.open(tmp_path / "some" / f"{name}.tar", "w", format=tarfile.PAX_FORMAT) as tar:
            for number in numbers:
                for ending, content in (
                    (".cls", b"%d\n" % (number % 2)),
                    (".PNG", encoded(number)),
                    (".txt", b"a cat"),
                ):
                    entry = tarfile.TarInfo(f"{'long' * 30}/sample {number}{ending}")
                    entry.size = len(content)
                    tar.addfile(entry, io.BytesIO(content))
    train, val = load_splits("shards", root=tmp_path, size=4, workers=0)
    assert "indexing 3 tar shards without an index, once" in capsys.readouterr().err
    assert values(train) == [(number, number % 2) for number in range(11)]
    assert values(val) == [(number, number % 2) for number in range(3)]
    assert train.classes == ["0", "1"]
    load("shards", root=tmp_path, workers=0)
    assert "indexing" not in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_has_its_index_in_the_cache(packed, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "tars").mkdir()
    (tmp_path / "tars" / "a.tar").write_bytes((packed / "train-00000.tar").read_bytes())
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path / "tars" and real(path, mode))
    assert len(load("shards", root=tmp_path / "tars", val_fraction=0, workers=0)) == 5
    assert [file.name for file in (tmp_path / "tars").iterdir()] == ["a.tar"]
    assert len(list((tmp_path / "cache").rglob("*.index"))) == 1


@pytest.mark.parametrize("as_struct", [True, False])
def test_parquet_files_are_read_by_row_groups(tmp_path, as_struct):
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    def write(name, numbers):
        images = [{"bytes": encoded(number), "path": None} if as_struct else encoded(number) for number in numbers]
        table = arrow.table({"image": images, "label": [number % 2 for number in numbers]})
        names = {"info": {"features": {"label": {"names": ["even", "odd"]}}}}
        parquet.write_table(
            table.replace_schema_metadata({"huggingface": json.dumps(names)}), tmp_path / name, row_group_size=3
        )

    write("train-00000-of-00002.parquet", range(8))
    write("train-00001-of-00002.parquet", range(8, 13))
    write("validation.parquet", range(4))
    train, val = load_splits("shards", root=tmp_path, size=4, workers=0)
    assert values(train) == [(number, number % 2) for number in range(13)]
    assert values(val) == [(number, number % 2) for number in range(4)]
    assert train.classes == ["even", "odd"]
    assert list(train.loader_hints.groups) == [3, 3, 2, 3, 2]
    assert sorted(number for step in epoch_of(train, 2) for number in step) == list(range(13))


def as_mode(mode: str) -> tuple[bytes, tuple[int, int, int]]:
    """An encoded image of a mode, and the colour that it shows."""
    file = io.BytesIO()
    if mode == "16 bit":
        Image.fromarray(np.full((8, 8), 100 * 256 + 7, np.uint16)).save(file, "png")
        return file.getvalue(), (100, 100, 100)
    if mode == "float":
        Image.fromarray(np.full((8, 8), 0.5, np.float32)).save(file, "tiff")
        return file.getvalue(), (127, 127, 127)
    if mode == "CMYK":
        Image.new("CMYK", (8, 8), (0, 255, 255, 0)).save(file, "jpeg", quality=95)
        return file.getvalue(), (254, 0, 0)
    if mode == "palette":
        image = Image.new("P", (8, 8), 1)
        image.putpalette([0, 0, 0, 10, 20, 30])
        image.save(file, "png")
        return file.getvalue(), (10, 20, 30)
    if mode == "transparent palette":
        image = Image.new("P", (8, 8), 1)
        image.putpalette([0, 0, 0, 10, 20, 30])
        image.save(file, "png", transparency=1)
        return file.getvalue(), (255, 255, 255)
    if mode == "half transparent":
        Image.new("RGBA", (8, 8), (0, 0, 0, 128)).save(file, "png")
        return file.getvalue(), (127, 127, 127)
    if mode == "bilevel":
        Image.new("1", (8, 8), 1).save(file, "png")
        return file.getvalue(), (255, 255, 255)
    Image.new("L", (8, 8), 60).save(file, "jpeg")
    return file.getvalue(), (60, 60, 60)


@pytest.mark.parametrize(
    "mode",
    ["16 bit", "float", "CMYK", "palette", "transparent palette", "half transparent", "bilevel", "grey"],
)
def test_every_mode_becomes_rgb(mode):
    content, shown = as_mode(mode)
    pixels = decode(content, 4)
    assert pixels.shape == (4, 4, 3)
    assert np.abs(pixels.astype(int) - shown).max() <= 1


@pytest.mark.parametrize("shape", [(40, 20), (20, 40), (21, 20), (16, 16), (600, 400)])
def test_the_centre_is_cut_out_and_resized(shape):
    """Left, right and middle of an image have colours of their own: only the middle is left of a wide image."""
    width, height = shape
    x = np.linspace(0, 255, width, dtype=np.uint8)[None, :, None].repeat(height, 0).repeat(3, 2)
    file = io.BytesIO()
    Image.fromarray(x).save(file, "jpeg", quality=95)
    pixels = decode(file.getvalue(), 16)
    assert pixels.shape == (16, 16, 3)
    left = 255 * max(0, width - height) / 2 / width
    assert pixels[:, 0].mean() == pytest.approx(left + (255 - 2 * left) / 32, abs=8)
    assert pixels[:, -1].mean() == pytest.approx(255 - left - (255 - 2 * left) / 32, abs=8)


BROKEN = {
    "truncated": lambda: encoded(200, "jpeg")[:-200],
    "empty": lambda: b"",
    "text": lambda: b"<html>not found</html>",
    "broken png": lambda: encoded(200)[:30] + b"\0" * 30,
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_images_are_recognised(kind):
    with pytest.raises(UndecodableImage):
        decode(BROKEN[kind](), 8)


@pytest.mark.parametrize("workers", [0, 2])
def test_broken_images_are_replaced_by_the_next_one_counted_and_named(tmp_path, workers):
    class_folders(tmp_path, {"train": 20, "val": 3})
    for number in (4, 9):
        (tmp_path / "train" / f"class-{number % 3}" / f"image-{number}.png").write_bytes(BROKEN["truncated"]())
    data = load("shards", root=tmp_path, size=4, workers=workers)
    loader = shard_loader(data, batch_size=5, training=False)
    assert loader.problems() == ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        read = [number for batch in loader for number in batch[0][:, 0, 0, 0].tolist()]
        again = [number for batch in loader for number in batch[0][:, 0, 0, 0].tolist()]
    loader.close()
    files = sorted(range(20), key=lambda number: (number % 3, str(number) + ".png"))
    assert read == again == [files[files.index(each) + 1] if each in (4, 9) else each for each in files]
    said = "2 samples could not be decoded, and the next image was read instead: "
    assert loader.problems() == said + "train/class-0/image-9.png, train/class-1/image-4.png"
    if workers == 0:
        said = [str(each.message) for each in caught]
        assert len(said) == 2
        assert "train/class-0/image-9.png is replaced by the next image: " in said[0]


def test_a_data_set_without_a_whole_image_is_an_error(tmp_path):
    class_folders(tmp_path, {"train": 3})
    for file in tmp_path.rglob("*.png"):
        file.write_bytes(b"not an image")
    data = load("shards", root=tmp_path, val_fraction=0, workers=0)
    with (
        pytest.warns(UserWarning, match="is replaced"),
        pytest.raises(DataError, match="in a row cannot be decoded, from train/class-0"),
    ):
        data[0]


def test_empty_class_folders_are_named_before_training(tmp_path):
    class_folders(tmp_path)
    (tmp_path / "train" / "class-1b").mkdir()
    loader = shard_loader(load("shards", root=tmp_path, size=4, workers=0), batch_size=4)
    assert loader.notes == ["1 of 4 class folders hold no images: class-1b (they stay classes)"]
    val = load("shards", "val", root=tmp_path, size=4, workers=0)
    assert {label for _, label in values(val)} == {0, 1, 3}  # by the names of the training folders
    (tmp_path / "val" / "class-9").mkdir()
    (tmp_path / "val" / "class-9" / "a.png").write_bytes(encoded(1))
    with pytest.raises(DataError, match=r"val has 1 classes that the training images lack: class-9"):
        load_splits("shards", root=tmp_path, workers=0)


def test_without_a_validation_split_some_are_held_out(tmp_path):
    class_folders(tmp_path, {"train": 20})
    train, val = load_splits("shards", root=tmp_path, size=4, val_fraction=0.25, workers=0)
    assert (len(train), len(val)) == (15, 5)
    assert not set(values(train)) & set(values(val))


def repacked(tmp_path):
    class_folders(tmp_path / "files")
    write_folder(tmp_path / "shards", FolderSource(tmp_path / "files"), 3, quiet)
    return tmp_path / "shards"


def test_an_index_that_does_not_match_its_tar_is_refused(tmp_path):
    folder = repacked(tmp_path)
    first, second = folder / "train-00000.tar", folder / "train-00001.tar"
    content = first.read_bytes()
    first.write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match=r"train-00000.tar.index does not match its tar: .* has \d+ bytes"):
        load("shards", root=folder, workers=0)
    first.write_bytes(b"\0" * 512 + content[:-512])  # as long as before, but another tar
    data = load("shards", root=folder, workers=0)
    with pytest.raises(DataError, match=r"the index of .*train-00000.tar does not match it: train-00000.tar: train/"):
        data[0]
    first.write_bytes(content)
    index_path(second).write_bytes(b"PK not an index")
    with pytest.raises(DataError, match=r"train-00001.tar.index is damaged"):
        load("shards", root=folder, workers=0)
    second.unlink()
    with pytest.raises(DataError, match=r"lacks a shard or its index: train-00001.tar"):
        load("shards", root=folder, workers=0)


def test_packing_again_writes_what_is_missing_or_damaged(tmp_path):
    folder = repacked(tmp_path)
    before = {file.name: file.read_bytes() for file in folder.glob("*.tar")}
    (folder / "train-00002.tar").unlink()
    damaged = bytearray(before["val-00000.tar"])
    damaged[600] ^= 1
    (folder / "val-00000.tar").write_bytes(damaged)
    assert [record.name for record in damaged_shards(folder, ShardList.read(folder), quiet)] == [
        "train-00002.tar",
        "val-00000.tar",
    ]
    done = []
    write_folder(folder, FolderSource(tmp_path / "files"), 3, lambda record, how: done.append((record.name, how)))
    assert sorted(done) == [
        ("train-00000.tar", "intact"),
        ("train-00001.tar", "intact"),
        ("train-00002.tar", "damaged"),
        ("train-00002.tar", "written"),
        ("val-00000.tar", "damaged"),
        ("val-00000.tar", "written"),
    ]
    assert {file.name: file.read_bytes() for file in folder.glob("*.tar")} == before
    assert damaged_shards(folder, ShardList.read(folder), quiet) == []


def test_packing_that_was_interrupted_goes_on(tmp_path):
    class_folders(tmp_path / "files")

    def stop(record, how):
        if record.name == "train-00001.tar":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_folder(tmp_path / "shards", FolderSource(tmp_path / "files"), 3, stop)
    with pytest.raises(DataError, match=r"is not complete: train-00002.tar"):
        load("shards", root=tmp_path / "shards", workers=0)
    unfinished = tmp_path / "shards" / ".train-00002.tar.0123.new"
    unfinished.write_bytes(b"of a process that was killed")
    done = []
    write_folder(tmp_path / "shards", FolderSource(tmp_path / "files"), 3, lambda *each: done.append(each[1]))
    assert not unfinished.exists()
    assert done == ["intact", "intact", "written", "written"]
    assert len(load("shards", root=tmp_path / "shards", workers=0)) == 23


def test_file_names_need_not_be_utf8(tmp_path):
    class_folders(tmp_path / "files", {"train": 3})
    strange = os.fsencode(tmp_path / "files" / "train" / "class-0") + b"/\xff.png"
    with open(strange, "wb") as file:
        file.write(encoded(9))
    write_folder(tmp_path / "shards", FolderSource(tmp_path / "files"), 1, quiet)
    for root in ("files", "shards"):
        data = load("shards", root=tmp_path / root, size=4, val_fraction=0, workers=0)
        assert sorted(values(data)) == [(0, 0), (1, 1), (2, 2), (9, 0)]
        assert all(data.name(index).endswith(".png") for index in range(4))


def test_packing_other_files_or_another_number_into_a_folder_is_refused(tmp_path):
    folder = repacked(tmp_path)
    with pytest.raises(UsageError, match="already holds shards in another number: 4"):
        write_folder(folder, FolderSource(tmp_path / "files"), 5, quiet)
    (tmp_path / "files" / "train" / "class-0" / "new.png").write_bytes(encoded(77))
    with pytest.raises(UsageError, match="already holds shards of other samples"):
        write_folder(folder, FolderSource(tmp_path / "files"), 3, quiet)
    (folder / "index.json").unlink()
    with pytest.raises(UsageError, match="already holds tars that are not listed"):
        write_folder(folder, FolderSource(tmp_path / "files"), 3, quiet)


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ([("a.jpg", b"x")], "1 samples lack their image or their .cls: a"),
        ([("a.jpg", b"x"), ("a.cls", b"cat")], "a.cls holds 'cat', which is not the number of a class"),
        ([("a.txt", b"x")], "holds no images with labels"),
    ],
)
def test_tars_that_are_not_labelled_images_are_refused(tmp_path, members, said):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name, content in members:
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    with pytest.raises(DataError, match=said):
        load("shards", root=tmp_path, workers=0)


def test_a_truncated_tar_is_refused(packed, tmp_path):
    (tmp_path / "a.tar").write_bytes((packed / "train-00000.tar").read_bytes()[:1500])
    with pytest.raises(DataError, match=r"a.tar cannot be read as a tar|lack their image"):
        load("shards", root=tmp_path, workers=0)


def test_mistakes_are_answered(tmp_path, packed, monkeypatch):
    with pytest.raises(UsageError, match="shards needs the folder"):
        load("shards")
    with pytest.raises(UsageError, match="there is nothing at that path"):
        load("shards", root=tmp_path / "nowhere")
    with pytest.raises(DataError, match="holds no images in class folders"):
        load("shards", root=tmp_path)
    with pytest.raises(UsageError, match="Did you mean 'shards'"):
        load("shards", root=packed, shuffle="shard")
    with pytest.raises(UsageError, match="size = 0: must be 1 or more"):
        load("shards", root=packed, size=0)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(UsageError, match=r"pip install 'phalanx\[data\]'"):
        load("shards", root=packed)


def test_packing_needs_no_torch():
    code = "import sys, phalanx.zoo.pack.pack, phalanx.zoo.pack.shapes; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
