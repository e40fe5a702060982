"""Pipelines: the layers of each stage, and the micro-batches that each rank keeps. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from phalanx.tools.plan.model import ModelShape
from phalanx.tools.plan.rank_bytes import counts
from phalanx.world.splits import SCHEDULES


def in_flight(schedule: str, ranks: int, virtual_stages: int, index: int, micro_batches: int) -> float:
    """Return the micro-batches whose activations a pipeline rank keeps at its peak, in units of all its layers.

    1f1b: p - i; interleaved: 1 + (p - 1)/(p v) times p on the first rank; zero-bubble: p on every rank; gpipe: all.
    """
    if ranks == 1:
        return 1.0
    if schedule == "gpipe":
        return float(micro_batches)
    if schedule == "zero-bubble":
        return float(min(micro_batches, ranks))
    if virtual_stages > 1:
        chunks = 2 * (ranks - 1 - index) + (virtual_stages - 1) * ranks + 1
        return min(micro_batches * virtual_stages, chunks) / virtual_stages
    return float(min(micro_batches, ranks - index))


def held_passes(
    schedule: str, ranks: int, virtual_stages: int, index: int, micro_batches: int
) -> tuple[tuple[float, float], ...]:
    """Return the moments at which a rank can hold the most: micro-batches in flight, and how many of them are pending.

    Pending: their gradient of the input is computed and that of the weights is not yet, which zero-bubble leaves for
    the end of the step. Rank i of p then holds p + i of its half micro-batches, of which 2i + 1 are pending.
    """
    passes = in_flight(schedule, ranks, virtual_stages, index, micro_batches)
    if schedule != "zero-bubble" or ranks == 1:
        return ((passes, 0.0),)
    halves = 2 * micro_batches
    return (passes, 0.5), (min(halves, ranks + index) / 2, min(halves, 2 * index + 1) / 2)


class StageLayers(NamedTuple):
    """Layers of the first, of each middle and of the last pipeline stage."""

    first: float
    middle: float
    last: float


@lru_cache(maxsize=1024)
def train_cut(model: ModelShape, stages: int) -> StageLayers:
    """Return how `train` cuts a model: so that the stage with the most parameters has as few as possible."""
    here = counts(model)
    layer, most = here.layer + here.experts, -(-model.layers // stages)
    best: tuple[tuple[float, float], StageLayers] | None = None
    for first in range(most + 1):
        for last in range(most + 1) if stages > 2 else (model.layers - first,):
            per_stage, more = divmod(model.layers - first - last, stages - 2) if stages > 2 else (0, 0)
            middle, ends = per_stage + (more > 0), (here.embedding + first * layer, here.table + last * layer)
            squares = more * (per_stage + 1) ** 2 + (stages - 2 - more) * per_stage**2
            cost = max(*ends, middle * layer), ends[0] ** 2 + ends[1] ** 2 + squares * layer**2
            if best is None or cost < best[0]:
                best = cost, StageLayers(first, middle, last)
    assert best is not None, "there is at least one way"
    return best[1]


def rank_layers(
    cut: StageLayers, virtual: int, schedule: str, further: float | None = None
) -> tuple[StageLayers, bool]:
    """Return the layers of the first, a middle and the last rank, and whether the first holds the last stage too.

    `further`: layers of each further stage of a rank, by default of the longest in the middle.
    """
    further = cut.middle if further is None else further
    inner = (virtual - 1) * further
    if schedule in SCHEDULES and SCHEDULES[schedule].folded:
        first, others = cut.first + cut.last + inner - further, cut.middle + inner
        return StageLayers(first, others, others), True
    return StageLayers(*(layers + inner for layers in cut)), False


def even_cut(layers: int, stages: int) -> StageLayers:
    """Return as many layers for each stage, as publications have them; a share that is not whole is rounded up."""
    share = float(-(-layers // stages))
    return StageLayers(share, share, share)


@dataclass(frozen=True)
class PipelineRank:
    """What one kind of rank holds."""

    layers: float
    moments: tuple[tuple[float, float], ...] = ((1.0, 0.0),)
    """Micro-batches whose activations it keeps, and how many of them are pending; see `held_passes`."""
    embeds: bool = True
    computes_loss: bool = True
    receives: int = 0
    """Buffers per micro-batch: each stage but the first receives inputs, each but the last gradients."""


@lru_cache(maxsize=4096)
def pipeline_ranks(
    cut: StageLayers, pp: int, virtual: int, schedule: str, micro_batches: int
) -> dict[str, PipelineRank]:
    """Return the kinds of rank; each holds `virtual` stages."""
    if pp == 1:
        return {"all": PipelineRank(cut.first)}
    layers_of, folded = rank_layers(cut, virtual, schedule)
    return {
        name: PipelineRank(
            layers,
            held_passes(schedule, pp, virtual, index, micro_batches),
            embeds=index == 0,
            computes_loss=index == (0 if folded else pp - 1),
            receives=2 * virtual - (index == 0) - (index == (0 if folded else pp - 1)),
        )
        for name, index, layers in zip(
            ("first stage", "middle stage", "last stage"), (0, 1, pp - 1), layers_of, strict=True
        )
        if pp > 2 or name != "middle stage"
    }
