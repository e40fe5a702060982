"""The grader of pipeline schedules: the lists of all stages run on paper."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

from grader.exercise import Attempt, Mistake

SEE_PLAN = "Plan a pipeline"
Action = tuple[str, int]
Plan = list[list[Action]]
"""The actions of each stage."""
FORWARD, BACKWARD = 1, 2
"""Time units of one forward and one backward."""


def rank_schedule(module: ModuleType, cases: Sequence[tuple[str, int, int]]) -> list[Any]:
    """Return the schedules of all stages of each case, and what an unknown kind gives."""
    found: list[Any] = [
        [[tuple(action) for action in module.pipeline_schedule(kind, stage, stages, count)] for stage in range(stages)]
        for kind, stages, count in cases
    ]
    try:
        found.append(module.pipeline_schedule("sideways", 0, 2, 2))
    except ValueError:
        found.append(None)
    return found


def grade_schedule(attempt: Attempt) -> None:
    """Check every stage, then let the stages run on paper."""
    dice = attempt.random
    shapes = [(4, dice.randint(5, 9)), (3, dice.randint(4, 6)), (4, 2), (dice.randint(2, 3), 1), (1, 3)]
    cases = [(kind, stages, count) for stages, count in shapes for kind in ("1f1b", "gpipe")]
    *plans, unknown = attempt.call(rank_schedule, cases)
    for case, plan in zip(cases, plans, strict=True):
        for stage, actions in enumerate(plan):
            check_actions(case, stage, actions)
        if case[0] == "gpipe":
            check_gpipe(case, plan)
        time_needed = simulate(case, plan)
        check_memory(case, plan)
        best = (case[1] + case[2] - 1) * (FORWARD + BACKWARD)
        if time_needed > best:
            raise Mistake(
                f"{name(case)}: the pipeline takes {time_needed} units of time (forward 1, backward 2); {best} are "
                f"enough. Is the warm-up of each stage long enough? Stage 0 does: {words(plan[0])}",
                SEE_PLAN,
            )
    if unknown is not None:
        raise Mistake("pipeline_schedule('sideways', ...) gave a list; an unknown kind must be a ValueError", SEE_PLAN)


def name(case: tuple[str, int, int]) -> str:
    """Return a case in words."""
    return f"{case[0]}, {case[1]} stages, {case[2]} micro-batches"


def words(actions: Sequence[Action]) -> str:
    """Return actions as F0 F1 B0."""
    return " ".join(f"{kind}{number}" for kind, number in actions)


def check_actions(case: tuple[str, int, int], stage: int, actions: list[Action]) -> None:
    """Raise unless each forward and backward is there once, forward first, in order."""
    count = case[2]
    where = f"{name(case)}: stage {stage} does {words(actions)}"
    for kind, word in (("F", "forward"), ("B", "backward")):
        numbers = [number for each, number in actions if each == kind]
        missing = sorted(set(range(count)) - set(numbers))
        if missing:
            raise Mistake(f"{where}: the {word} of micro-batch {missing[0]} is missing", SEE_PLAN)
        extra = [number for number in numbers if number not in range(count)]
        if extra:
            raise Mistake(f"{where}: there is no micro-batch {extra[0]}; the warm-up is at most {count} long", SEE_PLAN)
        if len(numbers) > count:
            raise Mistake(f"{where}: a {word} is there twice", SEE_PLAN)
        if numbers != sorted(numbers) and (kind == "F" or case[0] == "1f1b"):
            raise Mistake(f"{where}: the {word}s are not in the order of the micro-batches", SEE_PLAN)
    for number in range(count):
        if actions.index(("B", number)) < actions.index(("F", number)):
            raise Mistake(f"{where}: the backward of micro-batch {number} stands before its forward", SEE_PLAN)


def check_gpipe(case: tuple[str, int, int], plan: Plan) -> None:
    """Raise unless all forwards stand before all backwards."""
    for stage, actions in enumerate(plan):
        if "F" in [kind for kind, _ in actions[case[2] :]]:
            raise Mistake(f"{name(case)}: stage {stage} does {words(actions)}; gpipe runs all forwards first", SEE_PLAN)


def check_memory(case: tuple[str, int, int], plan: Plan) -> None:
    """Raise if a stage of 1f1b keeps too many micro-batches alive."""
    for stage, actions in enumerate(plan):
        alive = most = 0
        for kind, _ in actions:
            alive += 1 if kind == "F" else -1
            most = max(most, alive)
        limit = min(case[1] - stage, case[2])
        if case[0] == "1f1b" and most > limit:
            raise Mistake(
                f"{name(case)}: stage {stage} keeps {most} micro-batches alive ({words(actions)}); {limit} are enough: "
                "a stage needs as many as there are stages from it to the end",
                SEE_PLAN,
            )


def simulate(case: tuple[str, int, int], plan: Plan) -> int:
    """Run the stages on paper and return the time; raise for stages that wait for each other."""
    done: dict[tuple[str, int, int], int] = {}
    clocks, places = [0] * len(plan), [0] * len(plan)
    moved = True
    while moved:
        moved = False
        for stage, actions in enumerate(plan):
            while places[stage] < len(actions):
                kind, number = actions[places[stage]]
                source = stage - 1 if kind == "F" else stage + 1
                needs = 0 if source in (-1, len(plan)) else done.get((kind, source, number))
                if needs is None:
                    break
                clocks[stage] = max(clocks[stage], needs) + (FORWARD if kind == "F" else BACKWARD)
                done[kind, stage, number] = clocks[stage]
                places[stage] += 1
                moved = True
    stuck = [stage for stage, actions in enumerate(plan) if places[stage] < len(actions)]
    if stuck:
        waits = [f"stage {stage} waits before {words([plan[stage][places[stage]]])}" for stage in stuck]
        raise Mistake(f"{name(case)}: deadlock: {', '.join(waits)}. Compare the warm-ups of the stages", SEE_PLAN)
    return max(clocks)
