"""Grading of checkpoints: what a kill, a flipped bit or a cut file leaves, and what a complete state holds."""

from __future__ import annotations

import copy
import functools
import os
import pickle
import random
import shutil
import signal
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import torch
from torch import nn

from grader.exercise import Attempt, Mistake


def reported(check: Callable[..., None]) -> Callable[..., str]:
    """Make a check that runs beside the answer return the text of its Mistake, or nothing."""

    @functools.wraps(check)
    def run(*args: Any) -> str:
        try:
            check(*args)
        except Mistake as mistake:
            return str(mistake)
        return ""

    return run


def ask(attempt: Attempt, check: Callable[..., str], *args: Any, see: str = "") -> None:
    """Run a reported check in the process of the answer and raise what it found."""
    if text := attempt.call(check, *args):
        raise Mistake(text, see)


def grade_checkpoints(attempt: Attempt) -> None:
    """Grade `atomic-checkpoint`."""
    ask(attempt, checkpoints, attempt.folder, attempt.seed(), see="Save so that a kill cannot hurt")


@reported
def checkpoints(module: ModuleType, folder: Path, seed: int) -> None:
    """Save, read back, look at the file operations, damage files, kill a save at each of its operations."""
    torch.manual_seed(seed)
    _round_trip(module, folder / "a")
    _file_operations(module, folder / "b", _state(3))
    _file_operations(module, folder / "small", {"step": 3})  # fits into the buffer of a file: only flush() writes it
    _keeps(module, folder / "c")
    _damage(module, folder / "d", random.Random(seed))
    _kills(module, folder / "e")
    _copied(module, folder / "f")


class Probe:
    """Part of a state that tells when it is pickled."""

    seen: Callable[[str], None] | None = None

    def __reduce_ex__(self, protocol: Any) -> Any:
        if Probe.seen is not None:
            Probe.seen("pickling the state")
        return OrderedDict, ()


def _state(step: int) -> dict[str, Any]:
    return {"weight": torch.randn(40, 25), "step": step, "list": [torch.ones(3) * step], "probe": Probe()}


def _same(found: Any, state: dict[str, Any]) -> bool:
    return isinstance(found, dict) and all(
        key in found and same_value(found[key], value) for key, value in state.items() if key != "probe"
    )


def same_value(one: Any, other: Any) -> bool:
    """Return whether two nested values are equal to the bit."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(same_value(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same_value, one, other))
    return bool(numpy.array_equal(one, other)) if isinstance(one, numpy.ndarray) else bool(one == other)


def _round_trip(module: ModuleType, folder: Path) -> None:
    found = module.CheckpointStore(folder).load()
    if found is not None:
        raise Mistake(f"load() of an empty folder returned {found!r}; the contract says None")
    store, states = module.CheckpointStore(folder, keep=5), {}
    for step in (9, 10, 100):
        states[step] = _state(step)
        path = store.save(step, states[step])
        if not isinstance(path, Path) or not path.is_file():
            raise Mistake(f"save() returned {path!r}; it should return the path of the checkpoint that it wrote")
    step, state = _loaded(module, folder, "after the steps 9, 10 and 100 were saved")
    if step in (9, 10):
        raise Mistake(
            f"after the steps 9, 10 and 100 were saved, load() returned step {step}: file names are compared as text, "
            f"where 'step-{step}' comes after 'step-100'. Compare numbers, or write them with leading zeros"
        )
    if step != 100 or not _same(state, states[100]):
        raise Mistake(f"after the steps 9, 10 and 100 were saved, load() returned step {step} with other values")
    for before, after in ((99_999, 100_000), (999_999, 1_000_000)):
        place = folder / f"{after}"
        for step in (before, after):
            module.CheckpointStore(place, keep=2).save(step, _state(step))
        step, _ = _loaded(module, place, f"after the steps {before} and {after} were saved")
        if step != after:
            raise Mistake(
                f"after the steps {before} and {after} were saved, load() returned step {step}: with more digits than "
                "the file name has leading zeros for, names are compared as text. Compare numbers"
            )


def _loaded(module: ModuleType, folder: Path, when: str) -> tuple[int, Any]:
    """Return what a new store finds in a folder, as after a restart."""
    try:
        found = module.CheckpointStore(folder).load()
    except NotImplementedError:
        raise
    except Exception as error:
        raise Mistake(f"{when}, load() raised {type(error).__name__}: {str(error)[:100]}") from error
    if found is None:
        raise Mistake(f"{when}, load() of a new CheckpointStore returned None: a restart would begin at step 0")
    return found  # type: ignore[no-any-return]


@contextmanager
def _watched(seen: Callable[..., None]) -> Iterator[None]:
    """Report renames and syncs of files."""
    real = {name: getattr(os, name) for name in ("rename", "replace", "link", "fsync", "fdatasync")}

    def wrap(name: str) -> Callable[..., Any]:
        def wrapped(first: Any, *args: Any, **kwargs: Any) -> Any:
            found = os.stat(first)
            seen(name, found.st_ino, found.st_size, first)
            return real[name](first, *args, **kwargs)

        return wrapped

    for name in real:
        setattr(os, name, wrap(name))
    try:
        yield
    finally:
        for name, function in real.items():
            setattr(os, name, function)


def _file_operations(module: ModuleType, folder: Path, state: dict[str, Any]) -> None:
    operations: list[tuple[str, int, int, Any]] = []
    store = module.CheckpointStore(folder)
    with _watched(lambda *operation: operations.append(operation)):
        path = store.save(3, state)
    inode, size = path.stat().st_ino, path.stat().st_size
    places = [
        at
        for at, (name, number, _, source) in enumerate(operations)
        if number == inode and "sync" not in name and os.path.realpath(os.fsdecode(source)) != os.path.realpath(path)
    ]
    if not places:
        raise Mistake(
            f"save() wrote straight into {path.name}: a kill half way leaves half a file under the name of a good one. "
            "Write to a temporary name and rename it when it is complete"
        )
    source = Path(os.fsdecode(operations[places[0]][3])).absolute()
    if not source.is_relative_to(folder):
        raise Mistake(
            f"the temporary file is in {source.parent}, outside the folder of the checkpoints: a rename from another "
            "file system fails or copies, and a copy is not atomic"
        )
    syncs = [at for at, (name, number, _, _) in enumerate(operations) if number == inode and "sync" in name]
    if not syncs:
        raise Mistake(
            "the file is renamed but never synced (os.fsync): after a power failure the new name can stand on the disk "
            "with empty content"
        )
    if syncs[0] > places[0]:
        raise Mistake("os.fsync comes after the rename: sync the content first, then give it its name")
    if operations[syncs[0]][2] < size:
        raise Mistake(
            f"os.fsync was called when {operations[syncs[0]][2]:,} of {size:,} bytes had left Python's buffer: call "
            "flush() first"
        )


def _keeps(module: ModuleType, folder: Path) -> None:
    store = module.CheckpointStore(folder, keep=2)
    foreign = folder / "metrics.jsonl"
    foreign.parent.mkdir(parents=True, exist_ok=True)
    foreign.write_text("{}")
    paths = [store.save(step, _state(step)) for step in (8, 9, 10, 11, 12)]
    left = [step for step, path in zip((8, 9, 10, 11, 12), paths, strict=True) if path.exists()]
    if left != [11, 12]:
        raise Mistake(
            f"after the steps 8 to 12 were saved with keep=2, the checkpoints of the steps {left} are there; "
            "[11, 12] should be"
        )
    if not foreign.exists():
        raise Mistake("save() removed metrics.jsonl, which it had not written: remove old checkpoints, nothing else")
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    if size > 2.5 * paths[-1].stat().st_size:
        raise Mistake("save() leaves other files behind: the folder holds more than the two checkpoints of keep=2")


def _copied(module: ModuleType, folder: Path) -> None:
    """Change the times of the files, as a copy or a restored backup does: the names alone say which is the newest."""
    store = module.CheckpointStore(folder)
    paths = [store.save(step, _state(step)) for step in (3, 20, 100)]
    for age, path in enumerate(paths):
        os.utime(path, (10**9 - age, 10**9 - age))
    step, _ = _loaded(module, folder, "after the folder was copied")
    if step != 100:
        raise Mistake(
            f"the steps 3, 20 and 100 were saved and the folder was copied, which gave the files other times; load() "
            f"returned step {step}. The newest checkpoint is the one of the largest step, not of the latest time"
        )


def _damage(module: ModuleType, folder: Path, draw: random.Random) -> None:
    store, states = module.CheckpointStore(folder), {step: _state(step) for step in (1, 2, 3)}
    paths = {step: store.save(step, state) for step, state in states.items()}
    whole = paths[3].read_bytes()
    weight = states[3]["weight"].numpy().tobytes()
    at = whole.find(weight[:64])
    places = [len(whole) // 2] if at < 0 else [at + 2, at + len(weight) - 6, at + len(weight) // 2]
    places += [draw.randrange(len(whole)) for _ in range(6)]
    for number, place in enumerate(places):
        content = bytearray(whole)
        content[place] ^= 16 if number < 3 else 1 << draw.randrange(8)
        paths[3].write_bytes(content)
        step, state = _loaded(module, folder, "with one flipped bit in the newest of three checkpoints")
        if step == 3 and not _same(state, states[3]):
            raise Mistake(
                f"one bit of the newest checkpoint was flipped, in byte {place:,} of {len(whole):,}, and load() "
                "returned it as if it were whole: keep a checksum of the whole content with it and compare when you "
                "read"
            )
        if step not in (2, 3) or not _same(state, states[step]):
            raise Mistake(f"with a flipped bit in step 3, load() returned step {step}; step 2 is the newest whole one")
    content = bytearray(whole)
    content[places[0]] ^= 16
    paths[3].write_bytes(content)
    paths[2].write_bytes(paths[2].read_bytes()[: paths[2].stat().st_size // 2])
    step, _ = _loaded(module, folder, "with a file that was cut in the middle")
    if step != 1:
        raise Mistake(f"with step 3 damaged and step 2 cut in the middle, load() returned step {step}; 1 is whole")
    try:
        found = module.CheckpointStore(folder, keep=1).load()
    except RuntimeError as error:
        found = error
    if not isinstance(found, tuple) or found[0] != 1:
        raise Mistake(
            f"of three checkpoints the two newest are damaged and step 1 is whole; load() of a store with keep=1 gave "
            f"{found!r:.80}: keep limits what save() leaves, load() looks at all that are there"
        )
    paths[1].write_bytes(b"")
    try:
        found = module.CheckpointStore(folder).load()
    except RuntimeError:
        return
    except Exception as error:
        raise Mistake(f"for an empty file, load() raised {type(error).__name__}, not RuntimeError") from error
    raise Mistake(
        f"all three checkpoints are damaged, and load() returned {found!r}: the run would begin anew without a word. "
        "Raise RuntimeError"
    )


def _kills(module: ModuleType, folder: Path) -> None:
    """Kill a save at its first file operation, at its second, and so on until it comes to its end."""
    store, old, new = module.CheckpointStore(folder / "first", keep=1), _state(1), _state(2)
    store.save(1, old)
    for number in range(1, 60):
        place = folder / f"{number}"
        shutil.copytree(folder / "first", place)
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            _killed_save(module, place, new, number, writer)
        os.close(writer)
        operation = os.read(reader, 200).decode()
        os.close(reader)
        _, status = os.waitpid(pid, 0)
        _after_kill(module, place, operation, old, new)
        if os.waitstatus_to_exitcode(status) == 0:
            return


def _killed_save(module: ModuleType, folder: Path, state: dict[str, Any], number: int, writer: int) -> None:
    """Save, and end this process at the operation of that number."""
    left = number

    def seen(operation: str, *_: Any) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.write(writer, operation.encode())
            os.kill(os.getpid(), signal.SIGKILL)

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if writes or event in ("os.rename", "os.remove", "os.link", "os.truncate"):
            seen("opening a file" if writes else event)

    try:
        store = module.CheckpointStore(folder, keep=1)
        Probe.seen = staticmethod(seen)
        sys.addaudithook(audit)
        with _watched(lambda name, *_: seen(f"os.{name}")):
            store.save(2, state)
    finally:
        os._exit(0)


def _after_kill(module: ModuleType, place: Path, operation: str, old: dict[str, Any], new: dict[str, Any]) -> None:
    when = f"a save with keep=1 was killed at: {operation or 'its end'}. After that"
    try:
        step, state = _loaded(module, place, when)
    except Mistake as mistake:
        reason = "the old checkpoint must stay until the new one has its name"
        raise Mistake(f"{mistake}. A kill at any moment must leave the old or the new checkpoint: {reason}") from None
    if step not in (1, 2):
        raise Mistake(
            f"{when}, load() returned step {step}, and only the steps 1 and 2 were ever saved: the temporary file has "
            "a name that load() takes for a checkpoint. The next saves are then older than it, and are lost"
        )
    if not _same(state, old if step == 1 else new):
        raise Mistake(f"{when}, load() returned step {step} with other values than were saved")
    later = _state(3)
    module.CheckpointStore(place, keep=1).save(3, later)
    step, state = _loaded(module, place, f"{when}, step 3 was saved, and")
    if step != 3 or not _same(state, later):
        raise Mistake(
            f"{when}, the run went on and saved step 3; load() returned step {step}: what the killed save left behind "
            "counts as newer, or save() removed the new checkpoint"
        )


class Run:
    """A training of the grader that depends on every kind of state."""

    def __init__(self, seed: int, restarts: bool = False) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        numpy.random.seed(seed % 2**32)
        self.model = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Dropout(0.3), nn.Linear(12, 1))
        self.model.register_buffer("seen", torch.zeros((), dtype=torch.float64))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.05)
        schedulers = torch.optim.lr_scheduler
        if restarts:  # its state is more than the number of steps
            self.scheduler: Any = schedulers.CosineAnnealingWarmRestarts(self.optimizer, T_0=2, T_mult=2)
        else:
            self.scheduler = schedulers.StepLR(self.optimizer, step_size=2, gamma=0.7)
        self.epoch, self.position = 0, 0
        self.data = torch.randn(20, 6, generator=torch.Generator().manual_seed(3))

    def run(self, steps: int) -> list[float]:
        """Train and return the losses."""
        return [self._step() for _ in range(steps)]

    def _step(self) -> float:
        order = torch.randperm(20, generator=torch.Generator().manual_seed(self.epoch))
        inputs = self.data[order[self.position : self.position + 5]]
        self.position += 5
        if self.position == 20:
            self.epoch, self.position = self.epoch + 1, 0
        self.model.seen += 0.1
        noise = torch.from_numpy(numpy.random.normal(0.0, 0.1, inputs.shape)).float()
        outputs = self.model(inputs * random.uniform(0.9, 1.1) + noise)
        loss = (outputs - inputs.sum(1, keepdim=True)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        return loss.item()

    def parts(self) -> dict[str, Any]:
        """Return a copy of every kind of state, with the words that name it."""
        buffers = {name for name, _ in self.model.named_buffers()}
        state = self.model.state_dict()
        found = {
            "the weights of the model": {name: value for name, value in state.items() if name not in buffers},
            "the buffers of the model (the running mean of BatchNorm)": {name: state[name] for name in sorted(buffers)},
            "the optimizer (its moments)": self.optimizer.state_dict()["state"],
            "the learning rate": [group["lr"] for group in self.optimizer.param_groups],
            "the scheduler": self.scheduler.state_dict(),
            "the epoch of the data": self.epoch,
            "the position in the epoch": self.position,
            "the random state of Python (random)": random.getstate(),
            "the random state of torch": torch.get_rng_state(),
            "the random state of numpy": numpy.random.get_state(),
        }
        return copy.deepcopy(found)


def grade_state(attempt: Attempt) -> None:
    """Grade `complete-state`."""
    ask(attempt, complete_state, attempt.seed(), see="Keep all that the next step depends on")


@reported
def complete_state(module: ModuleType, seed: int) -> None:
    """Compare a training that was stopped and restored with one that was not: in an epoch, and between two."""
    for cut, restarts in ((4 + 1 + seed % 3, False), (8, True)):
        _stopped(module, seed, cut, restarts)


def _stopped(module: ModuleType, seed: int, cut: int, restarts: bool) -> None:
    losses = Run(seed, restarts).run(cut + 6)
    first = Run(seed, restarts)
    first.run(cut)
    parts = first.parts()
    state = module.TrainingState.capture(first)
    if not isinstance(state, dict):
        raise Mistake(f"capture() returned {type(state).__name__}; it should return a dict")
    stored, kept = pickle.dumps(state), copy.deepcopy(state)
    if first.run(2) != losses[cut : cut + 2]:
        raise Mistake("after capture() the training went on with other numbers: capture() must change nothing")
    if not same_value(kept, state):
        raise Mistake(
            "two steps after capture() the captured state had changed: state_dict() returns the tensors, not "
            "copies. Return a copy (copy.deepcopy), so that a save in the background writes one moment"
        )
    second = Run(seed + 1, restarts)
    second.run(2 if cut % 4 != 2 else 3)  # in another epoch, at another position
    snapshot = pickle.loads(stored)
    module.TrainingState.restore(second, snapshot)
    found = second.parts()
    lost = [name for name, value in parts.items() if not same_value(value, found[name])]
    if lost:
        raise Mistake(f"after restore(), {lost[0]} is not as it was at capture(): continuing gives other bits")
    after = second.run(6)
    if after != losses[cut:]:
        at = next(number for number, pair in enumerate(zip(after, losses[cut:], strict=True)) if pair[0] != pair[1])
        raise Mistake(
            f"step {at + 1} after restore() has the loss {after[at]:.6f}, without a stop {losses[cut + at]:.6f}"
        )
    module.TrainingState.restore(second, snapshot)
    found = second.parts()
    lost = [name for name, value in parts.items() if not same_value(value, found[name])]
    if lost and lost[0] not in ("the weights of the model", "the optimizer (its moments)"):
        raise Mistake(f"after a second restore() of one snapshot, {lost[0]} is not as it was at capture()")
    if not same_value(snapshot, kept) or second.run(6) != losses[cut:]:
        raise Mistake(
            "a second restore() from the same snapshot, six steps after the first, gives another training: "
            "load_state_dict() of an optimizer keeps the tensors that it gets, and the next steps change them. Give it "
            "a copy (copy.deepcopy)"
        )
