"""Recognise directories and files that are not Phalanx checkpoints, so that the user reads what they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

_EXPECTED = "Expected the checkpoint_dir of an earlier run, which holds step-00000100 and the like, or one of those."
_TORCH_SUFFIXES = (".pt", ".pth", ".ckpt", ".bin")


def looks_like(path: Path) -> str | None:
    """Say what kind of foreign checkpoint is at `path`, or None when it is none that we know."""
    if path.is_file():
        return "a single file, as torch.save writes it" if path.suffix in _TORCH_SUFFIXES else "a single file"
    names = sorted(entry.name for entry in path.iterdir())
    if ".metadata" in names or any(name.endswith(".distcp") for name in names):
        return "a torch.distributed.checkpoint directory without a Phalanx manifest"
    if "config.json" in names and any(name.endswith((".safetensors", ".bin")) for name in names):
        return "a Hugging Face model directory"
    if any(name.endswith(".safetensors") for name in names):
        return "a directory of safetensors files"
    if "checkpoint" in names and any(name.endswith(".index") for name in names):
        return "a TensorFlow checkpoint directory"
    files = [name for name in names if name.endswith(_TORCH_SUFFIXES)]
    return f"a directory of torch.save files ({files[0]})" if files else None


def foreign(path: Path, kind: str) -> CheckpointError:
    """Return the error for something that is no checkpoint of ours."""
    return CheckpointError(f"{path} is not a Phalanx checkpoint: it looks like {kind}", hint=_EXPECTED)


def nothing_there(path: Path) -> CheckpointError:
    """Return the error for a place that holds no checkpoint of any kind."""
    what = "holds no checkpoint" if path.exists() else "does not exist"
    return CheckpointError(f"{path} {what}", hint=_EXPECTED)
