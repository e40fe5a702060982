"""Failures of jobs: faults as data, published failure rates, and the training time that is left.

A fault says what is done to a run, to which rank and when; read from text or a file, or drawn from a seed. Effective
training time is a closed form by Young and Daly: failures come at random with a mean time between them; a job that
restarts loses its work since the last checkpoint and the time of the restart, one that recovers in place loses the time
of the recovery and at most one step.
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.errors import UsageError, unknown_name

KINDS = {
    "exception": "the rank raises an exception",
    "kill": "the rank gets SIGKILL",
    "stop": "the rank gets SIGSTOP: it is alive, and does nothing",
    "disk": "the rank's next checkpoint fails: writes to files fail as on a full disk",
    "corrupt": "bits of the newest checkpoint are flipped; a later restart must not use it",
    "launcher": "the launcher gets SIGKILL; phalanx resume continues the run",
    "store": "the process with the ranks' store gets SIGKILL",
    "scale": "the number of ranks is changed to ranks=N, as by phalanx runs scale",
    "cut": "the network link of the rank's host is cut, for seconds=X or for good",
    "slow": "the network link of the rank's host is limited to rate=10mbit, for seconds=X or for good",
}
"""What can be done to a run."""

AT_RANDOM = ("kill", "stop", "exception")
"""The kinds that are drawn unless others are named: all are survived in place."""
LINKS = ("cut", "slow")
_MARGIN = 3
"""Steps at the beginning and the end that random faults leave out: a finished rank cannot be lost."""
_SYNTAX = "Write KIND:rank=R,step=S, for example kill:rank=2,step=50"


@dataclass(frozen=True)
class Fault:
    """One fault. It happens after the first step from `step` on that the rank completes, and only once."""

    kind: str
    step: int
    rank: int = 0
    phase: float = 0.0
    """How much later, in step times: within a step the rank computes, waits for others, saves or evaluates."""
    ranks: int = 0
    """The number of ranks to change to (scale)."""
    seconds: float = 0.0
    """How long a link is cut or slow; 0: for good."""
    rate: str = "10mbit"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UsageError(unknown_name("fault", self.kind, KINDS))
        for name, least in (("step", 1), ("rank", 0), ("phase", 0.0), ("ranks", 0), ("seconds", 0.0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, type(least))) or value < least:
                number = "a whole number" if isinstance(least, int) else "a number"
                raise UsageError(f"fault {self.kind}: {name} = {value!r}, expected {number} from {least} on.")
        if self.kind == "scale" and not self.ranks:
            raise UsageError("fault scale: to how many ranks?", hint="Write: scale:ranks=2,step=50")

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Read `kill:rank=2,step=50`."""
        kind, _, rest = text.partition(":")
        pairs = [part.partition("=") for part in rest.split(",") if part.strip()]
        return cls.from_mapping({"kind": kind.strip(), **{key.strip(): _value(value) for key, _, value in pairs}})

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Fault:
        """Read a fault from the names of its fields."""
        names = {field.name for field in dataclasses.fields(cls)}
        kind = values.get("kind", "")
        if kind not in KINDS:
            raise UsageError(unknown_name("fault", str(kind), KINDS), hint=_SYNTAX)
        for name in values:
            if name not in names:
                raise UsageError(unknown_name("field", name, names, of=f"the fault {kind}"), hint=_SYNTAX)
        if "step" not in values:
            raise UsageError(f"fault {kind} needs step=N", hint=_SYNTAX)
        return cls(**values)

    def __str__(self) -> str:
        """Return the text that `parse` reads."""
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        values = {name: value for name, value in dataclasses.asdict(self).items() if name not in ("kind", "phase")}
        words = [
            f"{name}={value}" for name, value in values.items() if name in ("rank", "step") or value != defaults[name]
        ]
        return f"{self.kind}:{','.join(words)}"


def _value(text: str) -> Any:
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            continue
    return text.strip()


def read_faults(path: Path) -> list[Fault]:
    """Read a TOML file: one table [[fault]] per fault, with the fields of `Fault`."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"no file at {path}") from None
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path} is not TOML: {error}") from None
    listed = document.get("fault")
    if not isinstance(listed, list) or not listed or set(document) != {"fault"}:
        raise UsageError(
            f"{path} does not hold a list of faults",
            hint='For each fault write: [[fault]], then kind = "kill", rank = 2, step = 50 on separate lines.',
        )
    return [Fault.from_mapping(table) for table in listed]


def draw_faults(
    count: int,
    *,
    ranks: int,
    steps: int,
    seed: int,
    kinds: Sequence[str] = AT_RANDOM,
    sizes: Sequence[int] = (),
) -> list[Fault]:
    """Return random faults in the order of their steps: equal for equal arguments. No two share a step if possible.

    `sizes`: the numbers of ranks that `scale` chooses from; the run begins with `ranks` of them.
    """
    for kind in kinds:
        if kind not in KINDS:
            raise UsageError(unknown_name("fault", kind, KINDS))
    if unable := [kind for kind in kinds if kind in LINKS]:
        raise UsageError(f"{unable[0]} is not drawn at random", hint=f"Write: --fault {unable[0]}:step=50,...")
    if "scale" in kinds and len(sizes) < 2:
        raise UsageError("scale needs several numbers of ranks to choose from", hint="Write: --num-workers 1:4")
    possible = range(_MARGIN, steps - _MARGIN)
    if not possible:
        raise UsageError(f"{steps} steps are too few for random faults", hint="Set --max-steps to 50 or more.")
    draw = random.Random(seed)
    chosen = draw.sample(possible, count) if count <= len(possible) else draw.choices(possible, k=count)
    faults: list[Fault] = []
    for step in sorted(chosen):
        faults.append(_draw(draw, step, ranks, kinds, sizes))
        ranks = faults[-1].ranks or ranks
    return faults


def _draw(draw: random.Random, step: int, ranks: int, kinds: Sequence[str], sizes: Sequence[int]) -> Fault:
    kind, phase = draw.choice(list(kinds)), round(draw.random(), 3)
    if kind == "scale":
        return Fault(kind, step, ranks=draw.choice([size for size in sizes if size != ranks]))
    first = 1 if kind == "disk" and ranks > 1 else 0  # rank 0 writes the events as well
    return Fault(kind, step, draw.randrange(first, ranks), phase)


def to_json(faults: Iterable[Fault]) -> str:
    """Return faults as a text that `from_json` reads."""
    return json.dumps([dataclasses.asdict(fault) for fault in faults])


def from_json(text: str) -> list[Fault]:
    """Read what `to_json` wrote."""
    return [Fault.from_mapping(fields) for fields in json.loads(text)]


@dataclass(frozen=True)
class Mark:
    """That a fault has happened: where and when."""

    number: int
    rank: int
    step: int
    time: float
    """In seconds since the epoch."""


class Marks:
    """Which faults of a plan have happened, as files in a folder: a replaced rank does not repeat them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def take(self, mark: Mark) -> bool:
        """Note a fault that happens now; return whether it had not happened before."""
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            with (self.folder / f"{mark.number:04}.json").open("x") as file:
                file.write(json.dumps(dataclasses.asdict(mark)))
        except FileExistsError:
            return False
        return True

    def has(self, number: int) -> bool:
        """Whether a fault has happened."""
        return (self.folder / f"{number:04}.json").exists()

    def read(self) -> dict[int, Mark]:
        """Return all that have happened, by number."""
        texts = [path.read_text() for path in sorted(self.folder.glob("*.json"))]
        marks = [Mark(**json.loads(text)) for text in texts if text]
        return {mark.number: mark for mark in marks}


DAY = 86400.0
HOUR = 3600.0
GPUS_PER_NODE = 8


@dataclass(frozen=True)
class FailureRate:
    """Mean times to failure by job size, as points (GPUs, seconds).

    Between two points the curve is a straight line of logarithms; outside of them the time is inverse to the number of
    GPUs, as it is for GPUs that fail independently of each other.
    """

    points: tuple[tuple[int, float], ...]
    source: str = ""

    @classmethod
    def per_gpu_day(cls, failures: float, source: str = "") -> FailureRate:
        """Return the rate of GPUs that fail independently, this often per day."""
        return cls(((1, DAY / failures),), source)

    @classmethod
    def observed(cls, failures: float, days: float, gpus: int, source: str = "") -> FailureRate:
        """Return the rate of a job on `gpus` GPUs that was interrupted `failures` times in `days` days."""
        return cls.per_gpu_day(failures / days / gpus, source)

    def mtbf(self, gpus: int) -> float:
        """Return the mean time between failures of a job on this many GPUs, in seconds."""
        first, last = self.points[0], self.points[-1]
        for (fewer, slow), (more, fast) in zip(self.points, self.points[1:], strict=False):
            if fewer <= gpus <= more:
                share = math.log(gpus / fewer) / math.log(more / fewer)
                return slow * math.exp(share * math.log(fast / slow))
        near = first if gpus < first[0] else last
        return near[1] * near[0] / gpus


def _per_node_day(failures_per_thousand: float, source: str) -> FailureRate:
    return FailureRate.per_gpu_day(failures_per_thousand / 1000 / GPUS_PER_NODE, source)


_KOKOLIS = "Kokolis et al., Revisiting Reliability in Large-Scale ML Research Clusters, HPCA 2025"

PRESETS = {
    "llama-3": FailureRate.observed(
        419, 54, 16384, "419 unexpected interruptions in 54 days on 16,384 GPUs (The Llama 3 Herd of Models, table 5)"
    ),
    # One rate does not give both times: 6.50 failures per thousand days of a node of 8 GPUs would be 28.8 h at 1,024.
    "rsc-1": FailureRate(
        ((8, 47.7 * DAY), (1024, 7.9 * HOUR), (16384, DAY / (16384 / GPUS_PER_NODE * 6.50 / 1000))),
        f"RSC-1: 47.7 days at 8 GPUs and 7.9 h at 1,024, as measured; from 16,384 on their projection with 6.50 "
        f"failures per thousand node-days ({_KOKOLIS})",
    ),
    "rsc-1-nodes": _per_node_day(6.50, f"RSC-1: 6.50 failures per thousand node-days at every size ({_KOKOLIS})"),
    "rsc-2-nodes": _per_node_day(2.34, f"RSC-2: 2.34 failures per thousand node-days at every size ({_KOKOLIS})"),
}
"""Published failure rates by name."""


PARTS = ("productive", "checkpoint", "lost", "recovery")


def best_interval(checkpoint_cost: float, mtbf: float) -> float:
    """Return the seconds of work between two checkpoints that waste the least time (Daly's higher-order estimate).

    Its first term is Young's: the square root of twice the cost times the mean time between failures.
    """
    if checkpoint_cost >= 2 * mtbf:
        return mtbf
    ratio = checkpoint_cost / (2 * mtbf)
    work = math.sqrt(2 * checkpoint_cost * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - checkpoint_cost
    return max(work, checkpoint_cost)


@dataclass(frozen=True)
class Process:
    """A job that fails and recovers; all times in seconds."""

    mtbf: float
    """Mean time between failures of the whole job."""
    checkpoint_cost: float
    """How long training stands still for a checkpoint."""
    interval: float
    """Work between two checkpoints."""
    recovery: float
    """From a failure to the first step after it: detection, restart, loading; or recovery in place."""
    lost: float | None = None
    """Work lost per failure, where that does not depend on checkpoints (in place: one step); None: since the last."""

    def expected(self) -> dict[str, float]:
        """Return the expected shares of wall time for productive work, checkpoints, lost work and recovery."""
        cycle = self.interval + self.checkpoint_cost
        # Failures during a recovery begin it again.
        per_failure = self.mtbf * math.expm1(self.recovery / self.mtbf)
        if self.lost is None:
            failures = math.expm1(cycle / self.mtbf)  # per cycle that comes to its end
            lost = failures * self.mtbf - cycle
        else:
            failures = cycle / (self.mtbf - self.lost)
            lost = failures * self.lost
        parts = (self.interval, self.checkpoint_cost, lost, failures * per_failure)
        return {name: part / sum(parts) for name, part in zip(PARTS, parts, strict=True)}
