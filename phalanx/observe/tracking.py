"""The ids of a run at tracking services, kept in `tracking.json` of its folder so that a resumed run continues them."""

from __future__ import annotations

import json
from pathlib import Path

from phalanx.host.files import replace_file
from phalanx.observe.guard import Guard, say_to_user

_NAME = "tracking.json"


def read_tracking(run_dir: Path | None, service: str) -> str | None:
    """Return the id of the run in this folder at a service, where it has one."""
    return None if run_dir is None else _read(run_dir).get(service)


def write_tracking(run_dir: Path | None, service: str, run_id: str) -> None:
    """Keep the id of the run in this folder at a service."""
    if run_dir is not None:
        path, ids = run_dir / _NAME, _read(run_dir) | {service: run_id}
        Guard(str(path), say_to_user).attempt(lambda: replace_file(path, json.dumps(ids, indent=2) + "\n"))


def _read(run_dir: Path) -> dict[str, str]:
    path = run_dir / _NAME
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return {str(service): str(run_id) for service, run_id in found.items()}
