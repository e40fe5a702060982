"""Grade BackgroundLoader of template_data_loader.py: order, run-ahead, errors, the end of its thread."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import torch

from grader.exercise import Attempt, Mistake

BACKGROUND = "Load batches in the background"


HUNG = "hung"
DELIVERED = "delivered as a batch"
LOADS = 12
DEPTH = 3


def guarded(function: Callable[[], Any], seconds: float = 2.5) -> Any:
    """Return what `function` returns, or HUNG if it takes longer; it runs in a thread of its own."""
    box: dict[str, Any] = {}

    def work() -> None:
        try:
            box["value"] = function()
        except BaseException as error:  # noqa: BLE001 - raised again by the caller of guarded
            box["error"] = error

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    if "error" in box:
        raise box["error"]
    return box.get("value", HUNG)


class Disk:
    """A slow dataset that counts its loads and fails at one of them."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.started = 0
        self.fail_at = fail_at
        self.error = LookupError("sample 7 is damaged")

    def load(self, indices: list[int]) -> torch.Tensor:
        """Return the indices as a tensor, after 3 to 9 ms."""
        self.started += 1
        number = self.started
        time.sleep(0.009 if number % 3 == 1 else 0.003)
        if self.fail_at is not None and indices[0] == self.fail_at:
            raise self.error
        return torch.tensor(indices)


def new_threads(before: set[threading.Thread]) -> int:
    """Return the number of threads that are not in `before`, after at most half a second of patience."""
    deadline = time.monotonic() + 0.5
    while time.monotonic() < deadline and set(threading.enumerate()) - before:
        time.sleep(0.01)
    return len(set(threading.enumerate()) - before)


def run_loader(module: ModuleType, batches: list[list[int]]) -> dict[str, Any]:
    """Use a loader as a training loop does; return what was seen."""
    seen: dict[str, Any] = {}
    for use in (two_passes, loads_ahead, failing_pass, left_early):
        seen[use.__name__] = guarded(partial(use, module, batches))
        if seen[use.__name__] == HUNG:
            break
    return seen


def two_passes(module: ModuleType, batches: list[list[int]]) -> list[list[list[int]]]:
    """Return the batches of two passes over one loader."""
    loader = module.BackgroundLoader(Disk().load, batches, depth=DEPTH)
    return [[batch.tolist() for batch in loader] for _ in range(2)]


def loads_ahead(module: ModuleType, batches: list[list[int]]) -> tuple[int, int]:
    """Return the loads begun when the first batch arrives, and after a pause while the caller holds it."""
    disk = Disk()
    iterator: Iterator[torch.Tensor] = iter(module.BackgroundLoader(disk.load, batches, depth=DEPTH))
    next(iterator)
    at_once = disk.started
    time.sleep(0.15)
    held = disk.started
    for _ in iterator:
        pass
    return at_once, held


def failing_pass(module: ModuleType, batches: list[list[int]]) -> tuple[int, str, bool]:
    """Return the batches before the error, the error, and whether it is the one of the dataset."""
    disk = Disk(fail_at=batches[5][0])
    delivered = 0
    try:
        for batch in module.BackgroundLoader(disk.load, batches, depth=DEPTH):
            if isinstance(batch, Exception):
                return delivered, DELIVERED, False
            delivered += 1
            time.sleep(0.02)
    except Exception as error:  # noqa: BLE001 - the kind of error is what is graded
        return delivered, repr(error), error is disk.error
    return delivered, "", False


def left_early(module: ModuleType, batches: list[list[int]]) -> tuple[int, int]:
    """Return the threads left after a loop that ended, and after one that was left."""
    before = set(threading.enumerate())
    loader = module.BackgroundLoader(Disk().load, batches[:3], depth=DEPTH)
    for _ in loader:
        pass
    after_end = new_threads(before)
    for _ in module.BackgroundLoader(Disk().load, batches, depth=DEPTH):
        break
    return after_end, new_threads(before)


def grade_load_in_background(attempt: Attempt) -> None:
    """Check order, run-ahead, errors and the end of the thread."""
    draw = random.Random(attempt.seed())
    names = draw.sample(range(1000), LOADS * 3)
    batches = [names[3 * step : 3 * step + draw.randint(1, 3)] for step in range(LOADS)]
    seen = attempt.call(run_loader, batches)
    check_passes(batches, seen["two_passes"])
    check_ahead(seen["loads_ahead"])
    check_failure(seen["failing_pass"])
    check_end(seen["left_early"])


def check_passes(batches: list[list[int]], passes: Any) -> None:
    """Raise a Mistake unless both passes deliver all batches in order."""
    if passes == HUNG:
        raise Mistake("A pass over 12 batches does not end: the thread has to send a mark at its end.", see=BACKGROUND)
    first, second = passes
    if first != batches and sorted(first) == sorted(batches):
        raise Mistake(
            f"The batches arrive in another order: place {first.index(batches[0])} has batch 0. With several workers "
            "the fast loads overtake the slow ones: one thread and one queue keep the order.",
            see=BACKGROUND,
        )
    if first == batches[:-1]:
        raise Mistake("The last batch never arrives: the end of the queue replaces it.", see=BACKGROUND)
    if first == batches[1:]:
        raise Mistake("The first batch never arrives.", see=BACKGROUND)
    if first != batches:
        raise Mistake(f"{len(batches)} batches were asked for, {len(first)} arrived: {first[:3]} ...", see=BACKGROUND)
    if second != batches:
        raise Mistake(
            f"The second `for batch in loader` delivers {len(second)} batches: each iter() must start a new pass, with "
            "a new thread and a new queue.",
            see=BACKGROUND,
        )


def check_ahead(ahead: Any) -> None:
    """Raise a Mistake unless the loader runs DEPTH batches ahead."""
    if ahead == HUNG:
        raise Mistake("A caller that pauses after the first batch gets no other batch: it waits.", see=BACKGROUND)
    at_once, held = ahead
    if held == 1:
        raise Mistake(
            "While the caller holds the first batch, nothing is loaded: loading and computing do not overlap.",
            see=BACKGROUND,
        )
    if at_once == LOADS:
        raise Mistake(
            f"The first batch arrives after all {LOADS} batches are loaded: deliver each as soon as it is there.",
            see=BACKGROUND,
        )
    if held - 1 > DEPTH + 1:
        raise Mistake(
            f"With depth={DEPTH}, {held - 1} batches are loaded ahead while the caller holds the first: the queue has "
            "no limit, and a slow training loop fills the memory.",
            see=BACKGROUND,
        )
    if held - 1 < DEPTH:
        raise Mistake(
            f"With depth={DEPTH}, only {held - 1} batches are loaded ahead: is `depth` used as the size of the queue?",
            see=BACKGROUND,
        )


def check_failure(failed: Any) -> None:
    """Raise a Mistake unless the error of batch 5 reaches the caller after 5 batches."""
    if failed == HUNG:
        raise Mistake(
            "load raised an error in the thread and the caller waits for ever: catch it there and put it in the queue.",
            see=BACKGROUND,
        )
    delivered, error, same = failed
    if not error:
        raise Mistake(
            f"load raised an error for batch 5, and the loop ended after {delivered} batches as if all was well: an "
            "epoch would be shorter and give no sign. Raise the error to the caller.",
            see=BACKGROUND,
        )
    if error == DELIVERED:
        raise Mistake("The caller gets the exception object of `load` as a batch: raise it instead.", see=BACKGROUND)
    if not same:
        raise Mistake(
            f"load raised LookupError('sample 7 is damaged'), the caller got {error}: raise the same exception object.",
            see=BACKGROUND,
        )
    if delivered != 5:
        raise Mistake(
            f"The error of batch 5 was raised after {delivered} batches: the {5 - delivered} before it were good and "
            "should be delivered first.",
            see=BACKGROUND,
        )


def check_end(left: Any) -> None:
    """Raise a Mistake unless no thread stays."""
    if left == HUNG:
        raise Mistake(
            "Leaving the loop early blocks for ever: join() waits for a thread that waits for a free place. Tell the "
            "thread to stop and wake it up before you join it.",
            see=BACKGROUND,
        )
    after_end, after_leaving = left
    if after_end:
        raise Mistake(f"{after_end} threads still run after the loop has ended.", see=BACKGROUND)
    if after_leaving:
        raise Mistake(
            f"After the loop is left with break, {after_leaving} thread still runs 0.5 s later: it waits for a place "
            "in the queue that never gets free. Stop it in the `finally` block of the generator.",
            see=BACKGROUND,
        )
