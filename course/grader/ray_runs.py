"""Runs of Ray Train on the two nodes with a learner's loop: what each worker did, and a failure in words.

`Collect` runs in Ray Train's controller, `Observed` in the workers; both leave files that the grader reads.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import torch
from ray import train
from ray.train import UserCallback
from torch.optim.optimizer import register_optimizer_step_pre_hook

_WAIT_SECONDS = 20.0
"""How long a worker that is to be killed waits until the controller has its last report."""


class Collect(UserCallback):
    """Writes what all workers reported, one line per report."""

    def __init__(self, folder: str) -> None:
        self._file = Path(folder) / "reports.jsonl"

    def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any) -> None:
        """Append a line."""
        with self._file.open("a") as file:
            file.write(json.dumps({"metrics": metrics, "checkpoint": checkpoint is not None}, default=str) + "\n")


class Observed:
    """The learner's loop, with a note of where it runs and of each step; worker 1 is killed once before a step."""

    def __init__(self, loop: Callable[[dict[str, Any]], None], folder: str, stop: int = 0, after: int = 0) -> None:
        self._loop = loop
        self._folder = folder
        self._stop = stop
        """The step before which worker 1 is killed; 0: it is not."""
        self._after = after
        """The number of reports that the controller has by then."""
        self.__name__ = "train_loop"  # Ray asks a loop for its name

    def __call__(self, config: dict[str, Any]) -> None:
        """Run the loop."""
        rank = train.get_context().get_world_rank()
        attempt = len(list(Path(self._folder).glob(f"worker-{rank}-*.jsonl")))
        file = Path(self._folder) / f"worker-{rank}-{attempt}.jsonl"
        _note(file, {"node": ray.get_runtime_context().get_node_id()})
        steps = 0

        def before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            nonlocal steps
            steps += 1
            gradients = [
                one.grad for group in optimizer.param_groups for one in group["params"] if one.grad is not None
            ]
            _note(file, {"gradient": sum(float(one.double().abs().sum()) for one in gradients)})
            if rank == 1 and attempt == 0 and steps == self._stop:
                _wait_for_lines(Path(self._folder) / "reports.jsonl", self._after)
                os.kill(os.getpid(), signal.SIGKILL)

        register_optimizer_step_pre_hook(before_step)
        self._loop(config)


def _note(file: Path, line: dict[str, Any]) -> None:
    with file.open("a") as opened:
        opened.write(json.dumps(line) + "\n")


def _wait_for_lines(file: Path, count: int) -> None:
    deadline = time.monotonic() + _WAIT_SECONDS
    while time.monotonic() < deadline and (not file.exists() or len(file.read_text().splitlines()) < count):
        time.sleep(0.05)
    time.sleep(0.5)  # the line is written just before the controller counts the checkpoint as the last one


def lines(file: Path) -> list[dict[str, Any]]:
    """Return the lines of a file of JSON; none where there is no file."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def fitted(trainer: Any, folder: str, answer: str) -> dict[str, Any]:
    """Fit, and return what came out: the reports, the notes of the workers, the last state, or the failure in words."""
    found: dict[str, Any] = {"failure": "", "state": None}
    try:
        result = trainer.fit()
    except train.WorkerGroupError as error:
        found["failure"] = in_words(error, answer)
    except train.TrainingFailedError as error:
        found["failure"] = (str(error).strip() or type(error).__name__).splitlines()[-1]
    else:
        found["state"] = _state(result.checkpoint)
    found["reports"] = lines(Path(folder) / "reports.jsonl")
    found["workers"] = {file.stem.removeprefix("worker-"): lines(file) for file in Path(folder).glob("worker-*.jsonl")}
    return found


def _state(checkpoint: Any) -> dict[str, Any] | None:
    """Return the content of state.pt of a checkpoint, or its files where it has none of that name."""
    if checkpoint is None:
        return None
    with checkpoint.as_directory() as folder:
        file = Path(folder) / "state.pt"
        if not file.exists():
            return {"files": sorted(path.name for path in Path(folder).iterdir())}
        return torch.load(file, weights_only=True)  # type: ignore[no-any-return]


def in_words(failed: train.WorkerGroupError, answer: str) -> str:
    """Return the first cause among the failures of workers, with the line of the learner's file."""
    failures = sorted(failed.worker_failures.items())
    if any("CollectiveTimeoutError" in repr(error) for _, error in failures):
        return (
            "ray.train.report waited in vain: it is a meeting point, and not all workers called it equally often."
            " Call it on every worker; give a checkpoint only where there is one"
        )
    # A worker whose peer was lost fails too; the cause is the one that says something else.
    rank, error = ([one for one in failures if not _is_secondary(str(one[1]))] or failures)[0]
    cause = getattr(error, "_base_exc", error)
    places = re.findall(rf'File "{re.escape(answer)}", line (\d+), in (\w+)', f"{failed}\n{error}")
    where = f" in {places[-1][1]} ({Path(answer).name}:{places[-1][0]})" if places else ""
    said = next((line.strip() for line in str(cause).splitlines() if line.strip()), "")
    return f"worker {rank}: {type(cause).__name__}{where}: {said}"


def _is_secondary(text: str) -> bool:
    return bool(re.search("connection (closed|reset)|broken pipe|socket closed", text, re.IGNORECASE))
