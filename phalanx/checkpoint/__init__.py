"""Checkpoints: sharded, hashed, published by one atomic rename, and loaded at any other layout.

Writing is `save`; resuming is `choose`, then `compare_model`, then `load`. A checkpoint directory holds

    step-00000100/          published: complete by construction
        manifest.json       what is in it, with the size and hash of every file
        index.json          where each part of each tensor is, with the hash of every 4 MiB
        shard-00000.safetensors ...   the tensors, one file per rank; state.safetensors in a full checkpoint
        rank-00000.pt ...   the state of one rank, such as its random generators
        best.json           only in the best one: which metric, and its value (`find_best`)
    .run-....lock           held by a run in progress that saves here
    .run-....fence          which group of a run published last, or began: an earlier one publishes no more
    .chunks-.../            the tensors of a run's incremental checkpoints
    .writing-...            a save in progress, or the rest of a failed one, which the next save removes
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.lazy import lazy_names

if TYPE_CHECKING:
    from phalanx.checkpoint.copy import copy_checkpoint
    from phalanx.checkpoint.differences import StateDifference, compare
    from phalanx.checkpoint.find import Checkpoint, Choice, choose, find_best, list_checkpoints, read_index, verify
    from phalanx.checkpoint.keep import keep_newest
    from phalanx.checkpoint.lock import RunLock
    from phalanx.checkpoint.manifest import Manifest, SavedCheckpoint, Snapshot, TensorInfo, read_manifest
    from phalanx.checkpoint.read import (
        LoadedState,
        compare_model,
        entries,
        load,
        load_newest,
        read_tensors,
        stored_tensors,
    )
    from phalanx.checkpoint.storage import check_writable
    from phalanx.checkpoint.write import Request, Saver, save
    from phalanx.observe.best_mark import Best, mark_best

_NAMES = {
    ".copy": "copy_checkpoint",
    ".differences": "StateDifference compare",
    ".find": "Checkpoint Choice choose find_best list_checkpoints read_index verify",
    ".keep": "keep_newest",
    ".lock": "RunLock",
    ".manifest": "Manifest SavedCheckpoint Snapshot TensorInfo read_manifest",
    ".storage": "check_writable",
    ".read": "LoadedState compare_model entries load load_newest read_tensors stored_tensors",
    ".write": "Request Saver save",
    "phalanx.observe.best_mark": "Best mark_best",
}
__getattr__ = lazy_names(__name__, _NAMES)

__all__ = [
    "Best",
    "Checkpoint",
    "Choice",
    "LoadedState",
    "Manifest",
    "Request",
    "RunLock",
    "SavedCheckpoint",
    "Saver",
    "Snapshot",
    "StateDifference",
    "TensorInfo",
    "check_writable",
    "choose",
    "compare",
    "compare_model",
    "copy_checkpoint",
    "entries",
    "find_best",
    "keep_newest",
    "list_checkpoints",
    "load",
    "load_newest",
    "mark_best",
    "read_index",
    "read_manifest",
    "read_tensors",
    "save",
    "stored_tensors",
    "verify",
]
