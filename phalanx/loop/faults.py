"""`FaultPlan`: does to a run what a list of faults says, from inside its ranks, each fault once.

It is a callback. A run that was started with the variable PHALANX_FAULTS, a file of faults, has it as well, without a
change to the user's code. Signals come from a thread, a part of a step later: also within backward or a collective.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from phalanx import reliability
from phalanx.errors import UsageError
from phalanx.host.files import replace_file
from phalanx.loop.hooks import Callback
from phalanx.loop.step_info import StepInfo
from phalanx.reliability import AT_RANDOM, Fault, Mark, Marks
from phalanx.world.abort import raise_if_aborted

if TYPE_CHECKING:
    from phalanx.loop.running_trainer import RunningTrainer
    from phalanx.loop.stopping import StopRequest
    from phalanx.loop.train_loop import TrainLoop

VARIABLE = "PHALANX_FAULTS"
"""Names the file of faults; marks are kept in a folder beside it."""
LINK = "PHALANX_FAULTS_LINK"
"""Names the network link that faults may cut; without it none is touched."""
OBJECTS = "PHALANX_FAULTS_OBJECTS"
"""Set: the run gets an optimizer and a scheduler object, as one that was started from Python has."""
_SCALE_SECONDS = 60.0
_LONGEST_DELAY = 0.5
_FLIPPED = 64


def weights_file(plan: Path) -> Path:
    """Return where a run leaves its weights beside its plan of faults, to be compared with those of another run."""
    return plan.with_suffix(".weights")


class InjectedFault(RuntimeError):
    """What a rank raises because a fault plan says so."""


class FaultPlan(Callback):
    """Injects faults during training: FaultPlan("kill:rank=2,step=50", "exception:rank=0,step=80")."""

    def __init__(self, *faults: Fault | str, folder: Path | str | None = None) -> None:
        """`folder`: where it is noted which faults have happened; `faults` in the run's folder by default."""
        self.faults = [Fault.parse(fault) if isinstance(fault, str) else fault for fault in faults]
        self._folder = None if folder is None else Path(folder)
        self.weights_path: Path | None = None
        """Where the run leaves its weights."""
        self._marks: Marks | None = None
        self._before = 0.0
        self._step_time = _LONGEST_DELAY
        self._limited = False
        self._armed = False
        """Whether a signal is on its way: this process takes no other fault."""

    @classmethod
    def random(
        cls, count: int, *, ranks: int, steps: int, seed: int = 0, kinds: Sequence[str] = AT_RANDOM
    ) -> FaultPlan:
        """Return a plan of random faults, equal for equal arguments."""
        return cls(*reliability.draw_faults(count, ranks=ranks, steps=steps, seed=seed, kinds=kinds))

    @classmethod
    def from_environment(cls) -> FaultPlan | None:
        """Return the plan that PHALANX_FAULTS names, if it is set."""
        path = os.environ.get(VARIABLE)
        if not path:
            return None
        try:
            plan = cls(*reliability.from_json(Path(path).read_text()), folder=f"{path}.marks")
        except (OSError, ValueError, TypeError) as error:
            hint = 'It names a file such as [{"kind": "kill", "rank": 1, "step": 50}].'
            raise UsageError(f"{VARIABLE} = {path} cannot be read as a list of faults: {error}", hint=hint) from None
        plan.weights_path = weights_file(Path(path))
        return plan

    def fail_at(self, rank: int, step: int, kind: str = "exception") -> FaultPlan:
        """Add a fault, and return the plan."""
        self.faults.append(Fault(kind, step, rank))
        return self

    def on_fit_start(self, trainer: RunningTrainer) -> None:
        """Find out where it is noted which faults have happened; a new rank begins here too."""
        self._marks = Marks(self._folder or trainer.run_dir / "faults")
        self._before = time.monotonic()

    def on_checkpoint(self, trainer: RunningTrainer, path: str) -> None:
        """End a full disk that this checkpoint did not notice."""
        if self._limited:
            self._limit_files(resource.RLIM_INFINITY)

    def on_step_end(self, trainer: RunningTrainer, info: StepInfo) -> None:
        """Let the faults that are due happen."""
        now = time.monotonic()
        self._step_time, self._before = min(self._step_time, now - self._before), now  # a recovery is not a step's time
        assert self._marks is not None, "set when the fit started"
        if self._armed:
            return
        for number, fault in enumerate(self.faults):
            if fault.step > info.step or fault.rank != trainer.formation.rank or self._marks.has(number):
                continue
            delay = fault.phase * self._step_time if fault.kind in _DELAYED else 0.0
            if self._marks.take(Mark(number, fault.rank, info.step, time.time() + delay)):
                self._happen(fault, trainer, delay)
                return  # another one that is due comes after the next step, if this rank is still there

    def _happen(self, fault: Fault, trainer: RunningTrainer, delay: float) -> None:
        if fault.kind in _DELAYED:
            number = signal.SIGSTOP if fault.kind == "stop" else signal.SIGKILL
            pid = _DELAYED[fault.kind]()
            timer = threading.Timer(delay, os.kill, (pid, number))
            timer.daemon = True
            timer.start()
            self._armed = fault.kind != "store"
        elif fault.kind == "exception":
            self._raise(fault, trainer)
        elif fault.kind == "disk":
            self._limit_files(0)
        elif fault.kind == "corrupt":
            _flip_bits(cast("TrainLoop", trainer).saving.last_path)
        elif fault.kind == "scale":
            if fault.ranks != trainer.formation.world_size:  # a restart has begun with all of them again
                _scale(cast("TrainLoop", trainer).stop, fault.ranks)
        else:
            _change_link(fault)

    def _raise(self, fault: Fault, trainer: RunningTrainer) -> None:
        """Raise now, or in the next forward pass."""

        def fail(*_: Any) -> None:
            raise InjectedFault(f"the fault {fault} of the plan")

        if fault.phase < 0.5:
            fail()
        trainer.formation.models[0].register_forward_pre_hook(fail)

    def _limit_files(self, size: int) -> None:
        """Let writes to files fail beyond a size: what a full disk does, without filling one."""
        self._limited = size == 0
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def _launcher() -> int:
    """Return the process that started the fork server, of which this rank is a child."""
    return _parent(os.getppid())


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _store() -> int:
    """Return the process that hosts the ranks' store: a child of the fork server, as this rank is."""
    for path in Path("/proc").glob("[0-9]*/comm"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if path.read_text().startswith("phalanx-store") and _parent(int(path.parent.name)) == os.getppid():
                return int(path.parent.name)
    raise UsageError("the fault store: this run has no process that hosts a store")


_DELAYED = {"kill": os.getpid, "stop": os.getpid, "launcher": _launcher, "store": _store}
"""Faults that are a signal, and to which process."""


def _flip_bits(checkpoint: str | None) -> None:
    """Change some bytes in the middle of the largest file of a checkpoint, and leave its size as it is."""
    if checkpoint is None:
        raise UsageError("the fault corrupt: there is no checkpoint yet", hint="Set checkpoint_frequency to '5 steps'.")
    shards = [path for path in Path(checkpoint).iterdir() if path.name not in ("manifest.json", "best.json")]
    largest = max(shards, key=lambda path: path.stat().st_size)
    with largest.open("r+b") as file:
        file.seek(largest.stat().st_size // 2)
        content = file.read(_FLIPPED)
        file.seek(-len(content), os.SEEK_CUR)
        file.write(bytes(byte ^ 0xFF for byte in content))


def _scale(stop: StopRequest, ranks: int) -> None:
    """Ask the launcher for another number of ranks, and wait until the ranks have to regroup for it."""
    log_dir = Path(os.environ.get("PHALANX_LOG_DIR", ""))
    answer = log_dir / "ranks.answer"  # as `phalanx runs scale` does, whose code belongs to the launcher's side
    answer.unlink(missing_ok=True)
    replace_file(log_dir / "ranks.request", json.dumps({"ranks": ranks}))
    deadline = time.monotonic() + _SCALE_SECONDS
    refused = None
    while not (stop.requested or refused or time.monotonic() > deadline):
        raise_if_aborted()  # another rank was lost; the request is carried out after that
        time.sleep(0.01)
        with contextlib.suppress(FileNotFoundError):
            refused = json.loads(answer.read_text())["refused"]
    answer.unlink(missing_ok=True)
    if not stop.requested:
        hint = "The run must allow that number: --num-workers 2:8, and with fixed_order a power of two."
        raise UsageError(refused or f"the launcher did not change the ranks to {ranks}", hint=hint)


def _change_link(fault: Fault) -> None:
    """Cut or slow the link of this host, which must be a network namespace that was made for it."""
    link = os.environ.get(LINK)
    if not link:
        raise UsageError(
            f"the fault {fault.kind} needs hosts that are network namespaces",
            hint=f"Write: phalanx verify RECIPE --num-nodes 2 --fault {fault.kind}:step=50",
        )
    tree = ["tc", "qdisc", "replace", "dev", link, "root", "tbf", "rate", fault.rate, "burst", "32k", "latency", "1s"]
    make, undo = {
        "cut": (["ip", "link", "set", link, "down"], ["ip", "link", "set", link, "up"]),
        "slow": (tree, ["tc", "qdisc", "delete", "dev", link, "root"]),
    }[fault.kind]
    subprocess.run(make, check=True, capture_output=True)
    if fault.seconds:
        timer = threading.Timer(fault.seconds, functools.partial(subprocess.run, undo, check=True))
        timer.daemon = True
        timer.start()
