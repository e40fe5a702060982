"""`phalanx submit --uv`: rendered scripts make the environment of uv.lock with the real uv, and train in it."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from pathlib import Path

import pytest
from command import phalanx
from uv_project import find_uv, uv_variables, write_project

TRAIN = ("digits", "--num-workers", "1", "--device", "cpu", "--max-steps", "2", "--job-name", "job", "--uv")
SLURM = {"SLURM_JOB_NODELIST": "n1", "SLURM_JOB_ID": "7", "SLURM_NNODES": "1", "SLURM_CPUS_PER_TASK": "1"}


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A folder with a locked project, a home of its own, and stand-ins for Slurm's programs."""
    found, home = tmp_path / "my project", tmp_path / "home"
    (home / ".local/bin").mkdir(parents=True)
    found.mkdir()
    write_project(found, home)
    programs = {
        "scontrol": "#!/bin/sh\necho n1\n",
        "srun": '#!/bin/sh\nwhile [ "${1#--}" != "$1" ]; do shift; done\nexec "$@"\n',
    }
    (home / "bin").mkdir()
    for name, text in programs.items():
        (home / "bin" / name).write_text(text)
        (home / "bin" / name).chmod(0o755)
    monkeypatch.chdir(found)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return found


def rendered(*words: str) -> str:
    found = phalanx("submit", *words, "--render")
    assert found.code == 0, found.err
    return found.out


def start(text: str, folder: Path, **more: str) -> subprocess.Popen[str]:
    home = folder.parent / "home"
    variables = uv_variables(home)
    variables |= {"PATH": f"{home / 'bin'}:{variables['PATH']}", **SLURM, "TMPDIR": str(home), **more}
    return subprocess.Popen(
        ["bash", "-c", text], env=variables, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def test_two_launchers_of_a_node_share_an_environment_that_is_made_once(folder):
    text = rendered("slurm", *TRAIN).replace("phalanx train", "phalanx --version #")
    (made,) = re.findall(r"^environment=\"\$HOME\"/(\S+)-\"\$\(uname -m\)\"$", text, re.M)
    waiting = text.replace("flock 9", "sleep 1; flock 9")  # both are there before one begins
    both = [start(waiting, folder) for _ in range(2)]
    said = [each.communicate(timeout=240)[0] for each in both]
    assert [each.returncode for each in both] == [0, 0], said
    assert sum(each.count("Creating virtual environment") for each in said) == 1, said
    assert all(re.search(r"^phalanx \d", each, re.M) for each in said), said
    assert (folder.parent / "home" / f"{made}-{platform.machine()}/bin/phalanx").exists()


def test_shipped_code_has_its_environment_inside_and_both_are_removed(folder):
    text = rendered("slurm", *TRAIN, "--ship", "archive")
    (folder.parent / "kept").mkdir()
    subprocess.run(["tar", "-czf", folder.parent / "kept/code-1.tar.gz", "."], check=True)
    folder.joinpath("uv.lock").unlink()  # that of the copy is read
    process = start(text, folder, PHALANX_JOB_FOLDER=str(folder.parent / "kept"), SLURM_TMPDIR=str(folder.parent))
    said = process.communicate(timeout=240)[0]
    assert process.returncode == 0, said
    assert "Creating virtual environment at: .venv" in said
    assert (folder / "runs/job/run.json").exists(), "the run stays"
    assert not (folder.parent / "phalanx-7").exists()


def test_a_copy_whose_environment_fails_is_removed(folder):
    (folder.parent / "kept").mkdir()
    subprocess.run(["tar", "-czf", folder.parent / "kept/code-1.tar.gz", "."], check=True)
    text = rendered("slurm", *TRAIN, "--ship", "archive", "--uv-sync", "--extra none")
    process = start(text, folder, PHALANX_JOB_FOLDER=str(folder.parent / "kept"), SLURM_TMPDIR=str(folder.parent))
    said = process.communicate(timeout=240)[0]
    assert process.returncode == 1, "schedulers may try again"
    assert "Extra `none` is not defined" in said
    assert not (folder.parent / "phalanx-7").exists()


def test_an_environment_that_a_killed_job_left_incomplete_is_made_anew(folder):
    text = rendered("slurm", *TRAIN).replace("phalanx train", "phalanx --version #")
    (made,) = re.findall(r"^environment=\"\$HOME\"/(\S+)-", text, re.M)
    left = folder.parent / "home" / f"{made}-{platform.machine()}"
    left.mkdir(parents=True)
    (left / ".gitignore").write_text("*")  # uv refuses a folder like this
    process = start(text, folder)
    said = process.communicate(timeout=240)[0]
    assert process.returncode == 0, said
    assert (left / "pyvenv.cfg").exists()


def test_a_node_without_uv_says_what_to_do(folder):
    process = start(rendered("slurm", *TRAIN), folder, PATH=f"{folder.parent}/home/bin:/usr/bin:/bin")
    said = process.communicate(timeout=120)[0]
    assert process.returncode == 2, "settings are wrong: schedulers do not try again"
    assert "uv is not on the PATH of" in said
    assert "--venv" in said


def test_uv_in_a_users_own_folder_is_found(folder):
    (folder.parent / "home/.local/bin/uv").symlink_to(find_uv())
    text = rendered("slurm", *TRAIN).replace("phalanx train", "phalanx --version #")
    process = start(text, folder, PATH=f"{folder.parent}/home/bin:/usr/bin:/bin")
    said = process.communicate(timeout=240)[0]
    assert process.returncode == 0, said


def test_the_environment_is_named_by_what_decides_its_content(folder):
    def name(*more: str) -> str:
        return re.findall(r"/uv/([0-9a-f]{16})-", rendered("slurm", *TRAIN, *more), re.M)[0]

    before = name()
    assert name() == before
    assert name("--uv-sync", "--no-dev") != before
    assert name("--directory", "/elsewhere") != before, "uv installs the project of this folder in place"
    with (folder / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    assert name() != before


def test_containers_make_it_with_the_uv_of_the_image(folder):
    words = (*TRAIN, "--image", "x", "--num-nodes", "1")
    for target in ("kubernetes", "jobset", "kubeflow", "compose"):
        text = rendered(target, *words)
        assert "uv sync --frozen" in text
        assert text.index("uv sync") < text.index("exec phalanx train")
        assert text.count("uv sync") == text.count("exec phalanx train")
    assert "- /tmp:exec" in text, "docker mounts tmpfs without the right to execute"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("slurm", "--venv", "/opt/x"), "--venv /opt/x is another"),
        (("slurm", "--container", "pyxis", "--image", "x"), "--uv with --image x"),
        (("ray",), "--uv with ray"),
        (("kubeflow", "--kind", "mpijob", "--image", "x"), "--uv with kind mpijob"),
        (("slurm", "--uv-sync", "--extra 'a"), "--uv-sync --extra 'a: No closing quotation"),
        (("slurm", "--no-uv", "--uv-sync=--no-dev"), "--uv-sync --no-dev without --uv"),
    ],
)
def test_what_contradicts_it_is_refused(folder, words, said):
    found = phalanx("submit", words[0], *TRAIN, *words[1:], "--render")
    assert (found.code, said in found.err) == (2, True), found.err


def test_a_project_that_is_not_locked_is_refused(folder):
    lock = folder / "uv.lock"
    text = lock.read_text()
    for content, said in ((text.replace('"phalanx"', '"other"'), "uv.lock has no phalanx"), ("x", "cannot be read")):
        lock.write_text(content)
        assert said in phalanx("submit", "slurm", *TRAIN, "--render").err
    lock.unlink()
    found = phalanx("submit", "slurm", *TRAIN, "--render")
    assert (found.code, "has no uv.lock" in found.err, "uv add phalanx" in found.err) == (2, True, True)
    assert not os.path.exists(folder / "runs")
