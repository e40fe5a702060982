"""Names of other libraries are answered with ours: flags, settings, keys of files, values and variables."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from command import phalanx

import phalanx as package
from phalanx import DistributedConfig, PhalanxError
from phalanx.config import resolve
from phalanx.config.meanings import _SETTINGS, _VALUES, like, like_flag
from phalanx.config.option import problem
from phalanx.config.renamed import NAMES
from phalanx.config.sources import NOT_SETTINGS

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


def test_a_name_that_is_not_allowed_is_not_suggested():
    assert like("lr", {"epochs"}) is None
    assert like_flag("resume", {"resume", "run-dir"}) == "--resume"


def test_the_table_names_settings_and_allowed_values_only():
    for target in _SETTINGS:
        name, _, value = target.partition("=")
        assert name in NAMES.keys() | OF_A_VERB
        assert not value or problem(NAMES[name], value) is None
    for name, words in _VALUES.items():
        for value in words:
            assert value in {"true", "false"} or problem(NAMES[name], value) is None


def test_no_name_in_the_table_is_a_setting_itself():
    assert not {word for words in _SETTINGS.values() for word in words.split()} & NAMES.keys()


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
