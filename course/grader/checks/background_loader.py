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
    """Return what `function` returns, or HUNG if it takes longer; it runs in a separate thread."""
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
        self.ended = 0
        self.fail_at = fail_at
        self.error = LookupError("sample 7 is damaged")

    def load(self, indices: list[int]) -> torch.Tensor:
        """Return the indices as a tensor, after 3 to 9 ms."""
        self.started += 1
        number = self.started
        time.sleep(0.009 if number % 3 == 1 else 0.003)
        if self.fail_at is not None and indices[0] == self.fail_at:
            raise self.error
        self.ended += 1
        return torch.tensor(indices)

    def wait_until_ahead(self, loads: int) -> int:
        """Return the loads begun when the loader has run as far ahead as it will; it should begin `loads`.

        A busy machine may stop its thread for a while: a loader that has begun fewer loads gets half a second.
        """
        deadline = time.monotonic() + 0.5
        while self.ended < loads and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(0.06)
        return self.started


def new_threads(before: set[threading.Thread]) -> int:
    """Return the number of threads that are not in `before`, after at most half a second of patience."""
    deadline = time.monotonic() + 0.5
    while time.monotonic() < deadline and set(threading.enumerate()) - before:
        time.sleep(0.01)
    return len(set(threading.enumerate()) - before)


def run_loader(module: ModuleType, batches: list[list[int]]) -> dict[str, Any]:
    """Use a loader as a training loop does; return what was seen."""
    seen: dict[str, Any] = {}
    for use in (two_passes, two_at_once, loads_ahead, failing_pass, left_early, left_when_full):
        seen[use.__name__] = guarded(partial(use, module, batches))
        if seen[use.__name__] == HUNG:
            break
    return seen


def two_passes(module: ModuleType, batches: list[list[int]]) -> list[list[list[int]]]:
    """Return the batches of two passes over one loader."""
    loader = module.BackgroundLoader(Disk().load, batches, depth=DEPTH)
    return [[batch.tolist() for batch in loader] for _ in range(2)]


def two_at_once(module: ModuleType, batches: list[list[int]]) -> list[list[list[int]]]:
    """Return the batches of two iterators of one loader that are used in turn, as by zip."""
    loader = module.BackgroundLoader(Disk().load, batches, depth=DEPTH)
    pairs = [(one.tolist(), other.tolist()) for one, other in zip(loader, loader, strict=False)]
    return [[one for one, _ in pairs], [other for _, other in pairs]]


def loads_ahead(module: ModuleType, batches: list[list[int]]) -> list[tuple[int, int, int, int]]:
    """Return for three depths: the depth, and the loads begun at the first batch, while it is held, and in all."""
    found = []
    for depth in (DEPTH, 1, 5):
        disk = Disk()
        loader = module.BackgroundLoader(disk.load, batches, depth=depth)
        iterator: Iterator[torch.Tensor] = iter(loader)
        next(iterator)
        at_once = disk.started
        held = disk.wait_until_ahead(depth + 1)
        for _ in iterator:
            pass
        found.append((depth, at_once, held, disk.started))
    return found


def failing_pass(module: ModuleType, batches: list[list[int]]) -> list[tuple[int, int, str, bool, int]]:
    """Return for three places of the error: the place, the batches before it, the error, whether it is the one of the
    dataset, and the loads begun after it.
    """
    found = []
    for place in (5, 0, LOADS - 1):
        disk = Disk(fail_at=batches[place][0])
        delivered, error, same = 0, "", False
        try:
            for batch in module.BackgroundLoader(disk.load, batches, depth=DEPTH):
                if isinstance(batch, Exception):
                    error = DELIVERED
                    break
                delivered += 1
                time.sleep(0.01)
        except Exception as raised:  # noqa: BLE001 - the kind of error is what is graded
            error, same = repr(raised), raised is disk.error
        time.sleep(0.03)
        found.append((place, delivered, error, same, disk.started - place - 1))
    return found


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


def left_when_full(module: ModuleType, batches: list[list[int]]) -> tuple[int, int]:
    """Return the threads left, and the loads begun, after a loop that is left while its thread waits for a place."""
    before = set(threading.enumerate())
    disk = Disk()
    iterator = iter(module.BackgroundLoader(disk.load, batches, depth=DEPTH))
    next(iterator)
    started = disk.wait_until_ahead(DEPTH + 1)
    iterator.close()
    return new_threads(before), disk.started - started


def grade_load_in_background(attempt: Attempt) -> None:
    """Check order, run-ahead, errors and the end of the thread."""
    draw = random.Random(attempt.seed())
    names = draw.sample(range(1000), LOADS * 3)
    batches = [names[3 * step : 3 * step + draw.randint(1, 3)] for step in range(LOADS)]
    seen = attempt.call(run_loader, batches)
    check_passes(batches, seen["two_passes"])
    check_two_at_once(batches, seen["two_at_once"])
    check_ahead(seen["loads_ahead"])
    check_failure(seen["failing_pass"])
    check_end(seen["left_early"])
    check_left_when_full(seen["left_when_full"])


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


def check_two_at_once(batches: list[list[int]], passes: Any) -> None:
    """Raise a Mistake unless two iterators at the same time have a pass each."""
    if passes == HUNG or passes != [batches, batches]:
        raise Mistake(
            "Two iterators of one loader, used in turn, do not get all batches each: they share a queue or a thread. "
            "Each iter() makes its own.",
            see=BACKGROUND,
        )


def check_ahead(ahead: Any) -> None:
    """Raise a Mistake unless the loader runs as many batches ahead as its depth."""
    if ahead == HUNG:
        raise Mistake("A caller that pauses after the first batch gets no other batch: it waits.", see=BACKGROUND)
    for depth, at_once, held, started in ahead:
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
        if held - 1 == depth + 1:
            raise Mistake(
                f"With depth={depth}, {held - 1} finished batches wait while the caller holds the first: beside those "
                "in the queue the thread holds one more, which it has loaded and cannot put. Wait for a free place "
                "before you load.",
                see=BACKGROUND,
            )
        if held - 1 > depth:
            raise Mistake(
                f"With depth={depth}, {held - 1} batches are loaded ahead while the caller holds the first: the queue "
                "has no limit, or not this one, and a slow training loop fills the memory.",
                see=BACKGROUND,
            )
        if held - 1 < depth:
            raise Mistake(
                f"With depth={depth}, only {held - 1} batches are loaded ahead: is `depth` used as the size of the "
                "queue, and is a place free again as soon as the caller takes a batch?",
                see=BACKGROUND,
            )
        if started != LOADS:
            raise Mistake(
                f"{LOADS} batches were loaded {started} times in one pass: load each batch once, and only when a pass "
                "has begun.",
                see=BACKGROUND,
            )


def check_failure(failed: Any) -> None:
    """Raise a Mistake unless the error of batch 5 reaches the caller after 5 batches."""
    if failed == HUNG:
        raise Mistake(
            "load raised an error in the thread and the caller waits for ever: catch it there and put it in the queue.",
            see=BACKGROUND,
        )
    for place, delivered, error, same, loads_after in failed:
        if not error:
            raise Mistake(
                f"load raised an error for batch {place}, and the loop ended after {delivered} batches as if all was "
                "well: an epoch would be shorter and give no sign. Raise the error to the caller.",
                see=BACKGROUND,
            )
        if error == DELIVERED:
            raise Mistake(
                "The caller gets the exception object of `load` as a batch: raise it instead.", see=BACKGROUND
            )
        if not same:
            raise Mistake(
                f"load raised LookupError('sample 7 is damaged'), the caller got {error}: raise the same exception "
                "object.",
                see=BACKGROUND,
            )
        if delivered != place:
            raise Mistake(
                f"The error of batch {place} was raised after {delivered} batches: the {place - delivered} before it "
                "were good and should be delivered first.",
                see=BACKGROUND,
            )
        if loads_after > DEPTH:
            raise Mistake(
                f"load raised an error for batch {place}, and {loads_after} more loads began after it: no batch "
                "follows an error, so the thread should end there.",
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


def check_left_when_full(left: Any) -> None:
    """Raise a Mistake unless closing the iterator ends a thread that waits for a place, without another load."""
    if left == HUNG:
        raise Mistake(
            "close() of the iterator blocks for ever while the thread waits for a free place: wake the thread up "
            "before you join it.",
            see=BACKGROUND,
        )
    threads, loads = left
    if threads:
        raise Mistake(
            f"The loop is left while the thread waits for a free place, and {threads} thread is blocked for ever: set "
            "the stop event and wake the thread up (free a place) in the `finally` block of the generator.",
            see=BACKGROUND,
        )
    if loads:
        raise Mistake(
            f"The loop is left while the thread waits for a free place, and {loads} more load begins: look at the stop "
            "event after the wait, before you load.",
            see=BACKGROUND,
        )
