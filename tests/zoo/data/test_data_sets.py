"""The built-in data sets: contents, splits, and what they say when the files are wrong."""

from __future__ import annotations

import gzip
import struct
import subprocess
import sys

import pytest
import torch
from PIL import Image
from torch.utils.data import default_collate

import phalanx.data
from phalanx.data.fetch import GatherDataset
from phalanx.errors import DataError, UsageError
from phalanx.zoo.data import load, names


def test_names_are_listed_without_torch():
    code = "import sys; from phalanx.zoo.data import names; names(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert names() == [
        *("chats", "choices", "digits", "files", "imagefolder", "masked", "mnist", "pairs", "preferences", "prompts"),
        *("questions", "ratings", "shards", "spans", "synthetic", "text", "tokens"),
    ]


def test_every_public_name_of_the_package_can_be_imported():
    assert all(hasattr(phalanx.data, name) for name in phalanx.data.__all__)


def test_unknown_names_get_the_nearest():
    with pytest.raises(UsageError, match="Did you mean 'digits'"):
        load("digit")
    with pytest.raises(UsageError, match="Did you mean 'val'"):
        load("digits", "vall")
    with pytest.raises(UsageError, match="Did you mean 'seq_len'"):
        load("text", seqlen=4)
    with pytest.raises(UsageError, match=r"unknown option 'block_size' of data set 'text'\. Did you mean 'seq_len'"):
        load("text", block_size=4)


def test_digits():
    train, val = load("digits"), load("digits", "val")
    assert (len(train), len(val)) == (1437, 360)
    images, labels = train.tensors
    assert (images.shape[1:], images.dtype, labels.dtype) == ((1, 8, 8), torch.float32, torch.int64)
    assert (images.min(), images.max()) == (0, 1)
    assert labels.bincount().min() > 100
    assert val.tensors[1].bincount().min() > 20


@pytest.mark.parametrize("task", ["classification", "regression", "tokens"])
def test_synthetic_samples_depend_on_their_index_only(task):
    data = load("synthetic", length=1 << 40, shape=(3, 4), task=task, classes=5)
    indices = [0, 7, 1 << 39, 7]
    together = data.gather(torch.tensor(indices))
    alone = default_collate([data[index] for index in indices])
    assert all(torch.equal(one, other) for one, other in zip(together, alone, strict=True))
    assert not torch.equal(together[0][0], together[0][1])
    assert not torch.equal(together[0][0], load("synthetic", "val", length=9, shape=(3, 4), task=task, classes=5)[0][0])


def test_synthetic_tasks_can_be_learnt():
    inputs, labels = load("synthetic", length=512, shape=(16,), classes=4).gather(torch.arange(512))
    assert labels.bincount(minlength=4).min() > 80
    centres = torch.stack([inputs[labels == label].mean(0) for label in range(4)])
    nearest = torch.cdist(inputs, centres).argmin(1)
    assert (nearest == labels).float().mean() > 0.8
    inputs, targets = load("synthetic", length=512, shape=(16,), task="regression").gather(torch.arange(512))
    residual = torch.linalg.lstsq(inputs, targets).solution
    torch.testing.assert_close(inputs @ residual, targets, atol=1e-3, rtol=0)
    tokens, following = load("synthetic", length=9, shape=(6,), task="tokens", classes=11).gather(torch.arange(9))
    assert torch.equal(tokens[:, 1:], following[:, :-1])
    assert tokens.max() < 11


def test_synthetic_mistakes():
    with pytest.raises(UsageError, match="Did you mean 'regression'"):
        load("synthetic", task="regresion")
    with pytest.raises(UsageError, match="length = 0: must be 1 or more"):
        load("synthetic", length=0)


def test_text_windows_follow_one_another_and_splits_share_no_file():
    train, val = (load("text", split, seq_len=32, max_bytes=50_000) for split in ("train", "val"))
    assert len(train) == (50_000 - 1) // 32
    inputs, targets = train.gather(torch.tensor([0, 1]))
    assert torch.equal(inputs.flatten(), train.tokens[:64].long())
    assert torch.equal(targets.flatten(), train.tokens[1:65].long())
    assert b"def " in bytes(train.tokens.tolist())
    assert bytes(val.tokens[:5000].tolist()) not in bytes(train.tokens.tolist())
    with pytest.raises(DataError, match="too few for a window"):
        load("text", seq_len=600, max_bytes=500)


def write_idx(path, shape, *, magic=None, data=None):
    count = 1
    for size in shape:
        count *= size
    header = magic if magic is not None else bytes([0, 0, 8, len(shape)])
    body = header + struct.pack(f">{len(shape)}I", *shape) + (bytes(range(count)) if data is None else data)
    path.write_bytes(gzip.compress(body) if path.suffix == ".gz" else body)


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_mnist_files(tmp_path, ending):
    write_idx(tmp_path / f"train-images-idx3-ubyte{ending}", (5, 4, 3))
    write_idx(tmp_path / f"train-labels-idx1-ubyte{ending}", (5,))
    data = load("mnist", root=tmp_path)
    assert isinstance(data, GatherDataset)
    image, label = data[4]
    assert (image.shape, image.dtype, label.item()) == ((1, 4, 3), torch.float32, 4)
    assert image[0, 0, 0] == 48 / 255
    with pytest.raises(DataError, match="has no t10k-images-idx3-ubyte"):
        load("mnist", "val", root=tmp_path)


def test_mnist_mistakes(tmp_path):
    with pytest.raises(UsageError, match="needs the folder"):
        load("mnist")
    with pytest.raises(UsageError, match="nothing at that path"):
        load("mnist", root=tmp_path / "nowhere")
    images, labels = tmp_path / "train-images-idx3-ubyte", tmp_path / "train-labels-idx1-ubyte"
    write_idx(labels, (5,))
    for magic, data, said in [
        (b"<htm", None, "starts with 3c68746d"),
        (None, b"short", "damaged"),
        (b"", b"", "not an IDX"),
    ]:
        write_idx(images, (2, 2, 2), magic=magic, data=data)
        with pytest.raises(DataError, match=said):
            load("mnist", root=tmp_path)
    write_idx(images, (2, 2, 2))
    with pytest.raises(DataError, match="2 train images but 5 labels"):
        load("mnist", root=tmp_path)
    images.unlink()
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(b"no gzip")
    with pytest.raises(DataError, match="cannot be unpacked"):
        load("mnist", root=tmp_path)


def test_image_folder(tmp_path):
    for split, name, grey in [
        ("train", "dark", 0),
        ("train", "light", 255),
        ("val", "dark", 51),
        ("val", "light", 102),
    ]:
        folder = tmp_path / split / name
        folder.mkdir(parents=True)
        Image.new("L", (10, 6), grey).save(folder / "one.png")
        (folder / "notes.txt").write_text("no image")
    train, val = (load("imagefolder", split, root=tmp_path, size=4) for split in ("train", "val"))
    assert train.classes == ["dark", "light"]
    assert [(image.shape, image.mean().item(), label) for image, label in train] == [
        ((3, 4, 4), 0, 0),
        ((3, 4, 4), 1, 1),
    ]
    assert [round(image.mean().item(), 3) for image, _ in val] == [0.2, 0.4]
    assert load("imagefolder", root=tmp_path, transform=lambda image: image.size)[0] == ((10, 6), 0)


def test_image_folder_mistakes(tmp_path):
    with pytest.raises(UsageError, match="nothing at that path"):
        load("imagefolder", root=tmp_path / "nowhere")
    (tmp_path / "cat").mkdir()
    with pytest.raises(DataError, match="holds no images in class folders"):
        load("imagefolder", root=tmp_path)
    (tmp_path / "cat" / "one.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"one\.png is not a readable image"):
        load("imagefolder", root=tmp_path)[0]
    with pytest.raises(DataError, match=r"one\.png is not a readable image"):
        load("imagefolder", root=tmp_path / "cat" / "one.png", needs_target=False)[0]
    (tmp_path / "notes.txt").write_text("no image")
    with pytest.raises(DataError, match=r"notes\.txt is not an image"):
        load("imagefolder", root=tmp_path / "notes.txt", needs_target=False)


def test_a_missing_pillow_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(UsageError, match=r"pip install 'phalanx\[data\]'"):
        load("imagefolder", root=tmp_path)
