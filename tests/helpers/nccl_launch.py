"""Start the ranks of `nccl_cases`, and collect what each case measured.

    python tests/helpers/nccl_launch.py FOLDER [part of a case's name ...]

prints a table without pytest. With CASES_DEVICE=cpu the same cases run over gloo.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib.util
import json
import math
import os
import sys
import time
import traceback
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from nccl_cases import Case, Place, all_cases
from ranks import RecordingConsole

from phalanx.launch import CallTarget, LaunchSpec, launch
from phalanx.world.groups import forget_groups

DEVICE = os.environ.get("CASES_DEVICE", "cuda")
_LAUNCHES = 4
"""How often the ranks of a list of cases are started: a case that hangs or kills a rank ends them."""
_POLL_SECONDS = 0.002
_GRACE_SECONDS = 20.0
"""How long the other ranks may take to end a case that has failed on one."""


@dataclass
class Outcome:
    """What the ranks found: all differences are below the bound, or what went wrong."""

    differences: dict[str, float] = field(default_factory=dict)
    error: str = ""
    seconds: float = 0.0

    @property
    def worst(self) -> tuple[str, float]:
        """The largest difference, and of what."""
        return max(self.differences.items(), key=lambda item: item[1], default=("nothing", 0.0))

    def failure(self, bound: float) -> str:
        """Return what is wrong; an empty string where nothing is."""
        name, value = self.worst
        return self.error or (f"{name} differs by {value:.3g}, and may by {bound:g}" if value > bound else "")


def run_all(folder: Path, wanted: tuple[str, ...] = ()) -> dict[str, Outcome]:
    """Run all cases, or those whose name has one of some words in it; log each to $OUT, if it is set."""
    found: dict[str, Outcome] = {}
    for number, (ranks, cases) in enumerate(all_cases()):
        chosen = {name: case for name, case in cases.items() if _is_wanted(name, case, wanted, number)}
        if chosen:
            found |= _run_launches(folder, number, ranks, chosen)
    if out := os.environ.get("OUT"):
        text = json.dumps({name: asdict(outcome) for name, outcome in found.items()}, indent=1)
        (Path(out) / "nccl-cases.json").write_text(text)
    return found


def _is_wanted(name: str, case: Case, wanted: tuple[str, ...], number: int) -> bool:
    """The first launch makes what the others are compared with."""
    named = number == 0 or not wanted or any(word in name for word in wanted)
    return named and is_here(case)


def is_here(case: Case) -> bool:
    """Whether the package that a case needs is installed."""
    return not case.needs or importlib.util.find_spec(case.needs) is not None


def _run_launches(folder: Path, number: int, ranks: int, cases: dict[str, Case]) -> dict[str, Outcome]:
    """Run cases until each has an outcome; the case that ends a launch is the first without one."""
    left, found = list(cases), dict[str, Outcome]()
    for attempt in range(_LAUNCHES):
        here = folder / f"launch-{number}-{attempt}"
        here.mkdir()
        problem = _launch(folder, here, number, ranks, left)
        found |= _read(here, ranks, left)
        left = [name for name in left if name not in found]
        if not left:
            return found
        found[left[0]] = Outcome(error=f"it ended its ranks: {problem}\n{_traces(here, left[0])}")
        _log(f"{ranks} ranks  {left[0]}  ENDED ITS RANKS: {problem.splitlines()[0] if problem else '?'}")
        left = left[1:]
    return found | {name: Outcome(error=f"not run: {_LAUNCHES} launches ended before it") for name in left}


def _launch(folder: Path, here: Path, number: int, ranks: int, names: list[str]) -> str:
    payload = here / "request.json"
    payload.write_text(json.dumps({"folder": str(folder), "launch": number, "names": names}))
    spec = LaunchSpec(
        target=CallTarget("nccl_launch:run_cases", str(payload)),
        ranks_per_node=ranks,
        log_dir=here / "logs",
        ranks_per_gpu=ranks if DEVICE == "cuda" else 1,
        env={"TORCHINDUCTOR_COMPILE_THREADS": "1"},  # no pool of compilers that outlives a rank
    )
    console = RecordingConsole()
    begin = time.monotonic()
    result = launch(spec, console)
    _log(f"{ranks} ranks  launch of {len(names)} cases: {time.monotonic() - begin:.1f} s {' | '.join(console.notices)}")
    return "" if result.failure is None else f"{result.failure}\n{console.text[-4000:]}"


def _read(here: Path, ranks: int, names: list[str]) -> dict[str, Outcome]:
    """Return the outcomes of the cases that all ranks have ended."""
    by_rank = [_lines(here / f"rank-{rank}.jsonl") for rank in range(ranks)]
    found = {}
    for name in names:
        if all(name in lines for lines in by_rank):
            outcomes = [lines[name] for lines in by_rank]
            every = sorted({key for one in outcomes for key in one.differences})
            worst = {key: max(one.differences.get(key, 0.0) for one in outcomes) for key in every}
            errors = [f"rank {rank}:\n{one.error}" for rank, one in enumerate(outcomes) if one.error]
            found[name] = Outcome(worst, "\n".join(errors[:2]), max(one.seconds for one in outcomes))
    return found


def _lines(path: Path) -> dict[str, Outcome]:
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {line.pop("case"): Outcome(**line) for line in lines}


def _traces(here: Path, name: str) -> str:
    """Return what ranks raised in a case that others did not end, and where those were when their time was over."""
    raised = [(path.name, _lines(path).get(name, Outcome()).error) for path in sorted(here.glob("rank-*.jsonl"))]
    waited = [(path.name, path.read_text()) for path in sorted(here.glob("stack-*"))]
    return "\n".join(f"{file}:\n{text}" for file, text in [*raised, *waited] if text)


def _log(text: str) -> None:
    if out := os.environ.get("OUT"):
        with (Path(out) / "nccl-cases.log").open("a") as file:
            file.write(text + "\n")


def run_cases(payload: str) -> None:
    """In a rank: run the cases one after the other, each with its own limit of time."""
    request = json.loads(Path(payload).read_text())
    here = Path(payload).parent
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    settings = {"device": DEVICE, **({"share_gpus": True} if DEVICE == "cuda" and size > 1 else {})}
    place = Place(Path(request["folder"]), settings)
    cases = all_cases()[request["launch"]][1]
    with (here / f"stack-{rank}").open("w") as stack:
        for name in request["names"]:
            faulthandler.dump_traceback_later(cases[name].seconds, exit=True, file=stack)
            outcome = _run_one(cases[name], place, size)
            with (here / f"rank-{rank}.jsonl").open("a") as file:
                file.write(json.dumps({"case": name, **asdict(outcome)}) + "\n")
            if outcome.error:  # other ranks may wait for this one
                faulthandler.dump_traceback_later(_GRACE_SECONDS, exit=True, file=stack)
            if rank == 0:
                shown = (outcome.failure(cases[name].bound) or "ok").strip().splitlines()[-1]
                _log(f"{size} ranks  {name}  {outcome.worst[1]:.2g}  {outcome.seconds:.2f} s  {shown}")
            _wait_for_all(here, size, name)
        faulthandler.dump_traceback_later(_GRACE_SECONDS, exit=True, file=stack)
        _leave()
        faulthandler.cancel_dump_traceback_later()


def _run_one(case: Case, place: Place, size: int) -> Outcome:
    begin = time.perf_counter()
    try:
        _prepare_group(case, size)
        found = {name: math.inf if math.isnan(value) else value for name, value in case.run(place).items()}
        return Outcome(found, "", time.perf_counter() - begin)
    except Exception:  # noqa: BLE001 - it is the outcome, and the next case may well run
        return Outcome({}, traceback.format_exc(), time.perf_counter() - begin)


def _prepare_group(case: Case, size: int) -> None:
    """Have the common group for most cases, as a script that joins by itself; none for the others."""
    if size == 1:
        return
    if case.owns_group:
        _leave()
    if case.owns_group or dist.is_initialized():
        return
    timeout = timedelta(minutes=5)  # a case that takes longer than it may is ended with its stack before
    if DEVICE == "cpu":
        dist.init_process_group("gloo", timeout=timeout)
        return
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", timeout=timeout, device_id=device)


def _leave() -> None:
    """Leave the group, after what still holds it."""
    if dist.is_initialized():
        forget_groups()
        gc.collect()
        dist.destroy_process_group()


def _wait_for_all(here: Path, size: int, name: str) -> None:
    """Wait until every rank has ended a case, also one that failed on some: by files, since a group may be broken."""
    mark = json.dumps({"case": name})[:-1]
    waiting = [here / f"rank-{rank}.jsonl" for rank in range(size)]
    while waiting:
        path = waiting[-1]
        if path.exists() and any(line.startswith(mark) for line in path.read_text().splitlines()):
            waiting.pop()
        else:
            time.sleep(_POLL_SECONDS)


def main(folder: str, *wanted: str) -> int:
    """Print a line for each case, and what is wrong with those that fail."""
    outcomes = run_all(Path(folder), wanted)
    bounds = {name: case.bound for _, cases in all_cases() for name, case in cases.items()}
    failed = {name: text for name, one in outcomes.items() if (text := one.failure(bounds[name]))}
    for name, one in outcomes.items():
        state = "FAILED" if name in failed else "ok"
        print(f"{state:6} {one.worst[1]:8.2g} {one.seconds:6.2f} s  {name}: {one.worst[0]}")
    for name, text in failed.items():
        print(f"\n== {name}\n{text[-3000:]}")
    print(f"{len(outcomes) - len(failed)} of {len(outcomes)} cases passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
