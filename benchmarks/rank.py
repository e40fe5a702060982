"""One rank of one contestant in a separate process: python rank.py CONTESTANT MODEL DEVICE STEPS FILE."""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
import warnings
from pathlib import Path

import torch
from contestants import CONTESTANTS
from workloads import build_task


def main() -> None:
    """Train, then write the time and a fingerprint of the weights: ranks that were in step have the same."""
    name, model, device, steps, path = sys.argv[1:]
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)  # banners are not part of a step
    contestant = CONTESTANTS[name]
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_float32_matmul_precision("high")
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    task = build_task(model, device=device, world_size=world_size, steps=int(steps) or None)
    before = fingerprint(task.model)
    getattr(importlib.import_module(contestant.module), contestant.function)(task)
    result = {
        "ms_per_step": task.clock.ms_per_step,
        "before": before,
        "after": fingerprint(task.model),
    }
    Path(path).write_text(json.dumps(result), encoding="utf-8")


def fingerprint(model: torch.nn.Module) -> float:
    return sum(parameter.detach().double().abs().sum().item() for parameter in model.parameters())


if __name__ == "__main__":
    main()
