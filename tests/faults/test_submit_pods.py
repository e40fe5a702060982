"""Pods of a rendered Kubernetes job, played by network namespaces: they meet, and one that is replaced joins again."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import programs
import pytest
from command import ROOT, clean_environment
from long_proofs import long_proof
from network_hosts import HostNamespace, network
from waiting import LIMIT_SECONDS

from phalanx.errors import EXIT_PREEMPTED

yaml = pytest.importorskip("yaml")

TRAIN = [
    *("digits", "--num-nodes", "2", "--num-workers", "1:2", "--max-restarts", "3", "--heartbeat-timeout", "2"),
    *("--epochs", "50", "--max-steps", "150", "--checkpoint-frequency", "20 steps", "--no-progress"),
]


STEPS = 150


class Pods:
    """Two namespaces that run the container of a rendered job, each with the names of the job's Service."""

    def __init__(self, hosts: list[HostNamespace], folder: Path) -> None:
        self.hosts, self.folder = hosts, folder
        words = ["submit", "kubernetes", *TRAIN, "--image", "x:1", "--job-name", "pods", "--directory", str(folder)]
        words += ["--pvc", f"work:{folder}"]
        said = programs.run(
            [sys.executable, "-m", "phalanx", *words, "--render"],
            capture_output=True,
            text=True,
            cwd=folder,
            check=True,
        )
        self.service, self.job = yaml.safe_load_all(said.stdout)
        self.container = self.job["spec"]["template"]["spec"]["containers"][0]
        self.running: dict[int, subprocess.Popen[str]] = {}
        self.starts = 0
        (folder / "bin").mkdir()
        (folder / "bin/phalanx").write_text(f'#!/bin/sh\nexec {sys.executable} -m phalanx "$@"\n')
        (folder / "bin/phalanx").chmod(0o755)

    def start(self, index: int) -> None:
        """Start a pod: the rendered command and environment, and what Kubernetes adds to it."""
        self.starts += 1
        own = self.folder / f"pod{self.starts}"
        own.mkdir()
        given = {each["name"]: each["value"] for each in self.container["env"] if "value" in each}
        given |= {
            "HOME": str(own),
            "TMPDIR": str(own),
            "JOB_COMPLETION_INDEX": str(index),
            "PHALANX_JOB_SECRET": "s" * 32,
        }
        path = {"PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
        self.running[index] = subprocess.Popen(
            self.hosts[index].command(*self.container["command"]),
            cwd=self.container["workingDir"],
            env={**clean_environment(), **given, **path},
            stdout=(self.folder / f"out{self.starts}-{index}").open("w"),
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def step(self) -> int:
        return max((event["step"] for event in self.events("step")), default=0)

    def events(self, kind: str) -> list[dict]:
        path = self.folder / "runs/pods/events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [event for event in (json.loads(line) for line in lines if line.endswith("}")) if event["event"] == kind]

    def wait_for_step(self, step: int) -> None:
        end = time.monotonic() + 240
        while self.step() < step:
            assert time.monotonic() < end, self.output()
            time.sleep(0.05)

    def kill(self, index: int) -> None:
        """Kill all processes of a pod, as when its node is lost."""
        listed = subprocess.run(["ip", "netns", "pids", self.hosts[index].namespace], capture_output=True, text=True)
        for pid in listed.stdout.split():
            os.kill(int(pid), signal.SIGKILL)

    def output(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in sorted(self.folder.glob("out*")))


@contextmanager
def names(hosts: list[HostNamespace]) -> Iterator[None]:
    """Give the namespaces the names that the Service gives to pods: `ip netns exec` mounts this file as /etc/hosts."""
    lines = "127.0.0.1 localhost\n" + "".join(f"{host.address} pods-{n}.pods\n" for n, host in enumerate(hosts))
    folders = [Path("/etc/netns", host.namespace) for host in hosts]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "hosts").write_text(lines)
    try:
        yield
    finally:
        for folder in folders:
            (folder / "hosts").unlink()
            folder.rmdir()


@pytest.fixture
def pods(tmp_path):
    with network(2) as hosts, names(hosts):
        found = Pods(hosts, tmp_path)
        try:
            yield found
        finally:
            for index in found.running:
                found.kill(index)
            for process in found.running.values():
                process.wait(LIMIT_SECONDS)


def test_a_project_of_init_trains_from_what_is_rendered(tmp_path, monkeypatch):
    """The container's own command, with folders of this test in the place of those of the pod."""
    monkeypatch.chdir(tmp_path)
    run = [sys.executable, "-m", "phalanx"]
    programs.run([*run, "init", "net"], check=True, capture_output=True)
    words = ["recipe.toml", "--num-workers", "1", "--device", "cpu", "--max-steps", "2", "--image", "x:1"]
    words += ["--directory", str(tmp_path / "work"), "--job-name", "demo", "--render"]
    said = programs.run(
        [*run, "submit", "kubernetes", *words], cwd=tmp_path / "net", capture_output=True, text=True, check=True
    )
    code, job = yaml.safe_load_all(said.stdout)
    (tmp_path / "code.tar.gz").write_bytes(base64.b64decode(code["binaryData"]["code.tar.gz"]))
    for name in ("net", "bin", "work"):
        shutil.rmtree(tmp_path / name, ignore_errors=True)
        (tmp_path / name).mkdir()
    (tmp_path / "bin/phalanx").write_text(f'#!/bin/sh\nexec {sys.executable} -m phalanx "$@"\n')
    (tmp_path / "bin/phalanx").chmod(0o755)
    (*shell, script) = job["spec"]["template"]["spec"]["containers"][0]["command"]
    script = script.replace("/phalanx-code", str(tmp_path)).replace("/tmp/code", str(tmp_path / "unpacked"))
    path = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*shell, script], cwd=tmp_path / "work", env={**clean_environment(), **path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert list((tmp_path / "work/runs/demo/checkpoints").glob("step-*")), "outside of the copy"


@long_proof
def test_a_killed_pod_is_replaced_and_joins_again(pods: Pods):
    pods.start(1)  # before the first pod: it waits for it
    pods.start(0)
    pods.wait_for_step(30)
    pods.kill(1)
    pods.running.pop(1).wait(LIMIT_SECONDS)
    pods.start(1)
    codes = {index: process.wait(120) for index, process in pods.running.items()}
    assert codes == {0: 0, 1: 0}, pods.output()
    assert "2 ranks go on" in pods.output(), "the new pod has joined"
    assert pods.step() == STEPS


@long_proof
def test_an_evicted_pod_saves_and_exits_with_75(pods: Pods):
    pods.start(0)
    pods.start(1)
    pods.wait_for_step(30)
    for index in (0, 1):  # SIGTERM goes to the container's first process, which is the launcher
        listed = subprocess.run(["ip", "netns", "pids", pods.hosts[index].namespace], capture_output=True, text=True)
        os.kill(min(map(int, listed.stdout.split())), signal.SIGTERM)
    codes = [process.wait(LIMIT_SECONDS) for process in pods.running.values()]
    assert codes == [EXIT_PREEMPTED] * 2, pods.output()
    reached = pods.step()
    for index in (0, 1):
        pods.start(index)
    assert [process.wait(120) for process in pods.running.values()] == [0, 0], pods.output()
    resumed = [event["step"] for event in pods.events("step")]
    assert max(resumed) == STEPS
    assert resumed.count(reached) == 1, "no step was taken twice"
