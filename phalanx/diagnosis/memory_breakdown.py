"""`MemoryBreakdown`: what a rank's memory is spent on, and which changes of the settings save how much.

A rank writes its breakdown beside its log, so that the launcher can show it when the kernel has killed the rank.
"""

from __future__ import annotations

import dataclasses
import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from phalanx.config.strategies import facts_of
from phalanx.host.files import replace_file
from phalanx.observe.format import size, table

_BLOCK_INPUT = 0.06
"""Of a transformer block's activations its input is 2 of 34 bytes per value (half precision, flash attention)."""
_GROWTH = 1.1
"""Memory that is held between steps and has grown by more than this is a finding."""
_CHANGES = 3


class MemoryChange(NamedTuple):
    """A change of the settings: what to write, how many bytes it saves per rank, and its price."""

    setting: str
    saves: float
    price: str


def optimizer_states(name: str, momentum: float = 0.9) -> float:
    """Return how many fp32 values per parameter an optimizer keeps; one that is not known, as many as Adam.

    adamw8bit keeps two of 8 bits, and for each 32 of them a scale in fp32: 2 + 8/32 bytes.
    """
    extra = int(momentum > 0)
    values = {"sgd": extra, "lars": 1, "rmsprop": 1 + extra, "adagrad": 1, "adamw8bit": (2 + 8 / 32) / 4}
    return values.get(name.lower(), 2)


@dataclass(frozen=True)
class MemoryBreakdown:
    """The memory of one rank in bytes, by what it is for, and the settings that decide about it."""

    device: str
    limit: float
    """What the device has, or on the CPU the node or control group, for all ranks together."""
    parameters: float
    gradients: float
    optimizer: float
    activations: float = 0.0
    """The most that was held beyond the rest within a step; 0 before the first step."""
    other: float = 0.0
    """Before training: the interpreter, libraries, data; on CUDA nothing."""
    ranks: int = 1
    local_ranks: int = 1
    """Ranks that share the limit: those of the node on the CPU, those of the GPU on it."""
    strategy: str = "ddp"
    precision: str = "fp32"
    batch_size: int = 1
    accumulation: int = 1
    recomputes: bool = False
    blocks: int = 0
    """Repeated blocks of the model, which can be recomputed."""
    held: tuple[tuple[int, float], ...] = ()
    """Step and bytes held between steps: after the first step, and last."""

    @property
    def rows(self) -> list[tuple[str, str, str]]:
        """The breakdown as rows of a table."""
        note = "" if self.activations else "not measured before the end of a step"
        return [
            ("parameters", size(self.parameters), ""),
            ("gradients", size(self.gradients), ""),
            ("optimizer states", size(self.optimizer), ""),
            ("activations", size(self.activations) if self.activations else "?", note),
            *([("interpreter, libraries, data", size(self.other), "before training")] if self.other else []),
        ]

    @property
    def growth(self) -> str:
        """What grew between steps, as a sentence; empty where nothing did."""
        if len(self.held) < 2 or self.held[-1][0] <= self.held[0][0] or self.held[-1][1] < _GROWTH * self.held[0][1]:
            return ""
        (first, before), (last, now) = self.held[0], self.held[-1]
        slope = size((now - before) / (last - first))
        return (
            f"memory that is held between steps grew from {size(before)} after step {first} to {size(now)} after step "
            f"{last}, {slope} per step: something keeps tensors or data (a list of losses without .item(), a cache)"
        )

    def changes(self, needed: float = 0.0) -> list[MemoryChange]:
        """Return up to three changes, the cheapest first; one that alone saves what is `needed` is among them."""
        states = self.parameters + self.gradients + self.optimizer
        changes: list[MemoryChange] = []
        if self.batch_size > 1:
            half = self.batch_size // 2
            now = f"batch_size={half}, gradient_accumulation_steps={self.accumulation * 2}"
            savings = self.activations * (1 - half / self.batch_size)
            changes.append(MemoryChange(now, savings, "a few percent of the speed"))
        if self.precision == "fp32" and self.device == "cuda":
            changes.append(
                MemoryChange("mixed_precision='bf16'", self.activations / 2, "none in speed; other rounding")
            )
        if self.blocks > 1 and not self.recomputes and self.device == "cuda":
            savings = 0.5 * self.activations + 0.75 * self.optimizer
            changes.append(MemoryChange("memory=True", savings, "about a tenth of the speed; compiles"))
        elif self.blocks > 1 and not self.recomputes:
            savings = self.activations * (1 - _BLOCK_INPUT - 1 / self.blocks)
            changes.append(MemoryChange("activation_checkpointing=True", savings, "about a third more computation"))
        if self.ranks > 1 and facts_of(self.strategy).replicates:
            savings = states * (1 - 1 / self.ranks)
            changes.append(MemoryChange("strategy='fsdp'", savings, "half as much communication again"))
        if self.device == "cpu" and self.local_ranks > 1:
            changes.append(MemoryChange(f"num_workers={self.local_ranks - 1}", states + self.other, "fewer ranks"))
        elif facts_of(self.strategy).shards:
            changes.append(MemoryChange("offload='cpu'", states, "states travel to the device in every step"))
        enough = [change for change in changes if change.saves >= needed > 0]
        cheapest = changes[:_CHANGES]
        return [*cheapest[: _CHANGES - 1], enough[0]] if enough and not set(enough) & set(cheapest) else cheapest

    def lines(self, needed: float = 0.0) -> list[str]:
        """Return the breakdown, what grew, and what to change, as lines for the user."""
        total = sum((self.parameters, self.gradients, self.optimizer, self.activations, self.other))
        sharing = f", shared by {self.local_ranks} ranks" if self.local_ranks > 1 else ""
        lines = [
            f"memory per rank: {size(total)} known, of {size(self.limit)}{sharing}",
            table(self.rows, indent="  "),
        ]
        lines += [self.growth] if self.growth else []
        changes = self.changes(needed)
        if changes:
            rows = [
                (
                    change.setting,
                    f"saves about {size(change.saves)}" if change.saves else "saves activations",
                    change.price,
                )
                for change in changes
            ]
            lines += ["what to change, the cheapest first, with its price:", table(rows, indent="  ")]
        return "\n".join(lines).splitlines()


def _path(log_dir: Path, rank: int) -> Path:
    return log_dir / f"rank-{rank}.memory.json"


def write_breakdown(breakdown: MemoryBreakdown, log_dir: Path, rank: int) -> None:
    """Keep a rank's breakdown where the launcher finds it."""
    with suppress(OSError):  # a full disk must not end training
        replace_file(_path(log_dir, rank), json.dumps(dataclasses.asdict(breakdown)))


def read_breakdown(log_dir: Path, rank: int) -> MemoryBreakdown | None:
    """Return the last breakdown of a rank; None where it wrote none."""
    try:
        data = json.loads(_path(log_dir, rank).read_text())
        return MemoryBreakdown(**{**data, "held": tuple((step, held) for step, held in data["held"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None
