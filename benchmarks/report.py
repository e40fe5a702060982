"""Numbers of interleaved rounds as ratios, a table and a JSON file."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

_PACKAGES = ("torch", "phalanx", "accelerate", "lightning", "pytorch-lightning", "transformers")


def ratio(values: list[float], base: list[float]) -> float:
    """Return the median over the rounds of value / base: each round is compared with its own baseline."""
    return median(value / reference for value, reference in zip(values, base, strict=True))


def table(title: str, header: list[str], rows: list[list[str]]) -> str:
    """Return an aligned Markdown table under a heading."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    lines = [_line(header, widths), "|" + "|".join(_rule(column, width) for column, width in enumerate(widths)) + "|"]
    return "\n".join([f"### {title}", "", *lines, *(_line(row, widths) for row in rows), ""])


def _line(cells: list[str], widths: list[int]) -> str:
    """Names stand left, numbers right."""
    aligned = [
        cell.rjust(width) if column else cell.ljust(width)
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return "| " + " | ".join(aligned) + " |"


def _rule(column: int, width: int) -> str:
    return "-" * (width + 1) + ":" if column else "-" * (width + 2)


def environment(device: str = "cpu") -> dict[str, Any]:
    """Return what the numbers depend on: the kind of machine and the versions."""
    found = {"python": platform.python_version(), "cores": os.cpu_count(), "device": device}
    if device == "cuda":
        import torch

        found["device"] = torch.cuda.get_device_name()
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def describe(found: dict[str, Any]) -> str:
    """Return the environment in one line."""
    return ", ".join(f"{name} {value}" for name, value in found.items())


def write_json(path: Path | None, document: dict[str, Any]) -> None:
    """Write the numbers, every round of them, when a file was asked for."""
    if path is not None:
        path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
