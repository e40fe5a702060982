"""What is installed here, without importing it: packages, the CUDA version of torch, and which extras are complete."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import sys
from contextlib import suppress
from pathlib import Path

_NOT_FOR_USERS = ("bench", "dev", "docs", "engines", "lint", "test")
"""Extras of the package for its own development."""

NEWEST_TORCH = "2.15"
"""The newest torch that Phalanx was tested with (`make test-torch`); a newer one is used, and named if a run fails."""


def untested_torch(version: str | None) -> str:
    """Return the note about a torch that is newer than the newest tested; empty for any other."""
    match = re.match(r"(\d+)\.(\d+)", version or "")
    if match is None or (int(match[1]), int(match[2])) <= tuple(map(int, NEWEST_TORCH.split("."))):
        return ""
    return f"torch {version} is newer than {NEWEST_TORCH}, the newest that Phalanx was tested with"


def installed_packages() -> dict[str, str]:
    """Return the installed packages with their versions, by the names of their folders: nothing is read."""
    versions: dict[str, str] = {}
    for folder in sys.path:
        with suppress(OSError):
            for name in os.listdir(folder or "."):
                if match := re.fullmatch(r"(.+?)-([^-]+)\.(?:dist-info|egg-info)", name):
                    versions.setdefault(match[1].replace("_", "-").lower(), match[2])  # the first one is imported
    return dict(sorted(versions.items()))


def cuda_of_torch() -> str | None:
    """Return the CUDA version that torch was built for, "none" for the CPU; None where torch is not installed."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    match = re.search(r"^cuda\b.*= *(?:'([\d.]+)'|None)", text, re.MULTILINE)
    return None if match is None else match[1] or "none"


def extras(installed: dict[str, str]) -> dict[str, list[str]]:
    """Return what each extra of this package lacks, by its name; an empty list where it is complete."""
    try:
        needed = importlib.metadata.requires("phalanx") or []
    except importlib.metadata.PackageNotFoundError:  # it runs from its sources
        return {}
    missing: dict[str, list[str]] = {}
    for line in needed:
        match = re.match(r"([\w.-]+).*extra == ['\"]([\w-]+)['\"]", line)
        if match is None or match[2] in _NOT_FOR_USERS or "platform_machine" in line:
            continue
        lacking = missing.setdefault(match[2], [])
        if (name := match[1].replace("_", "-").lower()) not in installed:
            lacking.append(name)
    return missing
