"""Every setting in every way to train: changed, it is refused, or the code of that way reads it; some also by effect.

The examples and the refusals are those of `tools/settings_ways.py`, from which the table in the docs is made.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import json
import os
import runpy
import sys
import types
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import phalanx
from phalanx import DistributedConfig, Formation, Trainer
from phalanx.cli import main
from phalanx.config import ways
from phalanx.config.settings import ENGINE_GROUPS, FIELDS, Settings
from phalanx.errors import PhalanxError
from phalanx.launch import CallTarget, ScriptTarget
from phalanx.run.spec import launch_spec
from phalanx.strategies.base import local
from phalanx.world.mesh import plan_layout

PACKAGE = Path(phalanx.__file__).parent
TOOL = runpy.run_path(str(PACKAGE.parent / "tools" / "settings_ways.py"))
WAYS, changed, companions, refusal = (TOOL[name] for name in ("WAYS", "changed", "companions", "refusal"))
_CONFIG = str(PACKAGE / "config")
_COPIES = {"hyperparameters", "save_config", "identity", "given_settings"}
"""Functions that copy all settings, whatever they are."""
_PROPERTIES = {name for name, value in vars(Settings).items() if isinstance(value, property)}
_NOT_APPLIED = {
    "mlflow",
    "wandb",
    "sinks",
    "compile",
    "verbosity",
    "progress",
    "console_ranks",
    "metrics_port",
    "share_gpus",
    "deepspeed_config",
}
"""Settings that need a service, a compiler, a GPU or a package: the run that must read them has their defaults."""


def reader(frame: types.FrameType | None) -> str | None:
    """Return the module, in the package, that reads a setting; None if a function only copies or checks it."""
    while frame is not None and (frame.f_code.co_filename.startswith(_CONFIG) or frame.f_code.co_name == "note_read"):
        if frame.f_code.co_name not in _PROPERTIES | {"note_read"}:
            return None
        frame = frame.f_back
    while frame is not None and frame.f_code.co_name.startswith("<"):  # a comprehension
        frame = frame.f_back
    if frame is None or frame.f_code.co_name in _COPIES:
        return None
    path = Path(frame.f_code.co_filename)
    return path.relative_to(PACKAGE).with_suffix("").as_posix() if path.is_relative_to(PACKAGE) else None


@contextlib.contextmanager
def recorded_reads() -> Iterator[dict[str, set[str]]]:
    """Record which modules read which settings of any config meanwhile."""
    found: dict[str, set[str]] = defaultdict(set)

    def note_read(self: Any, name: str) -> Any:
        if name in FIELDS and (module := reader(sys._getframe(1))) is not None:
            found[name].add(module)
        return object.__getattribute__(self, name)

    for kind in (DistributedConfig, *ENGINE_GROUPS):
        kind.__getattribute__ = note_read  # type: ignore[method-assign]
    try:
        yield found
    finally:
        for kind in (DistributedConfig, *ENGINE_GROUPS):
            del kind.__getattribute__


def data() -> TensorDataset:
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


def model() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))
    return nn.Sequential(*blocks, nn.Linear(4, 1))


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def outcome(trained: nn.Module, folder: Path) -> dict[str, Any]:
    """Return what a run has left that another one may differ in."""
    logs = list(folder.rglob("events.jsonl"))
    # The rank that writes may still be writing a line.
    events = [
        json.loads(line) for log in logs for line in log.read_text().splitlines(keepends=True) if line[-1] == "\n"
    ]
    steps = [event["step"] for event in events if event["event"] == "step"]
    kinds = [event["event"] for event in events]
    weights = [local(parameter.detach()).tolist() for parameter in trained.parameters()]
    return {"weights": weights, "steps": steps, "kinds": kinds, "files": files(folder), "names": sorted(os.listdir())}


BASE = {"device": "cpu", "batch_size": 4, "run_dir": "run"}


def fit(settings: dict[str, Any]) -> dict[str, Any]:
    trained = model()
    given = {**BASE, "progress": False, "log_every_n_steps": 1, **settings}
    Trainer(trained, loss_fn="mse", **given).fit(data(), data())
    return outcome(trained, Path())


def loop(settings: dict[str, Any]) -> dict[str, Any]:
    """Train two steps, save them, and load them again; the settings of others stand where those count."""
    trained = model()
    given = {name: value for name, value in settings.items() if ways.counts(name, ways.LOOP)}
    with Formation(**{**BASE, "log_every_n_steps": 1, **given}) as f:
        wrapped = f.prepare(trained)
        free = [parameter for parameter in trained.parameters() if parameter.requires_grad]
        optimizer, loader = f.prepare(torch.optim.SGD(free, lr=0.1), data())
        for inputs, targets in loader:
            if f.world.mesh.pp > 1:
                f.train_batch(wrapped, (inputs, targets), nn.MSELoss())
            else:
                with f.autocast():
                    loss = (wrapped(inputs) - targets).square().mean()
                f.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            f.save("saved")
        f.load("saved")
    return outcome(trained, Path())


def start(settings: dict[str, Any], target: Any) -> None:
    """Plan the ranks and their launch, as the parent process does."""
    config = DistributedConfig(**{**BASE, **settings})
    launch_spec(config, plan_layout(config, 0), target, Path("logs"))


def applied(name: str) -> dict[str, Any]:
    given = {**companions(name), name: changed(name)}
    return companions(name) if name in _NOT_APPLIED else given


def test_every_setting_is_declared_for_somebody():
    users = {"command", "recovery", "ranks", "trainer", "value"}
    for name in FIELDS:
        assert ways.used_by(name) <= users, name
        assert ways.used_by(name) - {"value"}, name
        assert changed(name) != FIELDS[name].default, name
        if not ways.counts(name, ways.LOOP):
            assert ways.in_loop(name), name


OF_ENGINES = {name for group in ENGINE_GROUPS for name in group.__dataclass_fields__}
ELSEWHERE = {"num_nodes", "node_rank", "rdzv_endpoint", "hosts"} | OF_ENGINES
"""Settings of machines and engines: only their parent process is looked at."""
SERVED = {name for name in FIELDS if companions(name).get("strategy") == "parameter-server"}
"""Those of parameter servers, which are looked at as one of the ways."""


class Walk:
    """What was found on the way: who has read each setting, which changed something, and who refused it later."""

    def __init__(self, run: Any) -> None:
        self.run = run
        self.read: dict[str, set[str]] = {}
        self.changed: set[str] = set()
        self.errors: dict[str, str] = {}
        self._before: dict[str, Any] = {}

    def try_out(self, names: list[str]) -> Walk:
        for name in names:
            with recorded_reads() as reads:
                found = self._run(f"{name}", applied(name))
                if found != self._baseline(companions(name)) and isinstance(found, dict):
                    self.changed.add(name)
            self.read[name] = reads[name]
            if isinstance(found, str):
                self.errors[name] = found
        return self

    def _baseline(self, settings: dict[str, Any]) -> Any:
        key = repr(settings)
        if key not in self._before:
            self._before[key] = self._run(f"before-{len(self._before)}", settings)
        return self._before[key]

    def _run(self, folder: str, settings: dict[str, Any]) -> Any:
        place = Path(f"{self.run.__name__}-{os.environ.get('WORLD_SIZE', 1)}-{folder}")
        place.mkdir(exist_ok=True)
        with contextlib.chdir(place):
            try:
                return self.run(settings)
            except PhalanxError as error:
                return str(error)


def walk(ranks: Any, way: str, run: Any) -> Walk:
    """Try out each setting that is accepted in a way, on one rank in this process or on two."""
    names = [name for name in FIELDS if refusal(name, way) is None and name not in ELSEWHERE | SERVED]
    of_two = [name for name in names if companions(name).get("num_workers") == 2 or name == "num_workers"]
    found = Walk(run).try_out([name for name in names if name not in of_two])
    here = os.getcwd()

    def on_ranks() -> Walk:
        os.chdir(here)
        return Walk(run).try_out(of_two)

    first, *_ = ranks(on_ranks, world_size=2)
    found.read |= first.read
    found.changed |= first.changed
    found.errors |= first.errors
    return found


@functools.cache
def _of_properties() -> dict[str, set[str]]:
    """Return the settings behind each property of a config."""
    tree = ast.parse((PACKAGE / "config" / "settings.py").read_text())
    (body,) = (node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Settings")
    uses = {node.name: _attributes(node, {"self"}) for node in body if isinstance(node, ast.FunctionDef)}
    for _ in uses:
        uses = {name: used.union(*(uses.get(each, set()) for each in used)) for name, used in uses.items()}
    return uses


def _attributes(tree: ast.AST, of: set[str]) -> set[str]:
    """Return the attributes that code reads from these variables, attributes or arguments of getattr and get."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            value = node.value
            name = value.id if isinstance(value, ast.Name) else getattr(value, "attr", "")
            if isinstance(value, ast.Call) and ast.unparse(value.func) == "options_of":  # those of an engine
                name = "options"
            found |= {node.attr} if name in of else set()
        if isinstance(node, ast.Call):
            called = getattr(node.func, "id", getattr(node.func, "attr", ""))
            if called in ("get", "getattr"):
                found |= {each.value for each in node.args if isinstance(each, ast.Constant)}
    return found


def read_in(*rooms: str) -> set[str]:
    """Return the settings that the code of some rooms reads."""
    found: set[str] = set()
    for room in rooms:
        path = PACKAGE / room
        for file in path.rglob("*.py") if path.is_dir() else [path]:
            names = _attributes(ast.parse(file.read_text()), {"config", "_config", "settings", "options", "placed"})
            found |= names.union(*(_of_properties().get(name, set()) for name in names))
    return found & FIELDS.keys()


PARENT = (
    *(f"run/{name}.py" for name in ("conductor", "preflight", "record", "result", "spec", "start")),
    *("observe/run_folder.py", "launch", "world", "engine.py", "cli/train.py"),
)
TORCH = (
    *PARENT,
    "run",
    "loop",
    "data",
    "checkpoint",
    "observe",
    "recovery",
    "strategies/base.py",
    "strategies/registry.py",
)
ANY_ENGINE = ("strategies", "comm", "engines/ray", "engines/deepspeed", "engines/parameter_server")
ROOMS = {
    "script": (*PARENT, "engines/ray", "engines/horovod"),
    "horovod": (*TORCH, "engines/horovod"),
    "deepspeed": (*TORCH, "engines/deepspeed"),
    "ray": (*TORCH, *ANY_ENGINE),
    "tensorflow": (*PARENT, "engines/tensorflow", "loop/recorders.py", "observe/sinks.py"),
    "parameter servers": (*TORCH, "engines/parameter_server", "engines/ray"),
}
"""The code that runs in a way; Ray's ranks have any strategy, and any strategy runs on Ray."""
HARD_TO_RUN = {
    **dict.fromkeys(("scaler_init_scale", "scaler_growth_interval", "share_gpus"), "a GPU"),
    **dict.fromkeys(("spares", "heartbeat_timeout", "stall_timeout", "memory_frequency"), "ranks that are lost"),
    "preemption_margin": "a job of Slurm",
    "timeout": "ranks without a group",
    "start_timeout": "ranks that do not start",
}
"""Settings whose effect needs what a test in this process has not: their readers are found in the code."""
# fmt: off
EFFECTS = {
    "trainer": {
        "base_batch_size", "batch_size", "checkpoint_dir", "checkpoint_frequency", "checkpoint_kind",
        "compression_ratio", "compression_warmup", "decay_norms", "ema_decay", "epochs", "eval_every",
        "fast_dev_run", "keep_best", "gradient_accumulation_steps", "gradient_clipping", "keep_every",
        "keep_last", "learning_rate", "lora_alpha", "lora_base", "lora_dropout", "lora_rank", "lora_targets",
        "lr_scaling", "lr_schedule", "max_steps", "min_delta", "mixed_precision", "momentum", "name",
        "optimizer", "outer_learning_rate", "outer_momentum", "powersgd_rank", "pipeline_cuts",
        "pipeline_parallel", "profile", "resume_from_checkpoint", "run_dir", "seed", "shard_size", "strategy",
        "tensorboard", "tensorboard_histograms", "warmup", "weight_decay",
    },
    "own loop": {
        "batch_size", "checkpoint_kind", "compression_ratio", "compression_warmup",
        "gradient_accumulation_steps", "keep_last", "lora_alpha", "lora_base", "lora_dropout", "lora_rank",
        "lora_targets", "mixed_precision", "name", "outer_learning_rate", "outer_momentum", "pipeline_cuts",
        "pipeline_parallel", "powersgd_rank", "run_dir", "seed", "shard_size", "strategy", "tensorboard",
    },
}
# fmt: on
"""Settings after which weights, steps, events or files of two steps are others."""
NEEDS_A_MODEL = {"tensor_parallel", "context_parallel", "expert_parallel"}
"""Settings that the model of the walk cannot follow: the run ends with what it lacks."""


@pytest.mark.parametrize(("way", "run"), [("trainer", fit), ("own loop", loop)], ids=["trainer", "loop"])
def test_every_setting_that_is_accepted_has_an_effect_on_the_ranks(ranks, tmp_path, monkeypatch, way, run):
    monkeypatch.chdir(tmp_path)
    found = walk(ranks, way, run)
    at_start = set()
    if way == "trainer":
        job = CallTarget("phalanx.worker:run_job")
        at_start = {name for name in FIELDS if refusal(name, way) is None and name in reads_at_start(name, job)}
    accepted = {name for name in FIELDS if refusal(name, way) is None} - SERVED - OF_ENGINES
    by_rank = {name for name, readers in found.read.items() if readers}
    in_code = HARD_TO_RUN.keys() & read_in(*TORCH)
    assert accepted - by_rank - at_start - in_code == set()
    assert EFFECTS[way] <= found.changed
    assert found.errors.keys() == NEEDS_A_MODEL
    assert all(name in message for name, message in found.errors.items())


def reads_at_start(name: str, target: Any) -> set[str]:
    with recorded_reads() as reads, contextlib.suppress(PhalanxError):  # such as hosts, which need the command line
        start(applied(name), target)
    return {each for each, readers in reads.items() if readers}


def test_a_loop_of_the_users_reads_nothing_that_it_refuses(tmp_path, monkeypatch):
    """So the declarations are true, and a setting that no code reads is found."""
    monkeypatch.chdir(tmp_path)
    with recorded_reads() as reads:
        loop({"tensorboard": True})
    assert {"batch_size", "seed", "keep_last", "tensorboard"} <= {name for name, readers in reads.items() if readers}
    not_used = {name for name in FIELDS if ways.used_by(name) <= {"trainer", "value", "recovery"}}
    assert {name for name in not_used if reads.get(name)} == {"fast_dev_run"}, "whether the folder of the run will stay"


@pytest.mark.parametrize("way", ROOMS)
def test_the_code_of_a_way_reads_what_it_accepts(way):
    accepted = {name for name in FIELDS if refusal(name, way) is None}
    assert accepted
    assert accepted - read_in(*ROOMS[way]) == set()


def test_the_command_reads_what_it_accepts_for_scripts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain.py").write_text("import torch\n")
    accepted = [name for name in FIELDS if refusal(name, "script") is None]
    unread = [name for name in accepted if name not in reads_at_start(name, ScriptTarget("plain.py"))]
    of_command = {
        "metrics_port",
        "verbosity",
        "progress",
        "console_ranks",
        "run_dir",
        "name",
        "checkpoint_dir",
        "resume_from_checkpoint",
        "address",
    }
    assert set(unread) <= of_command, "which the command reads before or after the launch"
    assert set(unread) <= read_in("run", "cli/train.py", "engines")


SCRIPTS = {
    "plain": "import torch\n",
    "logs": "import phalanx\nphalanx.log({'loss': 1.0})\n",
    "loop": "import phalanx\nf = phalanx.Formation()\nprint(f.config.epochs)\n",
    "trains": "from phalanx import Trainer\n",
    "beside": "from package import helper\n",
    "reads": "import os\nprint(os.environ['PHALANX_EPOCHS'])\n",
}


def refused_flags(capsys: Any, script: str) -> str:
    """Return the flags that a plan for a script refuses, with what it says of the script."""
    flags = "--gradient-clipping 1 --epochs 3 --seed 3 --stop-grace 9 --max-restarts 1 --heartbeat-timeout 3"
    code = main(
        ["train", "--script", f"{script}.py", "--num-workers", "2", "--device", "cpu", "--dry-run", *flags.split()]
    )
    error = capsys.readouterr().err
    assert code == 2, error
    return error.splitlines()[0].removeprefix("phalanx: ")


@pytest.fixture
def scripts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in SCRIPTS.items():
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("from .inner import train\n")
    (tmp_path / "package" / "inner.py").write_text("from phalanx import Formation as train\n")
    (tmp_path / "package" / "helper.py").write_text("")


@pytest.mark.parametrize(
    ("script", "flags", "why"),
    [
        ("plain", "epochs seed gradient-clipping heartbeat-timeout", "uses neither a Trainer nor a Formation"),
        ("logs", "epochs seed gradient-clipping heartbeat-timeout", "uses neither a Trainer nor a Formation"),
        ("loop", "gradient-clipping heartbeat-timeout", "trains with your own loop"),
        ("beside", "epochs gradient-clipping heartbeat-timeout", "trains with your own loop"),
        ("trains", "heartbeat-timeout", "the ranks of trains.py are those of a script"),
        ("reads", "heartbeat-timeout", "the ranks of reads.py are those of a script"),
    ],
)
def test_flags_of_a_script_that_would_have_no_effect_are_refused(scripts, capsys, script, flags, why):
    said = refused_flags(capsys, script)
    assert said.startswith(", ".join(f"--{flag}" for flag in flags.split()) + " would have no effect: ")
    assert why in said


def test_settings_of_a_script_from_a_file_are_named(scripts, capsys, tmp_path):
    (tmp_path / "shared.toml").write_text("gradient_clipping = 1.0\nstop_grace = 9.0\n")
    arguments = ["train", "--script", "loop.py", "--config", "shared.toml", "--device", "cpu", "--dry-run"]
    assert main(arguments) == 0
    error = capsys.readouterr().err
    assert (
        "warning: settings without effect, for loop.py trains with your own loop: gradient_clipping = 1.0: call"
        in error
    )
    assert "stop_grace" not in error


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"num_workers": 2}, "num_workers is a setting of what starts the ranks, and a Formation joins ranks that run"),
        ({"num_gpus": 2}, "num_workers is a setting of what starts the ranks"),
        ({"progress": False}, "progress is a setting of what starts the ranks"),
        ({"stop_grace": 9.0}, "stop_grace is a setting of what starts the ranks"),
        ({"decay_norms": False}, "decay_norms is a setting of the trainer's loop"),
        ({"epochs": 3, "warmup": 2}, "epochs, warmup are settings of the trainer's loop, and this loop is yours"),
    ],
)
def test_a_formation_refuses_other_spellings_too(given, said):
    with pytest.raises(PhalanxError) as refused:
        Formation(device="cpu", **given)
    assert said in str(refused.value)


def test_a_trainer_on_ranks_that_run_names_settings_of_the_launch(tmp_path, monkeypatch, capfd):
    """The flag of the command is in a variable; the same settings are used where the trainer starts the ranks."""
    monkeypatch.chdir(tmp_path)
    started = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "PHALANX_NCCL_ENV": "gcp"}
    for name, value in {**started, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29555"}.items():
        monkeypatch.setenv(name, value)
    fit({"max_restarts": 2, "heartbeat_timeout": 5.0, "nccl_env": "gcp", "num_workers": 2})
    note = "warning: not used by ranks that were started before the trainer: max_restarts: give it to the command that"
    error = capfd.readouterr().err
    assert note in error
    assert "heartbeat_timeout: leave it out: lost ranks are replaced one by one for a recipe" in error
    assert "nccl_env" not in error
