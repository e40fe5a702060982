"""Recipes suit the machine: two ranks on CPUs, no more ranks than GPUs on GPUs."""

from __future__ import annotations

import pytest

from phalanx.config import resolve
from phalanx.errors import UsageError
from phalanx.recipes import load_recipe, recipe_names


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_asks_for_no_more_ranks_than_there_are_gpus(name):
    recipe = load_recipe(name)
    assert [recipe.settings_for(gpus)["recipe"]["num_workers"] for gpus in (0, 1, 2, 8)] == [2, 1, 2, 2]
    assert recipe.settings_for(1)["recipe"] == {**recipe.settings, "num_workers": 1}


def test_a_preset_for_a_recipe_without_any_names_the_way_to_that_of_its_model():
    with pytest.raises(UsageError, match=r"names no presets[^\n]*\n.*--set model\.preset=resnet50$"):
        load_recipe("imagefolder").with_preset("resnet50")


def test_the_length_that_is_given_replaces_that_of_the_recipe_in_the_other_unit():
    sft, gpt = (load_recipe(name).settings_for(0) for name in ("sft", "gpt"))
    assert resolve({}, environ={}, **sft).config.epochs == 3
    longer = resolve({"max_steps": 120}, environ={}, **sft)
    assert (longer.config.max_steps, longer.config.epochs, longer.origins["epochs"]) == (120, None, "default")
    by_variable = resolve({}, environ={"PHALANX_MAX_STEPS": "120"}, **sft).config
    assert (by_variable.max_steps, by_variable.epochs) == (120, None)
    epochs = resolve({"epochs": 2}, environ={}, **gpt).config
    assert (epochs.epochs, epochs.max_steps) == (2, None)
    both = resolve({"epochs": 2, "max_steps": 9}, environ={}, **gpt).config
    assert (both.epochs, both.max_steps) == (2, 9)
