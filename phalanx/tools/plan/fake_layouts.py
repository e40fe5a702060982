"""The models of a plan as modules: what a shape describes, built from the reference models, and batches for it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from phalanx.errors import UsageError
from phalanx.models.registry import build
from phalanx.tools.plan.cluster import Cluster
from phalanx.tools.plan.fake_ranks import dry_run
from phalanx.tools.plan.memory_trace import DryRun
from phalanx.tools.plan.model import ModelShape, TracedShape
from phalanx.tools.plan.plans import Goal, Layout
from phalanx.tools.plan.rules import accepted
from phalanx.torch_compat import pytree


def dry_run_layout(
    shape: ModelShape | TracedShape,
    layout: Layout,
    goal: Goal,
    cluster: Cluster,
    make: Callable[[], nn.Module] | None = None,
) -> DryRun:
    """Try a planned layout; see `dry_run`. `make` builds the model; None: the reference model of the shape."""
    config = accepted(layout, goal, cluster)
    ranks = cluster.gpus, cluster.gpus // cluster.nodes
    if isinstance(shape, ModelShape):
        return dry_run(make or model_of(shape, goal.seq_len), batch_of(shape, goal.seq_len), config, *ranks)
    if make is None:
        raise UsageError(f"a dry run of {shape.name} needs the model itself, not its shape")
    return dry_run(make, _example_of(shape), config, *ranks, loss_fn=_mean_output)


def model_of(shape: ModelShape, seq_len: int) -> Callable[[], nn.Module]:
    """Return what builds the reference model of a shape; UsageError where none has this shape."""
    name, options = _reference(shape, seq_len)
    whole = shape.head_dim in (None, shape.hidden // shape.heads)
    if name is None or not whole:
        raise UsageError(
            f"none of the reference models has the shape of {shape.name}",
            hint="Give the model itself: its class by import path, package.module:Class.",
        )
    return lambda: build(name, **options)


def _reference(shape: ModelShape, seq_len: int) -> tuple[str | None, dict[str, Any]]:
    size = {"layers": shape.layers, "heads": shape.heads, "hidden": shape.hidden}
    if shape.patches:
        side = math.isqrt(shape.patch_inputs // 3)
        image = {"image_size": side * math.isqrt(shape.patches), "patch_size": side, "channels": 3}
        exact = shape.patch_inputs == 3 * side**2 and math.isqrt(shape.patches) ** 2 == shape.patches
        return "vit" if exact else None, {**size, **image, "classes": shape.outputs or 1000, "ffn_hidden": shape.ffn}
    text = {**size, "vocab_size": shape.vocab, "tie_weights": shape.tied_embeddings}
    if not shape.causal or shape.outputs is not None:
        return None, {}
    if shape.gated_mlp:
        text |= {"ffn_hidden": shape.ffn, "kv_heads": shape.kv_heads or shape.heads, "seq_len": seq_len}
        if not shape.experts:
            return "llama", text
        plain = not (shape.dense_layers or shape.shared_experts)
        return "moe" if plain else None, {**text, "experts": shape.experts, "top_k": shape.active_experts}
    plain = shape.ffn == 4 * shape.hidden and shape.kv_heads in (None, shape.heads) and not shape.experts
    return "gpt" if plain else None, {**text, "bias": shape.biases, "seq_len": max(shape.positions, seq_len)}


def _example_of(shape: TracedShape) -> Callable[[int], Any]:
    """Return what makes a batch of the samples with which a module was traced."""
    kind, _, sizes = shape.example.rpartition(":")
    dtype = torch.long if kind == "tokens" else torch.float32

    def samples(count: int) -> Any:
        return torch.zeros(count, *map(int, sizes.split("x")), dtype=dtype), torch.zeros(count)

    return samples


def _mean_output(output: Any, _: Any) -> torch.Tensor:
    """Stand in for a loss that is not known: a number of every output."""
    found = [leaf.float().mean() for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    return torch.stack(found).mean()


def batch_of(shape: ModelShape, seq_len: int) -> Callable[[int], Any]:
    """Return a function that makes a batch of a size."""

    def images(count: int) -> Any:
        side = math.isqrt(shape.patch_inputs // 3) * math.isqrt(shape.patches)
        return torch.zeros(count, 3, side, side), torch.zeros(count, dtype=torch.long)

    def texts(count: int) -> Any:
        tokens = torch.zeros(count, seq_len, dtype=torch.long)
        return tokens, tokens

    return images if shape.patches else texts
