"""What each strategy is for, in words: for `phalanx strategies` and the documentation. No torch here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """One strategy: what it does, when to choose it, what it goes together with."""

    name: str
    summary: str
    choose: str
    combines: str


CATALOG = (
    Entry(
        "ddp",
        "every rank holds the whole model; gradients are averaged during backward",
        "the model, its gradients and optimizer states fit on one device",
        "tensor_parallel, accumulation, clipping, mixed precision, compile, activation checkpointing, LoRA",
    ),
    Entry(
        "fsdp",
        "parameters, gradients and optimizer states are sharded; blocks are gathered one at a time",
        "they do not fit; sharding=grad-op trades memory for less traffic, hybrid shards within a machine only",
        "tensor_parallel, accumulation, clipping, mixed precision, offload=cpu, activation checkpointing, LoRA; "
        "one rank runs the bare model",
    ),
)
