"""What `phalanx predict` prints and writes. This module imports torch; `cli.predict` loads it when the verb runs."""

from __future__ import annotations

import argparse
import csv
import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import torch

from phalanx.cli.evaluate import asked_of
from phalanx.cli.flags import given_flags
from phalanx.cli.json_output import print_json
from phalanx.errors import UsageError, a_type
from phalanx.observe.format import table
from phalanx.zoo.models.decoder import Decoder
from phalanx.zoo.models.generation import Sampling
from phalanx.zoo.models.t5 import T5
from phalanx.zoo.saved_run import SavedRun, load_run, open_run
from phalanx.zoo.text_model import language_model, text_of_run, written_text

_OF_ROWS = (".jsonl", ".csv")
"""Files with a row per sample; the others hold the outputs themselves."""
_DIGITS = 6
_EXACT = 9
"""Digits that tell any two numbers of 32 bits apart."""


def predict(namespace: argparse.Namespace) -> int:
    """Print or write what a trained model gives for data or for a text; return the exit code."""
    request = asked_of(namespace)
    if namespace.prompt is not None:
        for name, value in (("--data", request["data"]), ("--set", request["changes"]), ("--model", request["model"])):
            if value:
                raise UsageError(f"--prompt and {name} exclude each other", hint="Leave one of them out.")
        saved = load_run(namespace.run, checkpoint=namespace.checkpoint)
        print(_continued(saved, namespace))
        return 0
    saved_run, data = open_run(**request, needs_target=False)
    if hasattr(saved_run.model, "generate") and not namespace.raw:
        raise UsageError(
            f"{a_type(saved_run.model)} gives scores of every token at every place, which are not texts",
            hint=f'Write: phalanx predict {namespace.run} --prompt "TEXT", or add --raw for the scores.',
        )
    with redirect_stdout(sys.stderr):
        outputs = saved_run.predict(data, **given_flags(namespace))
    path = None if namespace.output is None else Path(namespace.output)
    if path is not None and path.suffix not in _OF_ROWS:
        count = _write_outputs(outputs, path)
    else:
        decode = None if namespace.raw else getattr(data, "predictions", None)  # data whose outputs mean texts
        rows = _rows(outputs, data, saved_run, raw=namespace.raw) if decode is None else decode(outputs)
        count = len(rows)
        if namespace.json:
            print_json({"run": saved_run.name, "checkpoint": str(saved_run.checkpoint), "rows": rows})
        elif path is None:
            print(_as_table(rows))
        if path is not None:
            with path.open("w", encoding="utf-8", newline="") as file:
                _write_rows(rows, file, path.suffix)
    if path is not None:
        print(f"wrote {count} rows to {path}", file=sys.stderr if namespace.json else sys.stdout)
    return 0


def _continued(saved: Any, namespace: Any) -> str:
    """Return a text with what follows it, a chat model's answer, or what an encoder and decoder write for it."""
    model = language_model(saved)
    if not isinstance(model, Decoder | T5):
        raise UsageError(f"{a_type(model)} does not continue texts", hint="Leave --prompt out.")
    if not namespace.prompt or namespace.max_tokens < 1:
        raise UsageError("--prompt needs at least one letter to continue, and --max-tokens at least 1")
    request = namespace.prompt, namespace.max_tokens, Sampling(temperature=namespace.temperature)
    if isinstance(model, T5):
        return written_text(saved, *request)
    return text_of_run(saved).answer(*request)


def _as_table(rows: list[dict[str, Any]]) -> str:
    """Return rows as a table with a title; a class is shown by its name."""
    names = [name for name in rows[0] if name != "class" or "name" not in rows[0]] if rows else []
    title_of = {"name": "class"}
    cells = [[json.dumps(row[n]) if isinstance(row[n], list) else str(row[n]) for n in names] for row in rows]
    return table([[title_of.get(name, name) for name in names], *cells])


def _rows(outputs: Any, data: Any, run: SavedRun, *, raw: bool) -> list[dict[str, Any]]:
    """Return what is written of each sample: its row and file, and the class with its probability, or the output."""
    if not isinstance(outputs, torch.Tensor) and not all(isinstance(part, torch.Tensor) for part in outputs):
        raise _not_one_tensor(outputs)
    places, files = _inputs(data, len(outputs))
    rows: list[dict[str, Any]] = [{"row": index} for index in places]
    for row, file in zip(rows, files, strict=False):
        row["file"] = file
    classes: list[str] = run.classes
    if raw or not _is_classifier(outputs, data, run):
        digits = _EXACT if raw else _DIGITS
        for row, output in zip(rows, outputs, strict=True):
            row["output"] = _rounded(output.tolist(), digits)
        return rows
    likeliest = outputs.float().softmax(-1).max(-1)
    for row, number, share in zip(rows, likeliest.indices.tolist(), likeliest.values.tolist(), strict=True):
        row["class"] = number
        if len(classes) == outputs.shape[-1]:
            row["name"] = classes[number]
        row["probability"] = _rounded(share, _DIGITS)
    return rows


def _inputs(data: Any, count: int) -> tuple[list[int], list[str]]:
    """Return the samples' places in the data as they are stored, and the names of their files where they have some."""
    places = list(range(count))
    while isinstance(indices := getattr(data, "indices", None), list) and hasattr(data, "dataset"):  # a subset
        places, data = [indices[row] for row in places], data.dataset
    samples = getattr(data, "samples", None)  # of folders of images, as torchvision has it: (file, label)
    if isinstance(samples, list):
        return places, [_shorter(str(samples[row][0])) for row in places]
    return places, [data.name(row) for row in places] if hasattr(data, "name") else []


def _shorter(file: str) -> str:
    """Return a path below the current folder as it is seen from there."""
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file


def _is_classifier(outputs: Any, data: Any, run: SavedRun) -> bool:
    """Whether an output scores classes: one for each known name, or those of a run whose labels are whole numbers."""
    if isinstance(outputs, list) or outputs.ndim != 2 or outputs.shape[1] < 2 or not outputs.is_floating_point():
        return False
    if run.classes:
        return bool(len(run.classes) == outputs.shape[1])
    if "target_type" in run.learned:
        return bool(run.learned["target_type"] == "class")
    sample = data[0] if hasattr(data, "__getitem__") and hasattr(data, "__len__") else None
    label: Any = sample.get("labels") if isinstance(sample, dict) else sample[-1] if isinstance(sample, tuple) else None
    return isinstance(label, int) or (getattr(label, "ndim", 1) == 0 and not label.is_floating_point())


def _rounded(value: Any, digits: int) -> Any:
    if isinstance(value, list):
        return [_rounded(item, digits) for item in value]
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value


def _write_outputs(outputs: Any, path: Path) -> int:
    """Write the outputs themselves as .pt or .npy, and return how many there are."""
    if path.suffix == ".pt":
        torch.save(outputs, path)
    elif not isinstance(outputs, torch.Tensor):
        raise _not_one_tensor(outputs)
    else:
        np.save(path, (outputs.float() if outputs.dtype == torch.bfloat16 else outputs).numpy())
    return len(outputs)


def _not_one_tensor(outputs: Any) -> UsageError:
    kind = type(outputs).__name__
    return UsageError(f"the model's outputs are a {kind}, not one tensor", hint="Write them with: -o outputs.pt")


def _write_rows(rows: list[dict[str, Any]], file: Any, ending: str) -> None:
    if ending == ".csv":
        lines = csv.DictWriter(file, fieldnames=list(rows[0]) if rows else ["row"])
        lines.writeheader()
        lines.writerows(rows)
        return
    file.writelines(json.dumps(row) + "\n" for row in rows)
