"""The package as a graph of modules and imports, read from the source."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "phalanx"
ENTRY_POINT_GROUPS = {"phalanx.engines", "phalanx.strategies"}
"""Texts that are spelled as a module, and name entry points of other packages."""
_NAMED = re.compile(
    r"(?P<whole>phalanx(?:\.\w+)+)(?:\.|:\w+)?"  # "phalanx.zoo.recipe:recipe_job"; f"phalanx.cli.{verb}"
    r"|.*(?:\bfrom|-m) (?P<code>phalanx(?:\.\w+)*)\b.*"  # code and commands for another process
)


@functools.cache
def modules() -> dict[str, Path]:
    """Every module of the package by dotted name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts).removesuffix(".__init__")] = path
    return found


@functools.cache
def parsed(name: str) -> ast.Module:
    return ast.parse(modules()[name].read_text())


def _targets(node: ast.AST) -> Iterator[str]:
    """Modules of the package that one import statement names."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name in modules())
    elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "phalanx":
        for alias in node.names:
            inner = f"{node.module}.{alias.name}"
            yield inner if inner in modules() else node.module


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


@functools.cache
def imports(name: str, *, types: bool = True, functions: bool = True) -> frozenset[str]:
    """Modules that a module imports, also under `if` and `try`; optionally for type checking and inside functions."""

    def visit(node: ast.AST) -> Iterator[str]:
        yield from _targets(node)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)) and not functions:
                continue
            if _is_type_checking(child) and not types:
                continue
            yield from visit(child)

    return frozenset(visit(parsed(name))) - {name, "phalanx"}


@functools.cache
def loads(name: str) -> frozenset[str]:
    """Modules that importing a module loads, itself included: those of imports outside functions, and all packages."""
    found, pending = set[str](), [name]
    while pending:
        module = pending.pop()
        if module and module not in found:
            found.add(module)
            pending += [*imports(module, types=False, functions=False), module.rpartition(".")[0]]
    return frozenset(found)


def imports_in_functions(name: str) -> Iterator[tuple[int, frozenset[str]]]:
    """Line and modules of each import statement inside a function that names modules of the package."""
    functions = [node for node in ast.walk(parsed(name)) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    for node in {inner for function in functions for inner in ast.walk(function)}:
        if targets := frozenset(_targets(node)):
            yield node.lineno, targets  # type: ignore[attr-defined]


@functools.cache
def named_in_texts(name: str) -> frozenset[str]:
    """Modules that texts of a module name for an import: entries of tables, code for another process. No prose."""
    tree = parsed(name)
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    texts = {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose
    }
    matches = filter(None, map(_NAMED.fullmatch, texts - ENTRY_POINT_GROUPS))
    return frozenset(match["whole"] or match["code"] for match in matches) & {*modules()} - {name, "phalanx"}


def circles(*, types: bool, functions: bool = False) -> list[list[str]]:
    """Strongly connected groups of modules (Tarjan), largest first."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in sorted(imports(name, types=types, functions=functions)):
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            group = []
            while not group or group[-1] != name:
                group.append(stack.pop())
            if len(group) > 1:
                found.append(sorted(group))

    for name in modules():
        if name not in index:
            visit(name)
    return sorted(found, key=len, reverse=True)


def room(name: str) -> str:
    """The top-level package or module that a module belongs to."""
    return name.split(".")[1] if "." in name else ""
