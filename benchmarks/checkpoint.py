"""Saving and restoring one rank's state: Phalanx beside torch.save and torch.distributed.checkpoint.

    PYTHONPATH=$PWD python benchmarks/checkpoint.py                     # 1 GB on the CPU, 4.5 GB on a GPU
    python benchmarks/checkpoint.py --gb 0.2 --rounds 1 --directory /scratch/x

`stall` is how long training waits, `saved` when the checkpoint is complete on the disk, `restore` the time to read it
back into the same tensors (from the page cache). Phalanx hashes what it writes and verifies what it reads; torch does
neither. torch.save does not flush to the disk, the others do. The first save of each is left out: it allocates memory.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from report import describe, environment, ratio, table, write_json

from phalanx.checkpoint import Checkpoint, Request, Saver, Snapshot, load, read_manifest

State = dict[str, dict[str, torch.Tensor]]
Times = dict[str, float]


def make_state(gb: float, device: str) -> State:
    """Return weights and two Adam moments: large matrices with small vectors between them."""
    model: dict[str, torch.Tensor] = {}
    per_layer = 12 * 1024 * 1024 * 4 * 3
    for layer in range(max(1, round(gb * 1e9 / per_layer))):
        for name, rows in (("qkv", 3), ("proj", 1), ("up", 4), ("down", 4)):
            model[f"layers.{layer}.{name}.weight"] = torch.randn(rows * 1024, 1024, device=device)
            model[f"layers.{layer}.{name}.bias"] = torch.randn(rows * 1024, device=device)
    moments = {f"{name}.{moment}": torch.randn_like(value) for name, value in model.items() for moment in "mv"}
    return {"model": model, "optimizer": moments}


def timed(action: Callable[[], Any], device: str) -> float:
    """Return the seconds of an action, its work on the device included."""
    if device == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    action()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


class Phalanx:
    """The library's saver, as the training loop uses it."""

    def __init__(self) -> None:
        self._saver = Saver()
        self._step = 0

    def save(self, state: State, folder: Path) -> Times:
        self._step += 1
        shutil.rmtree(folder)
        began = time.perf_counter()
        self._saver.begin(Snapshot(self._step, 0, state), Request(directory=folder, run_id="bench"))
        stall = time.perf_counter() - began
        saved = self._saver.finish()
        assert saved is not None
        self._path = saved.path
        return {"stall": stall, "saved": time.perf_counter() - began}

    def restore(self, state: State, folder: Path) -> None:
        load(Checkpoint(self._path, read_manifest(self._path)), state)  # type: ignore[arg-type]


class TorchSave:
    """torch.save and torch.load of one file."""

    def save(self, state: State, folder: Path) -> Times:
        took = timed(lambda: torch.save(state, folder / "state.pt"), "cpu")
        return {"stall": took, "saved": took}

    def restore(self, state: State, folder: Path) -> None:
        saved = torch.load(folder / "state.pt", weights_only=True)
        for name, part in state.items():
            for key, value in part.items():
                value.copy_(saved[name][key])


class Dcp:
    """torch.distributed.checkpoint, synchronous."""

    def save(self, state: State, folder: Path) -> Times:
        shutil.rmtree(folder / "dcp", ignore_errors=True)
        took = timed(lambda: dcp.save(state, checkpoint_id=folder / "dcp"), "cpu")
        return {"stall": took, "saved": took}

    def restore(self, state: State, folder: Path) -> None:
        dcp.load(state, checkpoint_id=folder / "dcp")


class DcpAsync(Dcp):
    """torch.distributed.checkpoint.async_save."""

    def save(self, state: State, folder: Path) -> Times:
        shutil.rmtree(folder / "dcp", ignore_errors=True)
        began = time.perf_counter()
        future: Any = dcp.async_save(state, checkpoint_id=folder / "dcp")
        stall = time.perf_counter() - began
        future.result()
        return {"stall": stall, "saved": time.perf_counter() - began}


CONTESTANTS: dict[str, type[Any]] = {"torch.save": TorchSave, "dcp": Dcp, "dcp async": DcpAsync, "phalanx": Phalanx}


def main() -> None:
    """Measure all contestants in alternating rounds and print the table."""
    options = _parse()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    state = make_state(options.gb or (4.5 if options.device == "cuda" else 1.0), options.device)
    size = sum(value.nbytes for part in state.values() for value in part.values())
    document: dict[str, Any] = {"environment": environment(options.device), "bytes": size, "times": {}}
    print(describe(document["environment"]), flush=True)
    times: dict[str, dict[str, list[float]]] = {
        name: {"first": [], "stall": [], "saved": [], "restore": []} for name in CONTESTANTS
    }
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        contestants = {name: kind() for name, kind in CONTESTANTS.items()}
        for number in range(options.rounds + 1):
            for name, contestant in contestants.items():
                folder = Path(directory, name.replace(" ", "-"))
                folder.mkdir(exist_ok=True)
                _measure(contestant, state, folder, options.device, times[name], first=number == 0)
    dist.destroy_process_group()
    document["times"] = times
    print("\n" + _table(times, size))
    write_json(options.json, document)


def _measure(contestant: Any, state: State, folder: Path, device: str, times: Any, *, first: bool) -> None:
    found = contestant.save(state, folder)
    if first:
        times["first"].append(found["stall"])
        return
    wanted = state["model"]["layers.0.qkv.weight"].clone()
    for value in state["model"].values():
        value.zero_()
    found["restore"] = timed(lambda: contestant.restore(state, folder), device)
    assert torch.equal(state["model"]["layers.0.qkv.weight"], wanted), f"{contestant} restored other weights"
    for name, seconds in found.items():
        times[name].append(seconds)


def _table(times: dict[str, dict[str, list[float]]], size: int) -> str:
    base, peer = times["torch.save"], times["dcp"]
    rows = []
    for name, found in times.items():
        rows.append(
            [
                name,
                f"{found['first'][0]:.3f}",
                f"{median(found['stall']):.3f}",
                f"{ratio(found['stall'], base['stall']):.3f}",
                f"{median(found['saved']):.2f}",
                f"{size / 1e9 / median(found['saved']):.2f}",
                f"{ratio(peer['saved'], found['saved']):.2f}",
                f"{median(found['restore']):.2f}",
                f"{ratio(base['restore'], found['restore']):.2f}",
            ]
        )
    head = ["", "first stall s", "stall s", "of torch.save", "saved s", "GB/s", "x dcp", "restore s", "x torch.load"]
    return table(f"{size / 1e9:.2f} GB, one rank", head, rows)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--gb", type=float, help="size of the state (1 on the CPU, 4.5 on a GPU)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", type=Path, help="write below this folder (default: a temporary one)")
    parser.add_argument("--json", type=Path, help="write what was measured here")
    return parser.parse_args()


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    main()
