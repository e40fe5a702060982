"""The files in deploy/ are what `phalanx submit --render` prints, and are valid for the tools that read them.

Write them again after a change of the renderers: python tests/tools/submit/test_submit_files.py
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.cli import main

ROOT = Path(__file__).resolve().parents[3]
DEPLOY = ROOT / "deploy"
TRAIN = "text --num-nodes 4 --gpus-per-node 8 --device cuda --checkpoint-frequency auto --job-name train"
IN_PODS = f"{TRAIN} --image registry.example.com/phalanx:cuda --pvc phalanx:/workspace --time-limit 12h"
FILES = {
    "kubernetes.yaml": f"kubernetes {IN_PODS}",
    "kubeflow.yaml": f"kubeflow {IN_PODS}",
    "docker-compose.yaml": "compose digits --num-nodes 2 --num-workers 4 --job-name train --image phalanx:cpu",
    "slurm/train.sbatch": f"slurm {TRAIN} --time-limit 12h --venv /opt/phalanx --directory /workspace",
    "raycluster.yaml": f"ray {TRAIN} --kind raycluster --image registry.example.com/phalanx-ray:cuda "
    "--pvc phalanx:/workspace",
}
"""File to the words after `phalanx submit`."""


def rendered(words: str) -> str:
    target, *given = shlex.split(words)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        assert main(["submit", target, "--render", *given]) == 0
    return said.getvalue()


def all_files() -> dict[str, str]:
    return {file: rendered(words) for file, words in FILES.items()}


@pytest.fixture(autouse=True)
def plain_user(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("file", FILES)
def test_deploy_files_are_what_is_rendered(file):
    text = rendered(FILES[file])
    assert (DEPLOY / file).read_text() == text, "write them again: python tests/tools/submit/test_submit_files.py"
    assert str(ROOT) not in text
    assert sys.prefix not in text


@pytest.mark.parametrize(
    "words",
    [
        *FILES.values(),
        "slurm --script examples/01-ddp-basics/ddp_mnist.py --num-workers 2 --job-name job --no-requeue --exclusive "
        "--sbatch '--comment=two words' --env 'A=1,B=x y' -- --epochs 2",
        "kubeflow digits --num-nodes 2 --num-workers 4 --image x --pvc c:/workspace --kind pytorchjob --job-name job",
        "ray digits --num-workers 4 --image x --kind rayjob --job-name job",
    ],
)
def test_the_command_in_a_file_writes_it_again(words):
    text = rendered(words)
    command = next(line for line in text.splitlines() if "Written by: " in line).partition("Written by: ")[2]
    assert command.startswith("phalanx submit ")
    assert rendered(command.removeprefix("phalanx submit ")) == text


def test_kubernetes_files_follow_the_schemas():
    yaml = pytest.importorskip("yaml")
    from kube_schema import validate

    for file in ("kubernetes.yaml", "kubeflow.yaml"):
        for thing in yaml.safe_load_all((DEPLOY / file).read_text()):
            validate(thing)


def test_docker_compose_reads_its_file():
    if shutil.which("docker-compose") is None:
        pytest.skip("docker-compose is not installed")
    command = ["docker-compose", "--file", str(DEPLOY / "docker-compose.yaml"), "--profile", "monitoring", "config"]
    said = subprocess.run(command, capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    assert {"node0", "node1", "tensorboard", "mlflow", "prometheus", "grafana"} <= set(
        re.findall(r"^  ([\w-]+):", said.stdout, re.M)
    )


OF_INIT = "phalanx/recipes/project/train.sbatch.in"


@pytest.mark.parametrize("file", ["deploy/train_single_node.sh", "deploy/slurm/train.sbatch", OF_INIT])
def test_shell_scripts_are_sound(file):
    assert subprocess.run(["bash", "-n", str(ROOT / file)]).returncode == 0
    if shutil.which("shellcheck"):
        said = subprocess.run(["shellcheck", str(ROOT / file)], capture_output=True, text=True)
        assert said.returncode == 0, said.stdout


def test_both_files_for_slurm_give_srun_its_cores_and_go_back_into_the_queue_after_75_alone():
    for file in ("deploy/slurm/train.sbatch", OF_INIT):
        text = (ROOT / file).read_text()
        assert re.search(r'^srun .*--cpus-per-task="\$SLURM_CPUS_PER_TASK" ', text, re.M), file
        assert re.search(r'^if \[ "\$code" -eq 75 \]; then\n  scontrol requeue "\$SLURM_JOB_ID"\nfi$', text, re.M), file


def test_the_single_node_script_trains(tmp_path):
    program = tmp_path / "phalanx"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m phalanx "$@"\n')
    program.chmod(0o755)
    environ = {
        "PATH": "/usr/bin:/bin",
        "WORK": str(tmp_path),
        "PROGRAM": str(program),
        "PYTHONPATH": str(ROOT),
    }
    words = ["digits", "--num-workers", "2", "--max-steps", "5"]
    for _ in range(2):  # the second time continues a run that has ended
        said = subprocess.run([DEPLOY / "train_single_node.sh", *words], env=environ, capture_output=True, text=True)
        assert said.returncode == 0, said.stderr
    assert (tmp_path / "runs/single-node/run.json").exists()


def test_the_dockerfile_is_small_and_not_root():
    text = (DEPLOY / "Dockerfile").read_text()
    stages = {part.split("\n")[0].split()[-1]: part for part in re.split(r"^FROM ", text, flags=re.M)[1:]}
    assert {"cpu", "cuda"} <= set(stages)
    for name in ("cpu", "cuda"):
        assert "USER 1000:1000" in stages[name]
        assert "HEALTHCHECK" in stages[name]
    assert "--no-cache-dir" in text
    assert ":latest" not in text
    for line in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.M):
        assert all((ROOT / path).exists() for path in line.split()), line


def test_hadolint_accepts_the_dockerfile():
    program = shutil.which("hadolint") or shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if program is None:
        pytest.skip("hadolint is not installed")
    said = subprocess.run([program, str(DEPLOY / "Dockerfile")], capture_output=True, text=True)
    assert said.returncode == 0, said.stdout + said.stderr


if __name__ == "__main__":
    for file, text in all_files().items():
        (DEPLOY / file).parent.mkdir(parents=True, exist_ok=True)
        (DEPLOY / file).write_text(text)
