"""The house keeps its shape: imports point only down, no cycles, files stay small, help costs nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx import errors

PACKAGE = Path(__file__).resolve().parents[2] / "phalanx"

LAYERS = {
    "version": 0,
    "errors": 0,
    "config": 0,
    "recipes": 1,
    "plan": 1,
    "host": 1,
    "observe": 1,
    "launch": 1,
    "world": 2,
    "comm": 3,
    "runs": 4,
    "strategies": 4,
    "checkpoint": 4,
    "data": 4,
    "models": 4,
    "loop": 5,
    "trainers": 6,
    "tune": 6,
    "worker": 7,
    "cli": 7,
    "__main__": 7,
}
SIDEWAYS = {
    ("config", "errors"),
    ("errors", "version"),
    ("launch", "host"),
    ("launch", "observe"),
    ("observe", "host"),
    ("__main__", "cli"),
    ("tune", "trainers"),
    ("strategies", "models"),
}
"""Packages of one layer of which the first may import the second."""
PARENT_SIDE = "launch"
RANK_SIDE = ("world", "comm", "strategies", "loop", "data", "checkpoint", "models")
"""What runs in ranks does not import what starts them, although it stands above it; both may import host."""

MAX_LINES = 400


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def modules() -> list[Path]:
    return [path for path in sorted(PACKAGE.rglob("*.py")) if path.parent != PACKAGE or path.name != "__init__.py"]


def imports_of(path: Path) -> set[str]:
    """Every phalanx module a file imports, also inside functions and for type checking."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} if node.module != "phalanx" else {f"phalanx.{alias.name}" for alias in node.names}
    return {name for name in found if name.startswith("phalanx.")}


def test_every_part_has_a_layer():
    assert {part_of(path) for path in modules()} <= set(LAYERS)


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path):
    mine = part_of(path)
    for name in imports_of(path):
        other = name.split(".")[1]
        if other == mine:
            continue
        allowed = LAYERS[other] < LAYERS[mine] or (mine, other) in SIDEWAYS
        assert allowed, f"{path.relative_to(PACKAGE)} (layer {LAYERS[mine]}) imports {name} (layer {LAYERS[other]})"


@pytest.mark.parametrize("part", RANK_SIDE)
def test_rank_side_packages_do_not_import_the_launcher(part):
    for path in sorted((PACKAGE / part).rglob("*.py")):
        found = [name for name in imports_of(path) if name.split(".")[1] == PARENT_SIDE]
        assert not found, f"{path.relative_to(PACKAGE)} imports {found}"


def test_no_import_cycles_at_run_time():
    """Cycles between files, counting only imports that run when the module is loaded."""
    graph = {}
    for path in modules():
        name = ".".join(("phalanx", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")
        graph[name] = _loaded_with(path)
    state: dict[str, int] = {}

    def visit(name: str, trail: tuple[str, ...]) -> None:
        if state.get(name) == 2 or name not in graph:
            return
        assert state.get(name) != 1, "cycle: " + " -> ".join((*trail, name))
        state[name] = 1
        for other in graph[name]:
            visit(other, (*trail, name))
        state[name] = 2

    for name in graph:
        visit(name, ())


def _loaded_with(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("phalanx."):
            submodules = {f"{node.module}.{alias.name}" for alias in node.names}
            files = {
                name for name in submodules if (PACKAGE.parent / Path(*name.split("."))).with_suffix(".py").exists()
            }
            found |= files or {node.module}
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_files_stay_small(path):
    lines = len(path.read_text().splitlines())
    assert lines <= MAX_LINES, f"{lines} lines: does it still have one purpose?"


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
        ["bench", "compression", "--help"],
        ["bench", "compression", "--links", "fast"],
        ["bench", "comm", "--help"],
        ["bench", "comm", "--algo", "rign"],
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


def test_every_public_error_is_defined_in_errors():
    """The parent rebuilds an error of a rank by its name in `errors`; one defined elsewhere would lose its type."""
    known = {"PhalanxError", *(name for name, kind in vars(errors).items() if _is_error(kind))}
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and path.name != "errors.py" and not node.name.startswith("_"):
                bases = {
                    base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "") for base in node.bases
                }
                assert not bases & known, f"{path.relative_to(PACKAGE)}: move {node.name} to errors.py"


def _is_error(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, errors.PhalanxError)


def test_only_env_reads_rank_variables():
    """Rank variables have one reader, and one writer for the ranks (the launcher)."""
    for path in modules():
        relative = str(path.relative_to(PACKAGE))
        if relative == "world/env.py" or relative.startswith(("launch/", "observe/heartbeat.py")):
            continue
        text = path.read_text()
        for name in ("LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"):
            assert f'"{name}"' not in text, f"{relative} mentions {name}"
