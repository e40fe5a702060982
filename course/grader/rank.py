"""What one rank does: load the learner's file, join the group, run a function of the grader, leave the answer."""

from __future__ import annotations

import ctypes
import faulthandler
import importlib.util
import os
import pickle
import random
import resource
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from grader.guard import Refused, RefusedFile, protect
from grader.wire import Forbidden, Recorder

_PR_SET_PDEATHSIG = 1
_MOST_FILE_BYTES = 64 * 2**20
_kill_at: str | None = None
_began = 0.0


def clock() -> float:
    """Return the seconds since the run began, as recorded calls have them."""
    return time.monotonic() - _began


def marker(name: str) -> None:
    """Say that this rank has come to a place of that name; a grader may have asked to kill it there."""
    if name == _kill_at:
        os.kill(os.getpid(), signal.SIGKILL)


def run_rank(spec: dict[str, Any]) -> NoReturn:
    """Run one rank to its end; it leaves a file with its answer, or with its error, and waits to be ended."""
    try:
        _limit()
        _run(spec)
    finally:
        os._exit(1)  # never back into the process that was forked


def _limit() -> None:
    """End with the process that started this one, and write no endless files."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (_MOST_FILE_BYTES, _MOST_FILE_BYTES))


def _run(spec: dict[str, Any]) -> None:
    global _kill_at, _began
    _began = spec["began"]
    folder, rank = Path(spec["folder"]), spec["rank"]
    _redirect(folder / f"rank-{rank}.out")
    faulthandler.register(signal.SIGUSR1, file=open(folder / f"rank-{rank}.stack", "w"), all_threads=False)  # noqa: SIM115
    recorder = Recorder(Path(spec["answer"]), folder / f"rank-{rank}.state", spec["began"])
    recorder.note("starts")
    if isinstance(spec["kill"], str):
        _kill_at = spec["kill"]
    try:
        found = _work(spec, recorder)
    except BaseException as error:  # noqa: BLE001 (the learner's file may raise anything, SystemExit included)
        found = {"error": _described(error, spec, recorder)}
    _leave(folder / f"rank-{rank}.answer", found)
    recorder.note("has ended" if "value" in found else "has failed")
    with suppress(OSError):  # what it printed is beyond the limit
        sys.stdout.flush()
    while True:  # its sockets stay open until all ranks have their answers
        signal.pause()


def _work(spec: dict[str, Any], recorder: Recorder) -> dict[str, Any]:
    os.environ.update(spec["variables"])
    for path in spec["paths"]:
        if path not in sys.path:
            sys.path.append(path)
    function, args = pickle.loads(spec["function"])
    random.seed(spec["rank"])
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(spec["rank"])
    torch.manual_seed(spec["rank"])  # ranks that forget to agree on a seed must differ
    if spec["world"]:
        _join(spec)
    recorder.install()
    recorder.forbidden = frozenset(
        name.rpartition(".")[2] for name in spec["forbidden"] if name.startswith("torch.distributed.")
    )
    protect(Path(spec["answer"]), spec["forbidden"], spec["programs"])
    module = load(Path(spec["answer"]))
    if isinstance(spec["kill"], (int, float)):
        threading.Thread(target=_kill_after, args=(spec["kill"],), daemon=True).start()
    before, began = _peak(reset=True), time.monotonic()
    recorder.note("runs")
    value = function(module, spec["rank"], spec["world"], *args) if spec["world"] else function(module, *args)
    return {
        "value": value,
        "seconds": time.monotonic() - began,
        "peak_bytes": max(0, _peak() - before),
        "calls": recorder.calls,
    }


def _join(spec: dict[str, Any]) -> None:
    limit = timedelta(seconds=spec["timeout"])
    store = dist.FileStore(str(Path(spec["folder"]) / "store"), spec["world"])
    dist.init_process_group("gloo", store=store, rank=spec["rank"], world_size=spec["world"], timeout=limit)


def load(path: Path) -> ModuleType:
    """Return the learner's file as a module; files beside it can be imported by it."""
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses and pickle look for it there
    spec.loader.exec_module(module)
    return module


def _described(error: BaseException, spec: dict[str, Any], recorder: Recorder) -> dict[str, Any]:
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == spec["answer"]]
    line = own[-1].lineno if own else None
    if isinstance(error, SyntaxError) and error.filename == spec["answer"]:
        line = error.lineno
    if isinstance(error, Forbidden):
        line = error.line
    return {
        "kind": type(error).__name__,
        "text": _text(error),
        "line": line,
        "where": own[-1].name if own else "",
        "at": recorder.now(),
        "refused": isinstance(error, (Refused, RefusedFile, Forbidden)),
        "trace": "".join(traceback.format_exception(error)),
        "calls": recorder.calls,
    }


def _text(error: BaseException) -> str:
    """Return what an error says; a learner's class may fail at that, too."""
    try:
        text = str(error).strip()
    except Exception as inner:  # noqa: BLE001
        return f"(its text cannot be read: {type(inner).__name__})"
    return f"the code called exit({text})" if isinstance(error, SystemExit) else text


def _leave(path: Path, found: dict[str, Any]) -> None:
    """Write the answer so that it is there whole or not at all."""
    unfinished = path.with_suffix(".unfinished")
    try:
        text = pickle.dumps(found)
    except Exception as error:  # noqa: BLE001 (anything can hide in a learner's object)
        reason = {"kind": type(error).__name__, "text": f"the result cannot be sent: {error}", "line": None}
        text = pickle.dumps({"error": {**reason, "where": "", "at": 0.0, "refused": False, "trace": "", "calls": []}})
    unfinished.write_bytes(text)
    unfinished.replace(path)


def _kill_after(seconds: float) -> None:
    time.sleep(seconds)
    os.kill(os.getpid(), signal.SIGKILL)


def _redirect(path: Path) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)


def _peak(reset: bool = False) -> int:
    """Return the largest resident memory of this process in bytes, since the last reset where Linux offers one."""
    try:
        if reset:
            Path("/proc/self/clear_refs").write_text("5")
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
