"""`phalanx submit compose`: the file by the real docker-compose; verbs by a stand-in, where no Docker daemon runs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from phalanx.cli import main

yaml = pytest.importorskip("yaml")
TRAIN = ["digits", "--num-nodes", "2", "--num-workers", "4", "--image", "phalanx:cpu", "--job-name", "demo"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def phalanx(capsys):
    def run(*words: str, code: int = 0) -> str:
        found = main([*words])
        said = capsys.readouterr()
        assert found == code, said.out + said.err
        return said.out + said.err

    return run


@pytest.fixture
def docker(tmp_path, monkeypatch) -> Path:
    """Put a docker-compose on the PATH that writes down its arguments and answers from files."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "docker-compose"
    program.write_text(
        f"""#!/bin/bash
echo "$@" >> {folder}/asked
for word in "$@"; do
  case "$word" in
    config) cat >/dev/null; exit 0;;
    up) echo "secret ${{#PHALANX_JOB_SECRET}}" >> {folder}/asked; cat {folder}/up >&2 2>/dev/null && exit 1; exit 0;;
    ps) cat {folder}/ps; exit 0;;
    logs) echo "${{@: -1}} | a line"; exit 0;;
  esac
done
"""
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder


@pytest.mark.skipif(shutil.which("docker-compose") is None, reason="docker-compose is not installed")
@pytest.mark.parametrize(
    "words", [[], ["--device", "cuda", "--cpus", "4", "--memory", "8g", "--mounts", "/data:/data:ro"]]
)
def test_docker_compose_accepts_the_file(phalanx, tmp_path, words):
    text = phalanx("submit", "compose", *TRAIN, *words, "--render")
    (tmp_path / "docker-compose.yaml").write_text(text)
    said = subprocess.run(["docker-compose", "--profile", "monitoring", "config"], capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    services = yaml.safe_load(said.stdout)["services"]
    names = {"node0", "node1", "tensorboard", "mlflow", "prometheus", "node-exporter", "grafana"}
    assert set(services) == names, "the nodes, and monitoring"
    plain = [name for name, service in yaml.safe_load(text)["services"].items() if "profiles" not in service]
    assert plain == ["node0", "node1"], "the others are profiles"
    assert "docker-compose config accepts it" in phalanx("submit", "compose", *TRAIN, *words, "--dry-run")


def test_services_run_one_launcher_each(phalanx):
    services = yaml.safe_load(phalanx("submit", "compose", *TRAIN, "--render"))["services"]
    for index in (0, 1):
        service = services[f"node{index}"]
        assert f'--node-rank "{index}" --rdzv-endpoint node0:29400' in service["command"][0]
        assert (service["user"], service["read_only"], service["restart"]) == ("1000:1000", True, "on-failure:10")
    assert all(port.startswith("127.0.0.1:") for service in services.values() for port in service.get("ports", []))


def test_a_job_from_submission_to_its_end(phalanx, docker, tmp_path):
    assert "submitted demo" in phalanx("submit", "compose", *TRAIN, "--monitoring")
    asked = (docker / "asked").read_text()
    assert f"--project-directory {tmp_path} --project-name demo --profile monitoring" in asked
    assert "secret 64" in asked
    (docker / "ps").write_text("demo_node0_1  /bin/sh -c  Up\ndemo_node1_1  /bin/sh -c  Exit 1\n")
    assert "running (node0 Up, node1 Exit 1)" in phalanx("jobs", "show", "demo")
    assert "node1 | a line" in phalanx("jobs", "logs", "demo", "--rank", "2")
    assert "no rank 7" in phalanx("jobs", "logs", "demo", "--rank", "7", code=2)
    (docker / "ps").write_text("demo-node0-1  x  Exited (0) 2 minutes ago\ndemo-node1-1  x  Exited (0) 2 minutes ago\n")
    assert "finished" in phalanx("jobs", "show", "demo")


def test_what_was_started_is_removed_when_a_service_fails(phalanx, docker):
    (docker / "up").write_text("pull access denied for phalanx, repository does not exist\n")
    said = phalanx("submit", "compose", *TRAIN, code=2)
    assert said.startswith("phalanx: docker-compose: pull access denied")
    assert (docker / "asked").read_text().splitlines()[-1].endswith("down")
    assert "no jobs were submitted" in phalanx("jobs")


def test_cancel_stops_all_services(phalanx, docker):
    phalanx("submit", "compose", *TRAIN)
    (docker / "ps").write_text("demo_node0_1  x  Up\ndemo_node1_1  x  Up\n")
    assert "cancelled demo" in phalanx("jobs", "cancel", "demo")
    assert (docker / "asked").read_text().splitlines()[-1].endswith("down")


def test_no_docker_is_said(phalanx, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "neither docker-compose nor docker" in phalanx("submit", "compose", *TRAIN, code=2)


@pytest.mark.skipif(
    shutil.which("docker-compose") is None or Path("/var/run/docker.sock").exists(),
    reason="needs docker-compose, and a machine without a Docker daemon",
)
def test_no_daemon_is_said(phalanx):
    said = phalanx("submit", "compose", *TRAIN, code=2)
    assert "docker" in said.lower()
    assert "Traceback" not in said
    assert "no jobs were submitted" in phalanx("jobs")


def test_an_image_is_needed(phalanx):
    assert "--image is not given" in phalanx("submit", "compose", "digits", "--render", code=2)
    assert "compose mounts this folder" in phalanx("submit", "compose", *TRAIN, "--ship", "archive", "--render", code=2)
    assert "--memory 8Gi: not a size of Docker" in phalanx(
        "submit", "compose", *TRAIN, "--memory", "8Gi", "--render", code=2
    )


def test_servers_are_in_the_services_of_the_nodes(phalanx):
    words = ["digits", "--num-workers", "4", "--strategy", "parameter-server", "--image", "x", "--job-name", "demo"]
    services = yaml.safe_load(phalanx("submit", "compose", *words, "--render"))["services"]
    assert "--strategy parameter-server" in services["node0"]["command"][0]
    assert "parameter-server" not in services
