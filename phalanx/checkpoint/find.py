"""Find and verify checkpoints, and recognise those of other libraries."""

from __future__ import annotations

import stat
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from phalanx.checkpoint import collectives
from phalanx.checkpoint.chunks import is_whole
from phalanx.checkpoint.hashed_files import FileRecord, hash_bytes, hash_file
from phalanx.checkpoint.index import INDEX, DamagedError, Index, parse_index
from phalanx.checkpoint.locations import storage_and_name, storage_at
from phalanx.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from phalanx.checkpoint.publish import is_published
from phalanx.errors import CheckpointError
from phalanx.host.remote import RemotePath, as_path
from phalanx.observe.best_mark import Best, latest_mark


def verify(
    path: Path | str, files: Iterable[str] | None = None, *, manifest: Manifest | None = None, deep: bool = True
) -> list[str]:
    """Return what is wrong with a checkpoint (missing files, wrong sizes or hashes), an empty list if it is intact.

    Without `deep` only sizes are compared. With a process group this is collective: every rank hashes its share of the
    files, and all return the same list.
    """
    path = as_path(path)
    checkpoint = Checkpoint(path, manifest or read_manifest(path))
    records = checkpoint.manifest.files
    names = sorted(records if files is None else files, key=lambda name: (-records[name].size, name))
    mine = names[collectives.rank() :: collectives.world_size()]
    check = problem_of if deep else _size_problem
    problems = {name: problem for name in mine if (problem := check(path / name, records[name]))}
    if files is None and not problems:
        problems = _chunk_problems(checkpoint, collectives.rank(), collectives.world_size(), deep=deep)
    merged = {name: problem for part in collectives.gather_to_all(problems) for name, problem in part.items()}
    return [merged[name] for name in sorted(merged)]


def _chunk_problems(checkpoint: Checkpoint, share: int, of: int, *, deep: bool) -> dict[str, str]:
    """Return what is wrong with a share of an incremental checkpoint's chunks."""
    if checkpoint.manifest.kind != "incremental":
        return {}
    try:
        index = read_index(checkpoint)
    except CheckpointError as error:
        return {INDEX: error.message}
    storage, folder = storage_at(checkpoint.path.parent), index.chunk_folder or ""
    leaves = sorted({(leaf.hash, leaf.size) for listed in index.leaves.values() for leaf in listed})[share::of]
    bad = [hash for hash, size in leaves if not is_whole(storage, folder, hash, size, deep=deep)]
    return {hash: f"the chunk {folder}/{hash[:2]}/{hash} is missing or does not match its hash" for hash in bad}


def read_file(checkpoint: Checkpoint, file: str) -> bytes:
    """Return a small file of a checkpoint; a DamagedError where it is not what was written."""
    storage, name = storage_and_name(checkpoint.path)
    try:
        data = storage.read(name, file)
    except OSError as error:
        raise DamagedError(f"{checkpoint.path / file} cannot be read: {error.strerror or error}") from error
    record = checkpoint.manifest.files.get(file)
    if record is None or hash_bytes(data) != record.hash:
        raise DamagedError(f"{file} does not match its hash: it was changed after it was written")
    return data


def read_index(checkpoint: Checkpoint) -> Index:
    """Read the index of a checkpoint's tensors."""
    return parse_index(read_file(checkpoint, INDEX), str(checkpoint.path / INDEX))


def sizes_match(checkpoint: Checkpoint) -> bool:
    """Whether every file exists with its size: a check without reading, in this process only."""
    files = checkpoint.manifest.files.items()
    if any(_size_problem(checkpoint.path / name, record) for name, record in files):
        return False
    return not _chunk_problems(checkpoint, 0, 1, deep=False)


def problem_of(file: Path, record: FileRecord) -> str | None:
    """Return what is wrong with a file (missing, of another size, changed), or None."""
    try:
        problem = _size_problem(file, record)
        if problem is None and hash_file(file) != record.hash:
            problem = f"{file.name} does not match its hash: it was changed after it was written"
    except OSError as error:
        return f"{file.name} cannot be read: {error.strerror}"
    return problem


def _size_problem(file: Path, record: FileRecord) -> str | None:
    try:
        status = file.stat(follow_symlinks=False)
    except FileNotFoundError:
        return f"{file.name} is missing"
    except OSError as error:
        return f"{file.name} cannot be read: {error.strerror}"
    if not stat.S_ISREG(status.st_mode):
        return f"{file.name} is not a regular file"
    size = status.st_size
    if size == record.size:
        return None
    how = "truncated" if size < record.size else "longer than written"
    return f"{file.name} is {how}: {size:,} bytes, but the manifest says {record.size:,}"


_EXPECTED = "Expected the checkpoint_dir of an earlier run, which holds step-00000100 and the like, or one of those."
_TORCH_SUFFIXES = (".pt", ".pth", ".ckpt", ".bin")


def looks_like(path: Path) -> str | None:
    """Return the kind of another library's checkpoint at `path`, or None."""
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
    """Return the error for a checkpoint of another library."""
    return CheckpointError(f"{path} is not a Phalanx checkpoint: it looks like {kind}", hint=_EXPECTED)


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
    """The checkpoint to resume from, if any, and notes for the user about skipped ones."""

    checkpoint: Checkpoint | None
    notes: list[str] = field(default_factory=list)


def list_checkpoints(directory: Path | str) -> list[Checkpoint]:
    """Return the checkpoints whose manifest can be read, the newest first."""
    return survey(as_path(directory))[0]


def find_best(directory: Path | str) -> Best | None:
    """Return the best checkpoint in a directory, of the run that saved last and those it continues."""
    checkpoints = list_checkpoints(directory)
    if not checkpoints:
        return None
    newest = checkpoints[0].manifest
    through = {run["run_id"]: run["step"] for run in newest.lineage} | {newest.run_id: newest.step}
    return latest_mark(
        checkpoint.path for checkpoint in checkpoints if checkpoint.step <= through.get(checkpoint.manifest.run_id, -1)
    )


def choose(path: Path | str, *, required: bool = False, run_id: str | None = None, deep: bool = True) -> Choice:
    """Choose the newest intact checkpoint of a directory, or the one at `path`; collective with a process group.

    Damaged ones are skipped with a note; a CheckpointError where only such are left, or one is at `path` itself.
    Without any, `required` decides between an error and None; one of another library is always an error. With `run_id`
    (that of rank 0) only the checkpoints of that run count, and those whose run cannot be read. Without `deep` only
    sizes are compared; loading verifies the content.
    """
    path = as_path(path)
    if collectives.from_rank_zero(lambda: (path / MANIFEST).is_file() or (is_published(path.name) and path.is_dir())):
        return Choice(_named(path, deep=deep))
    candidates, notes = collectives.from_rank_zero(lambda: _candidates(path, run_id))
    for checkpoint in candidates:
        problems = verify(checkpoint.path, manifest=checkpoint.manifest, deep=deep)
        if not problems:
            return Choice(checkpoint, notes)
        notes.append(f"passed over {checkpoint.path}: {_summary(problems)}")
    if notes:  # starting at the first step would throw away the work that they hold
        raise CheckpointError(
            f"no checkpoint in {path} is usable:\n" + "\n".join(f"  - {note}" for note in notes),
            hint="To begin anew, remove them or set another checkpoint_dir.",
        )
    if required:
        problem = "holds no checkpoint" if path.exists() else "does not exist"
        raise CheckpointError(f"{path} {problem}", hint=_EXPECTED)
    return Choice(None)


def _named(path: Path, *, deep: bool) -> Checkpoint:
    """Open the checkpoint that the user named, without a fallback."""
    manifest = collectives.from_rank_zero(lambda: _manifest_of(path))
    problems = verify(path, manifest=manifest, deep=deep)
    if problems:
        raise CheckpointError(
            f"checkpoint {path} is damaged: {_summary(problems)}",
            hint=f"Resume from {path.parent} to fall back to the newest intact one.",
        )
    return Checkpoint(path, manifest)


def _manifest_of(path: Path) -> Manifest:
    kind = None if (path / MANIFEST).exists() else looks_like(path)
    # A published checkpoint always has a manifest, so this is probably a directory of another library.
    if kind is not None and not is_published(path.name):
        raise foreign(path, kind)
    return read_manifest(path)


def _candidates(directory: Path, run_id: str | None) -> tuple[list[Checkpoint], list[str]]:
    if not directory.exists():
        return [], []
    checkpoints, unreadable = survey(directory)
    notes = [f"passed over {path}: {error.message}" for path, error in unreadable]
    if not checkpoints and not notes:
        kind = looks_like(directory)
        if kind is not None:
            raise foreign(directory, kind)
    return [checkpoint for checkpoint in checkpoints if run_id in (None, checkpoint.manifest.run_id)], notes


def survey(
    directory: Path, paths: Iterable[Path] | None = None
) -> tuple[list[Checkpoint], list[tuple[Path, CheckpointError]]]:
    """Read every manifest of a directory, or these; return checkpoints, the newest first, and those not readable."""
    checkpoints: list[Checkpoint] = []
    unreadable: list[tuple[Path, CheckpointError]] = []
    if paths is None:
        paths = directory.iterdir() if directory.is_dir() else []
    for path in sorted(paths):
        if not is_published(path.name) or not path.is_dir():
            continue
        try:
            checkpoints.append(Checkpoint(path, read_manifest(path)))
        except CheckpointError as error:
            # At a URL a checkpoint without a manifest is one that is being written.
            if not isinstance(path, RemotePath) or (path / MANIFEST).exists():
                unreadable.append((path, error))
    checkpoints.sort(key=lambda checkpoint: (checkpoint.manifest.published_at, checkpoint.step), reverse=True)
    return checkpoints, unreadable


class Stamp(NamedTuple):
    """What tells a checkpoint from the others of its directory."""

    path: Path
    run_id: str
    step: int
    published_at: float
    kind: str
    file: tuple[int, int]
    """Inode and time of the manifest: a name that is free again may be taken by another run."""


def stamp_of(checkpoint: Checkpoint) -> Stamp:
    """Return the stamp of a checkpoint."""
    path, manifest = checkpoint.path, checkpoint.manifest
    return Stamp(path, manifest.run_id, manifest.step, manifest.published_at, manifest.kind, _manifest_file(path))


def _manifest_file(path: Path) -> tuple[int, int]:
    """Return what tells the manifest in a folder from a later one; zeros without one, and at a URL."""
    if isinstance(path, RemotePath):  # a save takes a name there that no other save has
        return 0, 0
    try:
        status = (path / MANIFEST).stat()
    except OSError:
        return 0, 0
    return status.st_ino, status.st_mtime_ns


def read_stamps(directory: Path, cache: dict[Path, Stamp]) -> list[Stamp]:
    """Return the stamps of all checkpoints whose manifest can be read, the newest first.

    `cache`: those that were read before, which is updated. A save reads only the manifests of others' new checkpoints,
    also in a directory that keeps all of them.
    """
    present = {path for path in directory.iterdir() if is_published(path.name)} if directory.is_dir() else set()
    for path, stamp in list(cache.items()):
        if path not in present or stamp.file != _manifest_file(path):
            del cache[path]
    checkpoints, _ = survey(directory, present - cache.keys())
    cache |= {checkpoint.path: stamp_of(checkpoint) for checkpoint in checkpoints}
    return sorted(cache.values(), key=lambda stamp: (stamp.published_at, stamp.step), reverse=True)


def _summary(problems: list[str]) -> str:
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return problems[0] + more
