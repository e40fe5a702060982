"""Graders of template_parameter_server.py: three kinds of server, and the distribution of tensors over servers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from torch import Tensor

from grader.checks.bounded_server import grade_bounded
from grader.checks.server_parts import (
    RATE,
    WAITS,
    Worker,
    begin,
    check_peers,
    check_worker_inputs,
    close,
    gradient_of,
    start_of,
)
from grader.checks.shard_plans import grade_shards
from grader.checks.talk import COLLECTIVES, Late, repeat_if_late, run_explained
from grader.exercise import Attempt, Exercise, Mistake
from grader.ranks import Answer

TEMPLATE = "phase3_multi_node/template_parameter_server.py"
SEE_SYNC, SEE_ASYNC = "A synchronous server", "An asynchronous server"


# --- server-sync ------------------------------------------------------------------------------------------------------


def rank_sync(module: ModuleType, rank: int, world: int, seed: int, size: int, steps: int) -> dict[str, Any]:
    """Train in lockstep; worker 1 is slower than the others."""
    weights, worker = begin(seed, size, rank), Worker(rank, 0.03 if rank == 1 else 0.0)
    module.train_sync(weights, worker, steps, RATE)
    return {"weights": weights, "seen": worker.seen, "steps": worker.steps}


def history(seed: int, size: int, workers: int, steps: int, factor: float = 1.0, sign: int = 1) -> list[Tensor]:
    """Return the weights before each step and after the last, as one process computes them."""
    weights = start_of(seed, size)
    found = [weights]
    for step in range(steps):
        total = sum(gradient_of(weights, worker, step) for worker in range(1, workers + 1))
        weights = weights - sign * factor * RATE * total / workers
        found.append(weights)
    return found


def grade_sync(attempt: Attempt) -> None:
    """Check all weights that were seen, and the messages."""
    ranks, steps = attempt.random.choice((3, 4)), attempt.random.randint(3, 4)
    seed, size = attempt.seed(), attempt.random.randint(5, 30)
    answers = run_explained(attempt, rank_sync, ranks, (seed, size, steps), waits=WAITS, see=SEE_SYNC)
    check_worker_inputs(answers, seed, size, steps, SEE_SYNC)
    check_one_version(answers, steps)
    right = history(seed, size, ranks - 1, steps)
    server = answers[0].value["weights"]
    if not close(server, right[-1]):
        raise Mistake(why_sync(server, seed, size, ranks - 1, steps), SEE_SYNC)
    for answer in answers[1:]:
        check_sync_worker(answer, right)
    check_peers(answers, steps, SEE_SYNC)


def check_one_version(answers: Sequence[Answer], steps: int) -> None:
    """Raise unless all workers computed a step at the same weights."""
    first = answers[1].value["seen"]
    for answer in answers[2:]:
        for step in range(steps):
            if not close(answer.value["seen"][step], first[step]):
                raise Mistake(
                    f"workers 1 and {answer.rank} computed the gradient of step {step} at different weights: the "
                    "server answers a worker only after the pushes of all workers",
                    SEE_SYNC,
                )


def check_sync_worker(answer: Answer, right: list[Tensor]) -> None:
    """Raise unless a worker saw the weights of each step, and ends with the last."""
    for step, weights in enumerate(answer.value["seen"]):
        if not close(weights, right[step]):
            raise Mistake(
                f"worker {answer.rank} computed the gradient of step {step} at weights that lack a part of the update: "
                "the server answers a worker only after the pushes of all workers",
                SEE_SYNC,
            )
    if not close(answer.value["weights"], right[-1]):
        last = close(answer.value["weights"], right[-2])
        why = "those before the last update: pull after the last step too" if last else "not the server's"
        raise Mistake(f"the final weights of worker {answer.rank} are {why}", SEE_SYNC)


def why_sync(found: Tensor, seed: int, size: int, workers: int, steps: int) -> str:
    """Say which mistake gives these final weights on the server."""
    if close(found, start_of(seed, size)):
        return "the server's weights did not change: update the tensor in place"
    wrong = {
        f"the sum of the {workers} workers' gradients was applied, not their mean": history(
            seed, size, workers, steps, factor=workers
        ),
        f"the sum was divided by {workers + 1}, the number of ranks: the server is not a worker": history(
            seed, size, workers, steps, factor=workers / (workers + 1)
        ),
        "the gradients were added: subtract rate * mean": history(seed, size, workers, steps, sign=-1),
        "the learning rate is missing": history(seed, size, workers, steps, factor=1 / RATE),
        "the last update is missing": history(seed, size, workers, steps)[:-1],
    }
    for text, weights in wrong.items():
        if close(found, weights[-1]):
            return f"after {steps} steps the server's weights are wrong: {text}"
    for worker in range(1, workers + 1):
        alone = start_of(seed, size)
        for step in range(steps):
            alone = alone - RATE * gradient_of(alone, worker, step)
        if close(found, alone):
            return f"the server's weights come from worker {worker} alone: the pushes of the others are lost"
    return (
        f"after {steps} steps the server's weights differ from those of one process by "
        f"{(found - history(seed, size, workers, steps)[-1]).abs().max():.3g}. Is each step one update, with the mean "
        "of all workers' gradients of that step?"
    )


# --- server-async -----------------------------------------------------------------------------------------------------

SLOW = 0.06
SLOW_START = 0.3


def rank_async(
    module: ModuleType, rank: int, world: int, seed: int, size: int, steps: int, slow: int, pauses: tuple[float, float]
) -> dict[str, Any]:
    """Train without lockstep; one worker pauses in each step, and once more in its first."""
    weights, worker = begin(seed, size, rank), Worker(rank, *(pauses if rank == slow else ()))
    log = module.train_async(weights, worker, steps, RATE)
    ended = time.monotonic()
    return {
        "weights": weights, "seen": worker.seen, "steps": worker.steps, "log": log, "times": worker.times, "end": ended
    }  # fmt: skip


def replay(
    seed: int, size: int, order: Sequence[int], scale: Callable[[int], float]
) -> tuple[Tensor, list[int], dict[int, list[Tensor]]]:
    """Return the final weights, the staleness of each update and what each worker saw, for an order of the pushes."""
    weights = start_of(seed, size)
    held = dict.fromkeys(set(order), (weights, 0))
    seen: dict[int, list[Tensor]] = {worker: [weights] for worker in set(order)}
    counts = dict.fromkeys(set(order), 0)
    staleness = []
    for version, worker in enumerate(order):
        at, since = held[worker]
        staleness.append(version - since)
        weights = weights - RATE * scale(version - since) * gradient_of(at, worker, counts[worker])
        counts[worker] += 1
        held[worker] = (weights, version + 1)
        seen[worker].append(weights)
    return weights, staleness, seen


def grade_async(attempt: Attempt) -> None:
    """Run it; a busy machine gets a second and a third chance."""
    for slow, first in ((2, 0.0), (1, 0.0), (2, SLOW_START), (1, SLOW_START)):
        repeat_if_late(
            lambda stretch, slow=slow, first=first: check_async(attempt, slow, SLOW * stretch, first * stretch)
        )


def check_async(attempt: Attempt, slow: int, pause: float, first: float) -> None:
    """Check the log, the weights that follow from it, and that the fast worker did not wait for the slow one."""
    steps, seed, size = attempt.random.randint(4, 5), attempt.seed(), attempt.random.randint(5, 30)
    answers = run_explained(
        attempt, rank_async, 3, (seed, size, steps, slow, (pause, first)), waits=WAITS, see=SEE_ASYNC
    )
    log = answers[0].value["log"]
    check_log(log, steps)
    workers, counted = [worker for worker, _ in log], [stale for _, stale in log]
    right = check_known_mistakes(answers[0].value["weights"], seed, size, workers)
    check_worker_inputs(answers, seed, size, steps, SEE_ASYNC)
    check_not_held(answers, steps, slow, pause, first)
    _, staleness, seen = replay(seed, size, workers, lambda stale: 1.0)
    if not right:
        raise Mistake(
            "the server's weights do not follow from the pushes in the order of its log: weights -= rate * gradient "
            "for each push, in place, and the pair (worker, staleness) of that push in the log",
            SEE_ASYNC,
        )
    for answer in answers[1:]:
        for step, at in enumerate([*answer.value["seen"], answer.value["weights"]]):
            if not close(at, seen[answer.rank][step]):
                raise Mistake(
                    f"worker {answer.rank} has other weights after its pull {step} than the server had after its push: "
                    "answer the sender with the weights that hold its push",
                    SEE_ASYNC,
                )
    if counted != staleness:
        raise Mistake(why_staleness(counted, staleness), SEE_ASYNC)
    check_peers(answers, steps, SEE_ASYNC)


def check_log(log: Any, steps: int) -> None:
    """Raise unless the log has one pair per push."""
    if not isinstance(log, list) or any(not isinstance(pair, (tuple, list)) or len(pair) != 2 for pair in log):
        raise Mistake(
            f"the server returned {log!r:.80}; it should return one (worker, staleness) per update", SEE_ASYNC
        )
    strange = next((pair for pair in log if pair[0] not in (1, 2) or type(pair[1]) is not int), None)
    if strange is not None:
        raise Mistake(f"the server's log has {strange!r:.80}; each entry is (worker, staleness), two int", SEE_ASYNC)
    for worker in (1, 2):
        count = sum(pair[0] == worker for pair in log)
        if count != steps:
            raise Mistake(
                f"the server's log has {count} updates of worker {worker}; it pushed {steps} times, each push counts",
                SEE_ASYNC,
            )


def check_not_held(answers: Sequence[Answer], steps: int, slow: int, pause: float, first: float) -> None:
    """Raise if the fast worker waited for the slow one, all along or for its first push."""
    fast = 3 - slow
    times, others = answers[fast].value["times"], answers[slow].value["times"]
    last = times[-1] - times[0]
    second = others[-1] - others[-2]
    reason = f"Worker {fast} waits for worker {slow}: receive from any rank and answer the sender at once"
    if last > second * (steps - 1) * 0.6:
        raise Late(
            f"worker {fast} takes no time for a gradient, but its last one came {last:.2f} s after its first; worker "
            f"{slow} takes {pause:.2f} s each. {reason}",
            SEE_ASYNC,
        )
    if first and times[1] - times[0] > 0.8 * first:
        raise Late(
            f"worker {fast} takes no time for a gradient, and began its second step {times[1] - times[0]:.2f} s after "
            f"its first; the first push of worker {slow} comes after {pause + first:.2f} s. {reason}, also in the "
            "first round",
            SEE_ASYNC,
        )


def check_known_mistakes(found: Tensor, seed: int, size: int, workers: Sequence[int]) -> bool:
    """Raise if the server's weights are what a known mistake gives; say whether they follow from the log's order."""
    wrong = {
        "": lambda stale: 1.0,
        "each push was divided by the number of workers; it is one update, applied whole": lambda stale: 0.5,
        "the gradients were added: subtract rate * gradient": lambda stale: -1.0,
        "pushes of stale gradients were dropped; each one is applied": lambda stale: float(stale == 0),
        "pushes were made smaller by their staleness; here each one is applied whole": lambda stale: 1 / (1 + stale),
        "the learning rate is missing": lambda stale: 1 / RATE,
    }
    for text, scale in wrong.items():
        if close(found, replay(seed, size, workers, scale)[0]):
            if text:
                raise Mistake(f"the server's weights are wrong: {text}", SEE_ASYNC)
            return True
    return False


def why_staleness(counted: list[int], right: list[int]) -> str:
    """Say what was counted instead of the staleness."""
    text = f"the updates have the staleness {right}; the log says {counted}"
    if not any(counted):
        return f"{text}: count the updates since the sender's last pull"
    if counted == [stale + 1 for stale in right]:
        return f"{text}: the update itself does not count, only those before it"
    if counted == list(range(len(right))):
        return f"{text}, which is the number of all updates so far: subtract the version that the sender pulled"
    return f"{text}: remember for each worker the number of updates at its last pull"


EXERCISES = (
    Exercise(
        name="server-sync",
        title="A synchronous server",
        template=TEMPLATE,
        target="train_sync",
        points=10,
        grade=grade_sync,
        forbidden=COLLECTIVES,
    ),
    Exercise(
        name="server-async",
        title="An asynchronous server",
        template=TEMPLATE,
        target="train_async",
        points=15,
        grade=grade_async,
        forbidden=COLLECTIVES,
    ),
    Exercise(
        name="bounded-staleness",
        title="Bounded staleness",
        template=TEMPLATE,
        target="train_bounded",
        points=20,
        grade=grade_bounded,
        forbidden=COLLECTIVES,
    ),
    Exercise(
        name="balance-shards",
        title="Tensors over several servers",
        template=TEMPLATE,
        target="balance_shards",
        points=10,
        grade=grade_shards,
    ),
)
