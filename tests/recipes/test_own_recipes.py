"""Recipes of the user: in files, in modules, in installed packages, and made of --model and --data."""

from __future__ import annotations

import re
import sys
import textwrap

import pytest

from phalanx.errors import UsageError
from phalanx.recipes import Recipe, find_recipe, from_document, load_recipe, read_changes, recipe_names
from phalanx.zoo.models import build, save_pretrained
from phalanx.zoo.recipe_parts import recipe_parts


@pytest.fixture(autouse=True)
def _project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    (tmp_path / "own_parts.py").write_text(
        textwrap.dedent(
            """
            class Net: ...
            def load(split): ...
            def tiny():
                return {"model": {"name": Net, "width": 8}, "data": load, "settings": {"epochs": 2}}
            def broken():
                raise KeyError("no such thing")
            wrong = 3
            """
        )
    )
    yield
    sys.modules.pop("own_parts", None)


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))


TOML = """
    model = "own_parts:Net"
    loss = "torch.nn.functional:mse_loss"
    [data]
    name = "./points.csv"
    [settings]
    epochs = 3
"""


def test_a_file_beside_the_code_is_a_recipe(tmp_path):
    write(tmp_path / "here" / "mine.toml", TOML)
    recipe = load_recipe("here/mine.toml")
    assert (recipe.name, recipe.model, recipe.settings) == ("mine", {"name": "own_parts:Net"}, {"epochs": 3})
    assert recipe.data == {"name": str(tmp_path / "here" / "points.csv")}
    assert recipe.paths == (str(tmp_path / "here"), str(tmp_path))
    recipe.check()


def test_yaml_says_the_same(tmp_path):
    write(tmp_path / "mine.yaml", "model: own_parts:Net\ndata: {name: digits}\nsettings:\n  epochs: 3\n")
    assert load_recipe("mine.yaml").settings == {"epochs": 3}


@pytest.mark.parametrize("folder", ["recipes", "config/phalanx/recipes"])
def test_recipes_are_found_by_name_in_the_project_and_in_the_users_folder(tmp_path, folder):
    write(tmp_path / folder / "own.toml", TOML)
    assert "own" in recipe_names()
    assert load_recipe("own").settings == {"epochs": 3}


def test_a_function_of_a_module_gives_a_recipe_with_classes_as_import_paths():
    recipe = load_recipe("own_parts:tiny")
    assert recipe.model == {"name": "own_parts:Net", "width": 8}
    assert recipe.data == {"name": "own_parts:load"}
    assert recipe.name == "tiny"


def test_a_function_that_raises_is_named():
    with pytest.raises(UsageError, match="the recipe 'own_parts:broken' raised KeyError"):
        load_recipe("own_parts:broken")


def test_an_installed_package_brings_recipes(tmp_path):
    write(tmp_path / "own-1.dist-info" / "METADATA", "Name: own\nVersion: 1\n")
    write(tmp_path / "own-1.dist-info" / "entry_points.txt", "[phalanx.recipes]\nfrom-package = own_parts:tiny\n")
    sys.path.insert(0, str(tmp_path))
    assert load_recipe("from-package").settings == {"epochs": 2}


def test_built_in_recipes_need_no_folder_of_the_user():
    assert load_recipe("digits").paths == ()
    assert find_recipe("no-such") is None


@pytest.mark.parametrize(
    ("document", "says"),
    [
        ({"data": "digits"}, "does not say which model"),
        ({"model": "gpt"}, "does not say which data"),
        ({"model": "gpt", "data": "text", "setings": {}}, "Did you mean 'settings'"),
        ({"model": "gpt", "data": "text", "settings": 3}, "expected a table"),
        ({"model": lambda: 3, "data": "text"}, "ranks cannot import it"),
    ],
)
def test_wrong_documents_are_refused(document, says):
    with pytest.raises(UsageError, match=says):
        from_document(document, "mine")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nope.toml", "no such recipe: nope.toml"),
        ("own_parts:tinyy", "Did you mean 'tiny'"),
        ("own_parts:wrong", "is an int, not a recipe"),
        ("nowhere:tiny", "no module 'nowhere'"),
        ("own_parts.Net", "--model own_parts:Net"),
        ("train.py", "--script train.py"),
        ("digist", "Did you mean 'digits'"),
    ],
)
def test_wrong_names_are_refused_with_what_to_write(name, says):
    with pytest.raises(UsageError) as caught:
        load_recipe(name)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("part", "says"),
    [
        ({"model": "own_parts:Nett"}, "Did you mean 'Net'"),
        ({"loss": "own_part:loss"}, "no module 'own_part'"),
        ({"metrics": {"f1": "own_parts:f1"}}, "metrics.f1"),
        ({"callbacks": ["own_parts:Cb"]}, "callbacks"),
    ],
)
def test_import_paths_are_checked_before_anything_starts(part, says):
    recipe = from_document({"model": "own_parts:Net", "data": "own_parts:load", **part}, "mine")
    with pytest.raises(UsageError, match=says):
        recipe.check()


def test_checking_an_import_path_does_not_run_the_module(tmp_path):
    (tmp_path / "slow_parts.py").write_text("Net = 3\nraise SystemError('imported')\n")
    Recipe("x", "", {"name": "digits"}, {"name": "slow_parts:Net"}, paths=(str(tmp_path),)).check()
    assert "slow_parts" not in sys.modules


def test_set_reaches_nested_values_and_settings():
    def known(name):
        return name == "batch_size"

    words = ["model.dropout=0.1", 'data.inputs=["a"]', "settings.batch-size=8", "model.kind=wide"]
    own, nested = read_changes(words, known)
    assert own == {"batch_size": 8}
    recipe = load_recipe("digits").with_values(nested)
    assert recipe.model == {"name": "convnet", "dropout": 0.1, "kind": "wide"}
    assert recipe.data["inputs"] == ["a"]
    for word in ("nope=3", "model", "=3"):
        with pytest.raises(UsageError, match="--set"):
            read_changes([word], known)
    with pytest.raises(UsageError, match="Did you mean 'model'"):
        recipe.with_values({"modle.width": 3})


def test_another_model_takes_the_place_of_the_recipes_and_its_options(tmp_path):
    changed = load_recipe("gpt").with_parts("own_parts:Net", None)
    assert changed.model == {"name": "own_parts:Net"}
    assert not changed.sample
    assert changed.paths == (str(tmp_path),)


def test_a_folder_of_a_model_gives_its_tokenizer_to_texts_and_bytes_are_refused(tmp_path):
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    words = ["<pad>", "</s>", "<unk>", "a", "b", "<extra_id_0>"]
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: n for n, word in enumerate(words)}, "<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    known = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    folder, other = tmp_path / "folder", tmp_path / "other"
    for place in (folder, other):
        transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **known).save_pretrained(place)
        inner.add_tokens(["c"])  # of the second one
    save_pretrained(build("t5", vocab_size=384), folder)
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "rows.csv").write_text("input,target\na,b\nb,a\n")
    recipe = load_recipe("seq2seq").with_parts(str(folder), None)
    recipe = recipe.with_values({"data.root": str(tmp_path / "rows")})
    model, train, *_ = recipe_parts(recipe)
    assert train[0][0][:2].tolist() == [3, 1], "words, not bytes"
    assert not hasattr(model, "weights_note")
    foreign = recipe.with_values({"data.tokenizer": str(other)})
    assert "differs from the model's own" in recipe_parts(foreign).model.weights_note
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("a b " * 400)
    bare = load_recipe("text").with_parts(str(folder), {"name": str(tmp_path / "texts")})
    with pytest.raises(UsageError, match=r"read as bytes, and the model in .*folder knows") as caught:
        recipe_parts(bare)
    assert f"data.tokenizer={folder}" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("convnet", {"width": "abc"}, "model 'convnet': width = 'abc': expected a whole number"),
        ("convnet", {"dropout": "high"}, "model 'convnet': dropout = 'high': expected a number"),
        ("gpt", {"layers": "x"}, "model 'gpt': layers = 'x': expected a whole number"),
    ],
)
def test_a_text_for_a_number_is_refused_before_torch_sees_it(name, options, says):
    with pytest.raises(UsageError, match=re.escape(says)):
        build(name, **options)
