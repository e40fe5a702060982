"""`phalanx data`: packing, drawing and showing folders of images; and a run over shards with a broken image."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys

import numpy as np
import programs
import pytest
from command import ROOT, clean_environment, completions, phalanx
from PIL import Image
from waiting import LIMIT_SECONDS

from phalanx.cli.data import ACTIONS
from phalanx.zoo.data import load_splits
from phalanx.zoo.pack.shapes import BACKGROUNDS, MOST_CLASSES, PALETTES, SHAPES, TEXTURES, ShapeSamples, class_parts

SMALL = ("--images", 40, "--size", 16, "--classes", 8, "--shards", 3, "--workers", 1)


@pytest.fixture
def folders(tmp_path):
    for number in range(20):
        file = tmp_path / "files" / "train" / ("cat" if number % 2 else "dog") / f"{number}.jpeg"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (10, 8), (12 * number, 0, 0)).save(file)
    return tmp_path / "files"


def test_pack_shows_what_it_wrote_and_goes_on_the_second_time(folders, tmp_path):
    words = ("data", "pack", folders, "--shards", 3, "--out", tmp_path / "out")
    (folders / "train" / "bird").mkdir()
    first = phalanx(*words)
    assert first.code == 0, first.text
    assert "3 classes (bird, cat, dog), made of class folders" in first.out
    assert "train  20      3 " in first.out
    assert "warning: 1 of 3 class folders hold no images: bird" in first.err
    assert first.err.count(" written") == 3
    (tmp_path / "out" / "train-00001.tar").unlink()
    second = phalanx(*words, "--verify", "--json")
    assert second.err.count(" written") == 1
    assert json.loads(second.out)["damaged"] == []


def test_info_names_damaged_and_missing_shards(folders, tmp_path):
    phalanx("data", "pack", folders, "--shards", 2, "--out", tmp_path / "out")
    assert phalanx("data", "info", tmp_path / "out", "--verify").code == 0
    shard = tmp_path / "out" / "train-00000.tar"
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    answer = phalanx("data", "info", tmp_path / "out", "--verify")
    assert answer.code == 1
    assert "damaged: train-00000.tar" in answer.out
    assert "Run the command that wrote the folder again" in answer.out


def test_info_shows_folders_of_other_programs(folders, tmp_path):
    answer = phalanx("data", "info", folders)
    assert answer.code == 0
    assert "class folders, 2 classes" in answer.out
    phalanx("data", "pack", folders, "--shards", 2, "--out", tmp_path / "out")
    for file in (tmp_path / "out").glob("*[!r]"):
        file.unlink()  # all but the tars
    facts = json.loads(phalanx("data", "info", tmp_path / "out", "--json").out)
    assert facts["images"] == {"train-00000.tar": 10, "train-00001.tar": 10}
    assert facts["classes"] == 2


def test_shapes_are_the_same_for_the_same_seed(tmp_path):
    first = phalanx("data", "make", "shapes", "--out", tmp_path / "a", *SMALL)
    assert first.code == 0, first.text
    phalanx("data", "make", "shapes", "--out", tmp_path / "b", *SMALL[:-4], "--shards", 5)
    phalanx("data", "make", "shapes", "--out", tmp_path / "c", *SMALL, "--seed", 1)

    def images(name):
        return [(pixels, label) for pixels, label in load_splits("shards", root=tmp_path / name, size=16, workers=0)[0]]

    assert [label for _, label in images("a")] == [number % 8 for number in range(40)]
    assert all(one.equal(other) for (one, _), (other, _) in zip(images("a"), images("b"), strict=True))
    assert not any(one.equal(other) for (one, _), (other, _) in zip(images("a"), images("c"), strict=True))
    train, val = load_splits("shards", root=tmp_path / "a", size=16, workers=0)
    assert (len(train), len(val), len(train.classes)) == (40, 8, 8)
    assert train.classes[0] == "disc-plain-smooth-warm"
    assert not train[0][0].equal(val[0][0])


def test_every_class_of_shapes_is_another_combination():
    assert len({class_parts(label) for label in range(MOST_CLASSES)}) == MOST_CLASSES == 400
    first = {class_parts(label) for label in range(200)}
    assert [len({parts[place] for parts in first}) for place in range(4)] == [
        len(SHAPES),
        len(TEXTURES),
        len(BACKGROUNDS),
        2,
    ]
    assert len(PALETTES) == 4


def test_images_of_a_class_differ_and_those_of_another_palette_have_other_colours():
    def drawn(label):
        samples = ShapeSamples("train", label, label + 1 + 400, 32, 400, 0)
        return [np.asarray(Image.open(io.BytesIO(each.content))).astype(int) for each in samples if each.label == label]

    warm, cold = drawn(0), drawn(100)  # a disc, plain, before a smooth background
    assert not np.array_equal(warm[0], warm[1])
    for image in warm:
        assert (image[..., 0] - image[..., 2]).max() > 90
    for image in cold:
        assert (image[..., 2] - image[..., 0]).max() > 90


def test_processes_write_what_one_process_writes(tmp_path):
    """A program of its own, as its processes are started anew; 2,500 images are enough for processes."""
    words = ("data", "make", "shapes", "--images", "2400", "--val-images", "100", "--size", "8", "--shards", "2")
    words = (*words, "--classes", "8")
    command = [sys.executable, "-m", "phalanx", *words, "--workers", "2", "--out", str(tmp_path / "two")]
    environment = {**clean_environment(), "PYTHONPATH": str(ROOT)}
    done = programs.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    phalanx(*words, "--workers", 1, "--out", tmp_path / "one")
    one, two = (json.loads((tmp_path / name / "index.json").read_text()) for name in ("one", "two"))
    assert one == two


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "data needs an action"),
        (("pak",), "Did you mean 'pack'?"),
        (("make", "shape", "--out", "x"), "Did you mean 'shapes'?"),
        (("make", "shapes", "--out", "x", "--classes", 500), "classes are 2 to 400"),
        (("pack", "nowhere", "--out", "x"), "there is nothing at that path"),
        (("pack", "files", "--out", "files/x"), "--out files/x is inside of files"),
        (("pack", "files", "--out", "x", "--shards", 21), "there are 1 to 20 shards"),
        (("info", "nowhere"), "nowhere is not a folder"),
        (("info", "files", "--verify"), "has no checksums to compare"),
    ],
)
def test_mistakes_are_answered(folders, monkeypatch, words, said):
    monkeypatch.chdir(folders.parent)
    answer = phalanx("data", *words)
    assert answer.code != 0
    assert said in answer.err
    assert not os.path.exists("x")


def test_the_verb_is_completed():
    assert completions("phalanx data ") == list(ACTIONS)
    assert completions("phalanx data make --val") == ["--val-images"]


def test_pack_and_info_import_no_torch(folders, tmp_path):
    code = "import sys; from phalanx.cli import main\nmain(sys.argv[1:])\nassert 'torch' not in sys.modules"
    for words in (["pack", folders, "--out", tmp_path / "out"], ["info", tmp_path / "out"], ["info", folders]):
        subprocess.run(
            [sys.executable, "-c", code, "data", *map(str, words)], check=True, cwd=ROOT, timeout=LIMIT_SECONDS
        )


NET = """
import torch

class Net(torch.nn.Module):
    def __init__(self, classes=2):
        super().__init__()
        self.layer = torch.nn.Linear(3 * 8 * 8, classes)

    def forward(self, images):
        assert images.dtype is torch.uint8
        return self.layer(images.flatten(1).float() / 255)
"""
RECIPE = """
summary = "images in shards"
model = {name = "net:Net"}
loss = "cross_entropy"
data = {name = "shards", root = "out", size = 8, workers = 1}

[settings]
num_workers = 2
device = "cpu"
batch_size = 4
epochs = 1
"""


def test_a_run_over_shards_reports_images_that_were_replaced(folders, tmp_path, monkeypatch):
    for name in ("3", "7", "13"):  # each rank reads some of them in an epoch
        (folders / "train" / "cat" / f"{name}.jpeg").write_bytes(b"not an image")
    assert phalanx("data", "pack", folders, "--shards", 3, "--out", tmp_path / "out").code == 0
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "images.toml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    answer = phalanx("train", "./images.toml", "--set", "data.val_fraction=0", "--run-dir", "run")
    assert answer.code == 0, answer.text
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    warned = {event["text"] for event in events if event["event"] == "message" and event["level"] == "warning"}
    (said,) = warned
    assert said.startswith("3 samples could not be decoded, and the next image was read instead: ")
    assert sorted(re.findall(r"train/cat/(\d+)\.jpeg", said)) == ["13", "3", "7"]
    assert ".jpeg is replaced by the next image: its 12 bytes are not an image" in answer.text  # at once
