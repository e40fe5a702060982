"""Recipes: a data set, a model and settings as data, built in or written by the user."""

from __future__ import annotations

from phalanx.recipes.find import find_recipe, load_recipe, recipe_names
from phalanx.recipes.recipe import Recipe

__all__ = ["Recipe", "find_recipe", "load_recipe", "recipe_names"]
