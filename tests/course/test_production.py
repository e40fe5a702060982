"""The production system of phase 4 trains, continues after a kill with the same bits, and its manifests are valid."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import programs
import pytest
import torch
from command import ROOT
from kube_schema import validate
from long_proofs import long_proof
from waiting import LIMIT_SECONDS

yaml = pytest.importorskip("yaml")
FOLDER = ROOT / "course" / "solutions" / "phase4_production"
SMALL = ["--samples=200", "--batch=20", "--image-size=12", "--save-every=4", "--log-every=2"]
RUN = [sys.executable, "-m", "torch.distributed.run"]


def start(words: list[str], folder: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "TMPDIR": str(folder)}
    environment.pop("PYTHONSAFEPATH", None)
    return programs.Popen(
        words, cwd=FOLDER, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(process: subprocess.Popen[str], code: int = 0) -> str:
    output, _ = process.communicate(timeout=300)
    assert process.returncode == code, output[-3000:]
    return output


def train(out: Path, *words: str) -> subprocess.Popen[str]:
    return start([sys.executable, "imagenet_trainer.py", f"--out={out}", *SMALL, *words], out.parent)


def wait_for_step(out: Path, step: int) -> None:
    file, end = out / "metrics.jsonl", time.monotonic() + 120
    while not (file.exists() and len(file.read_text().splitlines()) * 2 >= step):
        assert time.monotonic() < end, f"no step {step} in {out}"
        time.sleep(0.02)


def newest(out: Path) -> tuple[int, dict]:
    path = sorted((out / "checkpoints").glob("step-*.pt"))[-1]
    with open(path, "rb") as file:
        file.seek(32)
        return int(path.stem.split("-")[1]), torch.load(file, weights_only=True)


def assert_same_bits(one: dict, other: dict) -> None:
    for part in ("model", "average"):
        assert one[part].keys() == other[part].keys()
        for name, value in one[part].items():
            assert torch.equal(value, other[part][name]), name
    for first, second in zip(one["residuals"], other["residuals"], strict=True):
        assert all(torch.equal(first[name], second[name]) for name in first.keys() | second.keys())


def test_a_killed_run_ends_with_the_bits_of_one_that_was_not(tmp_path):
    whole, cut = train(tmp_path / "whole"), train(tmp_path / "cut")
    wait_for_step(tmp_path / "cut", 6)
    cut.send_signal(signal.SIGKILL)
    cut.communicate(timeout=LIMIT_SECONDS)
    assert newest(tmp_path / "cut")[0] < 20
    said = finish(train(tmp_path / "cut"))
    assert said == finish(whole)
    assert said.startswith("20 steps, accuracy")
    (last, state), (end, expected) = newest(tmp_path / "cut"), newest(tmp_path / "whole")
    assert last == end == 20
    assert_same_bits(state, expected)
    lines = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(2, 21, 2))
    assert lines[0]["loss"] > 1.2 * lines[-1]["loss"] > 0


@long_proof
def test_a_terminated_run_saves_and_continues(tmp_path):
    cut = train(tmp_path / "cut", "--save-every=1000")
    wait_for_step(tmp_path / "cut", 6)
    cut.send_signal(signal.SIGTERM)
    finish(cut, code=75)
    assert 6 <= newest(tmp_path / "cut")[0] < 20
    assert finish(train(tmp_path / "cut")) == finish(train(tmp_path / "whole"))
    assert_same_bits(newest(tmp_path / "cut")[1], newest(tmp_path / "whole")[1])


@long_proof
def test_two_ranks_with_compression_survive_a_kill_of_both(tmp_path):
    def two(out: Path) -> subprocess.Popen[str]:
        return start(
            [
                *RUN,
                "--standalone",
                "--nproc-per-node=2",
                "imagenet_trainer.py",
                f"--out={out}",
                *SMALL,
                "--compress=0.1",
            ],
            out.parent,
        )

    finish(two(tmp_path / "whole"))
    cut = two(tmp_path / "cut")
    wait_for_step(tmp_path / "cut", 8)
    workers = Path(f"/proc/{cut.pid}/task/{cut.pid}/children").read_text().split()
    for pid in (*workers, cut.pid):
        os.kill(int(pid), signal.SIGKILL)
    cut.communicate(timeout=LIMIT_SECONDS)
    finish(two(tmp_path / "cut"))
    assert_same_bits(newest(tmp_path / "cut")[1], newest(tmp_path / "whole")[1])


@long_proof
def test_the_defaults_reach_the_accuracy_that_the_readme_states(tmp_path):
    began = time.monotonic()
    said = finish(start([sys.executable, "imagenet_trainer.py", f"--out={tmp_path}", "--profile"], tmp_path))
    assert time.monotonic() - began < 120
    assert float(said.split("accuracy ")[1].split("%")[0]) >= 95
    assert "backward and communication" in said


@long_proof
def test_a_folder_of_images_is_read(tmp_path):
    image = pytest.importorskip("PIL.Image")
    for part, count in (("train", 12), ("val", 4)):
        for name, color in (("blue", (30, 30, 220)), ("red", (220, 30, 30))):
            folder = tmp_path / "data" / part / name
            folder.mkdir(parents=True)
            for number in range(count):
                image.new("RGB", (40 + number, 50), color).save(folder / f"{number}.png")
    words = [f"--data-dir={tmp_path / 'data'}", "--image-size=32", "--batch=6", "--epochs=4", "--ema=0.5", "--lr=0.05"]
    said = finish(start([sys.executable, "imagenet_trainer.py", f"--out={tmp_path / 'out'}", *words], tmp_path))
    assert said == "16 steps, accuracy 100.0% on 8 images\n"


def commands() -> list[list[str]]:
    services = yaml.safe_load((FOLDER / "deployment" / "docker-compose.yaml").read_text())["services"]
    return [shlex.split(service["command"]) for service in services.values()]


def test_compose_starts_two_nodes_that_find_each_other():
    document = yaml.safe_load((FOLDER / "deployment" / "docker-compose.yaml").read_text())
    services = document["services"]
    assert list(services) == ["node0", "node1"]
    for rank, (name, service) in enumerate(services.items()):
        assert service["hostname"] == name
        assert service["restart"].startswith("on-failure")
        volumes = [volume.split(":") for volume in service["volumes"]]
        assert all(source in document["volumes"] for source, _ in volumes)
        words = shlex.split(service["command"])
        assert {"torchrun", "--nnodes=2", f"--node-rank={rank}", "--master-addr=node0"} <= set(words)
        assert any(word.startswith(f"--out={volumes[0][1]}/") for word in words)


@long_proof
def test_the_commands_of_compose_train(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    changed = {"--master-addr=node0": "--master-addr=127.0.0.1", "--master-port=29400": f"--master-port={port}"}
    nodes = []
    for words in commands():
        own = [changed.get(word, word.replace("--out=/runs", f"--out={tmp_path}")) for word in words[1:]]
        nodes.append(start([*RUN, *own, *SMALL], tmp_path))
    said = [finish(node) for node in nodes]
    assert "20 steps, accuracy" in said[0]
    assert newest(tmp_path / "imagenet")[0] == 20


def test_kubernetes_objects_are_valid_and_fit_together():
    things = list(yaml.safe_load_all((FOLDER / "deployment" / "kubernetes.yaml").read_text()))
    for thing in things:
        validate(thing)
    service, claim, job = things
    assert [thing["kind"] for thing in things] == ["Service", "PersistentVolumeClaim", "Job"]
    spec = job["spec"]["template"]["spec"]
    labels = job["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    assert spec["subdomain"] == service["metadata"]["name"]
    assert spec["volumes"][0]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    words = dict(word.lstrip("-").split("=") for word in spec["containers"][0]["command"] if "=" in word)
    name, port = words["rdzv-endpoint"].split(":")
    assert name == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert int(port) == service["spec"]["ports"][0]["port"]
    assert int(words["nnodes"]) == job["spec"]["completions"] == job["spec"]["parallelism"]
    flags = (FOLDER / "imagenet_trainer.py").read_text()
    launcher = {"nnodes", "nproc-per-node", "max-restarts", "rdzv-backend", "rdzv-id", "rdzv-endpoint"}
    assert all(f'--{word}"' in flags or f'"{word}"' in flags for word in words.keys() - launcher)
