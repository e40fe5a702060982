"""An engine of another package: a launcher and a strategy, found by their entry points."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import programs
import pytest
from command import COMMAND, installed_package, phalanx

from phalanx.config import FIELDS, GROUPS, settings

ENGINE = '''
import json
import os
import socket
import subprocess
import sys

from dataclasses import dataclass

from phalanx.config.option import option, options_of
from phalanx.engine import Engine
from phalanx.errors import UsageError
from phalanx.launch.spec import LaunchResult, target_to_message

RANK = """
import json, sys
from phalanx.launch.rank import run_target
from phalanx.launch.spec import target_from_message
run_target(target_from_message(json.loads(sys.argv[1])), sys.path)
"""


class Subprocesses:
    """A launcher: one plain Python process per rank, with torchrun's variables."""

    def __init__(self, ranks):
        self.ranks = ranks

    def launch(self, spec, console):
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        command = [sys.executable, "-c", RANK, json.dumps(target_to_message(spec.target))]
        shared = {**os.environ, **spec.env, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        shared |= {"WORLD_SIZE": str(self.ranks), "LOCAL_WORLD_SIZE": str(self.ranks)}
        started = [
            subprocess.Popen(command, env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(self.ranks)
        ]
        return LaunchResult(exit_code=max(process.wait() for process in started), attempts=1)


@dataclass(frozen=True, kw_only=True)
class ToySettings:
    "Settings of the toy."

    toy_greeting: str = option("hello", "what it says of each epoch", choices=("hello", "bye"), backends=("toy",))
    toy_speed: float | None = option(None, "how fast it is", above=0, backends=("toy",))


class Toy(Engine):
    strategy = "toy-average"
    options = ToySettings

    def check(self, config):
        if config.batch_size == 7:
            raise UsageError("the toy engine refuses batch_size = 7")

    def starter(self, config, ranks):
        return Subprocesses(ranks.world_size)

    def callbacks(self):
        from phalanx import Callback

        class Note(Callback):
            def on_epoch_end(self, trainer, epoch, metrics):
                said = options_of(ToySettings, trainer.formation.config).toy_greeting
                print(f"{said}: the engine has seen epoch {epoch} of rank {trainer.formation.rank}", flush=True)

        return [Note()]


ENGINE = Toy()
'''
STRATEGY = """
import torch.distributed as dist
from phalanx.strategies.base import Strategy, share_weights


class Average(Strategy):
    name = "toy-average"
    sync = True

    def wrap(self, model):
        share_weights(model)
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return model

    def set_sync(self, wrapped, sync):
        self.sync = sync

    def backward(self, loss):
        loss.backward()
        for parameter in self.parameters if self.sync else ():
            dist.all_reduce(parameter.grad)
            parameter.grad /= self.world.world_size
"""


RING = """
from phalanx.config.strategies import COMPRESSORS, StrategyFacts
from phalanx.strategies.ring_ddp import RingDDP


class ToyRing(RingDDP):
    name = "toy-ring"
    facts = StrategyFacts(replicates=True, averages_gradients=True, recovery="resize", compressors=COMPRESSORS)
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fork_server: None) -> Iterator[dict[str, str]]:
    """Return the environment in which another Python finds the package; this one does already."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PHALANX_DEVICE", "cpu")
    entry_points = (
        "[phalanx.engines]\ntoy = toy_engine:ENGINE\nbroken = toy_engine:MISSING\nwrong = toy_engine:RANK\n"
        "[phalanx.strategies]\ntoy-average = toy_strategy:Average\ntoy-ring = toy_ring:ToyRing\n"
    )
    modules = {"toy_engine": ENGINE, "toy_strategy": STRATEGY, "toy_ring": RING}
    known, groups = set(FIELDS), [*GROUPS]
    with installed_package(tmp_path / "site", modules, entry_points) as environment:
        yield environment
    settings._add_engine.cache_clear()
    GROUPS[:] = groups
    for name in FIELDS.keys() - known:
        del FIELDS[name]


TRAIN = ("train", "digits", "--num-workers", "2", "--epochs", "1")


def losses(folder: Path) -> list[float]:
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    found = [event["loss"] for event in events if event["event"] == "step"]
    assert found, "no step was reported"
    return found


def test_an_engine_of_another_package_starts_the_ranks_and_trains_as_ddp_does(tmp_path, installed):
    command = [*COMMAND, *TRAIN, "--device", "cpu", "--backend", "toy", "--run-dir", "toy", "--toy-greeting", "bye"]
    done = programs.run(command, env=installed, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    # This launcher gives all ranks one pipe: a rank's line may follow an unfinished line of another.
    for rank in (0, 1):
        assert f"bye: the engine has seen epoch 0 of rank {rank}" in done.stdout
    assert 'toy_greeting = "bye"' in (tmp_path / "toy" / "config.toml").read_text()
    reference = phalanx(*TRAIN, "--strategy", "ddp", "--run-dir", "ddp")
    assert reference.code == 0, reference.err
    assert losses(tmp_path / "toy") == pytest.approx(losses(tmp_path / "ddp"), rel=1e-5)


OPTIONS = """
import sys
from phalanx import DistributedConfig
from phalanx.config import resolve
from phalanx.errors import ConfigError

before = DistributedConfig()
assert "toy_speed" not in before.to_dict()
config = DistributedConfig(backend="toy", toy_speed=2)
assert config.to_dict()["toy_speed"] == 2 and config.to_dict()["toy_greeting"] == "hello"
assert before.to_dict()["toy_speed"] is None and before.replace(backend="toy").changed("toy_speed") == []
given = {"PHALANX_TOY_SPEED": "3", "PHALANX_BACKEND": "toy"}
assert resolve({"toy_greeting": "bye"}, environ=given).config.to_dict()["toy_speed"] == 3
open("run.toml", "w").write('backend = "toy"\\ntoy_speed = 4\\n')
assert resolve({}, file="run.toml", environ={}).origins["toy_speed"] == "file run.toml"
for given in ({"backend": "toy", "toy_speed": -1}, {"toy_speed": 1}, {"backend": "toy", "toy_greeting": "by"}):
    try:
        DistributedConfig(**given)
    except ConfigError as error:
        print(error)
"""


def test_settings_of_an_engine_of_another_package_count_in_every_place(tmp_path, installed):
    (tmp_path / "options.py").write_text(OPTIONS)
    command = [sys.executable, "options.py"]
    done = programs.run(command, env=installed, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    for said in (
        "toy_speed = -1: must be greater than 0",
        "toy_speed = 1 with backend = 'pytorch-ddp', which does not follow it: write backend = 'toy'",
        "toy_greeting = 'by': not one of 'hello', 'bye'. Did you mean 'bye'?",
    ):
        assert said in done.stdout
    shown = [*COMMAND, "config", "show", "--backend", "toy", "--toy-speed", "3", "--changed"]
    done = programs.run(shown, env=installed, capture_output=True, text=True, timeout=400, check=False)
    assert "toy_speed" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--backend", "toy", "--batch-size", "7"), "the toy engine refuses batch_size = 7"),
        (("--backend", "broken"), "the entry point broken = toy_engine:MISSING in the group phalanx.engines cannot be"),
        (("--backend", "wrong"), "the entry point wrong in the group phalanx.engines is not a phalanx.engine.Engine"),
        (("--backend", "tyo"), "backend = 'tyo': not one of"),
    ],
)
def test_a_mistake_is_reported_before_ranks_start(tmp_path, installed, words, error):
    answer = phalanx(*TRAIN, *words)
    assert answer.code == 2
    assert error in " ".join(answer.err.split())
    assert "Traceback" not in answer.err
    assert not (tmp_path / "runs").exists()


def test_a_strategy_of_another_package_gets_what_its_facts_allow(tmp_path, installed):
    """Compression, averaged weights, checks of replicas, and recovery in place: by its facts, without another line."""
    more = ["--compression", "fp16", "--ema-decay", "0.9", "--straggler-factor", "9", "--check-replicas-every", "5"]
    words = ["digits", "--num-workers", "2", "--device", "cpu", "--max-steps", "30", "--strategy", "toy-ring", *more]
    faults = ["--fault", "kill:rank=1,step=10", "--no-compare", "--out", "out", "--json"]
    command = [*COMMAND, "verify", *words, *faults]  # a run under faults is a process of its own
    done = programs.run(command, env=installed, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    (fault,) = json.loads(done.stdout)["faults"]
    assert (fault["how"], fault["lost_steps"]) == ("in place, 2 ranks", 0)


def test_the_planner_knows_a_strategy_of_another_package_by_its_facts(tmp_path, installed):
    def memory(strategy: str) -> dict[str, int]:
        words = ["gpt", "--num-workers", "2", "--device", "cpu", "--strategy", strategy, "--dry-run", "--json"]
        answer = phalanx("train", *words)
        assert answer.code == 0, answer.err
        return json.loads(answer.out)["estimate"]["memory"]

    assert memory("toy-ring") == memory("ring")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--compression", "fp16"), "only strategy = 'ddp' and 'ring' average gradients through it"),
        (("--ema-decay", "0.9"), "does not hold the run's weights on the ranks after every step"),
        (("--straggler-factor", "2"), "compares ranks that take each step with equal weights"),
    ],
)
def test_a_strategy_without_facts_is_refused_what_it_does_not_declare(tmp_path, installed, words, message):
    answer = phalanx(*TRAIN, "--strategy", "toy-average", *words)
    assert answer.code == 2
    assert message in answer.err
