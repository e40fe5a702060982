"""Run histories, and shrink those that fail."""

from __future__ import annotations

import dataclasses
import time

from tests.simulation.cluster import Cluster, Violation
from tests.simulation.invariants import Unguaranteed
from tests.simulation.plan import Plan, draw
from tests.simulation.progress import Progress

_SAVE_SECONDS = 20.0


@dataclasses.dataclass(frozen=True)
class Result:
    """What came of a plan."""

    history: list[str]
    violation: Violation | None
    cluster: Cluster


def failure_of(plan: Plan, *, detailed: bool = False) -> Result:
    """Let a plan happen."""
    cluster = Cluster(plan, detailed=detailed)
    try:
        cluster.run()
    except Violation as violation:
        return Result(cluster.history, violation, cluster)
    except Unguaranteed:
        return Result(cluster.history, None, cluster)
    except Exception as error:  # noqa: BLE001 - the state machines must not raise either
        import traceback

        where = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {error} ({where.filename.rsplit('/', 1)[-1]}:{where.lineno})"
        return Result(cluster.history, Violation("an exception", text), cluster)
    return Result(cluster.history, None, cluster)


def run_seeds(progress: Progress, most_nodes: int = 16, seconds: float = float("inf")) -> None:
    """Run the histories of the seeds that are left, and note which of them fail."""
    began = saved = time.monotonic()
    try:
        for seed in progress.rest:
            if time.monotonic() - began > seconds:
                break
            used = time.process_time()
            violation = failure_of(draw(seed, most_nodes)).violation
            progress.note(seed, violation, time.process_time() - used)
            if time.monotonic() - saved > _SAVE_SECONDS:
                saved = time.monotonic()
                progress.save()
    finally:  # also of a run that is interrupted
        progress.save()


def shrink(plan: Plan) -> Plan:
    """Return the plan with the fewest faults and steps that violates the same invariant."""

    def fails(candidate: Plan) -> bool:
        violation = failure_of(candidate).violation
        return violation is not None and violation.name == name

    violation = failure_of(plan).violation
    assert violation is not None, "only a plan that fails is shrunk"
    name = violation.name
    smaller = True
    while smaller:
        smaller = False
        for index in range(len(plan.faults)):
            candidate = dataclasses.replace(plan, faults=plan.faults[:index] + plan.faults[index + 1 :])
            if fails(candidate):
                plan, smaller = candidate, True
                break
    for steps in (10, 20, 40):
        candidate = dataclasses.replace(plan, steps=steps)
        if steps < plan.steps and fails(candidate):
            return candidate
    return plan
