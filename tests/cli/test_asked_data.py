"""evaluate, predict and export read the data that they are asked about, as the run has read its own data."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from command import phalanx
from packages import require

import phalanx as px
from phalanx.errors import DataError, UsageError

Image = pytest.importorskip("PIL.Image")
require("datasets")

FAST = ("--device", "cpu", "--num-workers", 1, "--no-tensorboard", "--no-progress")
COLOURS = {"blue": (30, 30, 200), "green": (30, 200, 30), "red": (200, 30, 30)}


def draw(path: str, name: str, seed: int) -> None:
    noise = np.random.default_rng(seed).normal(0, 20, (40, 50, 3))
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray((np.array(COLOURS[name]) + noise).clip(0, 255).astype("uint8")).save(path)


def write_rows(path: str, count: int, columns: str = "a,b,label", *, above: float = 0) -> None:
    """Write points; the label is whether a is above 0, of which `above` shifts all."""
    drawn = np.random.default_rng(count)
    rows = []
    for a, b in drawn.normal(above, 1, (count, 2)):
        row = {"a": f"{a:.4f}", "b": f"{b:.4f}", "label": "yes" if a > 0 else "no", "city": "Paris"}
        rows.append(",".join(row[name] for name in columns.split(",")))
    Path(path).write_text("\n".join([columns, *rows]) + "\n")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a folder with a run on images of three colours, and one on rows of a table."""
    folder = tmp_path_factory.mktemp("asked")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name in COLOURS:
            for number in range(20):
                draw(f"imgs/{name}/{number}.png", name, number)
        for number, name in enumerate(("green", "red", "red")):
            draw(f"other/val/{name}/{number}.jpg", name, 90 + number)
        draw("shots/a.jpg", "red", 100)
        draw("shots/b.jpg", "blue", 101)
        Path("bad.jpg").write_text("not an image")
        Path("void").mkdir()
        answer = phalanx("train", "imagefolder", "--data", "imgs", "--epochs", 4, "--name", "images", *FAST)
        assert answer.code == 0, answer.text
        write_rows("rows.csv", 200, "a,b,city,label")
        write_rows("seven.csv", 7, above=5)
        write_rows("bare.csv", 3, "b,a", above=-5)
        rate = ("--learning-rate", 0.05)
        answer = phalanx("train", "--model", "mlp", "--data", "rows.csv", "--epochs", 4, "--name", "rows", *rate, *FAST)
        assert answer.code == 0, answer.text
        (events,) = Path("runs").glob("rows-*/events.jsonl")
        assert "columns used: a, b; left out (text): city" in events.read_text()
        Path("imgs").rename("moved")  # the training data are not read again
        Path("rows.csv").rename("moved.csv")
    return folder


@pytest.fixture
def inside(trained, monkeypatch):
    monkeypatch.chdir(trained)
    return trained


def rows_for(*words: object) -> list[dict[str, object]]:
    answer = phalanx("predict", *words, "--json", *FAST)
    assert answer.code == 0, answer.text
    found: list[dict[str, object]] = json.loads(answer.out)["rows"]
    return found


@pytest.mark.parametrize(
    ("words", "files", "names"),
    [
        (["--data", "other"], ["other/val/green/0.jpg", "other/val/red/1.jpg", "other/val/red/2.jpg"], "green red red"),
        (["shots/a.jpg"], ["shots/a.jpg"], "red"),
        (["shots"], ["shots/a.jpg", "shots/b.jpg"], "red blue"),
        (["--data", "shots/*.jpg"], ["shots/a.jpg", "shots/b.jpg"], "red blue"),
        (["shots/b.jpg", "shots/a.jpg"], ["shots/b.jpg", "shots/a.jpg"], "blue red"),
        (["--data", "shots/b.jpg", "shots/a.jpg"], ["shots/b.jpg", "shots/a.jpg"], "blue red"),
    ],
)
def test_predict_is_about_the_images_that_are_named(inside, words, files, names):
    rows = rows_for("images", *words)
    assert [row["file"] for row in rows] == files
    assert " ".join(str(row["name"]) for row in rows) == names


def test_predict_prints_a_table_and_takes_rows_without_a_target(inside):
    answer = phalanx("predict", "images", *FAST, "shots")
    assert answer.code == 0, answer.text
    title, first, second = answer.out.splitlines()
    assert title.split() == ["row", "file", "class", "probability"]
    assert first.split()[:3] == ["0", "shots/a.jpg", "red"]
    assert second.split()[:3] == ["1", "shots/b.jpg", "blue"]
    assert [row["name"] for row in rows_for("rows", "bare.csv")] == ["no"] * 3


def test_evaluate_measures_the_data_that_are_named(inside):
    for run, data, count in (("images", "other", 3), ("images", "moved/red/1*.png", 11), ("rows", "seven.csv", 7)):
        saved = px.load_run(run)
        asked = saved.read(data)
        assert len(asked) == count
        answer = phalanx("evaluate", run, data, "--json", *FAST)
        assert answer.code == 0, answer.text
        metrics = json.loads(answer.out)["metrics"]
        outputs = saved.predict(data, num_workers=1, device="cpu")
        assert len(outputs) == count
        labels = torch.tensor([int(asked[number][1]) for number in range(count)])
        assert metrics["loss"] == pytest.approx(float(torch.nn.functional.cross_entropy(outputs, labels)), rel=1e-5)


def test_export_takes_its_example_from_the_data_that_are_named(inside, tmp_path):
    path = tmp_path / "net.pt"
    answer = phalanx("export", "images", "--format", "torchscript", "-o", path, "--data", "shots/a.jpg")
    assert answer.code == 0, answer.text
    saved = px.load_run("images")
    pixels = saved.read("shots", needs_target=False)[1].unsqueeze(0)
    torch.testing.assert_close(torch.jit.load(str(path))(pixels), saved.model(pixels))


def test_options_of_the_run_hold_unless_others_are_given(inside):
    saved = px.load_run("images")
    assert saved.read("shots", needs_target=False)[0].shape == (3, 32, 32)
    assert saved.read("shots", needs_target=False, size=16)[0].shape == (3, 16, 16)
    answer = phalanx("predict", "images", "shots", "--set", "data.size=16", *FAST)
    assert answer.code != 0
    assert "16, 16" in answer.err, "other images than those of the run do not fit the model"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("predict", "images", "nope.jpg"), "nope.jpg': there is nothing at that path"),
        (("predict", "images", "--data", "none/*.jpg"), "no file matches this pattern"),
        (("predict", "images", "void"), "void holds no images"),
        (("predict", "images", "bad.jpg"), "bad.jpg is not a readable image"),
        (("predict", "images", "shots/a.jpg", "seven.csv"), "seven.csv is not an image"),
        (("evaluate", "images", "shots"), "holds no images in class folders"),
        (("evaluate", "images", "shots/a.jpg"), "the folder of an image tells its class, and 'shots' is none"),
        (("predict", "rows", "only_a.csv"), "unknown column 'b' of"),
        (("predict", "rows", "neither.csv"), "has no columns a, b. It has: c"),
        (("predict", "rows", "typo.csv"), "row 2 of"),
        (("predict", "rows", "empty.csv"), "empty.csv holds no rows"),
        (("evaluate", "rows", "bare.csv"), "unknown column 'label' of"),
        (("predict", "rows", "bare.csv", "--set", "data.inptus=a"), "Did you mean 'inputs'?"),
        (("predict", "rows", "bare.csv", "--set", "model.hidden=3"), "a trained model keeps its model"),
        (("predict", "rows", "--data-dir", "void"), "Did you mean --data?"),
        (("predict", "rows", "bare.csv", "--prompt", "x"), "--prompt and --data exclude each other"),
        (("predict", "rows", "bare.csv", "--devise", "cpu"), "unknown flag '--devise'"),
        (("export", "rows", "--data", "bare.csv"), "--data is for onnx and torchscript"),
        (("export", "rows", "-o", "net.pt"), "add --format torchscript"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(inside, words, said):
    Path("only_a.csv").write_text("a,c\n1,2\n")
    Path("neither.csv").write_text("c\n2\n")
    Path("typo.csv").write_text("a,b\n1,2\n1,oops\n")
    Path("empty.csv").write_text("a,b\n")
    answer = phalanx(*words)
    assert answer.code != 0
    assert said in answer.err, answer.text
    assert "Traceback" not in answer.text


def test_a_photograph_is_read_as_the_digits_were(inside):
    answer = phalanx("train", "digits", "--epochs", 1, "--name", "numbers", *FAST)
    assert answer.code == 0, answer.text
    (row,) = rows_for("numbers", "shots/a.jpg")
    assert row["name"] in [str(digit) for digit in range(10)]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("gpt", "--data", "seven.csv"), "GPT reads tokens, and the data hold numbers (the columns a, b)"),
        (("gpt", "--data", "shots"), "holds no images in class folders"),
        (("mnist", "--data", "bad.jpg"), "mnist reads a folder, and"),
        (("imagefolder", "--data", "seven.csv"), "seven.csv is not an image"),
        (("imagefolder",), "Add: --data path/to/them"),
        (("sft", "--data", "talk.jsonl", "--set", "data.template=plain"), "talk.jsonl cannot be read as json"),
    ],
)  # fmt: skip
def test_data_that_a_recipe_cannot_read_get_one_clear_line(inside, words, said):
    Path("talk.jsonl").write_text('{"messages": [\n')
    answer = phalanx("train", *words, *FAST)
    assert answer.code != 0
    assert said in answer.text
    assert "Failed to load JSON" not in answer.text
    assert "Traceback" not in answer.text


def test_one_file_is_enough_for_a_recipe_of_conversations(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]
    Path("chats.jsonl").write_text((json.dumps({"messages": messages}) + "\n") * 40)
    size = ("--set", "data.template=plain", "--set", "data.packing=none", "--batch-size", 4)
    answer = phalanx("train", "sft", "--data", "chats.jsonl", *size, "--max-steps", 30, "--json", *FAST)
    assert answer.code == 0, answer.text
    assert json.loads(answer.out)["step"] == 30, "the steps that are asked for, not the recipe's 3 epochs of 9"


def test_results_are_written_with_the_names_of_the_files(inside, tmp_path):
    assert phalanx("predict", "images", "shots", "-o", tmp_path / "out.csv", *FAST).code == 0
    with (tmp_path / "out.csv").open(newline="") as file:
        assert [row["file"] for row in csv.DictReader(file)] == ["shots/a.jpg", "shots/b.jpg"]


def test_read_in_python_refuses_what_the_command_line_does(inside):
    saved = px.load_run("images")
    with pytest.raises(UsageError, match="nothing at that path"):
        saved.predict("nope.jpg")
    with pytest.raises(DataError, match="holds no images"):
        saved.predict(["void"])
