"""Names of other libraries are answered with ours: flags, settings, keys of files, values and variables."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from command import phalanx

import phalanx as package
from phalanx import DistributedConfig, PhalanxError
from phalanx.config import resolve
from phalanx.config.aliases import NAMES
from phalanx.config.names import like, like_flag, like_option, table
from phalanx.config.option import problem
from phalanx.config.sources import NOT_SETTINGS
from phalanx.zoo.models.registry import build_options

OF_A_VERB = {"data", "resume", "time_limit"}
"""Names in the table that a flag of a verb brings."""


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("lr", "--learning-rate"),
        ("bs", "--batch-size"),
        ("wd", "--weight-decay"),
        ("amp", "--mixed-precision"),
        ("fp16", "--mixed-precision fp16"),
        ("gpus", "--num-gpus"),
        ("nproc_per_node", "--num-workers"),
        ("nproc-per-node", "--num-workers"),
        ("accumulate_grad_batches", "--gradient-accumulation-steps"),
        ("num_train_epochs", "--epochs"),
        ("clip", "--gradient-clipping"),
        ("lerning-rate", "--learning-rate"),
        ("project", "--wandb"),
    ],
)
def test_a_flag_of_another_library_is_answered_with_ours(given, meant):
    assert f"unknown flag '--{given}'. Did you mean {meant}?" in phalanx("train", "digits", f"--{given}", "1").err


def test_python_arguments_and_files_know_the_same_names(tmp_path):
    with pytest.raises(PhalanxError, match=r"unknown setting .lr.\. Did you mean .learning_rate."):
        DistributedConfig(lr=0.1)
    (tmp_path / "run.toml").write_text("bs = 3\nfp16 = true\n")
    with pytest.raises(PhalanxError) as caught:
        resolve({}, file=tmp_path / "run.toml", environ={})
    assert "unknown setting 'bs'. Did you mean 'batch_size'?" in str(caught.value)
    assert "unknown setting 'fp16'. Did you mean 'mixed_precision=fp16'?" in str(caught.value)


def test_a_value_of_another_library_is_answered_with_ours():
    assert "Did you mean 'cuda'?" in phalanx("train", "digits", "--device", "gpu").err
    assert "Did you mean 'bf16'?" in phalanx("train", "digits", "--mixed-precision", "bfloat16").err


@pytest.mark.parametrize(
    ("given", "meant"), [("n_embd", "hidden"), ("num_hidden_layers", "layers"), ("block_size", "seq_len")]
)
def test_an_option_of_a_model_is_known_by_the_names_of_others(given, meant, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert like_option(given, build_options("gpt")) == meant
    assert like_option(given, {"depth"}) is None
    answer = phalanx("train", "text", "--set", f"model.{given}=8")
    assert f"unknown option '{given}'" in answer.err
    assert f"Did you mean '{meant}'?" in answer.err
    assert f"Write: --set model.{meant}=8" in phalanx("train", "text", f"--{given}", "8").err


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (("fit", "digits"), "phalanx train digits"),
        (("cancel", "last"), "phalanx runs stop"),
        (("logs",), "phalanx runs logs RUN"),
        (("torchrun", "train.py"), "phalanx train --script train.py"),
    ],
)
def test_a_command_of_another_program_is_answered_with_ours(words, meant):
    assert f"unknown command '{words[0]}'. Write: {meant}" in phalanx(*words).err


def test_the_table_is_read_for_an_unknown_name_only():
    code = (
        "import sys; from phalanx.cli import main; from phalanx.config.names import table\n"
        "main(sys.argv[1:]); print(table.cache_info())"
    )
    command = [sys.executable, "-c", code, "config", "show"]
    known = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "misses=0" in known.stdout
    command = [sys.executable, "-c", code, "train", "digits", "--lr", "1"]
    unknown = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "misses=1" in unknown.stdout


def test_a_name_that_is_not_allowed_is_not_suggested():
    assert like("lr", {"epochs"}) is None
    assert like_flag("resume", {"resume", "run-dir"}) == "--resume"


def test_the_table_names_settings_and_allowed_values_only():
    for target in table()["settings"]:
        name, _, value = target.partition("=")
        assert name in NAMES.keys() | OF_A_VERB
        assert not value or problem(NAMES[name], value) is None
    for name, words in table()["values"].items():
        for value in words:
            assert value in {"true", "false"} or problem(NAMES[name], value) is None


def test_no_name_in_the_table_is_a_setting_itself():
    assert not {word for words in table()["settings"].values() for word in words.split()} & NAMES.keys()


@pytest.mark.parametrize(("given", "meant"), [("NUM_WORKER", "NUM_WORKERS"), ("LR", "LEARNING_RATE")])
def test_a_misspelt_variable_is_refused_with_the_nearest(monkeypatch, given, meant):
    monkeypatch.setenv(f"PHALANX_{given}", "2")
    answer = phalanx("config", "show")
    assert answer.code == 2
    assert f"unknown environment variable PHALANX_{given}. Did you mean PHALANX_{meant}?" in answer.err


def test_variables_of_launchers_and_of_other_programs_are_left_alone():
    others = {"PHALANX_SERVICE_HOST": "10.0.0.1", "PHALANX_PORT_8080_TCP_ADDR": "10.0.0.1", "PHALANX_SERVICE_PORT": "1"}
    resolve({}, environ={**{f"PHALANX_{name}": "x" for name in NOT_SETTINGS}, **others})


def test_every_variable_in_the_package_is_a_setting_or_known():
    sources = [path.read_text() for path in Path(package.__file__).parent.rglob("*.py")]
    named = {name for source in sources for name in re.findall(r"\bPHALANX_([A-Z][A-Z_]*[A-Z])\b", source)}
    assert named - {name.upper() for name in NAMES} <= NOT_SETTINGS
