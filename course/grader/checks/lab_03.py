"""Lab 03, a fault-tolerant system: checkpoints of all ranks, a supervisor, and state that is provably equal."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from grader.checks.saving import same_value
from grader.checks.supervised import grade_elastic, grade_failures, text_of
from grader.exercise import Attempt, Exercise, Mistake
from grader.ranks import Answer, marker

_TEMPLATE = "module-202/labs/lab-03-fault-tolerant/starter/system.py"
_FORBIDDEN = ("torch.distributed.checkpoint", "torch.distributed.elastic", "torch.distributed.launcher")
_WORKER = Path(__file__).resolve().parents[2] / Path(_TEMPLATE).with_name("worker.py")
_PARTS = 4
_SEVERAL = 3


def shared_state(seed: int, step: int) -> dict[str, Any]:
    """Return what all ranks have in common at a step."""
    draw = torch.Generator().manual_seed(seed + step)
    return {"weight": torch.randn(30, 20, generator=draw), "step": step}


def part_state(seed: int, step: int, part: int) -> Tensor:
    """Return what belongs to one part at a step."""
    return torch.randn(50, generator=torch.Generator().manual_seed(seed + 100 * step + part))


def save_steps(
    module: ModuleType, rank: int, world: int, folder: str, seed: int, steps: list[int], keep: int, stop: int = 0
) -> list[str]:
    """Save some steps; return the files that were opened or renamed; killed in the last save at file number `stop`."""
    checkpoints = module.Checkpoints(Path(folder), keep)
    touched: list[str] = []
    watching = False

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        writes = event == "open" and any(letter in str(arguments[1]) for letter in "wax+")
        if watching and (writes or event in ("os.rename", "os.remove")) and folder in str(arguments[0]):
            touched.append(f"{event} {Path(str(arguments[0])).name}")
            if len(touched) == stop:
                marker("saving")

    sys.addaudithook(hook)
    for step in steps:
        watching = step == steps[-1]
        own = {part: part_state(seed, step, part) for part in range(rank, _PARTS, world)}
        checkpoints.save(step, shared_state(seed, step), own)
    return touched


def load_newest(module: ModuleType, rank: int, world: int, folder: str) -> Any:
    """Return what a new start finds."""
    return module.Checkpoints(Path(folder)).load()


def loaded(attempt: Attempt, folder: Path, seed: int, ranks: int, allowed: tuple[int, ...], when: str) -> int:
    """Load on some ranks, compare with what was saved, and return the step."""
    try:
        values = [answer.value for answer in attempt.run(load_newest, ranks, (str(folder),))]
    except Mistake as mistake:
        raise Mistake(f"{when}: {mistake}") from None
    for rank, value in enumerate(values):
        if value is None:
            raise Mistake(f"{when}: load() on rank {rank} returned None; step {allowed[0]} is there, whole")
        if not isinstance(value, tuple) or len(value) != 3 or not isinstance(value[2], dict):
            raise Mistake(
                f"{when}: load() on rank {rank} returned a {type(value).__name__}; it should be a tuple of step, shared"
                " state, and a dict with the states of the parts"
            )
        step, shared, own = value
        if step != values[0][0]:
            raise Mistake(
                f"{when}: rank 0 continues from step {values[0][0]}, rank {rank} from {step}: decide together"
            )
        if step not in allowed:
            raise Mistake(f"{when}: load() returned step {step}; it should be {' or '.join(map(str, allowed))}")
        if not same_value(shared, shared_state(seed, step)):
            raise Mistake(f"{when}: the shared state on rank {rank} is not that of step {step}")
        for part in range(_PARTS):
            if part not in own:
                raise Mistake(
                    f"{when}: rank {rank} got the states of parts {sorted(own)}; part {part} is missing. {_PARTS} parts"
                    f" were saved: another number of ranks divides them in another way, so each rank needs all"
                )
            if not same_value(own[part], part_state(seed, step, part)):
                raise Mistake(f"{when}: the state of part {part} on rank {rank} is not that of step {step}")
    return int(values[0][0])


def grade_checkpoint(attempt: Attempt) -> None:
    """Save on 3 ranks, load on 1, 2 and 4; damage each file; kill a rank at each of its file operations."""
    seed, folder = attempt.seed(), attempt.folder / "a"
    attempt.run(save_steps, _SEVERAL, (str(folder), seed, [5], 3))
    old = set(folder.rglob("*"))
    quiet = attempt.run(save_steps, _SEVERAL, (str(folder), seed, [5, 10], 3))
    for ranks in (2, 4):
        loaded(attempt, folder, seed, ranks, (10,), f"3 ranks saved the steps 5 and 10, {ranks} ranks load")
    new = sorted(path for path in set(folder.rglob("*")) - old if path.is_file())
    for damage, how in ((_cut, "was cut in half"), (_flip, "has one bit flipped"), (_remove, "was removed")):
        path = attempt.random.choice([one for one in new if one.stat().st_size > 1] if damage is not _remove else new)
        whole = path.read_bytes()
        damage(path)
        loaded(attempt, folder, seed, 2, (5, 10), f"{path.name} of step 10 {how}")
        path.write_bytes(whole)
    _biggest_flipped(attempt, folder, seed, new)
    _kills(attempt, quiet)


def _biggest_flipped(attempt: Attempt, folder: Path, seed: int, new: list[Path]) -> None:
    """The file with most of the state: a flipped bit in it is in a tensor."""
    path = max(new, key=lambda one: one.stat().st_size)
    whole = path.read_bytes()
    _flip(path)
    loaded(attempt, folder, seed, 2, (5,), f"{path.name} of step 10 has one bit flipped")
    path.write_bytes(whole)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(bytes(content))


def _remove(path: Path) -> None:
    path.unlink()


def _kills(attempt: Attempt, quiet: list[Answer]) -> None:
    """With keep=1, a kill at a file operation of rank 0 or of another rank leaves one of the two checkpoints."""
    seed = attempt.seed()
    for rank in (0, 1):
        count = len(quiet[rank].value) + (1 if rank == 0 else 0)  # one more: rank 0 may remove the old one
        if len(quiet[rank].value) == 0:
            raise Mistake(f"rank {rank} wrote no file in save(): the states of its parts are on this rank only")
        for stop in sorted({1, count, attempt.random.randrange(1, count + 1)}):
            folder = attempt.folder / f"kill-{rank}-{stop}"
            order = (str(folder), seed, [5, 10], 1, stop)
            attempt.run(save_steps_killed, 2, (rank, *order), kill={rank: "saving"}, expect_failure=True, timeout=10)
            when = f"rank {rank} was killed in save() of step 10 at its file operation {stop}, keep=1"
            loaded(attempt, folder, seed, 2, (5, 10), when)


def save_steps_killed(module: ModuleType, rank: int, world: int, victim: int, *order: Any) -> list[str]:
    """Save; one rank is killed in between."""
    return save_steps(module, rank, world, *(order if rank == victim else order[:-1]))


def compare_states(module: ModuleType, rank: int, world: int, seed: int, change: str, where: list[int]) -> Any:
    """Return what the learner says about states of which some ranks have another one."""
    draw = torch.Generator().manual_seed(seed)
    state = {"b": torch.randn(400, 50, generator=draw), "a": torch.zeros(3), "n": torch.arange(4)}
    state["h"] = torch.ones(5, dtype=torch.bfloat16)
    state["scalar"] = torch.tensor(2.0)
    if rank in where:
        _CHANGES[change](state)
    before = {name: tensor.clone() for name, tensor in state.items()}
    found = module.disagreeing_ranks(state)
    if not all(torch.equal(state[name], before[name]) for name in before):
        raise ValueError("disagreeing_ranks() changed the state")
    return found


def _swap(state: dict[str, Tensor]) -> None:
    state["b"][[0, 1]] = state["b"][[1, 0]]


def _order(state: dict[str, Tensor]) -> None:
    items = list(state.items())
    state.clear()
    state.update(reversed(items))


_CHANGES: dict[str, Callable[[dict[str, Tensor]], Any]] = {
    "nothing": lambda state: None,
    "another order of the names": _order,
    "one bit of one weight": lambda state: state["b"].view(torch.int32)[7, 7].bitwise_xor_(1),
    "two rows exchanged": _swap,
    "-0.0 instead of 0.0": lambda state: state["a"].neg_(),
    "another type": lambda state: state.update(n=state["n"].to(torch.float64)),
    "a name exchanged": lambda state: state.update(scale=state.pop("scalar")),
}


def grade_consistency(attempt: Attempt) -> None:
    """Name the ranks that differ, by few bytes; then the whole system under faults against one process."""
    seed = attempt.seed()
    for change in _CHANGES:
        where = [] if change == "nothing" else [attempt.random.randrange(3)]
        quiet = change == "another order of the names"
        answers = attempt.run(compare_states, 3, (seed, change, where))
        wanted = [] if quiet else where
        for answer in answers:
            if answer.value != wanted:
                who = f"rank {where[0]} of 3 has {change}" if where else "all 3 ranks have the same state"
                raise Mistake(
                    f"{who}: disagreeing_ranks() returned {answer.value} on rank {answer.rank}, and {wanted} is right"
                )
            sent = sum(call.bytes for call in answer.calls if call.kind != "barrier")
            if sent > 4096:
                raise Mistake(f"a state of 80 kB: {sent:,} bytes were sent to compare it; send a digest of it")
    answers = attempt.run(compare_states, 2, (seed, "one bit of one weight", [1]))
    if any(answer.value != [0, 1] for answer in answers):
        raise Mistake(
            f"2 ranks with different states: disagreeing_ranks() returned {answers[0].value}; neither has more than"
            " half of the ranks, so [0, 1] is right"
        )
    _whole_system(attempt)


def run_system(module: ModuleType, folder: str, steps: int, ranks: int) -> list[Any]:
    """Run the worker of the lab under the learner's supervisor; one place is lost with the fault.

    -P: the worker takes system.py from the learner's folder, not the one beside it.
    """
    place = Path(folder)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(module.__file__ or "").parent), os.environ["PYTHONPATH"]])
    command = [sys.executable, "-P", str(_WORKER), folder, str(steps)]

    def slots() -> int:
        return 1 if (place / "fault-0-happened").exists() else ranks

    supervisor = module.Supervisor(command, place, slots, most=ranks, hung_after=20.0)
    return [(one.world, one.end, one.rank) for one in supervisor.run()]


def one_process(module: ModuleType, steps: int) -> str:
    """Return the digest of the weights after the same steps in one process without faults."""
    sys.path.append(str(_WORKER.parent))
    training = import_module("worker").Training(0, 1)
    for step in range(steps):
        training.update(training.gradients(step))
    return str(training.digest())


def _whole_system(attempt: Attempt) -> None:
    steps, folder = 17, attempt.folder / "system"
    folder.mkdir()
    faults = [{"kind": "flip", "rank": attempt.random.randrange(2), "step": 7}]
    (folder / "faults.json").write_text(json.dumps(faults))
    history = attempt.call(run_system, str(folder), steps, 2)
    if not (folder / "result.json").exists():
        raise Mistake(f"worker.py under your supervisor wrote no result; the history: {text_of(history)}")
    found, wanted = json.loads((folder / "result.json").read_text())["digest"], attempt.call(one_process, steps)
    if found != wanted:
        raise Mistake(
            f"{steps} steps of worker.py: one process without faults ends with weights of digest {wanted}; 2 ranks"
            f" with a flipped bit and a lost place end with {found} ({text_of(history)})"
        )


EXERCISES = (
    Exercise(
        name="lab-03-checkpoint",
        title="Checkpoints of all ranks: whole or not there",
        template=_TEMPLATE,
        target="Checkpoints",
        points=25,
        grade=grade_checkpoint,
        programs=True,
        forbidden=_FORBIDDEN,
    ),
    Exercise(
        name="lab-03-failures",
        title="A supervisor that survives dead and hanging ranks",
        template=_TEMPLATE,
        target="Supervisor",
        points=30,
        grade=grade_failures,
        programs=True,
        forbidden=_FORBIDDEN,
    ),
    Exercise(
        name="lab-03-elastic",
        title="Ranks leave and join",
        template=_TEMPLATE,
        target="Supervisor",
        points=20,
        grade=grade_elastic,
        programs=True,
        forbidden=_FORBIDDEN,
    ),
    Exercise(
        name="lab-03-consistency",
        title="Equal state, proved: by digest, and to the bit after faults",
        template=_TEMPLATE,
        target="disagreeing_ranks",
        points=25,
        grade=grade_consistency,
        programs=True,
        forbidden=_FORBIDDEN,
    ),
)
