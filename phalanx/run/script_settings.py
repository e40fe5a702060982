"""Settings of `phalanx train --script` that would have no effect: by what of Phalanx the script uses, as its code says.

The script and the modules beside it are read, not run. Where that cannot tell (names that are made at run time, a
package that depends on Phalanx), every setting may have a reader.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import itertools
import re
import sys
import sysconfig
from collections.abc import Collection, Iterator
from importlib.metadata import distribution, packages_distributions
from pathlib import Path
from typing import NamedTuple

from phalanx.config import FIELDS, ResolvedConfig
from phalanx.config.ways import IN_SCRIPT, SCRIPT, unused_by_script
from phalanx.errors import UsageError
from phalanx.launch import ModuleTarget, ScriptTarget
from phalanx.observe.guard import say_to_user

_READ_NOTHING = {"log", "errors", "models", "data", "version", "__version__"}
"""Names of Phalanx that read no settings."""
_VARIABLES = "PHALANX_"


class ScriptUsage(NamedTuple):
    """What a script usage."""

    users: frozenset[str]
    """Who uses settings there; see `option`."""
    names: Collection[str] = ()
    """The names in its code: a loop may read `f.config.epochs`."""


def check_script_settings(target: ScriptTarget | ModuleTarget, resolved: ResolvedConfig) -> None:
    """Refuse flags that have no effect for a script; name such settings of other sources, which runs may share."""
    config = resolved.config
    changed = config.changed(*FIELDS)
    if not unused_by_script(changed, SCRIPT, config.backend):
        return
    usage = usage_of(target)
    changed = [name for name in changed if name not in usage.names]
    unused = unused_by_script(changed, usage.users, config.backend)
    by_flag = {name for name, origin in resolved.origins.items() if origin == "flag"}
    refused = [name for name in unused if name in by_flag]
    if refused:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in refused)
        raise UsageError(
            f"{flags} would have no effect: {_why(usage, target)}",
            hint="\n  ".join(f"{name}: {unused[name]}" for name in refused),
        )
    if unused:
        settings = "; ".join(f"{name} = {getattr(config, name)!r}: {text}" for name, text in unused.items())
        say_to_user(f"warning: settings without effect, for {_why(usage, target)}: {settings}")


def _why(usage: ScriptUsage, target: ScriptTarget | ModuleTarget) -> str:
    name = target.path if isinstance(target, ScriptTarget) else target.name
    if usage.users == SCRIPT:
        return f"{name} uses neither a Trainer nor a Formation of Phalanx"
    return (
        f"{name} trains with your own loop"
        if usage.users == IN_SCRIPT["Formation"]
        else f"the ranks of {name} are those of a script"
    )


def usage_of(target: ScriptTarget | ModuleTarget) -> ScriptUsage:
    """Return who uses settings in a script or module, and the names in its code."""
    code = _Code(target)
    if code.is_opaque:
        return ScriptUsage(IN_SCRIPT["trainer"])
    readers = code.of_phalanx - _READ_NOTHING
    if not readers:
        return ScriptUsage(SCRIPT)
    if readers == {"Formation"}:
        return ScriptUsage(IN_SCRIPT["Formation"], code.names)
    return ScriptUsage(IN_SCRIPT["trainer"])


class _Code:
    """The code of a script and of the modules beside it that it imports."""

    def __init__(self, target: ScriptTarget | ModuleTarget) -> None:
        self.names: set[str] = set()
        self.of_phalanx: set[str] = set()
        """What it uses of Phalanx: `Formation` of phalanx.Formation, `data` of phalanx.data.load."""
        self.is_opaque = False
        """Whether the code cannot tell which settings are read."""
        self._aliases = {"phalanx"}
        self._files_read: set[Path] = set()
        first = _first_file(target)
        if first is None:
            self.is_opaque = True
            return
        self._roots = (first.parent, Path.cwd())
        self._read(first, "" if isinstance(target, ScriptTarget) else target.name)

    def _read(self, path: Path, module: str) -> None:
        if path in self._files_read:
            return
        self._files_read.add(path)
        try:
            tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError):  # the rank that runs it reports it better
            self.is_opaque = True
            return
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        for node in ast.walk(tree):
            self._note(node)
            for name in _imported(node, package):
                for whole in itertools.accumulate(name.split("."), "{}.{}".format):  # a package runs before its parts
                    self._follow(whole, path.parent)

    def _note(self, node: ast.AST) -> None:
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name):
                self.names.add(name)
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                    self.of_phalanx |= {name} if node.value.id in self._aliases else set()
            case ast.Constant(value=str() as text):
                self.is_opaque |= _VARIABLES in text or text == "phalanx"
            case ast.Import(names=imported):
                self._aliases |= {alias.asname for alias in imported if alias.name == "phalanx" and alias.asname}
                self.of_phalanx |= {alias.name.split(".")[1] for alias in imported if alias.name.startswith("phalanx.")}
            case ast.ImportFrom(module="phalanx", level=0, names=imported):
                self.of_phalanx |= {alias.name for alias in imported}
            case ast.ImportFrom(module=str() as module, level=0) if module.startswith("phalanx."):
                self.of_phalanx.add(module.split(".")[1])

    def _follow(self, name: str, folder: Path) -> None:
        """Read a module of the user's; an installed package counts if it depends on Phalanx."""
        top = name.partition(".")[0]
        if top == "phalanx" or top in sys.stdlib_module_names:
            return
        for root in dict.fromkeys((folder, *self._roots)):
            path = root / name.replace(".", "/")
            files = [file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()]
            if files:
                self._read(files[0], name)
                return
            if (root / top).is_dir() or (root / f"{top}.py").is_file():  # a name in a module that is read
                return
        self.is_opaque |= not _is_independent(top)


def _first_file(target: ScriptTarget | ModuleTarget) -> Path | None:
    """Return the file that is run; None if it is not known before it runs."""
    if isinstance(target, ScriptTarget):
        return Path(target.path)
    for folder in (Path.cwd(), *map(Path, sys.path)):
        path = folder / target.name.replace(".", "/")
        for file in (path / "__main__.py", path.with_suffix(".py")):
            if file.is_file():
                return file
    return None


def _imported(node: ast.AST, package: str) -> Iterator[str]:
    """Yield the modules that a statement may import."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        parts = package.split(".") if package else []
        base = ".".join([*parts[: len(parts) - node.level + 1], *filter(None, [node.module])] if node.level else [])
        module = base or node.module or ""
        yield from filter(None, (module, *(f"{module}.{alias.name}" if module else alias.name for alias in node.names)))


@functools.cache
def _is_independent(top: str) -> bool:
    """Whether an installed package, by the name of its module, does not depend on Phalanx."""
    spec = importlib.util.find_spec(top)
    if spec is None:
        return True  # an optional import
    places = [spec.origin or "", *(spec.submodule_search_locations or [])]
    installed = [sysconfig.get_path(kind) for kind in ("purelib", "platlib", "stdlib", "platstdlib")]
    if (
        not any(location.startswith(folder) for location in places for folder in installed)
        and spec.origin != "built-in"
    ):
        return False  # somewhere else on the path
    needed = [text for name in packages_distributions().get(top, ()) for text in distribution(name).requires or ()]
    return not any(re.match(r"phalanx\b", text) for text in needed)
