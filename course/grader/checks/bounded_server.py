"""The grader of bounded staleness: a slow worker, then one that hangs."""

from __future__ import annotations

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
    """A worker that notes its steps in a file, and hangs in one step if the grader wants it."""

    def __init__(self, rank: int, pause: float, folder: str, hang_at: int | None) -> None:
        super().__init__(rank, pause)
        self.folder, self.hang_at = Path(folder), hang_at

    def __call__(self, weights: Tensor, step: int) -> Tensor:
        """Return the gradient, or never."""
        if step == self.hang_at:
            while not (self.folder / "ended").exists():
                time.sleep(0.01)
            raise Silent
        return super().__call__(weights, step)


def rank_bounded(module: ModuleType, rank: int, world: int, case: dict[str, Any]) -> dict[str, Any]:
    """Train with a limit on the lead; one worker is slow, another may hang."""
    weights = begin(case["seed"], case["size"], rank)
    pause, hang = case["pauses"].get(rank, 0.0), case["hangs"].get(rank)
    worker = BoundedWorker(rank, pause, case["folder"], hang)
    lost: Any = None
    try:
        lost = module.train_bounded(weights, worker, case["steps"], RATE, case["bound"], case["patience"])
    except Silent:
        weights = torch.zeros(0)
    if rank == 0:
        Path(case["folder"], "ended").write_text(str(lost))
    return {"weights": weights, "times": worker.times, "seen": worker.seen, "steps": worker.steps, "lost": lost}


def grade_bounded(attempt: Attempt) -> None:
    """Run all cases; a busy machine gets a second and a third chance."""
    repeat_if_late(lambda: check_bounded(attempt))


def check_bounded(attempt: Attempt) -> None:
    """First a slow worker, then one that hangs from the start, then one that hangs while the others are held back."""
    bound, steps = attempt.random.choice((3, 4)), 7
    common = {"seed": attempt.seed(), "size": 6, "steps": steps, "bound": bound, "folder": str(attempt.folder)}
    slow = {**common, "pauses": {2: SLOW}, "hangs": {}, "patience": 0.3}
    lead = f"The lead may be {bound}: do not hold a worker whose lead is at most that"
    answers = run_case(attempt, 3, slow, f"{WAITS}. {lead}", [])
    check_bounded_weights(answers, common["seed"], common["size"], {1: steps, 2: steps})
    check_lead(answers, bound)
    silent = (
        "Worker 2 hangs, and the server must give it up after `patience` seconds and then answer those that waited; a "
        "recv from it in the server's own thread never returns"
    )
    # In the last case the first push of worker 2, after a pause, releases the others: they get their answers when
    # worker 2 does, push, and are held back again. When worker 2 is overdue, their last answers are as old.
    for pauses, first_steps in (({}, 0), ({2: 2 * SLOW}, 1)):
        hanging = {**common, "pauses": pauses, "hangs": {2: first_steps}, "patience": 4 * SLOW}
        answers = run_case(attempt, 4, hanging, silent, [2])
        check_bounded_weights(answers, common["seed"], common["size"], {1: steps, 2: first_steps, 3: steps})


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
        raise Mistake(f"worker 2 hangs, and {text}", SEE_BOUNDED)
    raise Late(
        f"{text}. Only a worker that has pulled and does not push for {patience} s is silent: not one that the server "
        "holds back, nor one that has finished",
        SEE_BOUNDED,
    )


def check_lead(answers: Sequence[Answer], bound: int) -> None:
    """Raise if the fast worker began a step too early, or was held back without need."""
    fast, slow = answers[1].value["times"], answers[2].value["times"]
    for step, moment in enumerate(fast):
        # Worker 1 begins step number `step` with `step` pushes done; worker 2 has one push for each pause that is over.
        pushed = sum(began + SLOW <= moment for began in slow)
        if step - pushed > bound:
            raise Mistake(
                f"worker 1 began step {step} when worker 2 had pushed {pushed} times; with bound={bound} it must wait "
                f"at the server until worker 2 has pushed {step - bound} times",
                SEE_BOUNDED,
            )
    if fast[bound] - fast[0] > SLOW * 0.8:
        raise Late(
            f"worker 1 was held back before its lead exceeded bound={bound}: it may begin step {bound} before worker 2 "
            "has pushed at all",
            SEE_BOUNDED,
        )


def check_bounded_weights(answers: Sequence[Answer], seed: int, size: int, pushes: dict[int, int]) -> None:
    """Raise unless the server's weights are the first ones minus all gradients of living workers."""
    expected = start_of(seed, size)
    for worker, count in pushes.items():
        value = answers[worker].value
        if len(value["seen"]) != count:
            raise Mistake(f"worker {worker} computed {len(value['seen'])} of {count} gradients", SEE_BOUNDED)
        for at, step in zip(value["seen"], value["steps"], strict=True):
            expected = expected - RATE * gradient_of(at, worker, step)
    found = answers[0].value["weights"]
    if not torch.allclose(found, expected, rtol=1e-8, atol=1e-8):
        raise Mistake(
            "the server's weights are not the first ones minus rate times each gradient that was pushed: apply each "
            "push once, when it comes, also while its sender is held back",
            SEE_BOUNDED,
        )
