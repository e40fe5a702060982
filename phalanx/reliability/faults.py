"""Faults as data: what is done to a run, to which rank and when; read from text or a file, or drawn from a seed."""

from __future__ import annotations

import dataclasses
import json
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
        known = {field.name for field in dataclasses.fields(cls)}
        kind = values.get("kind", "")
        if kind not in KINDS:
            raise UsageError(unknown_name("fault", str(kind), KINDS), hint=_SYNTAX)
        for name in values:
            if name not in known:
                raise UsageError(unknown_name(f"field of the fault {kind}", name, known), hint=_SYNTAX)
        if "step" not in values:
            raise UsageError(f"fault {kind}: after which step?", hint=_SYNTAX)
        return cls(**values)

    def __str__(self) -> str:
        """Return the text that `parse` reads."""
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        own = {name: value for name, value in dataclasses.asdict(self).items() if name not in ("kind", "phase")}
        shown = [
            f"{name}={value}" for name, value in own.items() if name in ("rank", "step") or value != defaults[name]
        ]
        return f"{self.kind}:{','.join(shown)}"


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
            hint='For each fault write: [[fault]], then kind = "kill", rank = 2, step = 50 in lines of their own.',
        )
    return [Fault.from_mapping(each) for each in listed]


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
    return [Fault.from_mapping(each) for each in json.loads(text)]


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
