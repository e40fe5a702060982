"""What an answer must not use: phalanx, the solutions, the graders, and what its exercise is about."""

from __future__ import annotations

import ast
import importlib
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

COURSE = Path(__file__).resolve().parents[1]
_NEVER = ("phalanx", "solutions", "grader")
_OTHER_WAYS = (
    *("torch.distributed._functional_collectives", "torch.distributed.nn", "torch.distributed.tensor"),
    *("torch.ops._c10d_functional", "torch.ops.c10d"),
)
"""Collectives that do not pass through the process group's methods."""
_STARTS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "pty.spawn")
"""What Python calls the start of another program; a fork of this process keeps its refusals."""
_HIDDEN = (
    *(COURSE / "solutions", COURSE / "grader" / "checks"),
    *(folder for name in ("solution", "example") for folder in sorted((COURSE / "module-202").rglob(name))),
)


class Refused(ImportError):
    """An answer asked for a module, a class or a function that it must not have."""


class RefusedFile(PermissionError):
    """An answer wanted to read a file that it must not have, or to start a program, which could."""


def uses(tree: ast.Module, target: str, forbidden: Iterable[str]) -> tuple[int, str] | None:
    """Return the line and the name of the first forbidden thing that an answer uses, or None.

    The target may not use what its exercise forbids, nor may what it calls in the same file; the whole file may not use
    phalanx, the solutions and the graders. Names are followed through imports: after `import torch.distributed as
    dist`, dist.all_reduce is torch.distributed.all_reduce.
    """
    names = dict(_imported(tree))
    wanted = tuple(forbidden)
    if any(name.startswith("torch.distributed.") for name in wanted):
        wanted += _OTHER_WAYS
    return _first(reached(tree, target), names, wanted) or _first([tree], names, _NEVER)


def _first(nodes: Iterable[ast.AST], names: dict[str, str], forbidden: Iterable[str]) -> tuple[int, str] | None:
    bad = tuple(forbidden)
    for node in (inner for outer in nodes for inner in ast.walk(outer)):
        for name in _names_of(node, names):
            if any(name == word or name.startswith(word + ".") for word in bad):
                return node.lineno, name  # type: ignore[attr-defined]
    return None


def reached(tree: ast.Module, target: str) -> list[ast.stmt]:
    """Return the definition of the target and of everything in the file that it names, directly or not."""
    defined: dict[str, ast.stmt] = {}
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            defined[node.name] = node
        elif isinstance(node, ast.Assign):
            defined |= {name.id: node for name in node.targets if isinstance(name, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            defined[node.target.id] = node
    found: list[str] = []
    waiting = [target]
    while waiting:
        name = waiting.pop()
        if name in defined and name not in found:
            found.append(name)
            waiting += [node.id for node in ast.walk(defined[name]) if isinstance(node, ast.Name)]
    return [defined[name] for name in found]


def _imported(tree: ast.AST) -> Iterable[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                yield alias.asname or first, alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def _names_of(node: ast.AST, names: dict[str, str]) -> Iterable[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Name) and node.id in names:
        yield names[node.id]
    elif isinstance(node, ast.Attribute):
        parts: list[str] = []
        inner: ast.AST = node
        while isinstance(inner, ast.Attribute):
            parts.insert(0, inner.attr)
            inner = inner.value
        if isinstance(inner, ast.Name) and inner.id in names:
            yield ".".join([names[inner.id], *parts])


def protect(answer: Path, forbidden: Iterable[str], programs: bool) -> None:
    """Refuse, in this process and for good, to import phalanx and to read the solutions and the graders.

    Unless the answer may start programs, these are refused, too: what a program reads is not seen here.
    """
    hidden = [str(folder) for folder in _HIDDEN if not answer.is_relative_to(folder)]

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "import" and str(arguments[0]).partition(".")[0] == "phalanx":
            raise Refused("phalanx is not for the answers of the course: write it with torch")
        if event in _STARTS and not programs:
            raise RefusedFile("an answer starts no other programs: write it in Python")
        if event == "open" and isinstance(arguments[0], (str, bytes, os.PathLike)):
            name = os.path.realpath(os.fsdecode(arguments[0]))
            if any(name.startswith(folder + os.sep) for folder in hidden):
                raise RefusedFile(f"{os.path.relpath(name, COURSE)} is not for answers: write your own")

    for name in forbidden:
        _refuse(name)
    sys.addaudithook(hook)


def _refuse(name: str) -> None:
    """Make a class or function of torch raise; calls of the process group are refused where they are recorded."""
    module, _, attribute = name.rpartition(".")
    if module == "torch.distributed":
        return
    found = getattr(importlib.import_module(module), attribute)

    def refused(*_: Any, **__: Any) -> None:
        raise Refused(f"{name} is what this exercise asks you to write")

    if isinstance(found, type):
        found.__init__ = refused  # type: ignore[misc]
    else:
        setattr(importlib.import_module(module), attribute, refused)
