"""The help in parts, and completion in real shells; both answer within a tenth of a second and import no torch."""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
import sys

import pytest
from command import clean_environment, phalanx

from phalanx.cli.completion import SHELLS, completions
from phalanx.cli.help import COMMON
from phalanx.config import FIELDS, GROUPS
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
    assert 18 <= len(COMMON) <= 26
    assert "phalanx train --help-all" in out
    assert "  digits " in out


@pytest.mark.parametrize("verb", ["train", "tune", "verify", "config"])
def test_help_all_shows_every_setting(verb):
    assert {f"--{name.replace('_', '-')}" for name in FIELDS} <= flags_in(phalanx(verb, "--help-all").out)


@pytest.mark.parametrize("group", GROUPS)
def test_one_group_is_shown_alone(group):
    title = group.__name__.lower()
    out = phalanx("train", "--help", title).out
    assert out.startswith(f"{title}:")
    assert flags_in(out) == {f"--{name.replace('_', '-')}" for name in group.__dataclass_fields__}


def test_an_unknown_group_is_answered_with_the_nearest():
    answer = phalanx("train", "--help", "optimisation")
    assert answer.code == 2
    assert "unknown group of settings 'optimisation'. Did you mean 'optimization'?" in answer.err


def test_switches_show_both_forms_and_choices_are_listed():
    out = phalanx("train", "--help-all").out
    assert "--[no-]compile " in out
    assert "--[no-]mixed-precision [{fp16,bf16}]" in out
    assert "--zero-stage {1,2,3}" in out


def test_a_flag_given_twice_with_different_values_is_refused():
    assert "--epochs is given twice, as 1 and as 2" in phalanx("train", "digits", "--epochs", 1, "--epochs", 2).err
    assert "--compile is given twice" in phalanx("train", "digits", "--compile", "--no-compile").err
    assert "takes no value" in phalanx("train", "digits", "--no-mixed-precision", "fp16").err
    assert phalanx("config", "show", "--epochs", 3, "--epochs", 3).code == 0


@pytest.mark.parametrize("words", [("train", "--help"), ("completion", "bash", "--", "train", "--dev")])
def test_help_and_completion_are_quick_and_import_no_torch(words):
    command = [sys.executable, "-c", NO_TORCH, *words]
    seconds = []
    for _ in range(6):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, env=clean_environment(), check=True, capture_output=True, timeout=60)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime - before.ru_utime)  # CPU time: other processes do not count
    assert min(seconds) < 0.2  # 0.09 s on an idle machine


def test_completions_know_verbs_flags_values_recipes_presets_and_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "digits-1").mkdir(parents=True)

    def values(*words: str) -> list[str]:
        return [value for value, _ in completions(words)]

    assert values("trai") == ["train"]
    assert values("train", "--learning") == ["--learning-rate"]
    assert values("train", "--no-comp") == ["--no-compile"]
    assert values("train", "--device", "") == ["auto", "cuda", "cpu"]
    assert values("train", "--device", "=", "cu") == ["cuda"]
    assert values("train", "--device", "=") == ["auto", "cuda", "cpu"]
    assert values("train", "--zero-stage", "") == ["1", "2", "3"]
    assert values("train", "--mixed-precision", "b") == ["bf16"]
    assert values("train", "dig") == ["digits"]
    assert values("tune", "digits", "--scheduler", "a") == ["asha"]
    assert "gpt2-xl" in values("train", "gpt", "--preset", "gpt2")
    assert values("strategies", "fs") == ["fsdp"]
    assert values("config", "") == ["show"]
    assert values("config", "show", "dig") == ["digits"]
    assert values("completion", "f") == ["fish"]
    assert values("train", "--script", "") == []
    assert values("train", "--script", "x.py", "--", "--dev") == []
    assert values("nothing", "") == []


def test_run_names_complete_arguments_of_that_name(tmp_path, monkeypatch):
    from phalanx.cli.completion import run_names

    monkeypatch.chdir(tmp_path)
    assert run_names([]) == []
    for number, name in enumerate(("old", "new")):
        (tmp_path / "runs" / name).mkdir(parents=True)
        os.utime(tmp_path / "runs" / name, (number, number))
    assert run_names([]) == ["new", "old"]
    monkeypatch.setattr("phalanx.cli.completion.VERBS", dict.fromkeys(("runs", "resume"), ""))
    monkeypatch.setattr("phalanx.cli.completion.parser_of", lambda verb: None)
    assert [value for value, _ in completions(["resume", "o"])] == ["old"]
    assert [value for value, _ in completions(["runs", "show", ""])] == ["new", "old"]
    assert [value for value, _ in completions(["runs", "s"])] == ["show"]


def test_an_unknown_shell_is_refused():
    answer = phalanx("completion", "bsh")
    assert answer.code == 2
    assert "unknown shell 'bsh'. Did you mean 'bash'?" in answer.err


ASK = {
    "bash": 'eval "$(phalanx completion bash)"\nCOMP_WORDS=(phalanx train "$1"); COMP_CWORD=2; _phalanx\n'
    'printf "%s\\n" "${COMPREPLY[@]}"',
    # Outside a completion zsh has no _describe; what it would be given is printed.
    "zsh": "compdef() { : }; _describe() { print -rl -- $found }; _files() { : }\n"
    'eval "$(phalanx completion zsh)"; words=(phalanx train "$1"); CURRENT=3; _phalanx',
    "fish": 'phalanx completion fish | source; complete -C "phalanx train $argv[1]"',
}


@pytest.mark.parametrize("shell", list(SHELLS))
@pytest.mark.parametrize(("typed", "expected"), [("--learning", "--learning-rate"), ("digi", "digits"), ("", "text")])
def test_a_real_shell_completes(tmp_path, shell, typed, expected):
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"{shell} is not installed")
    command = tmp_path / "bin" / "phalanx"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m phalanx.cli "$@"\n')
    command.chmod(0o755)
    path = f"{command.parent}:{os.environ['PATH']}"
    words = [program, "-c", ASK[shell], "--" if shell == "fish" else "shell", typed]
    environment = {**clean_environment(PATH=path), "HOME": str(tmp_path)}
    answer = subprocess.run(words, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    found = {re.split(r"[:\t]", line)[0] for line in answer.stdout.splitlines()}
    assert expected in found, answer
    if typed == "":
        assert set(recipe_names()) <= found
