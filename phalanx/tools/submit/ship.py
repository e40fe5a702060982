"""The code that a job needs: the folder as it is, or an archive of it, named by the digest of its content."""

from __future__ import annotations

import hashlib
import io
import subprocess
import tarfile
from pathlib import Path

from phalanx.errors import UsageError

LARGEST = 200 * 2**20
"""Bytes of an archive: more is probably data, which is not shipped."""
_NEVER = {".git", "__pycache__", ".venv", "venv", "node_modules", "runs", ".mypy_cache", ".ruff_cache"}


def archive(directory: Path) -> tuple[str, bytes]:
    """Return the name and content of an archive of a folder's code: `code-<digest>.tar.gz`, equal for equal files."""
    files = _tracked(directory) or _walked(directory)
    size = sum(path.stat().st_size for path in files)
    if size > LARGEST:
        largest = sorted(files, key=lambda path: -path.stat().st_size)[:3]
        named = ", ".join(str(path.relative_to(directory)) for path in largest)
        raise UsageError(
            f"the code in {directory} is {size / 2**20:,.0f} MB, more than {LARGEST / 2**20:.0f}; largest: {named}",
            hint="Data is not shipped: keep it outside, or list it in .gitignore.",
        )
    content = _packed(directory, files)
    return f"code-{hashlib.sha256(content).hexdigest()[:16]}.tar.gz", content


def _tracked(directory: Path) -> list[Path]:
    """Return the files that git knows or does not ignore; empty where the folder is not one of git."""
    command = ["git", "-C", str(directory), "ls-files", "-co", "--exclude-standard", "-z"]
    try:
        found = subprocess.run(command, capture_output=True, check=True).stdout.decode()
    except (OSError, subprocess.CalledProcessError):
        return []
    paths = [directory / name for name in found.split("\0") if name]
    return sorted(path for path in paths if path.is_file() and not path.is_symlink())


def _walked(directory: Path) -> list[Path]:
    found = (path for path in directory.rglob("*") if not _NEVER & set(path.relative_to(directory).parts))
    return sorted(path for path in found if path.is_file() and not path.is_symlink())


def _packed(directory: Path, files: list[Path]) -> bytes:
    import gzip

    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as stream, tarfile.open(fileobj=stream, mode="w") as tar:
        for path in files:
            entry = tarfile.TarInfo(str(path.relative_to(directory)))
            entry.size, entry.mode = path.stat().st_size, 0o755 if path.stat().st_mode & 0o100 else 0o644
            with path.open("rb") as file:
                tar.addfile(entry, file)
    return packed.getvalue()
