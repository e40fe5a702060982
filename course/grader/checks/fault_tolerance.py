"""The exercises of fault tolerance; failure detection is graded here, the rest in saving.py and recovery.py."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import ModuleType

import torch.distributed as dist

from grader.checks.recovery import grade_elastic, grade_recovery
from grader.checks.saving import ask, grade_checkpoints, grade_state, reported
from grader.exercise import Attempt, Exercise, Mistake
from grader.ranks import marker

TEMPLATE = "phase4_production/template_fault_tolerance.py"
DEAD, HUNG, TICK = 1.0, 3.0, 0.1
FAILED, WATCHED_SECONDS = {1: "hung", 2: "dead"}, 4.0


class Cluster:
    """Ranks with a clock of the grader: each has its own time of day, and all share one store."""

    def __init__(
        self, module: ModuleType, world: int, seed: int, absent: int = -1, skew: float = 1000.0, viewer: int = 0
    ) -> None:
        self.time, self.viewer, self.every, self.ticks = 0.0, viewer, 1, 0
        self.store = dist.HashStore()
        self.store.set_timeout(timedelta(seconds=0.2))
        self.ranks = {
            rank: module.FailureDetector(
                self.store, rank, world, DEAD, HUNG, clock=self._clock(skew * (seed % 7 + 1) * (world - rank))
            )
            for rank in range(world)
            if rank != absent
        }
        self.beating = set(self.ranks)
        self.history: list[tuple[float, dict[int, str]]] = []

    def _clock(self, offset: float) -> Callable[[], float]:
        return lambda: self.time + offset

    def step(self, number: int, durations: dict[int, float], seconds: float = 99.0) -> dict[int, str]:
        """Play one step: ranks compute for these times, then wait for the slowest; return the last verdict."""
        for rank in durations:
            self.ranks[rank].progress(number, waiting=False)
        reached: set[int] = set()
        for tick in range(round(min(seconds, max(durations.values())) / TICK) + 1):
            for rank in self.beating:
                self.ranks[rank].beat()
            for rank in durations:
                if tick * TICK >= durations[rank] and rank not in reached:
                    self.ranks[rank].progress(number, waiting=True)
                    reached.add(rank)
            self.ticks += 1
            if self.ticks % self.every == 0:
                self.look()
            self.time += TICK
        return self.history[-1][1]

    def look(self) -> None:
        """Note what the rank that looks finds now."""
        try:
            found = dict(self.ranks[self.viewer].failures())
        except dist.DistStoreError as error:
            raise Mistake(
                "failures() waits for the key of a rank that has not written it: Store.get() blocks until the key is "
                "there. Ask Store.check([key]) first"
            ) from error
        self.history.append((self.time, found))


def grade_detection(attempt: Attempt) -> None:
    """Grade `detect-failure`."""
    see = "Find the rank that failed"
    ask(attempt, detection, attempt.seed(), see=see)
    answers = attempt.run(rank_heartbeats, 3, (attempt.folder,), kill={2: "step 8"}, expect_failure=True)
    if answers[0].value is None or answers[1].value is None:
        raise Mistake(f"with real ranks: {answers[0].error or answers[1].error}", see)
    if answers[0].value != FAILED:
        raise Mistake(
            f"of 3 real ranks, rank 1 hung and rank 2 was killed; after {WATCHED_SECONDS:.0f} s failures() on rank 0 "
            f"said {answers[0].value}, with dead_after=0.4 and hung_after=0.6",
            see,
        )


@reported
def detection(module: ModuleType, seed: int) -> None:
    """Play ranks that are slow, dead, hung, absent or back again."""
    _slow(module, seed)
    _dead(module, seed)
    _hung(module, seed)
    _absent(module, seed)
    _returns(module, seed)
    _long_wait(module, seed)
    _late_look(module, seed)
    _both(module, seed)
    _stuck_at_the_start(module, seed)


def _slow(module: ModuleType, seed: int) -> None:
    slow = 1 + seed % 3
    durations = {rank: 2.4 if rank == slow else 0.3 for rank in range(4)}
    for first, every, skew in ((0, 1, 0.0), (0, 1, 1000.0), (7, 2, 1000.0), (98, 3, 1000.0)):
        cluster = Cluster(module, 4, seed, skew=skew)
        cluster.every = every
        for number in range(first, first + 4):
            cluster.step(number, durations)
        named = next((found for _, found in cluster.history if found), {})
        if named and first:
            raise Mistake(
                f"all ranks work, from step {first} on, beat every 0.1 s and are looked at every {every * TICK:.1f} s; "
                f"failures() says {named}. Each beat and each step must write a value that it has not written before, "
                "and any other value is a change, not only a greater one (as text '10' is less than '9')"
            )
        if named and skew:
            raise Mistake(
                f"with clocks that differ by {skew * (seed % 7 + 1):.0f} s, failures() said {named} though all ranks "
                "work: times of two machines cannot be compared. Note, by the clock of the process that looks, when a "
                "value has changed"
            )
        if slow in named:
            raise Mistake(
                f"rank {slow} computes 2.4 s per step and beats every 0.1 s, and failures() calls it "
                f"{named[slow]!r}: with dead_after={DEAD} and hung_after={HUNG} it is slow, not failed"
            )
        if named:
            raise Mistake(f"failures() names {named}, but these ranks wait for rank {slow}, which is slow, not failed")


def _dead(module: ModuleType, seed: int) -> None:
    for number, waits in enumerate((False, True, False, True)):
        dead = (seed + number) % 4
        cluster = Cluster(module, 4, seed, viewer=(dead + 1 + seed % 3) % 4)
        cluster.step(0, dict.fromkeys(range(4), 0.5))
        died = cluster.time
        cluster.beating.discard(dead)
        living = {rank: 0.3 for rank in range(4) if rank != dead}
        cluster.ranks[dead].progress(1, waiting=waits)
        named = cluster.step(1, {**living, cluster.viewer: 9.0}, seconds=1.8)
        if named.get(dead) != "dead":
            state = ", while it waited in a collective," if waits else ""
            raise Mistake(
                f"rank {dead} stopped beating{state} 1.8 s ago and failures() says {named}; with dead_after={DEAD} it "
                f"should name it 'dead'"
            )
        early = [at for at, found in cluster.history if dead in found and at - died < DEAD - 2 * TICK]
        if early:
            raise Mistake(
                f"rank {dead} is called dead {early[0] - died:.1f} s after its last beat: dead_after is {DEAD} s"
            )
        if named != {dead: "dead"}:
            raise Mistake(f"rank {dead} is dead; failures() also names ranks that beat: {named}")


def _hung(module: ModuleType, seed: int) -> None:
    for number in range(4):
        _hangs(module, seed, (seed + number) % 4)


def _hangs(module: ModuleType, seed: int, hung: int) -> None:
    cluster = Cluster(module, 4, seed, viewer=(hung + 1 + seed % 3) % 4)
    cluster.step(0, dict.fromkeys(range(4), 0.5))
    began = cluster.time
    named = cluster.step(1, {rank: 99.0 if rank == hung else 0.4 for rank in range(4)}, seconds=HUNG + 1.0)
    if hung not in named:
        raise Mistake(
            f"rank {hung} beats but has been in step 1 for {HUNG + 1.0} s, and failures() says {named}; with "
            f"hung_after={HUNG} it should be 'hung': a thread that beats does not show that the training gets on"
        )
    if set(named) != {hung}:
        raise Mistake(
            f"rank {hung} hangs, and failures() says {named}: the other ranks wait for it in a collective. A rank that "
            "said waiting=True is not the cause"
        )
    if named[hung] != "hung":
        raise Mistake(f"rank {hung} beats and does not get on; failures() says {named[hung]!r}, which should be 'hung'")
    early = [at for at, found in cluster.history if hung in found and at - began < HUNG - 2 * TICK]
    if early:
        raise Mistake(
            f"rank {hung} is called hung {early[0] - began:.1f} s after its last progress: hung_after is {HUNG} s"
        )


def _absent(module: ModuleType, seed: int) -> None:
    absent = seed % 4
    cluster = Cluster(module, 4, seed, absent=absent, viewer=(absent + 2) % 4)
    named = cluster.step(0, dict.fromkeys(cluster.ranks, 1.6))
    if named != {absent: "dead"}:
        raise Mistake(
            f"rank {absent} never came, and after 1.6 s failures() says {named}: a rank without a first beat is dead "
            f"dead_after={DEAD} s after the detector was made"
        )
    if any(found for at, found in cluster.history if at < DEAD - 2 * TICK):
        raise Mistake("a rank is called dead before its time to start (dead_after) is over")


def _returns(module: ModuleType, seed: int) -> None:
    cluster = Cluster(module, 3, seed)
    cluster.step(9, dict.fromkeys(range(3), 0.5))
    cluster.beating.discard(1)
    cluster.step(10, {0: 0.5, 2: 2.0})
    cluster.beating.add(1)
    for number in (4, 5, 6, 7):  # all ranks have gone back to a checkpoint
        cluster.step(number, dict.fromkeys(range(3), 1.0))
    named = next((found for at, found in cluster.history if at > cluster.time - 1.0 and found), None)
    if named:
        raise Mistake(
            f"rank 1 was silent for 2 s and beats again for 4 s, from step 4 on (a checkpoint was loaded), and "
            f"failures() still says {named}: it should say what is true now, and a smaller step is a change, too"
        )


def _long_wait(module: ModuleType, seed: int) -> None:
    """One rank works alone for a long time, step by step, as rank 0 does in a validation; the others wait for it."""
    alone = seed % 4
    cluster = Cluster(module, 4, seed, viewer=(alone + 1) % 4)
    cluster.step(0, {rank: 1.0 if rank == alone else 0.0 for rank in range(4)})
    for number in range(1, 18):
        cluster.step(number, {alone: 1.9})
        if named := cluster.history[-1][1]:
            raise Mistake(
                f"rank {alone} makes step after step while the others have waited for it for {2 * number} s, and "
                f"failures() says {named}: a rank that waits is not hung, however long it waits"
            )


def _late_look(module: ModuleType, seed: int) -> None:
    """The first look comes long after the detector was made; one rank never came."""
    absent = (seed + 1) % 3
    cluster = Cluster(module, 3, seed, absent=absent, viewer=(absent + 1) % 3)
    cluster.every = 1000
    cluster.history.append((0.0, {}))
    cluster.step(0, dict.fromkeys(cluster.ranks, 2.0))
    cluster.look()
    if cluster.history[-1][1] != {absent: "dead"}:
        raise Mistake(
            f"rank {absent} never came, and failures() was called for the first time 2 s after the detector was made; "
            f"it says {cluster.history[-1][1]}. The time until a rank must have come counts from the start, not from "
            "the first look"
        )


def _both(module: ModuleType, seed: int) -> None:
    """Of six ranks two die and two hang at the same time."""
    order = [(seed + 5 * number) % 6 for number in range(6)]
    dead, hung, viewer = order[:2], order[2:4], order[4]
    cluster = Cluster(module, 6, seed, viewer=viewer)
    cluster.step(0, dict.fromkeys(range(6), 0.5))
    cluster.beating -= set(dead)
    durations = {rank: 99.0 if rank in hung else 0.3 for rank in range(6) if rank not in dead}
    named = cluster.step(1, durations, seconds=HUNG + 1.0)
    right = {**dict.fromkeys(dead, "dead"), **dict.fromkeys(hung, "hung")}
    if named != right:
        raise Mistake(
            f"of 6 ranks, {sorted(dead)} are dead and {sorted(hung)} hang; failures() says "
            f"{dict(sorted(named.items()))}: it should name all ranks that have failed"
        )


def _stuck_at_the_start(module: ModuleType, seed: int) -> None:
    """One rank beats, and never comes to its first step."""
    stuck = seed % 3
    cluster = Cluster(module, 3, seed, viewer=(stuck + 1) % 3)
    named = cluster.step(0, {rank: 0.5 for rank in range(3) if rank != stuck}, seconds=0.6)
    if named:
        raise Mistake(
            f"rank {stuck} has not begun its first step after 0.6 s, and failures() says {named}: give it time"
        )
    while cluster.time < HUNG + 1.0:
        for rank in cluster.beating:
            cluster.ranks[rank].beat()
        cluster.look()
        cluster.time += TICK
    if cluster.history[-1][1] != {stuck: "hung"}:
        raise Mistake(
            f"rank {stuck} beats and has shown no progress at all for {HUNG + 1.0} s; failures() says "
            f"{cluster.history[-1][1]}: with hung_after={HUNG} it is 'hung', from the time when the detector was made"
        )


def rank_heartbeats(module: ModuleType, rank: int, world: int, folder: Path) -> dict[int, str]:
    """Beat in a thread; rank 1 hangs in step 5, rank 2 is killed in step 8, rank 0 looks."""
    detector = module.FailureDetector(dist.FileStore(str(folder / "beats"), world), rank, world, 0.4, 0.6)
    over = threading.Event()

    def beat() -> None:
        while not over.wait(0.05):
            detector.beat()

    threading.Thread(target=beat, daemon=True).start()
    end, found, step = time.monotonic() + WATCHED_SECONDS, {}, 0
    while found != FAILED and time.monotonic() < end and not (rank == 1 and step == 5):
        detector.progress(step, waiting=False)
        marker(f"step {step}")
        time.sleep(0.02)
        found = detector.failures() if rank == 0 else {}
        step += 1
    if rank == 0:
        (folder / "seen").touch()
    while not (folder / "seen").exists():  # rank 1 hangs, and beats, as long as rank 0 looks
        time.sleep(0.02)
    over.set()
    return found


EXERCISES = (
    Exercise(
        name="atomic-checkpoint",
        title="Save so that a kill cannot hurt",
        template=TEMPLATE,
        target="CheckpointStore",
        points=15,
        grade=grade_checkpoints,
    ),
    Exercise(
        name="complete-state",
        title="Keep all that the next step depends on",
        template=TEMPLATE,
        target="TrainingState",
        points=10,
        grade=grade_state,
    ),
    Exercise(
        name="detect-failure",
        title="Find the rank that failed",
        template=TEMPLATE,
        target="FailureDetector",
        points=15,
        grade=grade_detection,
    ),
    Exercise(
        name="automatic-recovery",
        title="Start again, but not for ever",
        template=TEMPLATE,
        target="supervise",
        points=15,
        grade=grade_recovery,
    ),
    Exercise(
        name="elastic",
        title="Go on with another number of ranks",
        template=TEMPLATE,
        target="ElasticTraining",
        points=15,
        grade=grade_elastic,
        forbidden=("torch.nn.parallel.DistributedDataParallel",),
    ),
)
