"""How many ranks: `num_workers`, `num_gpus` and `gpus_per_node` are one number; a pair is the least and the most."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from typing import Any

from phalanx.config.aliases import ALIASES
from phalanx.config.option import plain, problem
from phalanx.config.settings import FIELDS

RANK_COUNTS = {"num_workers", "num_gpus", "gpus_per_node"}
_RANGE = re.compile(r"\d+:\d+")


def count_ranks(settings: Mapping[str, Any], ranges: Container[str]) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Return settings with num_gpus and gpus_per_node as num_workers and device, and (name, message) for mistakes.

    For example num_nodes = 2 and gpus_per_node = 4 are num_workers = 8 and device = "cuda". `ranges`: those that
    are a pair (least, most); num_gpus is then checked as num_workers.
    """
    values = dict(settings)
    gpus, per_node = plain(values.pop("num_gpus", None)), plain(values.pop("gpus_per_node", None))
    checked = {"num_gpus": None if "num_gpus" in ranges else gpus, "gpus_per_node": per_node}
    mistakes = [(n, text) for n, v in checked.items() if v is not None and (text := problem(ALIASES[n], v))]
    workers, nodes = values.get("num_workers"), values.get("num_nodes", 1)
    is_wrong = "num_workers" not in ranges and problem(FIELDS["num_workers"], plain(workers))  # `check` reports it
    if mistakes or is_wrong or (gpus is None and per_node is None):
        return values, mistakes
    total, name = (gpus, "num_gpus") if workers is None else (workers, "num_workers")
    if None not in (workers, gpus) and workers != gpus:
        mistakes = [(name, f"num_workers = {workers} and num_gpus = {gpus} name the same thing: give one of them.")]
    elif per_node is not None and values.get("hosts"):
        text = f"gpus_per_node = {per_node} with hosts = {values['hosts']!r}, which says it: leave gpus_per_node out."
        mistakes = [("gpus_per_node", text)]
    elif per_node is not None and isinstance(nodes, int):  # else `problem` reports the number of nodes
        product = nodes * per_node
        if total not in (None, product):
            text = f"{name} = {total} is not num_nodes x gpus_per_node = {nodes} x {per_node} = {product}."
            mistakes = [(name, text)]
        total = product
    device = {"device": "cuda"} if values.get("device", "auto") == "auto" else {}
    return {**values, "num_workers": total, **device}, mistakes


def ranges(values: Mapping[str, Any]) -> dict[str, Sequence[Any]]:
    """Return the pairs (least, most) of workers that were given; a sequence of another length is not one."""
    pairs = {name: values[name] for name in ("num_workers", "num_gpus") if name in values}
    for name, text in pairs.items():
        if isinstance(text, str) and _RANGE.fullmatch(text):
            pairs[name] = [int(part) for part in text.split(":")]
    return {name: pair for name, pair in pairs.items() if isinstance(pair, (tuple, list)) and len(pair) == 2}
