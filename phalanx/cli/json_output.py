"""JSON output of verbs, to a file or standard output."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from phalanx.errors import UsageError


def write_json(value: Any, path: str) -> None:
    """Write a value where `--json` says; `-` is standard output."""
    text = json.dumps(value, indent=2) + "\n"
    if path == "-":
        sys.stdout.write(text)
        return
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--json {path}: {error.strerror}") from None
