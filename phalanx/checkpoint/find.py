"""Find checkpoints, and choose the one to resume from."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from phalanx.checkpoint import group
from phalanx.checkpoint.foreign import foreign, looks_like, nothing_there
from phalanx.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from phalanx.checkpoint.names import is_published
from phalanx.checkpoint.verify import verify
from phalanx.errors import CheckpointError


@dataclass(frozen=True)
class Checkpoint:
    """A published checkpoint and its manifest."""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        """The number of optimizer steps taken when it was saved."""
        return self.manifest.step


@dataclass(frozen=True)
class Choice:
    """The checkpoint to resume from, if any, and what the user should hear about those passed over."""

    checkpoint: Checkpoint | None
    notes: list[str] = field(default_factory=list)


def list_checkpoints(directory: Path | str) -> list[Checkpoint]:
    """Return the checkpoints whose manifest can be read, the newest first."""
    return _survey(Path(directory))[0]


def choose(place: Path | str, *, required: bool = False, run_id: str | None = None) -> Choice:
    """Choose the newest whole checkpoint of a directory, or the one that `place` is; collective with a process group.

    Damaged ones are passed over with a note. A checkpoint that was named itself must be whole. When there is none,
    `required` decides between a CheckpointError and a choice of None; something foreign is always an error. With
    `run_id` (rank 0's is taken) only the checkpoints of that run count.
    """
    place = Path(place)
    if group.from_rank_zero(lambda: _is_checkpoint(place)):
        return Choice(_named(place))
    candidates, notes = group.from_rank_zero(lambda: _candidates(place, run_id))
    for checkpoint in candidates:
        problems = verify(checkpoint.path, manifest=checkpoint.manifest)
        if not problems:
            return Choice(checkpoint, notes)
        notes.append(f"passed over {checkpoint.path}: {_summary(problems)}")
    if notes and required:
        raise CheckpointError(f"no checkpoint in {place} is usable:\n" + "\n".join(f"  - {note}" for note in notes))
    if required:
        raise nothing_there(place)
    return Choice(None, notes)


def _is_checkpoint(place: Path) -> bool:
    return (place / MANIFEST).is_file() or (is_published(place.name) and place.is_dir())


def _named(path: Path) -> Checkpoint:
    """Open the checkpoint that the user asked for by name: no other will do."""
    manifest = group.from_rank_zero(lambda: _manifest_of(path))
    problems = verify(path, manifest=manifest)
    if problems:
        raise CheckpointError(
            f"checkpoint {path} is damaged: {_summary(problems)}",
            hint=f"Resume from {path.parent} to fall back to the newest whole one.",
        )
    return Checkpoint(path, manifest)


def _manifest_of(path: Path) -> Manifest:
    kind = None if (path / MANIFEST).exists() else looks_like(path)
    # A kill never leaves a published name without a manifest, so a stranger's directory is the likelier story.
    if kind is not None and not is_published(path.name):
        raise foreign(path, kind)
    return read_manifest(path)


def _candidates(directory: Path, run_id: str | None) -> tuple[list[Checkpoint], list[str]]:
    if not directory.exists():
        return [], []
    found, notes = _survey(directory) if directory.is_dir() else ([], [])
    if not found and not notes:
        kind = looks_like(directory)
        if kind is not None:
            raise foreign(directory, kind)
    return [each for each in found if run_id in (None, each.manifest.run_id)], notes


def _survey(directory: Path) -> tuple[list[Checkpoint], list[str]]:
    """Read every manifest; those that cannot be read become notes."""
    found: list[Checkpoint] = []
    notes: list[str] = []
    if not directory.is_dir():
        return found, notes
    for path in sorted(directory.iterdir()):
        if not is_published(path.name) or not path.is_dir():
            continue
        try:
            found.append(Checkpoint(path, read_manifest(path)))
        except CheckpointError as error:
            notes.append(f"passed over {path}: {error.message}")
    found.sort(key=lambda checkpoint: (checkpoint.manifest.published_at, checkpoint.step), reverse=True)
    return found, notes


def _summary(problems: list[str]) -> str:
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return problems[0] + more
