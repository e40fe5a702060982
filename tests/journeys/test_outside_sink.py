"""Sinks of other packages, found by their entry points, and sinks given to a trainer in Python."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from command import Answer, installed_package, phalanx

from phalanx import PyTorchDDPTrainer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

OUTSIDE = '''
class Counter:
    """Counts events by their kind, into a file of the run."""

    next_commands = ["cat counts"]

    def __init__(self, path):
        self.path, self.counts = path, {}

    def handle(self, event):
        self.counts[event.kind] = self.counts.get(event.kind, 0) + 1

    def close(self):
        self.path.write_text(f"{self.counts['step']} steps, {self.counts['run_ended']} end")


def counter(config, run_dir):
    return Counter(run_dir / f"counts-{config.seed}")


def nothing(config, run_dir):
    return None
'''


@pytest.fixture
def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fork_server: None) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    entry_points = "[phalanx.sinks]\ncounter = outside:counter\nbroken = outside:missing\nnothing = outside:nothing\n"
    with installed_package(tmp_path / "site", {"outside": OUTSIDE}, entry_points):
        yield


def train(sinks: str) -> Answer:
    words = [
        "--num-workers",
        "2",
        "--device",
        "cpu",
        "--max-steps",
        "3",
        "--log-every-n-steps",
        "1",
        "--run-dir",
        "run",
    ]
    return phalanx("train", "digits", *words, "--seed", "7", "--sinks", sinks)


@pytest.mark.usefixtures("_installed")
def test_a_sink_of_another_package_gets_every_event_once(tmp_path):
    answer = train("counter")
    assert answer.code == 0, answer.err
    assert (tmp_path / "run/counts-7").read_text() == "3 steps, 1 end"
    assert answer.out.rstrip().endswith("cat counts")


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize(
    ("names", "code", "error"),
    [
        ("counter,kounter", 2, "no installed package has a sink 'kounter'. Did you mean 'counter'?"),
        ("broken", 2, "the entry point broken = outside:missing in the group phalanx.sinks cannot be loaded"),
        ("nothing", 2, "the entry point nothing in the group phalanx.sinks gave None, which is not a sink"),
    ],
)
def test_a_wrong_sink_is_named(names, code, error):
    answer = train(names)
    assert answer.code == code, answer.err
    assert error in " ".join(answer.err.split())


class Kept:
    """A sink that keeps the kinds of events."""

    def __init__(self) -> None:
        self.kinds: list[str] = []

    def handle(self, event) -> None:
        self.kinds.append(event.kind)

    def close(self) -> None:
        self.kinds.append("closed")


def test_a_trainer_takes_sinks_among_its_callbacks(tmp_path):
    kept = Kept()
    data = [(torch.randn(4), torch.tensor(n % 2)) for n in range(8)]
    trainer = PyTorchDDPTrainer(torch.nn.Linear(4, 2), num_workers=1, device="cpu", batch_size=4, callbacks=[kept],
                                loss_fn=torch.nn.CrossEntropyLoss(), run_dir=str(tmp_path / "run"),
                                verbosity="quiet")  # fmt: skip
    trainer.fit(data)
    assert kept.kinds[0] == "run_started"
    assert kept.kinds[-2:] == ["run_ended", "closed"]
    assert kept.kinds.count("step") >= 1
