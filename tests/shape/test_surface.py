"""The surface: every field is an argument, a flag and a key; names in the config exist in the registries."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest
from package_tree import modules, parsed

import phalanx
from phalanx.cli import VERBS
from phalanx.cli.flags import FlagParser, add_config_flags
from phalanx.config import BACKENDS
from phalanx.config.aliases import NAMES
from phalanx.config.fields import STRATEGY_NAMES
from phalanx.recipes import load_recipe, recipe_names

PROMISED = [
    "num_gpus",
    "num_nodes",
    "gpus_per_node",
    "num_workers",
    "device",
    "backend",
    "strategy",
    "batch_size",
    "epochs",
    "max_steps",
    "learning_rate",
    "optimizer",
    "weight_decay",
    "lr_schedule",
    "warmup",
    "lr_scaling",
    "base_batch_size",
    "seed",
    "mixed_precision",
    "scaler_init_scale",
    "scaler_growth_interval",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "compile",
    "activation_checkpointing",
    "communication_backend",
    "find_unused_parameters",
    "bucket_cap_mb",
    "timeout",
    "checkpoint_dir",
    "checkpoint_frequency",
    "keep_last",
    "resume_from_checkpoint",
    "tensorboard",
    "tensorboard_dir",
    "mlflow_tracking",
    "log_every_n_steps",
    "max_restarts",
]


def test_promised_settings_exist():
    assert set(PROMISED) <= set(NAMES)


def test_every_field_has_a_help_text_and_a_flag():
    parser = FlagParser(prog="x")
    add_config_flags(parser)
    flags = {flag for action in parser._actions for flag in action.option_strings}
    for name, field in NAMES.items():
        assert field.metadata["help"]
        assert f"--{name.replace('_', '-')}" in flags


def test_strategy_names_match_the_registry():
    from phalanx.config.strategies import TABLE
    from phalanx.strategies.registry import HOMES, load_strategy

    for name in HOMES:
        assert load_strategy(name).name == name
    for flag in (word for entry in TABLE for word in entry.flag.replace("[", " ").split() if word.startswith("--")):
        assert flag.removeprefix("--").replace("-", "_") in NAMES
    of_engines = {name for backend in BACKENDS.values() for name in backend.strategies}
    assert set(STRATEGY_NAMES) - {"auto"} == set(HOMES) | of_engines
    assert {backend.strategy for backend in BACKENDS.values()} <= {*HOMES, *of_engines}


def test_the_strategy_contract_stays_on_one_page():
    from phalanx.strategies.base import Strategy

    methods = [name for name, value in vars(Strategy).items() if callable(value) and not name.startswith("_")]
    assert len(methods) <= 25, methods


@pytest.mark.parametrize("package", ["loop", "run"])
def test_the_loop_asks_no_strategy_for_its_type(package):
    """What differs between strategies is in their contract: no isinstance, getattr or hasattr on one."""
    probed = re.compile(r"\b(isinstance|getattr|hasattr)\((self\.)?_?(\w+\.)*_?strategy\b")
    for path in (Path(phalanx.__file__).parent / package).rglob("*.py"):
        if "tensorflow" not in path.parts:  # tf.distribute's strategies, which have no such contract
            assert not probed.search(path.read_text()), path


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help(verb, capsys):
    from phalanx.cli import main

    with pytest.raises(SystemExit) as left:
        raise SystemExit(main([verb, "--help"]))
    assert left.value.code == 0
    assert "usage" in capsys.readouterr().out


@pytest.mark.parametrize("name", recipe_names())
def test_recipes_are_valid(name):
    from phalanx.config import DistributedConfig

    recipe = load_recipe(name)
    DistributedConfig(**recipe.settings)
    assert recipe.summary


def test_other_programs_load_nothing_of_phalanx():
    """torch fails to import where it cannot load an entry point of its group: metadata may be seen without the code."""
    groups = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"].get(
        "entry-points", {}
    )
    assert [name for name in groups if not name.startswith("phalanx.")] == []


def test_no_code_takes_the_first_line_of_a_text_that_may_be_empty():
    """`assert x` raises an error without a text: `phalanx.errors.first_line` and `error_line` are for all texts."""
    found = []
    for name in modules():
        for node in ast.walk(parsed(name)):
            lines = isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and node.slice.value == 0
            if lines and isinstance(node.value, ast.Call) and ast.unparse(node.value.func).endswith(".splitlines"):
                found.append(f"{name}:{node.lineno}: {ast.unparse(node)}")
    assert not found, found
