"""Starts the ranks of one contestant as plain processes with torchrun's variables: no library's launcher takes part."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

_RANK = Path(__file__).with_name("rank.py")


class ContestantFailed(RuntimeError):
    """A rank crashed or the ranks did not train together."""


def measure(contestant: str, model: str, *, device: str, ranks: int, steps: int, timeout: float = 540) -> float:
    """Train once in fresh processes and return rank 0's milliseconds per step."""
    with tempfile.TemporaryDirectory(prefix="phalanx-bench-") as name:
        folder = Path(name)
        words = [sys.executable, str(_RANK), contestant, model, device, str(steps)]
        port = _free_port()
        grouped = ranks > 1 or contestant == "raw-ddp"
        processes = [
            _start(
                [*words, str(folder / f"{rank}.json")], _environment(rank, ranks, port, grouped), folder / f"{rank}.log"
            )
            for rank in range(ranks)
        ]
        _wait(processes, timeout, folder)
        results = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
    check_trained_together(results)
    return float(results[0]["ms_per_step"])


def _start(words: list[str], env: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as file:
        return subprocess.Popen(words, env=env, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)


def _environment(rank: int, ranks: int, port: int, grouped: bool) -> dict[str, str]:
    threads = max(1, (os.cpu_count() or 1) // ranks)
    env = {**os.environ, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    if grouped:
        env |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RUN_ID": "benchmark",  # by which Lightning knows that its ranks are started
        }
    return env


def _wait(processes: list[subprocess.Popen[bytes]], timeout: float, folder: Path) -> None:
    try:
        codes = [process.wait(timeout) for process in processes]
    except subprocess.TimeoutExpired:
        raise ContestantFailed(f"not finished after {timeout:.0f} s") from None
    finally:
        for process in processes:
            _end(process)
    for rank, code in enumerate(codes):
        if code:
            tail = (folder / f"{rank}.log").read_text(errors="replace").strip().splitlines()[-12:]
            raise ContestantFailed(f"rank {rank} ended with {code}:\n    " + "\n    ".join(tail))


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of a rank, its own children included."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def check_trained_together(results: list[dict[str, Any]]) -> None:
    """A time counts only if the weights moved, and moved equally on all ranks."""
    after = {result["after"] for result in results}
    if len(after) > 1:
        raise ContestantFailed(f"the ranks ended with different weights: {sorted(after)}")
    if results[0]["before"] in after:
        raise ContestantFailed("the weights did not change")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
