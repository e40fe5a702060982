"""The grader of bounded staleness: a slow worker, then one that hangs."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from grader.checks.server_parts import RATE, WAITS, Worker, begin, gradient_of, start_of
from grader.checks.talk import Late, repeat_if_late, run_explained
from grader.exercise import Attempt, Mistake
from grader.ranks import Answer

SEE_BOUNDED = "Bounded staleness"
SLOW = 0.12
"""Seconds that the slow worker takes for a gradient."""


class Silent(Exception):
    """The worker has been silent until the server ended."""


class BoundedWorker(Worker):
    """A worker that hangs in one step, for ever or for some seconds, if the grader wants it."""

    def __init__(self, rank: int, case: dict[str, Any]) -> None:
        super().__init__(rank, case["pauses"].get(rank, 0.0))
        self.ended = Path(case["folder"], "ended")
        self.hang_at = case["hangs"].get(rank)
        self.seconds = case["late"].get(rank, float("inf"))
        self.was_late = False

    def __call__(self, weights: Tensor, step: int) -> Tensor:
        """Return the gradient, or never."""
        if step == self.hang_at:
            end = time.monotonic() + self.seconds
            while not self.ended.exists():
                if time.monotonic() > end:
                    self.was_late = True
                    break
                time.sleep(0.01)
            else:
                raise Silent
        return super().__call__(weights, step)


def rank_bounded(module: ModuleType, rank: int, world: int, case: dict[str, Any]) -> dict[str, Any]:
    """Train with a limit on the lead; one worker is slow, others may hang."""
    weights = begin(case["seed"], case["size"], rank)
    worker = BoundedWorker(rank, case)
    lost: Any = None

    def train() -> None:
        nonlocal lost, weights
        try:
            lost = module.train_bounded(weights, worker, case["steps"], RATE, case["bound"], case["patience"])
        except Silent:
            weights = torch.zeros(0)

    if rank in case["late"]:  # it gets no answer any more, so its call never ends
        thread = threading.Thread(target=train, daemon=True)
        thread.start()
        while thread.is_alive() and not worker.ended.exists():
            thread.join(0.02)
        thread.join(0.2)
    else:
        train()
    if rank == 0:
        worker.ended.write_text(str(lost))
    return {
        "weights": weights, "times": worker.times, "seen": worker.seen, "steps": worker.steps, "lost": lost,
        "late": worker.was_late,
    }  # fmt: skip


def grade_bounded(attempt: Attempt) -> None:
    """Run all cases; a busy machine gets a second and a third chance."""
    repeat_if_late(lambda stretch: check_bounded(attempt, SLOW * stretch))


def check_bounded(attempt: Attempt, pause: float) -> None:
    """Slow workers, one that hangs from the start, one that hangs while others are held back, one that comes late."""
    bound, steps = attempt.random.choice((3, 4)), 7
    common = {"seed": attempt.seed(), "size": 6, "steps": steps, "bound": bound, "folder": str(attempt.folder)}
    common |= {"hangs": {}, "late": {}}
    for limit, behind in ((bound, 2), (0, 1)):
        slow = {**common, "bound": limit, "pauses": {behind: pause}, "patience": 2.5 * pause}
        lead = f"The lead may be {limit}: do not hold a worker whose lead is at most that"
        answers = run_case(attempt, 3, slow, f"{WAITS}. {lead}", [])
        check_bounded_weights(answers, slow, {1: steps, 2: steps})
        check_lead(answers, limit, behind, pause)
    # In the second case the first push of the worker that hangs, after a pause, releases the others: they get their
    # answers when it does, push, and are held back again. When it is overdue, their last answers are as old.
    hung = attempt.random.sample((1, 2, 3), 2)
    for worker, before, first_steps in ((hung[0], 0.0, 0), (hung[1], 2 * pause, 1)):
        hanging = {**common, "pauses": {worker: before}, "hangs": {worker: first_steps}, "patience": 4 * pause}
        answers = run_case(attempt, 4, hanging, silent(worker), [worker])
        check_bounded_weights(answers, hanging, dict.fromkeys((1, 2, 3), steps) | {worker: first_steps})
    gone, late, last = attempt.random.choice(((1, 2, 3), (1, 3, 2), (2, 3, 1)))  # the higher number is given up first
    pauses = {gone: pause, last: 1.7 * pause}
    both = {**common, "pauses": pauses, "hangs": {late: 0, gone: 2}, "late": {late: 9 * pause}}
    both |= {"patience": 5 * pause, "steps": 9}
    answers = run_case(attempt, 4, both, silent(late), [late, gone])
    check_late_push(answers, late)
    check_bounded_weights(answers, both, {late: 0, gone: 2, last: 9})


def silent(worker: int) -> str:
    """Say what a server that stands still does about a silent worker."""
    return (
        f"Worker {worker} hangs, and the server must give it up after `patience` seconds and then answer those that "
        "waited; a recv from it in the server's own thread never returns"
    )


def check_late_push(answers: Sequence[Answer], late: int) -> None:
    """Raise if the worker that was given up got an answer to the push that came later."""
    if len(answers[late].value["seen"]) > 1:
        raise Mistake(
            f"worker {late} was given up, then pushed, and the server answered it: a worker that was given up gets no "
            "answers any more",
            SEE_BOUNDED,
        )
    value = answers[0].value
    if not answers[late].value["late"]:
        raise Late(f"the server ended before worker {late} came back: {value['lost']} were given up", SEE_BOUNDED)


def run_case(attempt: Attempt, ranks: int, case: dict[str, Any], waits: str, lost: list[int]) -> list[Answer]:
    """Run one case; if workers wait for ever because the server gave them up, say that first."""
    ended = attempt.folder / "ended"
    ended.unlink(missing_ok=True)
    try:
        answers = run_explained(attempt, rank_bounded, ranks, (case,), waits=waits, see=SEE_BOUNDED)
    except Mistake:
        if ended.exists():
            check_lost(ended.read_text(), lost, case["patience"])
        raise
    check_lost(str(answers[0].value["lost"]), lost, case["patience"])
    return answers


def check_lost(lost: str, right: list[int], patience: float) -> None:
    """Raise unless the server gave up the workers that hang and no others."""
    if lost == str(right):
        return
    text = f"the server returned {lost} as the workers given up; it should be {right}"
    if right and lost == "[]":
        raise Mistake(f"worker {right[0]} hangs, and {text}", SEE_BOUNDED)
    if sorted(lost) == sorted(str(right)):
        raise Late(f"{text}, in the order in which they were given up", SEE_BOUNDED)
    if len(right) > 1 and lost == str(right[:1]):
        raise Mistake(f"two workers hang, one after the other, and {text}", SEE_BOUNDED)
    raise Late(
        f"{text}. Only a worker that has pulled and does not push for {patience:.1f} s is silent: not one that the "
        "server holds back, nor one that has finished",
        SEE_BOUNDED,
    )


def check_lead(answers: Sequence[Answer], bound: int, behind: int, pause: float) -> None:
    """Raise if the fast worker began a step too early, or was held back without need."""
    ahead = 3 - behind
    fast, slow = answers[ahead].value["times"], answers[behind].value["times"]
    for step, moment in enumerate(fast):
        # The fast worker begins step number `step` with `step` pushes done; the other has one for each pause that is
        # over.
        pushed = sum(began + pause <= moment for began in slow)
        if step - pushed > bound:
            raise Mistake(
                f"worker {ahead} began step {step} when worker {behind} had pushed {pushed} times; with bound={bound} "
                f"it must wait at the server until worker {behind} has pushed {step - bound} times",
                SEE_BOUNDED,
            )
    if fast[bound] - fast[0] > pause * 0.8:
        raise Late(
            f"worker {ahead} was held back before its lead exceeded bound={bound}: it may begin step {bound} before "
            f"worker {behind} has pushed at all",
            SEE_BOUNDED,
        )


def check_bounded_weights(answers: Sequence[Answer], case: dict[str, Any], pushes: dict[int, int]) -> None:
    """Raise unless the server's weights are the first ones minus all gradients of living workers."""
    expected = start_of(case["seed"], case["size"])
    late = None
    for worker, count in pushes.items():
        value = answers[worker].value
        if value["late"]:
            late = worker, RATE * gradient_of(value["seen"][0], worker, value["steps"][0])
            continue
        if len(value["seen"]) != count:
            raise Mistake(f"worker {worker} computed {len(value['seen'])} of {count} gradients", SEE_BOUNDED)
        for at, step in zip(value["seen"], value["steps"], strict=True):
            expected = expected - RATE * gradient_of(at, worker, step)
    found = answers[0].value["weights"]
    if late is not None and torch.allclose(found, expected - late[1], rtol=1e-8, atol=1e-8):
        raise Mistake(
            f"worker {late[0]} was given up and pushed later, and the server applied that push: its gradient is of "
            "weights that are long gone. A push of a worker that was given up is not applied",
            SEE_BOUNDED,
        )
    if not torch.allclose(found, expected, rtol=1e-8, atol=1e-8):
        raise Mistake(
            "the server's weights are not the first ones minus rate times each gradient that was pushed: apply each "
            "push once, when it comes, also while its sender is held back",
            SEE_BOUNDED,
        )
