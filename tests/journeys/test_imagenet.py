"""The recipes for ImageNet at small size: images that a test draws, two CPU ranks, and what a run is evaluated with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command import Answer, phalanx

from phalanx.config import resolve
from phalanx.errors import UsageError
from phalanx.loop.metrics import top5_accuracy
from phalanx.recipes import load_recipe
from phalanx.zoo.recipe import recipe_augment, recipe_loss, recipe_task

pytest.importorskip("PIL.Image")
SMALL_RESNET = ("--set", "model.preset=debug", "--set", "model.width=8")


def draw(folder: Path, split: str, per_class: int) -> None:
    """Draw squares on noise, somewhere: the class is the colour of the square."""
    from PIL import Image

    numbers = np.random.default_rng(len(split))
    for label in range(3):
        (folder / split / f"class{label}").mkdir(parents=True)
        for number in range(per_class):
            pixels = numbers.integers(0, 80, (32, 40, 3), dtype=np.uint8)
            top, left = numbers.integers(0, 16, 2)
            pixels[top : top + 16, left + 4 : left + 20, label] = 250
            Image.fromarray(pixels).save(folder / split / f"class{label}" / f"{number}.png")


@pytest.fixture
def images(tmp_path, monkeypatch, fork_server) -> Path:
    monkeypatch.chdir(tmp_path)
    draw(tmp_path / "photos", "train", 16)
    draw(tmp_path / "photos", "val", 7)
    return tmp_path / "photos"


def trained(*words: object) -> Answer:
    answer = phalanx(*words)
    assert answer.code == 0, answer.text
    return answer


def small(name: str, images: Path, *words: object) -> tuple[object, ...]:
    sizes = (
        "--set",
        "data.size=32",
        "--batch-size",
        8,
        "--device",
        "cpu",
        "--run-dir",
        "run",
        "--keep-best",
        "val/accuracy",
    )
    return ("train", name, "--data", images, *sizes, *words)


def last_epoch(run: str = "run") -> dict[str, Any]:
    events = [json.loads(line) for line in Path(run, "events.jsonl").read_text().splitlines()]
    return [event for event in events if event["event"] == "epoch"][-1]


def test_the_recipe_learns_colours_and_is_evaluated_alike(images):
    changes = ("--set", "augment.crop=24", "--set", "augment.scale=[0.5,1.0]", "--base-batch-size", 16)
    trained(*small("imagenet", images, *SMALL_RESNET, *changes, "--epochs", 8))
    found = last_epoch()["val"]
    assert found.keys() == {"loss", "accuracy", "top5"}
    assert found["accuracy"] >= 0.9
    assert found["top5"] == 1.0, "of three classes"
    again = json.loads(trained("evaluate", "run", "--checkpoint", "last", "--json").out)
    assert again["metrics"] == pytest.approx(found, abs=1e-5)
    trained("export", "run", "-o", "net.ts", "--format", "torchscript")
    assert torch.jit.load("net.ts")(torch.zeros(4, 3, 24, 24)).shape == (4, 3)


def test_the_fast_recipe_enlarges_its_images(images):
    sizes = ("--set", 'augment.crop="0:16 1:24"', "--set", "augment.eval_crop=24", "--epochs", 2)
    trained(*small("imagenet-fast", images, *SMALL_RESNET, *sizes))
    assert last_epoch()["epoch"] == 2


def test_the_recipe_for_transformers_mixes_images(images):
    changes = [f"model.{change}" for change in ("preset=debug", "channels=3", "image_size=16", "patch_size=4")]
    words = [word for change in (*changes, "augment.crop=16") for word in ("--set", change)]
    trained(*small("imagenet-vit", images, *words, "--epochs", 2))
    assert last_epoch()["val"]["loss"] < 3


def parts(name: str, images: Path, **changes: Any) -> Any:
    tiny = {"model.preset": "debug", "model.channels": 3, "data.size": 32, "data.root": str(images)}
    recipe = load_recipe(name).with_values({**tiny, **changes})
    config = resolve({"device": "cpu"}, **recipe.settings_for(0)).config
    return recipe, recipe_task(recipe, config)


def test_options_reach_the_loss_and_the_augmentation(images):
    recipe, task = parts("imagenet-vit", images, **{"loss.label_smoothing": 0.2, "augment.erasing": 0.5})
    assert task.loss_fn.keywords == {"label_smoothing": 0.2}
    assert (task.augment.classes, task.augment.erasing, task.augment.mixes) == (3, 0.5, True)
    assert not recipe_augment(recipe, task.model).mixes, "for evaluation"
    assert task.metrics["top5"] is top5_accuracy


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"augment.crops": 3}, "'crops'.*augment.*crop"),
        ({"loss.smoothing": 0.1}, "'smoothing'.*loss 'cross_entropy'"),
        ({"loss.name": "cross"}, "loss 'cross'"),
        ({"augment.name": "nowhere:augment"}, "nowhere"),
    ],
)
def test_unknown_options_are_refused_with_the_nearest(images, changes, message):
    with pytest.raises(UsageError, match=message):
        parts("imagenet", images, **changes)


def test_a_dry_run_names_a_wrong_option(images):
    answer = phalanx(*small("imagenet", images, *SMALL_RESNET, "--set", "augment.crops=3", "--dry-run"))
    assert (answer.code, "option 'crops' of augment. Did you mean 'crop'?" in answer.text) == (2, True), answer.text


def test_a_loss_by_import_path_takes_options():
    recipe = load_recipe("imagenet").with_values(
        {"loss.name": "torch.nn:CrossEntropyLoss", "loss.label_smoothing": 0.3}
    )
    assert recipe_loss(recipe, None).label_smoothing == 0.3  # type: ignore[arg-type]
