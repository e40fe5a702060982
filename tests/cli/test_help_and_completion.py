"""The help in parts, and completion in real shells; both answer within a tenth of a second and import no torch."""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from command import clean_environment, completions, phalanx

from phalanx.cli.flags import COMMON, SECTIONS
from phalanx.config.aliases import NAMES
from phalanx.recipes import recipe_names

NO_TORCH = (
    "import sys; from phalanx.cli import main\ntry: main(sys.argv[1:])\nfinally: assert 'torch' not in sys.modules"
)


def flags_in(text: str) -> set[str]:
    return {flag.replace("[no-]", "") for flag in re.findall(r"^  (--[a-z\[\]-]+)", text, re.MULTILINE)}


def test_the_short_help_shows_the_settings_used_most_and_where_the_rest_is():
    out = phalanx("train", "--help").out
    shown = flags_in(out)
    assert {f"--{name.replace('_', '-')}" for name in COMMON} <= shown
    assert "--bucket-cap-mb" not in shown
    assert 18 <= len(COMMON) <= 25
    assert "phalanx train --help-all" in out
    assert "  digits " in out
    assert re.search(r"^  -q, --quiet +show errors.*\n  -v, --verbose +show every event", out, re.MULTILINE)


@pytest.mark.parametrize("verb", ["train", "tune", "verify", "config"])
def test_help_all_shows_every_setting(verb):
    assert {f"--{name.replace('_', '-')}" for name in NAMES} <= flags_in(phalanx(verb, "--help-all").out)


@pytest.mark.parametrize(("title", "group"), SECTIONS.items())
def test_one_group_is_shown_alone(title, group):
    out = phalanx("train", "--help", title).out
    assert out.startswith(f"{title}:")
    assert flags_in(out) == {f"--{name.replace('_', '-')}" for name in group.__dataclass_fields__}


def test_an_unknown_group_is_answered_with_the_nearest():
    answer = phalanx("train", "--help", "optimisation")
    assert answer.code == 2
    assert "unknown group of settings 'optimisation'. Did you mean 'optimization'?" in answer.err


def test_phalanx_alone_names_the_next_thing_to_type(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    begin = phalanx().out.partition("next:\n")[2]
    assert [line.split()[1:3] for line in begin.splitlines()[:2]] == [["train", "digits"], ["train", "--script"]]
    (tmp_path / "recipe.toml").touch()
    (tmp_path / "runs" / "a").mkdir(parents=True)
    (tmp_path / "runs" / "a" / "run.json").write_text("{}")
    there = phalanx().out.partition("next:\n")[2]
    assert re.findall(r"^  phalanx (\S+)", there, re.MULTILINE) == ["train", "runs", "resume", "ui", "<command>"]
    assert "phalanx train recipe.toml" in there


@pytest.mark.parametrize("words", [("grpo", "--help"), ("--help", "grpo")])
def test_the_help_of_a_recipe_has_its_own_values(words):
    out = phalanx("train", *words).out
    assert out.startswith("usage: phalanx train grpo --data FILES [--preset debug|")
    assert re.search(r"loss.num_generations +8\n", out)
    assert re.search(r"--lr-schedule +constant\n", out)
    assert re.search(r"--mixed-precision +bf16\n", out)
    assert "PART is one of model, data, loss\n" in out


@pytest.mark.parametrize(
    ("recipe", "part", "row"),
    [
        ("grpo", "loss", r"--set loss.reward= +\(required\)\n"),
        ("grpo", "loss", r"--set loss.scale_rewards= +true\n"),
        ("grpo", "model", r"--set model.preset= +debug +set by the recipe\n"),
        ("grpo", "model", r"--set model.kv_heads= +2\n"),
        ("sft", "data", r"--set data.packing= +documents\n"),
        ("imagenet", "augment", r"--set augment.crop= +224 +set by the recipe\n"),
        ("imagenet", "loss", r"--set loss.label_smoothing= +0.1 +set by the recipe\n"),
        ("digits", "optimization", r"--\[no-\]mixed-precision"),  # a group of settings, as without a recipe
    ],
)
def test_the_options_of_a_recipe_s_parts_are_listed(recipe, part, row):
    assert re.search(row, phalanx("train", recipe, "--help", part).out)


def test_a_part_that_a_recipe_does_not_have_is_refused():
    assert "the recipe 'digits' has no [loss]" in phalanx("train", "digits", "--help", "loss").text
    assert "Did you mean 'loss'" in phalanx("train", "grpo", "--help", "los").text
    assert "unknown recipe 'digitz'. Did you mean 'digits'" in phalanx("train", "digitz", "--help").text


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_and_each_of_its_parts_has_a_help(name):
    whole = phalanx("train", name, "--help")
    assert whole.code == 0
    for part in re.findall(r"PART is one of (.*)\n", whole.out)[0].split(", "):
        answer = phalanx("train", name, "--help", part)
        assert answer.code == 0, answer.text
        assert answer.out.startswith(f"phalanx train {name}: options of the {part}")


def test_help_before_a_command_is_its_help():
    assert phalanx("help", "train").out == phalanx("train", "--help").out
    assert phalanx("help", "ckpt").out == phalanx("ckpt", "--help").out


@pytest.mark.parametrize("words", [(), ("show", "--help")])
def test_the_help_of_config_begins_with_one_line_of_usage(words):
    first, second, *_ = phalanx("config", *words).out.splitlines()
    assert (first, second) == ("usage: phalanx config show [RECIPE] [--changed | --toml | --json] [settings]", "")


def test_config_shows_what_differs_from_the_defaults_and_where_it_was_set():
    out = phalanx("config", "show", "digits", "--changed", "--epochs", 3, "--no-compile").out
    assert re.search(r"^  epochs +3 +flag$", out, re.MULTILINE)
    assert re.search(r"^  batch_size +32 +recipe digits$", out, re.MULTILINE)
    assert "compile" not in out  # it was given, but as the default
    assert len(out.splitlines()) < 20
    assert phalanx("config", "show", "--changed").out == "every setting has its default\n"


def test_switches_show_both_forms_and_choices_are_listed():
    out = phalanx("train", "--help-all").out
    assert "--[no-]compile " in out
    assert "--[no-]mixed-precision [{fp16,bf16,fp8}]" in out
    assert "--zero-stage {1,2,3}" in out


def test_a_flag_given_twice_with_different_values_is_refused():
    assert "--epochs is given twice, as 1 and as 2" in phalanx("train", "digits", "--epochs", 1, "--epochs", 2).err
    assert "--compile is given twice" in phalanx("train", "digits", "--compile", "--no-compile").err
    assert "takes no value" in phalanx("train", "digits", "--no-mixed-precision", "fp16").err
    assert phalanx("config", "show", "--epochs", 3, "--epochs", 3).code == 0


@pytest.mark.parametrize(
    "words", [(), ("--faults",), ("digits", "--faults"), ("--faults", 1), ("--fault", "kill:step=5")]
)
def test_the_help_of_verify_has_the_flags_and_kinds_of_faults(words):
    out = phalanx("verify", *words, "--help").out
    assert {"--faults", "--fault", "--fault-plan", "--kinds", "--no-compare", "--own-objects", "--out"} <= flags_in(out)
    assert "kinds of faults:\n  exception " in out


def cpu_seconds(*words: str) -> float:
    """Return the CPU time of a Python program, the least of three runs: how long it waits for others does not count."""
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *words], env=clean_environment(), check=True, capture_output=True, timeout=240)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime - before.ru_utime)
    return min(seconds)


@pytest.mark.parametrize("words", [("train", "--help"), ("train", "gpt", "--help"), ("config", "show", "--help")])
def test_help_and_completion_are_quick_and_import_no_torch(words):
    """0.09 s on an idle machine, and 1.4 times as long as these modules of Python's own on any."""
    usual = cpu_seconds("-c", "import argparse, asyncio, dataclasses, inspect, tomllib")
    assert cpu_seconds("-c", NO_TORCH, *words) < 2.5 * usual


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("trai", ["train"]),
        ("train --learning", ["--learning-rate"]),
        ("train --no-comp", ["--no-compile"]),
        ("train --device ", ["auto", "cuda", "cpu"]),
        ("train --zero-stage ", ["1", "2", "3"]),
        ("train --mixed-precision b", ["bf16"]),
        ("train dig", ["digits"]),
        ("tune digits --scheduler a", ["asha"]),
        ("train gpt --preset gpt2-x", ["gpt2-xl"]),
        ("train gpt --set data.", ["data.seq_len=", "data.max_bytes="]),
        ("train gpt --set batch_", ["batch_size="]),
        ("strategies fs", ["fsdp"]),
        ("config ", ["show"]),
        ("config show dig", ["digits"]),
        ("runs s", ["show", "stop", "scale"]),
        ("runs show ", ["new", "old"]),
        ("resume o", ["old"]),
        ("ckpt pru", ["prune"]),
        ("bench ", ["comm", "machine"]),
        ("bench comm --al", ["--algo"]),
        ("submit slurm --num-w", ["--num-workers"]),
        ("plan llama-70", ["llama-70b"]),
    ],
)
def test_a_shell_completes(tmp_path, monkeypatch, line, expected):
    for number, name in enumerate(("old", "new")):
        (tmp_path / "runs" / name).mkdir(parents=True)
        os.utime(tmp_path / "runs" / name, (number, number))
    monkeypatch.chdir(tmp_path)
    assert sorted(completions(f"phalanx {line}")) == sorted(expected)


def test_a_real_bash_completes(tmp_path):
    program, register = shutil.which("bash"), Path(sys.executable).with_name("register-python-argcomplete")
    if program is None:
        pytest.skip("bash is not installed")
    command = tmp_path / "bin" / "phalanx"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m phalanx.cli "$@"\n')
    command.chmod(0o755)
    script = (
        f'eval "$({register} phalanx)"; COMP_LINE="phalanx train dig"; COMP_POINT=17; COMP_TYPE=9; COMP_KEY=9\n'
        'COMP_WORDS=(phalanx train dig); COMP_CWORD=2; _python_argcomplete phalanx; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    environment = {**clean_environment(PATH=f"{command.parent}:{os.environ['PATH']}"), "HOME": str(tmp_path)}
    answer = subprocess.run(
        [program, "-c", script], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=240
    )
    assert answer.stdout.split() == ["digits"], answer
