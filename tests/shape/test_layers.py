"""The package keeps its structure: imports point down, no circles, files of one topic, one meaning per name."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from importlib import import_module

import pytest
from package_tree import (
    PACKAGE,
    circles,
    imports,
    imports_in_functions,
    loads,
    modules,
    named_in_texts,
    parsed,
    room,
)

from phalanx.features import FEATURES

CORE = {
    "version": 0,
    "lazy": 0,
    "errors": 0,
    "config": 0,
    "engine": 1,
    "features": 1,
    "torch_compat": 1,
    "host": 1,
    "observe": 1,
    "recipes": 2,
    "reliability": 1,
    "launch": 1,
    "world": 2,
    "comm": 3,
    "strategies": 4,
    "checkpoint": 4,
    "data": 4,
    "model": 1,
    "loop": 5,
    "run": 6,
}
"""What trains a model. It names tools and engines in tables only (`features.py`, `config/backends.py`)."""
FEATURE_ROOMS = {"diagnosis": 7, "recovery": 7, "speed": 7, "trackers": 7}
LAYERS = {**CORE, **FEATURE_ROOMS, "zoo": 8, "tools": 9, "engines": 10, "worker": 11, "cli": 11, "__main__": 11}
SIDEWAYS = {
    ("config", "errors"),
    ("config", "lazy"),
    ("errors", "version"),
    ("observe", "host"),
    ("launch", "features"),
    ("launch", "host"),
    ("launch", "lazy"),
    ("launch", "observe"),
    ("launch", "torch_compat"),
    ("engine", "launch"),
    ("recovery", "diagnosis"),
    ("__main__", "cli"),
}
"""Packages of one layer of which one may import the other, in this direction only."""
BETWEEN_TOOLS = {("bench", "plan")}
"""Tools stand alone, but for the measurements that a plan is calibrated with."""
KERNELS = {("phalanx.zoo.models.loss", "phalanx.speed.kernels")}
"""A module that is given to others as a whole: `from phalanx.speed import kernels`."""
NAMES_ABOVE = {
    "phalanx.config.backends": "the table of engines",
    "phalanx.config.strategies": "the table of strategies",
    "phalanx.features": "the table of what the heart asks of the rooms above it",
    "phalanx.launch.forkserver.preload": "what the fork server imports once for all ranks",
    "phalanx.tools.verify.faults": "runs `phalanx train` in processes of its own",
}
"""The only modules whose texts name modules of higher layers, or of the insides of features."""
OF_ALL_TOOLS = {"svg", "namespaces", "web"}
"""Modules that several tools use."""

PARENT_SIDE = {
    *("conductor", "facts", "preflight", "record", "result", "resume", "script_settings", "spec", "start", "stored"),
}
"""The half of `run/` that commands load: without torch, and without the loop."""

RANK_SIDE = {"world", "comm", "strategies", "checkpoint", "data", "loop"}
"""Packages that run in a rank and must not import `launch`, which runs in the parent."""

TYPE_CIRCLES: list[set[str]] = []
"""Groups of modules that import each other for type annotations only."""

PRIVATE_TORCH = re.compile(r"\btorch(?:\.[a-z_]+)*\._[a-zA-Z]\w*|\bdist\._[a-z]\w*|\bdistributed_c10d\._\w+")


def named(name: str) -> str:
    return str(modules()[name].relative_to(PACKAGE))


def test_every_package_has_a_layer():
    assert {room(name) for name in modules()} - {""} == set(LAYERS)


def dependencies(name: str) -> frozenset[str]:
    """Modules that a module imports, or names in a text: a name that is imported later is a dependency, too."""
    return imports(name) if name in NAMES_ABOVE else imports(name) | named_in_texts(name)


def test_imports_point_down():
    wrong = []
    for name in filter(room, modules()):
        mine = room(name)
        for other in {room(other) for other in dependencies(name)} - {mine, ""}:
            if not (LAYERS[other] < LAYERS[mine] or (mine, other) in SIDEWAYS):
                wrong.append(f"{named(name)} (layer {LAYERS[mine]}) imports {other} (layer {LAYERS[other]})")
            if mine in RANK_SIDE and other == "launch":
                wrong.append(f"{named(name)} runs in ranks, launch/ in the parent")
    assert not wrong, wrong


def test_a_feature_is_entered_by_its_front_door():
    """Other rooms import the package of a feature, none of its modules; the table of features names that package."""
    inside = {f"phalanx.{name}." for name in FEATURE_ROOMS}
    wrong = [
        f"{named(name)} imports {other}"
        for name in modules()
        for other in dependencies(name)
        if room(name) != room(other) and other.startswith(tuple(inside)) and (name, other) not in KERNELS
    ]
    assert not wrong, wrong
    assert not [place for place in FEATURES.values() if place.startswith(tuple(inside))]


def test_the_parents_half_of_run_loads_no_torch():
    loaded = [f"phalanx.run.{name}" for name in PARENT_SIDE]
    for name in loaded:
        loaded += sorted(imports(name, types=False, functions=False) - set(loaded))
    assert not [name for name in loaded if room(name) in {"loop", "strategies", "checkpoint", "data", "comm"}]
    assert not [name for name in loaded for node in parsed(name).body if ast.unparse(node).startswith("import torch")]


@pytest.mark.parametrize(("side", "other_side"), [("launcher", "ranks"), ("ranks", "launcher")])
def test_the_two_sides_of_recovery_load_apart(side, other_side):
    of_side = [name for name in modules() if name.startswith(f"phalanx.recovery.{side}")]
    kept_out = f"phalanx.recovery.{other_side}"
    assert not [(name, other) for name in of_side for other in imports(name) if other.startswith(kept_out)]


def test_tools_stand_alone():
    tools = [(name.split(".")[2], other) for name in modules() if room(name) == "tools" for other in dependencies(name)]
    others = {(mine, name.split(".")[2]) for mine, name in tools if name.startswith("phalanx.tools.")}
    assert {(mine, other) for mine, other in others if other not in {mine, *OF_ALL_TOOLS}} == BETWEEN_TOOLS


def test_the_table_of_features_is_true():
    for place in FEATURES.values():
        module, _, function = place.partition(":")
        assert not function or hasattr(import_module(module), function), place


@pytest.mark.parametrize("name", NAMES_ABOVE)
def test_a_table_of_names_above_is_needed(name):
    above = {room(other) for other in named_in_texts(name)}
    assert any(LAYERS[other] >= LAYERS[room(name)] for other in above - {room(name)}), "it names nothing above itself"


LATE = [name for name in modules() if "__getattr__ = lazy_names(" in modules()[name].read_text()]


@pytest.mark.parametrize("name", LATE)
def test_names_that_are_imported_late_exist(name):
    module, missing = import_module(name), []
    for word in module.__all__:
        try:
            getattr(module, word)
        except AttributeError:
            missing.append(word)
        except ModuleNotFoundError as error:
            if error.name != "triton":  # kernels need a package that CPUs have no use for
                raise
    assert not missing


def test_no_two_packages_import_each_other():
    pairs = {(room(name), room(other)) for name in modules() for other in dependencies(name)}
    assert not {(a, b) for a, b in pairs if a < b and a and (b, a) in pairs}


def test_no_circles():
    """Of all imports, those inside functions too: what two modules share is in a third one below them."""
    assert circles(types=False, functions=True) == []


def test_an_import_inside_a_function_spares_loading_something():
    """Where the module has loaded everything already, the import belongs at the top."""
    habits = [
        f"{named(name)}:{line}: {', '.join(sorted(targets))}"
        for name in modules()
        for line, targets in imports_in_functions(name)
        if set().union(*map(loads, targets)) <= loads(name)
    ]
    assert not habits, "\n".join(habits)


def test_circles_of_types_are_listed():
    assert [group for group in circles(types=True) if set(group) not in TYPE_CIRCLES] == []


def test_what_takes_the_loop_or_a_trainer_says_what_it_gets():
    """Parts of the loop get what they use; callbacks of the package a `RunningTrainer`, as those of users do."""
    of_loop = {"state", "evaluation", "saving"}
    found = [
        f"{named(name)}:{node.lineno}: {node.name}({argument.arg}: Any)"
        for name in modules()
        for node in ast.walk(parsed(name))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
        if argument.arg in {"loop", "trainer", "formation", *(of_loop if room(name) == "loop" else ())}
        and (argument.annotation is None or ast.unparse(argument.annotation) == "Any")
    ]
    assert not found, "\n".join(found)


def test_public_class_names_mean_one_thing():
    homes = defaultdict(set)
    for name in modules():
        for node in parsed(name).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].add(room(name))
    assert not {word: rooms for word, rooms in homes.items() if len(rooms) > 1}


def test_private_torch_is_used_in_one_module_only():
    found = []
    for name, path in modules().items():
        if name in {"phalanx.torch_compat", "phalanx.launch.forkserver.preload"}:
            continue  # the second one only names modules, for a process that has not imported torch yet
        for number, line in enumerate(path.read_text().splitlines(), 1):
            match = PRIVATE_TORCH.search(line.split("#")[0])
            if match:
                found.append(f"{named(name)}:{number}: {match.group()}")
    assert not found, found


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["train", "--help"],
        ["verify", "--help"],
        ["config", "show"],
        ["--version"],
        ["train", "no-such-recipe"],
        ["verify", "no-such-model"],
        ["bench", "--help"],
        ["bench", "comm", "--help"],
        ["bench", "comm", "--algo", "rign"],
        ["data", "--help"],
        ["data", "make", "--help"],
        ["data", "make", "shape", "--out", "x"],
        ["data", "tokenize", "corpus.txt"],
        ["tune", "--help"],
        ["tune", "digits", "--space", "no-such-file.toml"],
    ],
)
def test_the_command_line_imports_neither_torch_nor_numpy(words):
    code = (
        "import sys; from phalanx.cli import main\n"
        f"try: main({words!r})\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'rich', 'cloudpickle', 'optuna', 'ray'} & set(sys.modules)\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_importing_phalanx_and_its_config_needs_no_torch():
    code = "import sys, phalanx; phalanx.DistributedConfig(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_only_env_reads_rank_variables():
    """Rank variables have one reader, and one writer for the ranks (the launcher)."""
    for name, path in modules().items():
        if named(name) == "world/env.py" or named(name).startswith(("launch/", "engines/", "observe/heartbeat.py")):
            continue
        text = path.read_text()
        for variable in ("LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"):
            assert f'"{variable}"' not in text, f"{named(name)} mentions {variable}"
