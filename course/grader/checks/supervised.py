"""Grading of the supervisor of lab 03: ranks that die, hang, fail for ever, and a number of places that changes."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType
from typing import Any

from grader import fake_rank
from grader.exercise import Attempt, Mistake
from grader.ranks import RunFailed

HUNG_AFTER = 1.5
_FAKE = Path(fake_rank.__file__)
_SECONDS = 25.0


def run_supervisor(module: ModuleType, folder: str, settings: dict[str, Any], wait: float) -> dict[str, Any]:
    """Run the learner's supervisor over ranks of the grader, and return what became of them."""
    place = Path(folder)
    began = time.monotonic()

    def slots() -> int:
        if time.monotonic() - began < wait:
            return 1
        found = json.loads((place / "slots").read_text())
        if isinstance(found, int):
            return found
        pid = place / "pids" / found["lost"]
        # not before the supervisor has waited for the process: it must call this a death, not a change of places
        return found["left"] if pid.exists() and _reaped(int(pid.read_text())) else found["places"]

    command = [sys.executable, "-E", "-S", str(_FAKE), folder]
    supervisor = module.Supervisor(command, place, slots, **settings)
    error = ""
    try:
        history = [(one.world, one.end, one.rank) for one in supervisor.run()]
    except NotImplementedError:  # a RuntimeError, too
        raise
    except RuntimeError as failure:
        history, error = [], str(failure)
    left = [file.name for file in (place / "pids").glob("?-?") if fake_rank.alive(int(file.read_text()))]
    return {"history": history, "error": error, "left": left}


def _reaped(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def supervise(
    attempt: Attempt, story: str, plan: dict[str, Any], slots: Any, wait: float = 0.0, **settings: Any
) -> tuple[dict[str, Any], Path]:
    """Run one scenario, and raise for what no scenario allows; the story says in messages what happens in it."""
    place = Path(tempfile.mkdtemp(dir=attempt.folder))
    for folder in ("pids", "beats", "steps"):
        (place / folder).mkdir(parents=True)
    (place / "plan.json").write_text(json.dumps(plan))
    (place / "slots").write_text(json.dumps(slots))
    settings = {"hung_after": HUNG_AFTER, "grace": 5.0, **settings}
    try:
        found = attempt.call(run_supervisor, str(place), settings, wait, timeout=_SECONDS)
    except Mistake as mistake:
        if isinstance(mistake.__cause__, RunFailed) and mistake.__cause__.unwritten:
            raise
        raise Mistake(f"{story}: {mistake}") from None
    if (place / "overlap").exists():
        raise Mistake(
            f"{(place / 'overlap').read_text()}: end all processes, with kill(), and wait() for each before the next"
            " start; two groups would write to the same folder"
        )
    if found["left"]:
        one = found["left"][0].split("-")
        raise Mistake(f"run() came back while rank {one[1]} of generation {one[0]} was alive: end what you started")
    return found, place


def text_of(history: list[Any]) -> str:
    """Return a history in words."""
    ends = [f"{world} ranks {end}" + ("" if rank is None else f" (rank {rank})") for world, end, rank in history]
    return ", ".join(ends) or "nothing"


def grade_failures(attempt: Attempt) -> None:
    """Grade `lab-03-failures`."""
    killed, hung = attempt.random.choice([1, 2]), attempt.random.choice([1, 2])
    faults = [
        {"generation": 0, "rank": killed, "step": 3, "signal": signal.SIGKILL},
        {"generation": 1, "rank": 0, "step": 5, "seconds": HUNG_AFTER / 2},  # slow, not hung
        {"generation": 1, "rank": hung, "step": 7, "early": True, "seconds": 0.4},  # its peers are silent for longer
        {"generation": 1, "rank": hung, "step": 7, "signal": signal.SIGSTOP},
    ]
    story = f"3 ranks; rank {killed} is killed in step 3, and rank {hung} of the next generation stops in step 7"
    found, _ = supervise(attempt, story, {"steps": 10, "faults": faults}, 3)
    _died_and_hung(found, killed, hung)
    faults = [{"generation": g, "rank": 0, "step": 2 * g + 2, "code": 1} for g in range(4)]
    found, _ = supervise(
        attempt, "2 ranks; rank 0 fails four times, two steps later each time", {"steps": 10, "faults": faults}, 2
    )
    if found["error"]:
        raise Mistake(
            f"four failures, each two steps later than the one before, and run() gave up ({found['error']}): count"
            " failures without progress; a step that no generation had reached before is progress"
        )
    faults = [{"generation": g, "rank": 1, "step": 4, "code": 41} for g in range(9)]
    found, place = supervise(attempt, "2 ranks; rank 1 always fails in step 4", {"steps": 10, "faults": faults}, 2)
    starts = len(list((place / "pids").glob("?-0")))
    if not found["error"]:
        raise Mistake(f"rank 1 failed in step 4 in each of {starts} starts, and run() did not raise RuntimeError")
    if starts != 3:
        raise Mistake(f"rank 1 fails in step 4 each time, most_failures=3: run() started {starts} generations, not 3")
    if "rank 1" not in found["error"] or "41" not in found["error"]:
        raise Mistake(f"the RuntimeError says {found['error']!r}: it should name rank 1 and its exit code 41")
    faults = [{"generation": g, "rank": 1, "step": 1, "code": 2} for g in range(9)]
    found, place = supervise(attempt, "2 ranks; rank 1 ends with code 2", {"steps": 10, "faults": faults}, 2)
    starts = len(list((place / "pids").glob("?-0")))
    if starts != 1 or not found["error"]:
        raise Mistake(
            f"rank 1 ended with code 2, which means wrong settings: it was started {starts} times, and run()"
            f" {'raised' if found['error'] else 'did not raise'} RuntimeError; do not try again, raise at once"
        )


def _died_and_hung(found: dict[str, Any], killed: int, hung: int) -> None:
    story = [(3, "died", killed), (3, "hung", hung), (3, "done", None)]
    seen = [tuple(one) for one in found["history"]]
    if seen == story:
        return
    if found["error"]:
        raise Mistake(f"one rank killed, one stopped, each in another step: run() gave up with {found['error']!r}")
    if len(seen) > 0 and seen[0] != story[0]:
        raise Mistake(
            f"rank {killed} was killed by a signal, the others ended with code 1 because they lost it; the first entry"
            f" of the history is {text_of(seen[:1])}, it should be {text_of(story[:1])}"
        )
    if len(seen) > 1 and seen[1][:2] == (3, "hung"):
        raise Mistake(
            f"rank {hung} was stopped while it computes, the others wait for it; you name rank {seen[1][2]}. All of"
            " them are silent: the one whose last beat is not `wait` is the one that hangs"
        )
    raise Mistake(f"the history is: {text_of(seen)}; it should be: {text_of(story)}")


def grade_elastic(attempt: Attempt) -> None:
    """Grade `lab-03-elastic`."""
    faults = [
        {"generation": 0, "rank": 2, "step": 5, "signal": signal.SIGKILL},
        {"generation": 1, "rank": 0, "step": 9, "slots": 4},
        {"generation": 2, "rank": 0, "step": 16, "slots": 9},
    ]
    places = {"places": 3, "lost": "0-2", "left": 2}
    found, place = supervise(attempt, "3 places, then 2, then 4", {"steps": 60, "faults": faults}, places, most=4)
    _left_and_joined(found, place)
    found, _ = supervise(attempt, "1 place for half a second, then 3; least=2", {"steps": 6}, 3, wait=0.5, least=2)
    if any(world < 2 for world, _, _ in found["history"]) or len(found["history"]) != 1:
        raise Mistake(
            f"for half a second there is 1 place, least=2: the history is {text_of(found['history'])}; wait until there"
            " are places for 2, and start then"
        )
    faults = [{"generation": 0, "rank": 0, "step": 4, "slots": 3}]
    found, _ = supervise(
        attempt,
        "2 places, then 3; the ranks do not listen to SIGTERM",
        {"steps": 60, "faults": faults, "deaf": True},
        2,
        grace=0.3,
    )
    story = [(2, "scaled", None), (3, "done", None)]
    if [tuple(one) for one in found["history"]] != story:
        raise Mistake(
            f"the ranks do not listen to SIGTERM, grace=0.3: the history is {text_of(found['history'])}; it should be"
            f" {text_of(story)}: kill what has not ended after `grace` seconds"
        )


def _left_and_joined(found: dict[str, Any], place: Path) -> None:
    seen = [tuple(one) for one in found["history"]]
    if found["error"]:
        raise Mistake(f"one rank was lost, and places came back: run() gave up with {found['error']!r}")
    if len(seen) > 1 and seen[1][0] == 3:
        raise Mistake("rank 2 was lost together with its place: 2 are left, and you started 3 ranks again; ask slots()")
    if len(seen) == 2 and seen[1] == (2, "done", None):
        raise Mistake(
            "the places grew from 2 to 4 in step 9, and the run ended with 2 ranks: ask slots() while they run"
        )
    if any(world > 4 for world, _, _ in seen):
        raise Mistake(f"9 places, most=4: the history is {text_of(seen)}; start at most 4")
    story = [(3, "died", 2), (2, "scaled", None), (4, "done", None)]
    if seen != story:
        raise Mistake(f"the history is: {text_of(seen)}; it should be: {text_of(story)}")
    last, first = (int((place / "steps" / name).read_text().split()[part]) for name, part in (("1-0", 1), ("2-0", 0)))
    if first != last + 1:
        raise Mistake(
            f"the change from 2 to 4 ranks was planned: step {last} was the last of 2 ranks, and 4 ranks began with"
            f" step {first}, so steps were computed twice. Send SIGTERM, and give the ranks `grace` seconds to save"
        )
