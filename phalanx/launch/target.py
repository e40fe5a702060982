"""Run the user's script, module or function in a rank exactly as a fresh Python would."""

from __future__ import annotations

import importlib
import importlib.machinery
import multiprocessing.process
import os
import runpy
import sys
import types
from pathlib import Path
from typing import Any

from phalanx.host.processes import PACKAGE
from phalanx.launch.spec import CallTarget, ModuleTarget, ScriptTarget, Target


def to_message(target: Target) -> dict[str, Any]:
    """Return a target as a message to the rank."""
    if isinstance(target, ScriptTarget):
        return {"script": str(target.path), "args": list(target.args)}
    if isinstance(target, ModuleTarget):
        return {"module": target.name, "args": list(target.args)}
    return {"call": target.function, "payload": target.payload}


def from_message(message: dict[str, Any]) -> Target:
    """Read back what `to_message` wrote."""
    if "script" in message:
        return ScriptTarget(message["script"], tuple(message["args"]))
    if "module" in message:
        return ModuleTarget(message["module"], tuple(message["args"]))
    return CallTarget(message["call"], message["payload"])


def run_target(target: Target, caller_path: list[str]) -> None:
    """Run the target in this process, as its main program."""
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    # The fork server was started elsewhere; spawned children resolve a relative main path against this.
    multiprocessing.process.ORIGINAL_DIR = os.getcwd()  # type: ignore[attr-defined]
    if isinstance(target, ScriptTarget):
        _run_script(target, main)
    elif isinstance(target, ModuleTarget):
        sys.argv = ["-m", *target.args]
        sys.orig_argv = [sys.executable, "-m", target.name, *target.args]
        sys.path[:] = [os.getcwd(), *_interpreter_path()]
        # What the interpreter itself calls for -m: packages, __main__ modules and its messages behave the same.
        runpy._run_module_as_main(target.name)  # type: ignore[attr-defined]
    else:
        sys.path[:] = [entry or os.getcwd() for entry in caller_path]
        call(target.function, target.payload)


def _run_script(target: ScriptTarget, main: types.ModuleType) -> None:
    path = os.path.abspath(target.path)
    sys.argv = [str(target.path), *target.args]
    sys.orig_argv = [sys.executable, *sys.argv]
    sys.path[:] = [str(Path(path).resolve().parent), *_interpreter_path()]
    main.__file__ = path
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    main.__dict__["__cached__"] = None
    code = compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
    exec(code, main.__dict__)


def call(function: str, *arguments: Any) -> None:
    """Import `package.module:name` and call it."""
    module, _, name = function.partition(":")
    getattr(importlib.import_module(module), name)(*arguments)


def _interpreter_path() -> list[str]:
    """Return the interpreter's own import path; a folder that `python -m phalanx...` put first goes last."""
    package_root = os.path.dirname(os.path.realpath(PACKAGE))
    if sys.path[0] != package_root or package_root in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        return list(sys.path)
    others = sys.path[1:]
    return others if package_root in others else [*others, package_root]
