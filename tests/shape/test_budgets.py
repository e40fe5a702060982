"""What a rank loads, and that no code knows a strategy or an engine by its name.

`python tools/lines.py` prints the lines and files per room, and what users can type.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

from command import COMMAND, ROOT, clean_environment
from package_tree import modules, parsed, room
from test_layers import CORE

from phalanx.config import BACKENDS
from phalanx.config.strategies import TABLE

RANK_MODULES = 178
"""Of a run that the fork server has started: its ranks share the memory of these modules, which it imports once."""
FORMATION_MODULES = 89

NAMES = {row.name for row in TABLE} | set(BACKENDS) | {name for row in BACKENDS.values() for name in row.strategies}
OWN_CHOICE = {"phalanx.tools.tune.search"}
"""A module whose own setting has a value that is spelled as an engine."""


def strings(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Constant):
        return {node.value} if isinstance(node.value, str) else set()
    return set().union(*map(strings, node.elts)) if isinstance(node, (ast.Tuple, ast.List, ast.Set)) else set()


def test_no_module_compares_the_name_of_a_strategy_or_an_engine():
    """What differs between them are facts of their rows (`config/strategies.py`, `config/backends.py`)."""
    others = [name for name in modules() if name not in OWN_CHOICE and not name.startswith("phalanx.engines.")]
    compared = [(name, node) for name in others for node in ast.walk(parsed(name)) if isinstance(node, ast.Compare)]
    found = [
        f"{name}:{node.lineno}: {ast.unparse(node)}"
        for name, node in compared
        if NAMES & set().union(*map(strings, (node.left, *node.comparators)))
    ]
    assert not found, found


def test_an_engine_compares_no_name_of_another():
    for name in modules():
        if not name.startswith("phalanx.engines.") or name.count(".") < 2:
            continue
        own = name.split(".")[2].replace("_", "-")
        row = BACKENDS.get(own)
        others = NAMES - {own} - ({*row.strategies, row.strategy} if row is not None else set())
        for node in ast.walk(parsed(name)):
            if isinstance(node, ast.Compare):
                used = others & set().union(*map(strings, (node.left, *node.comparators)))
                assert not used, f"{name}:{node.lineno} compares {used}"


HEART = {*CORE} - {"version", "lazy", "errors"}
NAMED = {
    "phalanx.config.backends": "the table of engines",
    "phalanx.config.arguments": "written from the fields; no program imports it",
    "phalanx.world.env": "the variables of all launchers",
    "phalanx.host.lost_peers": "what a lost rank makes other libraries print",
    "phalanx.launch.forkserver.client": "variables that libraries read while they are imported",
}
"""Modules of the heart that name an engine, and why."""


def test_the_heart_names_no_engine():
    """An engine says in its folder what it is, which settings it has and which it follows."""
    words = re.compile(r"keras|horovod|deepspeed|\bds_", re.IGNORECASE)
    found = [
        f"{name}:{number}: {line.strip()}"
        for name, path in modules().items()
        if room(name) in HEART and name not in NAMED
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if words.search(line)
    ]
    assert not found, "\n".join(found)


WATCH = """
import json, sys
from phalanx import Callback

class Watch(Callback):
    def on_fit_end(self, trainer):
        if not trainer.formation.is_main:  # it also writes the run's files
            return
        names = sorted(name for name in sys.modules if name.split(".")[0] == "phalanx")
        open("modules.json", "w").write(json.dumps(names))
"""
RECIPE = """
summary = "digits, with a list of what its ranks have loaded"
callbacks = ["watch:Watch"]
data = {name = "digits"}
model = {name = "convnet"}

[settings]
num_workers = 2
device = "cpu"
batch_size = 32
max_steps = 4
checkpoint_frequency = "4 steps"
"""


def test_a_rank_loads_few_modules_and_nothing_of_the_tools(tmp_path: Path):
    (tmp_path / "watch.py").write_text(WATCH)
    (tmp_path / "watched.toml").write_text(RECIPE)
    environment = {**clean_environment(), "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    command = [*COMMAND, "train", "./watched.toml"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    loaded = json.loads((tmp_path / "modules.json").read_text())
    others = [name for name in loaded if name.startswith(("phalanx.tools", "phalanx.engines", "phalanx.cli"))]
    # The config knows of every engine what it declares.
    assert not [name for name in others if not re.fullmatch(r"phalanx\.engines(\.\w+(\.declaration)?)?", name)]
    assert len(loaded) <= RANK_MODULES, f"{len(loaded)}: {loaded}"


def test_a_formation_loads_few_modules():
    code = "import sys, phalanx; phalanx.Formation; print(sum(name.startswith('phalanx') for name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) <= FORMATION_MODULES


def test_a_formation_loads_no_compiler():
    """It takes longer to import than torch, and most runs compile nothing."""
    code = "import sys, phalanx; phalanx.Formation; print('torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_the_command_train_loads_no_tool():
    code = "import sys, phalanx.cli.train; print([name for name in sys.modules if name.startswith('phalanx.tools')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
