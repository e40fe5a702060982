"""`phalanx train --dry-run`: what would run, and how much it would need; nothing is started or written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from phalanx.cli.json_output import print_json
from phalanx.config import Resolved
from phalanx.runs.spec import given_settings

if TYPE_CHECKING:
    from phalanx.recipes import Recipe
    from phalanx.trainers.estimate import Estimate
    from phalanx.world.layout import Layout


def show_plan(recipe: Recipe | None, resolved: Resolved, layout: Layout, what: str, *, as_json: bool) -> int:
    """Print the plan of a run: its layout, and for a recipe also steps, parameters and memory."""
    estimate = None
    if recipe is not None:
        from phalanx.trainers.estimate import estimate_recipe  # imports torch

        estimate = estimate_recipe(recipe, resolved.config, layout)
    if as_json:
        print_json(_as_data(what, resolved, layout, estimate))
    else:
        print("\n".join(_lines(what, resolved, layout, estimate)))
    return 0


def _as_data(what: str, resolved: Resolved, layout: Layout, estimate: Estimate | None) -> dict[str, Any]:
    return {
        "run": what,
        "ranks": layout.world_size,
        "nodes": layout.num_nodes,
        "device": layout.device,
        "strategy": resolved.config.resolved_strategy,
        "mesh": layout.mesh.sizes,
        "estimate": None if estimate is None else estimate.to_dict(),
        "settings": given_settings(resolved, resolved.config),
    }


def _lines(what: str, resolved: Resolved, layout: Layout, estimate: Estimate | None) -> list[str]:
    rows = [
        ("run", what),
        ("layout", _layout_words(layout)),
        ("strategy", f"{resolved.config.resolved_strategy} (backend {resolved.config.backend})"),
    ]
    if estimate is None:
        rows.append(("not known", "model, batch, steps and memory: the script decides them when it runs"))
    else:
        rows += _estimate_rows(resolved, layout, estimate)
    lines = [f"{label:<11} {text}" for label, text in rows]
    given = [(name, value) for name, value in given_settings(resolved, resolved.config).items()]
    width = max((len(name) for name, _ in given), default=0)
    lines += ["settings", *(f"  {name:<{width}}  {value!s:<14} {resolved.origins[name]}" for name, value in given)]
    return [line.rstrip() for line in lines] + ["Nothing was started: this was a dry run."]


def _layout_words(layout: Layout) -> str:
    axes = " x ".join(f"{axis} {size}" for axis, size in layout.mesh.sizes.items() if size > 1)
    nodes = f"{layout.num_nodes} machines, " if layout.num_nodes > 1 else ""
    ranks = f"{layout.world_size} rank{'s' * (layout.world_size > 1)}"
    return f"{nodes}{ranks} on {layout.device}{f' (mesh: {axes})' if axes else ''}"


def _estimate_rows(resolved: Resolved, layout: Layout, estimate: Estimate) -> list[tuple[str, str]]:
    from phalanx.trainers.estimate import LEFT_OUT

    config, memory = resolved.config, estimate.memory
    size, accumulation = config.batch_size, config.gradient_accumulation_steps
    parts = f"{size} per rank x {layout.mesh.dp_size} data ranks{f' x {accumulation} accumulated' * (accumulation > 1)}"
    batch = (
        "not known: set batch_size" if estimate.global_batch is None else f"{estimate.global_batch} samples ({parts})"
    )
    steps = "not known" if estimate.steps is None else f"{estimate.steps:,}"
    if estimate.steps_per_epoch is not None:
        steps += f" ({estimate.steps_per_epoch:,} per epoch of {estimate.samples:,} samples)"
    trained = "" if estimate.trainable == estimate.parameters else f", {estimate.trainable:,} of them trained"
    split = [("weights", memory.weights), ("gradients", memory.gradients), ("optimizer", memory.optimizer)]
    where = " (in CPU memory or on disk: offload)" if config.offload != "none" else ""
    return [
        ("model", f"{estimate.model}, {estimate.parameters:,} parameters{trained}"),
        ("batch", batch),
        ("steps", steps),
        ("memory", f"about {_bytes(memory.total)} per rank{where}: "
                   + ", ".join(f"{name} {_bytes(value)}" for name, value in split)),
        ("", f"without {LEFT_OUT}"),
    ]  # fmt: skip


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
