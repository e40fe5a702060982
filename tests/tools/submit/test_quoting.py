"""Rendered scripts run with a stand-in for `phalanx`: every argument and variable arrives as it was given."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from command import phalanx

OWN = ["two words", "it's", '"double"', "$HOME", "$1", "@TASK@", "back`tick`", "a\nexit 3\nb", "*", ""]
PROGRAM = f"""#!{sys.executable}
import json, os, sys
print(json.dumps([sys.argv[1:], os.environ["SAID"]]))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A folder with a space in its name, and stand-ins for the programs that the scripts call."""
    found = tmp_path / "my project"
    (found / "env/bin").mkdir(parents=True)
    (found / "train.py").write_text("")
    programs = {
        "env/bin/phalanx": PROGRAM,
        "env/bin/scontrol": "#!/bin/sh\necho n1\n",
        "env/bin/srun": '#!/bin/sh\nwhile [ "${1#--}" != "$1" ]; do shift; done\nexec "$@"\n',
    }
    for name, text in programs.items():
        (found / name).write_text(text)
        (found / name).chmod(0o755)
    monkeypatch.chdir(found)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("PATH", f"{found / 'env/bin'}{os.pathsep}{os.environ['PATH']}")
    return found


def rendered(*words: str) -> str:
    common = ("--script", "train.py", "--num-workers", "2", "--job-name", "job", "--env", "SAID=a $HOME 'b'")
    found = phalanx("submit", *words, *common, "--render", "--", *OWN)
    assert found.code == 0, found.err
    return found.out


def ran(shell: str, text: str, *arguments: str, **variables: str) -> list[str]:
    """Run a script; return the arguments that `phalanx` was given."""
    environ = {**os.environ, "SLURM_JOB_NODELIST": "n1", "SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "2", **variables}
    done = subprocess.run([shell, "-c", text, "script", *arguments], capture_output=True, text=True, env=environ)
    assert done.returncode == 0, done.stderr
    given, said = json.loads(done.stdout.splitlines()[-1])
    assert said == "a $HOME 'b'"
    assert given[given.index("--") + 1 :] == OWN
    return list(given)


def test_the_script_of_slurm(folder):
    assert ran("bash", rendered("slurm", "--venv", str(folder / "env")))[:1] == ["train"]


def test_the_command_of_ray_has_no_variables(folder):
    """Ray runs it as a command line, which all users of the head can read; the variables are in its runtime_env."""
    text = rendered("ray", "--venv", str(folder / "env"))
    script, _, runtime = text.partition("# ---- runtime_env.json\n")
    variables = json.loads(runtime)["env_vars"]
    assert [name for name, value in variables.items() if value in script] == []
    assert ran("bash", script, **variables)[:1] == ["train"]


def test_the_script_of_a_host(folder):
    text = rendered("ssh", "--hosts", "a:1,b:1", "--venv", str(folder / "env"))
    script = text.partition("# ---- node.sh\n")[2].partition("# ---- hosts")[0]
    given = ran("bash", script, "1", "a:29400")
    assert given[given.index("--node-rank") + 1] == "1"
    assert given[given.index("--rdzv-endpoint") + 1] == "a:29400"


def test_tasks_of_an_array_in_a_folder_with_a_space(folder):
    text = rendered("slurm", "--array", "0-3", "--run-dir", "my runs", "--venv", str(folder / "env"))
    given = ran("bash", text, SLURM_ARRAY_TASK_ID="3")
    assert given[given.index("--run-dir") + 1] == "my runs/3"
    assert given[given.index("--checkpoint-dir") + 1] == "my runs/3/checkpoints"


def test_the_part_of_a_search_is_before_the_arguments_of_the_script(folder):
    (folder / "space.toml").write_text("lr = [0.1, 1.0]\n")
    text = rendered("slurm", "--tune", "--space", "space.toml", "--array", "0-3", "--venv", str(folder / "env"))
    given = ran("bash", text, SLURM_ARRAY_TASK_ID="3", SLURM_ARRAY_TASK_COUNT="4")
    assert given[given.index("--part") + 1] == "3/4"
    assert given.index("--study-dir") < given.index("--")
    (folder / "runs/job/3").mkdir(parents=True)
    (folder / "runs/job/3/study.db").touch()
    assert "--resume" in ran("bash", text, SLURM_ARRAY_TASK_ID="3", SLURM_ARRAY_TASK_COUNT="4")


def test_lines_of_sbatch_quote_their_values(folder):
    text = rendered("slurm", "--sbatch", "--comment='my # run'", "--constraint", "a100|h100")
    assert f"#SBATCH --output='{folder}/runs/job/slurm-%j.out'" in text
    assert "#SBATCH --comment='my # run'\n" in text
    assert "#SBATCH --constraint='a100|h100'\n" in text


@pytest.mark.parametrize("target", ["kubernetes", "compose"])
def test_commands_of_containers(folder, target):
    yaml = pytest.importorskip("yaml")
    *_, main = yaml.safe_load_all(rendered(target, "--image", "phalanx:cpu", "--ship", "folder"))
    if target == "kubernetes":
        (container,) = main["spec"]["template"]["spec"]["containers"]
        command, variables = container["command"][2], {each["name"]: each.get("value") for each in container["env"]}
    else:
        (command,), variables = main["services"]["node0"]["command"], main["services"]["node0"]["environment"]
        command, variables = command.replace("$$", "$"), {"SAID": variables["SAID"].replace("$$", "$")}
    ran("sh", command, SAID=str(variables["SAID"]))


@pytest.mark.skipif(shutil.which("docker-compose") is None, reason="docker-compose is not installed")
def test_docker_compose_replaces_no_variable(folder):
    yaml = pytest.importorskip("yaml")
    text = rendered("compose", "--image", "phalanx:cpu")
    done = subprocess.run(["docker-compose", "-f", "-", "config"], input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = yaml.safe_load(done.stdout)["services"]["node0"]["environment"]["SAID"]
    assert said.replace("$$", "$") == "a $HOME 'b'", "config doubles the signs again"
