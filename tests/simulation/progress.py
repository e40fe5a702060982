"""How far a long run of seeds has come: one that is cut goes on where it was, if the code is still the same."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_SIMULATOR = ("cluster", "history", "invariants", "launcher", "network", "plan", "ranks")


def code() -> str:
    """Return a name of the code that decides about a history: another one if a line of it has changed."""
    digest = hashlib.sha256()
    files = [path for folder in ("launch", "recovery") for path in (_ROOT / "phalanx" / folder).rglob("*.py")]
    files += [Path(__file__).with_name(f"{name}.py") for name in _SIMULATOR]
    for path in sorted(files):
        digest.update(f"{path.relative_to(_ROOT)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def commit() -> str:
    """Return the commit of the working tree, "" outside a repository."""
    words = ["git", "-C", str(_ROOT), "describe", "--always", "--dirty", "--exclude", "*"]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()


class Progress:
    """The seeds of a run, those that are done, and those that failed; with a path in a file."""

    def __init__(self, seeds: range, most_nodes: int, path: Path | None = None) -> None:
        self._path = path
        self._run = {"first": seeds.start, "nodes": most_nodes, "code": code()}
        self.commit = commit()
        self.done = 0
        self.cpu_seconds = 0.0
        self.failed: dict[int, str] = {}
        if path is not None and path.exists():
            kept = json.loads(path.read_text())
            if kept["run"] == self._run:
                self.done, self.cpu_seconds = kept["done"], kept["cpu_seconds"]
                self.failed = {int(seed): text for seed, text in kept["failed"].items()}
        self.rest = seeds[self.done :]

    def note(self, seed: int, violation: Exception | None, cpu_seconds: float) -> None:
        """Note the result of the next seed."""
        self.done += 1
        self.cpu_seconds += cpu_seconds
        if violation is not None:
            self.failed[seed] = str(violation)

    def save(self) -> None:
        """Write the file, whole or not at all."""
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        facts = {"done": self.done, "cpu_seconds": round(self.cpu_seconds, 1), "failed": self.failed}
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps({"run": self._run, "commit": self.commit, **facts}, indent=1))
        os.replace(new, self._path)
