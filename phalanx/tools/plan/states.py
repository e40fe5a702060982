"""Parameters of one rank and their bytes: ZeRO, tensor parallelism, and the stages of a pipeline. No torch."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from phalanx.observe.memory_breakdown import optimizer_states
from phalanx.tools.plan.activations import HALF, SINGLE
from phalanx.tools.plan.model import ModelShape
from phalanx.world.splits import SCHEDULES


class StateBytes(NamedTuple):
    """Bytes per parameter."""

    weights: float
    gradients: float
    optimizer: float


def state_bytes(precision: str = "bf16", optimizer: str = "adamw", *, master_weights: bool = True) -> StateBytes:
    """Return the bytes per parameter: 2 + 2 + 12 in mixed precision with AdamW, 4 + 4 + 8 in fp32.

    torch's autocast keeps 4 + 4 + 8 instead of 2 + 2 + 12: the sum is the same, the fp32 weights take the place of the
    master copy. Without master weights everything is in half precision.
    """
    states = optimizer_states(optimizer)
    if precision == "fp32":
        return StateBytes(SINGLE, SINGLE, SINGLE * states)
    return StateBytes(HALF, HALF, SINGLE * (1 + states) if master_weights else HALF * states)


def zero_bytes(parameters: float, ranks: int, stage: int, states: StateBytes | None = None) -> StateBytes:
    """Return weights, gradients and optimizer states per rank under ZeRO.

    With 2 + 2 + 12 bytes: stage 1 P (4 + 12/N), stage 2 P (2 + 14/N), stage 3 16 P/N (arXiv 1910.02054).
    """
    states = states or state_bytes()
    parts = zip(states, (3, 2, 1), strict=True)
    return StateBytes(*(parameters * size / (ranks if stage >= first else 1) for size, first in parts))


class Counts(NamedTuple):
    """Parameters on one tensor-parallel rank, apart from the experts."""

    layer: float
    experts: float
    """Of one layer, on average, before they are spread over ranks."""
    embedding: float
    head: float
    """After the last layer; with tied weights the norm alone."""
    table: float
    """The output matrix, tied or not."""
    adapters: float
    """Of one layer and of rank 1: LoRA adapts the products of attention."""


@lru_cache(maxsize=1024)
def counts(model: ModelShape, tp: int = 1) -> Counts:
    """Return the parameters of a rank; norms are on every tensor-parallel rank."""
    experts = model.mixture_layers * model.expert_parameters / model.layers
    layers = model.parameters - model.embedding_parameters - model.head_parameters
    norms = 2 * model.norm_parameters
    classes = model.vocab if model.outputs is None else model.outputs
    head = (model.head_parameters - model.norm_parameters) / tp + model.norm_parameters
    layer = (layers / model.layers - experts - norms) / tp + norms
    adapters = 4 * model.hidden + 2 * model.attention_width + 2 * model.kv_width
    table = classes * model.hidden / tp
    return Counts(layer, experts / tp, model.embedding_parameters / tp, head, table, adapters)


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
            each, more = divmod(model.layers - first - last, stages - 2) if stages > 2 else (0, 0)
            middle, ends = each + (more > 0), (here.embedding + first * layer, here.table + last * layer)
            squares = more * (each + 1) ** 2 + (stages - 2 - more) * each**2
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
