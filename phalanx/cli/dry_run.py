"""`phalanx train --dry-run`: what would run, and how much it would need; nothing is started or written."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from phalanx.cli.json_output import print_json
from phalanx.config import ResolvedConfig
from phalanx.observe.format import size, speed_note, table
from phalanx.run.spec import given_settings

if TYPE_CHECKING:
    from phalanx.recipes import Recipe
    from phalanx.tools.plan.auto import RunNeeds
    from phalanx.world.mesh import JobLayout

_MANY_EPOCHS = 1000
"""More are probably max_steps for other data."""


def print_plan(
    recipe: Recipe | None, resolved: ResolvedConfig, layout: JobLayout, run: str, *, missing: int, as_json: bool
) -> int:
    """Print the plan of a run: its layout, and for a recipe also steps, parameters and memory.

    `missing`: GPUs of a node that this one lacks.
    """
    config, estimate = resolved.config, None
    if recipe is not None:
        from phalanx.tools.plan.auto import estimate_recipe  # imports torch

        estimate = estimate_recipe(recipe, config, layout)
        layout = dataclasses.replace(layout, mesh=estimate.mesh)
    settings = given_settings(resolved, config)
    if as_json:
        ranks = {"ranks": layout.world_size, "nodes": layout.num_nodes, "device": layout.device}
        ranks |= {"ranks_per_gpu": layout.ranks_per_gpu}
        plan = {"strategy": estimate.strategy if estimate else config.resolved_strategy, "mesh": layout.mesh.sizes}
        needs = None if estimate is None else estimate.to_dict()
        print_json({"run": run, **ranks, **plan, "estimate": needs, "settings": settings})
        return 0
    rows = [("run", run), ("layout", _layout_words(layout))]
    if missing > 0:
        needed = layout.ranks_per_node
        rows.append(("", f"a run needs {needed} GPU{'s' * (needed > 1)} on a node; this one has {needed - missing}"))
    chosen = estimate.strategy if estimate else config.resolved_strategy
    rows.append(("strategy", f"{chosen} (backend {config.backend})"))
    if estimate is None:
        rows.append(("not known", "model, batch, steps and memory: the script decides them when it runs"))
    else:
        rows += [("", estimate.note)] if estimate.note else []
        rows += _estimate_rows(resolved, layout, estimate)
    print(table(rows))
    print("settings")
    if settings:
        print(table([(name, str(value), resolved.origins[name]) for name, value in settings.items()], "  "))
    print("Nothing was started: this was a dry run.")
    return 0


def _layout_words(layout: JobLayout) -> str:
    axes = " x ".join(f"{axis} {count}" for axis, count in layout.mesh.sizes.items() if count > 1)
    nodes = f"{layout.num_nodes} nodes, " if layout.num_nodes > 1 else ""
    shared = f"; {note}" if (note := speed_note(layout.ranks_per_gpu)) else ""
    return f"{nodes}{layout.ranks} on {layout.device}{f' (mesh: {axes})' if axes else ''}{shared}"


def _estimate_rows(resolved: ResolvedConfig, layout: JobLayout, estimate: RunNeeds) -> list[tuple[str, str]]:
    config, batch, steps = resolved.config, "not known: set batch_size", "not known"
    if estimate.global_batch is not None:
        accumulation, ranks = config.gradient_accumulation_steps, layout.mesh.dp_size
        per_rank = estimate.global_batch // (accumulation * ranks)  # known also where no setting says it
        more = f" x {accumulation} accumulated" * (accumulation > 1)
        batch = f"{estimate.global_batch} samples ({per_rank} per rank x {ranks} data ranks{more})"
    if estimate.steps is not None:
        steps = f"{estimate.steps:,}"
    if estimate.steps_per_epoch is not None:
        steps += f" ({estimate.steps_per_epoch:,} per epoch of {estimate.samples:,} samples)"
    trained = "" if estimate.trainable == estimate.parameters else f", {estimate.trainable:,} of them trained"
    where = " (in CPU memory or on disk: offload)" if config.offload != "none" else ""
    bytes_of = dict(zip(("parameters", "gradients", "optimizer"), estimate.memory, strict=True))  # the planner's words
    parts = ", ".join(f"{name} {size(count, binary=True)}" for name, count in bytes_of.items())
    return [
        ("model", f"{estimate.model}, {estimate.parameters:,} parameters{trained}"),
        ("batch", batch),
        ("steps", steps),
        *(("", note) for note in _unusual(estimate)),
        ("memory", f"about {size(sum(estimate.memory), binary=True)} per rank{where}: {parts}"),
        ("", f"about {size(estimate.peak, binary=True)} at the peak, with activations and buffers"),
    ]


def _unusual(estimate: RunNeeds) -> list[str]:
    """Return what is probably not meant: a batch of more than the data, or very many epochs."""
    warnings = []
    samples, batch, steps = estimate.samples, estimate.global_batch, estimate.steps_per_epoch
    if samples and batch and batch > samples:
        warnings.append(f"the global batch of {batch:,} is larger than the data of {samples:,} samples")
    if steps and estimate.steps and (epochs := estimate.steps / steps) > _MANY_EPOCHS:
        warnings.append(f"these are {epochs:,.0f} epochs: every sample is seen as often")
    return warnings
