"""What happens in a history: the size of the job, its network, and faults, all drawn from one seed."""

from __future__ import annotations

import dataclasses
import functools
import random
from typing import Any

KINDS = (
    *("kill_rank", "kill_rank", "usage_error", "kill_machine", "kill_machine", "power_loss", "kill_launcher"),
    *("restart", "restart", "pause", "pause", "cut", "cut", "one_way", "partition", "disk", "resize", "arrive", "slow"),
)


@dataclasses.dataclass(frozen=True)
class Fault:
    """One thing that goes wrong, or that a user does."""

    at: float
    kind: str
    machine: int = 0
    other: int = 0
    seconds: float = 0.0
    """How long; infinity: for good."""
    value: int = 0

    def __str__(self) -> str:
        fields = {"other": self.other, "seconds": self.seconds, "value": self.value}
        more = "".join(f", {name}={value:g}" for name, value in fields.items() if value)
        return f"{self.at:.2f} s: {self.kind}(machine={self.machine}{more})"


@dataclasses.dataclass(frozen=True)
class Plan:
    """A history before it happens."""

    seed: int
    nodes: int
    ranks_per_node: int
    least: int
    steps: int
    faults: tuple[Fault, ...] = ()
    max_restarts: int = 3
    silence: float = 5.0
    step_seconds: float = 0.5
    save_every: int = 7
    delay: tuple[float, float] = (50e-6, 1e-3)
    process_seconds: tuple[float, float] = (0.5, 3.0)
    skew: float = 0.0
    needs_release: bool = False
    """Whether ranks leave as over nccl: only when all have aborted."""
    restarts: bool = True
    """Whether a scheduler starts launchers again."""
    coarseness: float = 1.0
    """Multiplier on the periods in which launchers look around, for very many of them."""

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """The numbers of ranks that the run may have."""
        most = self.nodes * self.ranks_per_node
        return tuple(range(most, self.least - 1, -1)) if most <= 1_000 else tuple(range(most, self.least - 1, -8))

    @property
    def request(self) -> dict[str, Any]:
        """As an agent gets it."""
        return {"num_nodes": self.nodes, "min_ranks": self.least, "seconds": 20.0, "silence_seconds": self.silence}

    def __str__(self) -> str:
        ranks = f"{self.nodes} machines with {self.ranks_per_node} ranks, at least {self.least}"
        kind = "nccl" if self.needs_release else "gloo"
        head = f"seed {self.seed}: {ranks}, {self.steps} steps, {kind}, max_restarts {self.max_restarts}"
        return "\n".join([head, *(f"  {fault}" for fault in self.faults)])


def draw(seed: int, most_nodes: int = 16) -> Plan:
    """Return the history of a seed."""
    rng = random.Random(seed)
    nodes = rng.choice([count for count in (2, 2, 3, 3, 3, 4, 4, 5, 5, 6, 7, 8, 10, 12, 16) if count <= most_nodes])
    ranks_per_node = rng.choice([1, 1, 2, 3]) if nodes <= 8 else 1
    least = rng.choice([1, 1, 2, max(1, nodes * ranks_per_node // 2)])
    steps = rng.choice([20, 40, 60])
    span = steps * 0.6 + 5.0
    faults = []
    for _ in range(rng.choice([0, 1, 1, 2, 2, 3, 3, 4, 6, 9])):
        kind = rng.choice(KINDS)
        forever = kind in ("cut", "one_way", "partition") and rng.random() < 0.5
        faults.append(
            Fault(
                at=round(rng.uniform(0.0, span), 3),
                kind=kind,
                machine=rng.choice([0, rng.randrange(nodes)]),
                other=rng.randrange(nodes),
                seconds=float("inf")
                if forever
                else round(rng.choice([0.5, 2.0, 4.0, 8.0, 15.0, 30.0]) * rng.uniform(0.5, 1.5), 3),
                value=rng.randrange(1, nodes * ranks_per_node + 1),
            )
        )
    if rng.random() < 0.3 and faults:  # several at nearly the same time, which is what breaks protocols
        at = faults[0].at
        faults = [dataclasses.replace(fault, at=round(at + rng.uniform(0.0, 3.0), 3)) for fault in faults]
    return Plan(
        seed=seed,
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        least=least,
        steps=steps,
        faults=tuple(sorted(faults, key=lambda fault: fault.at)),
        max_restarts=rng.choice([0, 1, 3, 3, 9]),
        silence=rng.choice([2.0, 5.0, 10.0]),
        step_seconds=rng.choice([0.2, 0.5, 1.0]),
        save_every=rng.choice([3, 7, 100]),
        delay=rng.choice([(50e-6, 1e-3), (1e-3, 2e-2), (50e-6, 0.3)]),
        skew=rng.choice([0.0, 0.0, 1e-3, 2e-2]),
        needs_release=rng.random() < 0.4,
        restarts=rng.random() < 0.7,
    )
