"""One rank of memory.py: builds a GPT under the given settings, takes three steps, and says what it holds.

Started by memory.py under `phalanx train --script`; prints one line of JSON a rank.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch

import phalanx
from phalanx.zoo.models.gpt import gpt

_WARM_STEPS = 2


def main() -> None:
    """Measure this rank."""
    request = json.loads(sys.argv[1])
    with phalanx.Formation(**request["settings"]) as formation:
        held = _measure(formation, request["model"], on_meta=request["on_meta"])
        gathered: list[Any] = [None] * formation.world_size
        if formation.world_size > 1:
            torch.distributed.all_gather_object(gathered, held)
        else:
            gathered = [held]
        if formation.is_main:
            Path(request["answer"]).write_text(json.dumps(gathered))


def _measure(formation: phalanx.Formation, shape: dict[str, Any], *, on_meta: bool) -> dict[str, float]:
    device = formation.device
    _touch(device)
    before = _held(device)
    with torch.device("meta") if on_meta else contextlib.nullcontext():
        model = gpt(**shape)
    wrapped = formation.prepare(model)
    optimizer = formation.prepare(torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))
    tokens = torch.zeros(2, 8, dtype=torch.long, device=device)
    held = 0.0
    for _ in range(_WARM_STEPS + 1):
        formation.train_batch(wrapped, (tokens, tokens))
        held = _held(device) - before  # weights and gradients, and from the second step on the optimizer's states
        optimizer.step()
        optimizer.zero_grad()
    return {"held": held, "peak": _peak(device) - before, "rank": formation.rank}


def _touch(device: torch.device) -> None:
    """Let the libraries take what they take anyway, before anything is counted."""
    layer = torch.nn.Linear(64, 64, device=device)
    layer(torch.zeros(4, 64, device=device)).sum().backward()
    torch.optim.AdamW(layer.parameters(), fused=True).step()


def _held(device: torch.device) -> float:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        return float(torch.cuda.memory_allocated())
    ctypes.CDLL(None).malloc_trim(0)  # what was freed is given back, so that the resident set is what is in use
    return _status("VmRSS")


def _peak(device: torch.device) -> float:
    return float(torch.cuda.max_memory_allocated()) if device.type == "cuda" else _status("VmHWM")


def _status(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return float(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


main()
