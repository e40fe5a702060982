"""Files of one's own as data: tables, texts, images, tar shards; and models from Hugging Face folders."""

from __future__ import annotations

import io
import json
import tarfile

import numpy as np
import pytest
import torch

from phalanx.errors import DataError, PhalanxError, UsageError
from phalanx.loop.forward import implied_loss
from phalanx.recipes import Recipe
from phalanx.zoo.data import READERS, load, load_splits, named_data, names, takes
from phalanx.zoo.data.files import files
from phalanx.zoo.models import build
from phalanx.zoo.recipe_parts import recipe_model, recipe_parts

ROWS = 50


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path_factory.getbasetemp() / "datasets-cache"))  # read once, at the import


def frame():
    pandas = pytest.importorskip("pandas")
    values = np.random.default_rng(0).normal(size=(ROWS, 2))
    table = pandas.DataFrame(values, columns=["a", "b"])
    table["label"] = np.where(values.sum(1) > 0, "yes", "no")
    return table


def write_as(table, path):
    kinds = {".csv": "to_csv", ".parquet": "to_parquet", ".jsonl": "to_json"}
    options = {".csv": {"index": False}, ".jsonl": {"orient": "records", "lines": True}}.get(path.suffix, {})
    getattr(table, kinds[path.suffix])(path, **options)


@pytest.mark.parametrize("ending", [".csv", ".parquet", ".jsonl"])
def test_rows_of_tables_become_inputs_and_labels(tmp_path, ending):
    pytest.importorskip("datasets")
    table = frame()
    write_as(table, tmp_path / f"rows{ending}")
    (tmp_path / "about.json").write_text('{"license": "mine"}')
    train, val = load_splits(str(tmp_path))
    assert (len(train), len(val)) == (45, 5)
    inputs, label = train[0]
    torch.testing.assert_close(inputs, torch.tensor(table.loc[0, ["a", "b"]].to_numpy(dtype="float32")))
    assert label == ["no", "yes"].index(table.loc[0, "label"])
    assert train.classes == ["no", "yes"]


def test_files_named_after_splits_are_the_splits(tmp_path):
    pytest.importorskip("datasets")
    table = frame()
    write_as(table[:40], tmp_path / "train.parquet")
    write_as(table[40:], tmp_path / "validation.parquet")
    train, val = load_splits(str(tmp_path), inputs="b", target="a")
    assert (len(train), len(val)) == (40, 10)
    assert train[3][0].shape == (1,)
    assert float(val[0][1]) == pytest.approx(table.loc[40, "a"])


def test_columns_that_do_not_exist_are_named(tmp_path):
    pytest.importorskip("datasets")
    write_as(frame(), tmp_path / "rows.csv")
    with pytest.raises(UsageError, match=r"unknown column 'labell' of .* Did you mean 'label'"):
        load(str(tmp_path), target="labell")
    with pytest.raises(UsageError, match="unknown column 'a,b'") as refused:
        load(str(tmp_path), inputs="a,b")
    assert """'["a", "b"]'""" in refused.value.hint


def test_texts_become_windows_that_do_not_overlap_between_splits(tmp_path):
    (tmp_path / "a.txt").write_text("".join(chr(65 + i % 26) for i in range(1000)))
    train, val = load_splits(str(tmp_path / "a.txt"), seq_len=16, val_fraction=0.2)
    assert train.vocab_size == 256
    assert len(train.tokens) == 800
    assert len(val.tokens) == 200
    inputs, targets = train[0]
    assert bytes(inputs.tolist()) == b"ABCDEFGHIJKLMNOP"
    assert torch.equal(inputs[1:], targets[:-1])


def test_a_folder_is_found_by_its_name_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.txt").write_text("x" * 1000)
    assert len(load("corpus", seq_len=16, val_fraction=0).tokens) == 1000


def test_images_in_class_folders_and_tar_shards(tmp_path):
    pillow = pytest.importorskip("PIL.Image")
    pytest.importorskip("datasets")

    def image(number):
        return pillow.fromarray(np.full((8, 8, 3), number, dtype=np.uint8))

    for name in ("cat", "dog"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for number in range(10):
            image(number).save(tmp_path / "images" / name / f"{number}.png")
    train, val = load_splits(str(tmp_path / "images"), size=4)
    assert (len(train), len(val), train.classes) == (18, 2, ["cat", "dog"])
    assert train[0][0].shape == (3, 4, 4)

    (tmp_path / "shards").mkdir()
    with tarfile.open(tmp_path / "shards" / "000.tar", "w") as shard:
        for number in range(10):
            encoded = io.BytesIO()
            image(25 * number).save(encoded, "png")
            for ending, content in (("png", encoded.getvalue()), ("cls", str(number).encode())):
                entry = tarfile.TarInfo(f"{number:04d}.{ending}")
                entry.size = len(content)
                shard.addfile(entry, io.BytesIO(content))
    pixels, label = load(str(tmp_path / "shards"), val_fraction=0)[4]
    assert label == 4
    torch.testing.assert_close(pixels, torch.full((3, 8, 8), 100 / 255))


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda path: path / "nope", UsageError, "nothing at that path"),
        (lambda path: path, DataError, r"\.bin \(1\)"),
    ],
)
def test_folders_without_data_say_what_they_hold(tmp_path, make, error, says):
    (tmp_path / "x.bin").write_bytes(b"x")
    with pytest.raises(error, match=says):
        load(str(make(tmp_path)))


def test_functions_of_the_user_give_splits_in_three_ways(tmp_path, monkeypatch):
    (tmp_path / "given_data.py").write_text(
        "def by_split(split, n=2): return [split] * n\n"
        "def pair(): return ['t'], ['v']\n"
        "def table(): return {'train': ['t'], 'validation': ['v']}\n"
        "def alone(): return ['t']\n"
        "def three(): return 1, 2, 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert load_splits("given_data:by_split", n=1) == (["train"], ["val"])
    assert load_splits("given_data:pair") == load_splits("given_data:table") == (["t"], ["v"])
    assert load_splits("given_data:alone") == (["t"], None)
    with pytest.raises(UsageError, match="tuple of 3"):
        load_splits("given_data:three")
    with pytest.raises(UsageError, match="Did you mean 'n'"):
        load_splits("given_data:by_split", nn=1)


def test_options_of_a_data_set_without_any_are_refused_plainly():
    with pytest.raises(UsageError, match="data set 'digits' takes no options; got 'size'"):
        load("digits", size=3)


def test_a_hugging_face_config_builds_our_model_or_that_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    small = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 64, "n_positions": 8}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", **small}))
    model = build(str(tmp_path), n_layer=2)
    assert type(model).__name__ == "GPT"
    assert model.config.layers == 2
    config = transformers.BertConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        vocab_size=50,
        architectures=["BertForSequenceClassification"],
    )
    config.save_pretrained(tmp_path / "bert")
    bert = build(str(tmp_path / "bert"), num_labels=5)
    assert bert.classifier.out_features == 5
    bert.save_pretrained(tmp_path / "bert")
    again = build(str(tmp_path / "bert"))
    torch.testing.assert_close(again.classifier.weight, bert.classifier.weight)
    with pytest.raises(UsageError, match="cannot be changed"):
        build(str(tmp_path / "bert"), num_labels=3)
    with pytest.raises(UsageError, match="nothing at that path"):
        build(str(tmp_path / "nope"))


def test_a_perceptron_takes_its_sizes_from_the_rows(tmp_path):
    pytest.importorskip("datasets")
    write_as(frame(), tmp_path / "rows.csv")
    write_as(frame().drop(columns="label").rename(columns={"b": "target"}), tmp_path / "numbers.csv")
    sizes = {}
    for name in ("rows", "numbers"):
        recipe = Recipe(name, "", {"name": str(tmp_path / f"{name}.csv")}, {"name": "mlp", "hidden": 5})
        layers = recipe_parts(recipe)[0].layers
        sizes[name] = layers[1].in_features, layers[-1].out_features
    assert sizes == {"rows": (2, 2), "numbers": (1, 1)}
    drawn = Recipe("drawn", "", {"name": "synthetic", "shape": [3], "classes": 4}, {"name": "mlp"})
    assert recipe_parts(drawn)[0].layers[-1].out_features == 4
    loss = implied_loss(torch.tensor([[1.0], [3.0]]), torch.tensor([2.0, 3.0]))
    assert loss == 0.5


def test_windows_of_texts_fit_the_model_of_a_folder(tmp_path):
    small = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 256, "n_positions": 8}
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps({"model_type": "gpt2", **small}))
    (tmp_path / "book.txt").write_text("a line of text\n" * 40)
    recipe = Recipe("hf", "", {"name": str(tmp_path / "book.txt")}, {"name": str(tmp_path / "hf")})
    assert recipe_parts(recipe)[1].seq_len == 8
    assert recipe_parts(recipe.with_values({"data.seq_len": 4}))[1].seq_len == 4


def test_a_tokenizer_makes_tokens_of_texts_and_dicts_of_rows(tmp_path):
    pytest.importorskip("datasets")
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    words = {"[UNK]": 0, "[PAD]": 1, "good": 2, "bad": 3, "film": 4}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]", pad_token="[PAD]")
    made.save_pretrained(tmp_path / "tokenizer")
    folder = str(tmp_path / "tokenizer")
    (tmp_path / "a.txt").write_text("good film bad film " * 50)
    windows = load(str(tmp_path / "a.txt"), tokenizer=folder, seq_len=4, val_fraction=0)
    assert windows.vocab_size == len(words)
    assert windows[0][0].tolist() == [2, 4, 3, 4]
    (tmp_path / "rows.csv").write_text("text,label\ngood film,1\nbad,0\n")
    rows = load(str(tmp_path / "rows.csv"), tokenizer=folder, seq_len=4, val_fraction=0)
    assert rows[0]["input_ids"].tolist() == [2, 4, 1, 1]
    assert rows[0]["attention_mask"].tolist() == [1, 1, 0, 0]
    assert int(rows[1]["labels"]) == 0
    with pytest.raises(UsageError, match="cannot be read"):
        load(str(tmp_path / "a.txt"), tokenizer=str(tmp_path / "nope"))
    made.pad_token = None
    made.save_pretrained(tmp_path / "without-padding")
    with pytest.raises(UsageError, match="has no padding token, and texts are padded to 4 tokens"):
        load(str(tmp_path / "rows.csv"), tokenizer=str(tmp_path / "without-padding"), seq_len=4, val_fraction=0)


def test_rows_without_a_label_are_refused_and_files_of_them_left_out(tmp_path):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["neg", "pos"])})

    def write(name: str, labels: list[int]) -> None:
        rows = {"text": [f"text {number}" for number in range(len(labels))], "label": labels}
        datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / name)

    write("train-0.parquet", [0, 1, 1])
    write("unsupervised-0.parquet", [-1, -1])
    write("test-0.parquet", [0, 1])
    train, _ = load_splits(str(tmp_path), text="text", target="label")
    assert [int(row["labels"]) for row in train] == [0, 1, 1]
    write("test-0.parquet", [-1, -1])
    with pytest.raises(DataError, match="holds '-1' in the column 'label'") as raised:
        load_splits(str(tmp_path), text="text", target="label")
    assert "-1 stands for no label" in raised.value.hint


def test_pairs_of_texts_are_one_sample_with_segments(tmp_path):
    pytest.importorskip("datasets")
    (tmp_path / "rows.csv").write_text("first,second,label\nab,cde,yes\nlonger text,x,no\n")
    rows = load(str(tmp_path / "rows.csv"), text=["first", "second"], seq_len=9, val_fraction=0)
    sample = rows[0]
    begin = 256
    assert sample["input_ids"].tolist() == [begin, *b"ab", begin, *b"cde", 0, 0]
    assert sample["token_type_ids"].tolist() == [0, 0, 0, 1, 1, 1, 1, 0, 0]
    assert sample["attention_mask"].tolist() == [1] * 7 + [0, 0]
    assert rows.classes == ["no", "yes"]
    assert rows[1]["input_ids"].tolist() == [begin, *b"longer", begin, *b"x"], "the longer text is cut"
    assert rows.columns["inputs"] == ["first", "second"], "files to predict are read alike"

    class WithoutSegments(torch.nn.Module):
        def forward(self, input_ids, attention_mask, labels=None): ...

    rows.fit_to(WithoutSegments())
    assert set(rows[0]) == {"input_ids", "attention_mask", "labels"}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"text": ["first", "second", "first"]}, "a sample is a text or a pair of texts, and 3 columns are named"),
        ({"text": ["first", "secnd"]}, "unknown column 'secnd' of .* Did you mean 'second'"),
        ({"text": ["first", "number"]}, "the column 'number' of .* holds no texts: row 1 has 3"),
        ({"text": ["first", "second"], "target": "lable"}, "unknown column 'lable' of .* Did you mean 'label'"),
    ],
)
def test_pairs_that_cannot_be_are_refused(tmp_path, options, says):
    pytest.importorskip("datasets")
    (tmp_path / "rows.csv").write_text("first,second,number,label\nab,cde,3,yes\nlonger text,x,4,no\n")
    with pytest.raises(PhalanxError, match=says):
        load(str(tmp_path / "rows.csv"), **options)


def test_pairs_without_a_column_of_labels_ask_for_the_target(tmp_path):
    pytest.importorskip("datasets")
    (tmp_path / "rows.csv").write_text("first,second,gold\nab,cde,1\nlonger text,x,0\n")
    with pytest.raises(UsageError, match=r"has no column called label, .* its columns: first, second, gold") as raised:
        load(str(tmp_path / "rows.csv"), text=["first", "second"])
    assert "--set data.target=NAME" in raised.value.hint


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (["a,b,answer", *["1.0,2.0,yes"] * 20], "columns of texts would be left out: answer"),
        (["a,b,label", *["1.0,2.0,1"] * 20, "x,2.0,1"], "row 21 of .* holds 'x' in the column 'a'"),
        (["a,b,label", *["1.0,2.0,1"] * 3, "oops,2.0,1"], "row 4 of .* holds 'oops' .* its other cells are numbers"),
        (["a,b,label", *["1.0,2.0,1"] * 1500, "x,2.0,1"], "row 1501 of .* holds 'x' in the column 'a'"),
        (["a,b,label"], "holds no rows"),
        ([""], "holds no rows"),
        (["a,b,label", *["1.0,2.0,yes"] * 20, "1.0,2.0,"], "row 21 of .* has no value in the column 'label'"),
        (["a,b,label", *["1.0,2.0,yes"] * 20, "1.0,,yes"], "row 21 of .* has no value in the column 'b'"),
    ],
)
def test_a_table_with_a_wrong_cell_or_an_unknown_target_is_refused(tmp_path, rows, says):
    pytest.importorskip("datasets")
    (tmp_path / "rows.csv").write_text("\n".join(rows) + "\n")
    with pytest.raises(PhalanxError, match=says):
        list(files("train", tmp_path / "rows.csv", val_fraction=0.01))


def test_data_to_predict_may_lack_the_target_and_have_names(tmp_path):
    pytest.importorskip("datasets")
    (tmp_path / "rows.csv").write_text("name,a,b\nfirst,1.0,2.0\n")
    rows = files("val", tmp_path / "rows.csv", target="answer", val_fraction=1, needs_target=False)
    assert rows[0].tolist() == [1.0, 2.0]


def tables(folder, **texts):
    pytest.importorskip("datasets")
    for name, rows in texts.items():
        (folder / f"{name}.csv").write_text("\n".join(rows) + "\n")
    return str(folder)


def test_columns_of_validation_files_are_taken_by_the_names_of_the_training_files(tmp_path):
    place = tables(tmp_path, train=["a,b,label", "1,2,0", "3,4,1"], val=["label,b,extra,a", "1,20,7.5,10"])
    _, val = load_splits(place)
    assert val[0][0].tolist() == [10, 20]


def test_the_type_of_a_target_is_that_of_the_training_files(tmp_path):
    place = tables(tmp_path, train=["a,y", "1,0.5", "2,1.5"], val=["a,y", "1,3", "2,4"])
    train, val = load_splits(place)
    assert train[0][1].dtype == val[0][1].dtype == torch.float32
    train, _ = load_splits(place, target_type="class", inputs="y", target="a", val_fraction=0)
    assert train[0][1].dtype == torch.int64
    with pytest.raises(DataError, match=r"train\.csv holds '0\.5' in the column 'y', and the labels") as refused:
        load_splits(place, target_type="class")
    assert "target_type=number" in refused.value.hint
    with pytest.raises(UsageError, match="Did you mean 'number'"):
        load_splits(place, target_type="numbers")


@pytest.mark.parametrize(
    ("train", "val", "said"),
    [
        (("a,label", "1,ant", "2,bee"), ("label,a", "bee,1", "cat,2"), r"row 2 of .*val.csv holds 'cat' .* ant, bee"),
        (("a,label", "1,ant", "2,bee"), ("a,label", "1,0", "2,1"), r"row 1 of .*val.csv holds '0' .* ant, bee"),
        (("a,label", "1,ant", "2,bee"), ("a,label", "1,0.5", "2,1.5"), r"row 1 of .*val.csv holds '0.5' .* ant, bee"),
        (("a,label", "1,0", "2,1"), ("a,label", "1,1", "2,2"), r"row 2 of .*val.csv holds '2' .* are 0, 1"),
        (("a,label", "1,True", "2,False"), ("a,label", "1,1", "2,0"), r"row 1 of .*val.csv holds '1' .* False, True"),
        (("a,b,label", "1,2,0", "2,1,1"), ("a,label", "1,1"), r"unknown column 'b' of .*val.csv"),
        (("a,label", "1,0", "2,1"), ("a,kind", "1,1"), r"unknown column 'label' of .*val.csv"),
        (("a,y", "1,0.5", "2,1.5"), ("a,y", "1,ant"), r"row 1 of .*val.csv holds 'ant' .* not a number"),
    ],
)
def test_a_split_that_does_not_fit_the_training_data_is_answered_by_name(tmp_path, train, val, said):
    place = tables(tmp_path, train=train, val=val)
    with pytest.raises((DataError, UsageError), match=said):
        load_splits(place)[1][0]


def test_labels_are_compared_by_name_whatever_number_a_file_gives_them(tmp_path):
    datasets = pytest.importorskip("datasets")
    for name, classes in (("train", ["ant", "bee"]), ("val", ["bee", "ant"])):
        features = datasets.Features({"a": datasets.Value("float32"), "label": datasets.ClassLabel(names=classes)})
        rows = datasets.Dataset.from_dict({"a": [1.0, 2.0], "label": ["ant", "bee"]}, features=features)
        rows.to_parquet(tmp_path / f"{name}.parquet")
    train, val = load_splits(str(tmp_path))
    assert [int(label) for _, label in train] == [int(label) for _, label in val] == [0, 1]


def test_texts_of_validation_are_the_column_that_was_trained(tmp_path):
    pytest.importorskip("datasets")
    transformers = pytest.importorskip("transformers")
    inner = pytest.importorskip("tokenizers").Tokenizer(
        pytest.importorskip("tokenizers").models.WordLevel({"[UNK]": 0, "right": 1, "wrong": 2}, unk_token="[UNK]")
    )
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]", pad_token="[UNK]")
    made.save_pretrained(tmp_path / "tokenizer")
    for name, row in {
        "train": {"text": "right", "title": "wrong", "y": "a"},
        "val": {"label": 7, "title": "wrong", "text": "right", "y": "a"},
    }.items():
        (tmp_path / f"{name}.jsonl").write_text(f"{json.dumps(row)}\n" * 2)
    train, val = load_splits(str(tmp_path), tokenizer=str(tmp_path / "tokenizer"), seq_len=2)
    assert train.columns == val.columns == {"inputs": ["text"], "target": "y", "target_type": "class"}
    assert val[0]["input_ids"].tolist() == train[0]["input_ids"].tolist() == [1, 0]
    assert int(val[0]["labels"]) == 0


def test_whole_numbers_may_be_a_quantity(tmp_path):
    place = tables(tmp_path, rows=["a,label", *[f"{n},{n}" for n in range(20)]])
    labels, numbers = (load(place, target_type=kind, val_fraction=0) for kind in (None, "number"))
    assert (labels[3][1].dtype, len(labels.classes)) == (torch.int64, 20)
    assert numbers[3][1].dtype == torch.float32
    assert not hasattr(numbers, "classes")


def test_labels_may_be_truth_values_and_one_column_is_enough(tmp_path):
    train = load(tables(tmp_path, rows=["x,label", *[f"{n},{n % 2 == 0}" for n in range(10)]]), val_fraction=0)
    assert train.classes == ["False", "True"]
    inputs, label = train[2]
    assert (inputs.tolist(), int(label)) == ([2.0], 1)


def test_lists_of_whole_numbers_are_reals_for_a_perceptron_and_tokens_for_an_embedding(tmp_path):
    pytest.importorskip("datasets")
    rows = "".join(json.dumps({"x": [n, 2, 3], "label": n % 2}) + "\n" for n in range(20))
    (tmp_path / "rows.jsonl").write_text(rows)
    recipe = Recipe("lists", "", {"name": str(tmp_path / "rows.jsonl")}, {"name": "mlp"})
    assert recipe_parts(recipe).train[1][0].dtype == torch.float32
    plain = load(str(tmp_path / "rows.jsonl"), val_fraction=0)
    plain.fit_to(torch.nn.Sequential(torch.nn.Embedding(30, 4), torch.nn.Linear(4, 2)))
    assert plain[1][0].dtype == torch.int64


def test_columns_of_texts_that_are_left_out_are_named(tmp_path):
    place = tables(tmp_path, rows=["a,city,b,label", *["1,Paris,2,0"] * 10, *["1,Rome,2,1"] * 10])
    train, val = load_splits(place)
    assert train.loader_hints.notes == ("columns used: a, b; left out (text): city",)
    assert val.loader_hints.notes == ()


def test_a_test_set_does_not_choose_the_model(tmp_path):
    rows = ["a,label", "1,0", "2,1"]
    train, val = load_splits(tables(tmp_path, train=rows * 1, val=[*rows, "3,0"], test=[*rows, "3,0", "4,1"]))
    assert (len(train), len(val)) == (2, 3)
    (tmp_path / "val.csv").unlink()
    assert len(load_splits(str(tmp_path))[1]) == 4


def test_a_validation_folder_without_a_class_keeps_the_numbers_of_the_others(tmp_path):
    pillow = pytest.importorskip("PIL.Image")
    for split, classes in {"train": ["ant", "bee", "cat"], "val": ["ant", "cat"]}.items():
        for name in classes:
            (tmp_path / split / name).mkdir(parents=True)
            pillow.new("RGB", (8, 8)).save(tmp_path / split / name / "0.png")
    for name, options in (
        (str(tmp_path), {}),
        ("imagefolder", {"root": tmp_path}),
        ("shards", {"root": tmp_path, "workers": 0}),
    ):
        _, val = load_splits(name, size=4, **options)
        assert [int(label) for _, label in (val[0], val[1])] == [0, 2], name


def test_a_convolutional_net_takes_its_sizes_from_the_images(tmp_path):
    pillow = pytest.importorskip("PIL.Image")
    for name in ("cat", "dog", "emu"):
        (tmp_path / name).mkdir()
        for number in range(4):
            pillow.new("RGB", (8, 8)).save(tmp_path / name / f"{number}.png")
    recipe = Recipe("images", "", {"name": str(tmp_path), "size": 12}, {"name": "convnet"})
    parts = recipe_parts(recipe)
    assert parts.model(parts.train[0][0].unsqueeze(0)).shape == (1, 3)
    assert parts.recipe.model == {"name": "convnet", "image_size": 12, "channels": 3, "classes": 3}
    assert recipe_model(parts.recipe).state_dict().keys() == parts.model.state_dict().keys()


def test_data_sets_of_files_are_known_before_they_are_imported():
    assert {*READERS} == {name for name in names() if takes(name, "root")}
    assert named_data("digits", {"name": "text"}) == {"name": "digits"}
    assert named_data("/a/b.csv", {"name": "text", "seq_len": 4}) == {"name": "/a/b.csv"}
    assert named_data("/a/imgs", {"name": "imagefolder", "size": 4}) == {
        "name": "imagefolder",
        "size": 4,
        "root": "/a/imgs",
    }
    assert named_data("pkg.data:load", {"name": "imagefolder"}) == {"name": "pkg.data:load"}
