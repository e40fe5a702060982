"""What a job brings to its nodes: an environment by `uv sync` (`--uv`), and an archive of its code (`--ship`)."""

from __future__ import annotations

import hashlib
import io
import shlex
import subprocess
import tarfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from phalanx.errors import EXIT_USAGE, UsageError
from phalanx.tools.submit.files import split_words
from phalanx.tools.submit.target import CommonOptions, Target

_LOCK, _PROJECT = "uv.lock", "pyproject.toml"
FIND = f"""PATH="$PATH:$HOME/.local/bin:$HOME/.cargo/bin"
if ! command -v uv >/dev/null; then
  echo "uv is not on the PATH of $(uname -n): install it there, or give an environment that has phalanx (--venv)" >&2
  exit {EXIT_USAGE}
fi"""
"""Shell lines that find uv, also where a login shell alone would have its folder on the PATH."""
_MAKE = f"""{FIND}
mkdir -p "$(dirname "$0")" && {{
  # Left by a job that was killed: uv would fail, or take the interpreter behind it for the environment.
  flock 9 && {{ [ -e "$0/pyvenv.cfg" ] || rm -rf "$0"; }} && UV_PROJECT_ENVIRONMENT="$0" uv sync --frozen%s
}} 9>"$0.lock" || exit 1"""
"""uv ends with 2 where an index is out of reach, and schedulers do not try again after 2."""


def check(target: Target[Any]) -> None:
    """Refuse options that contradict --uv, and targets that cannot make environments."""
    options = target.options
    if options.uv_sync is not None and not options.uv:
        raise UsageError(f"--uv-sync {options.uv_sync} without --uv", hint="Add --uv.")
    if options.uv and options.venv is not None:
        raise UsageError(f"--uv makes an environment, and --venv {options.venv} is another", hint="Leave one out.")
    if options.uv and target.lacks_uv:
        raise UsageError(f"--uv with {target.lacks_uv}", hint="Install phalanx there, or put it into the image.")


def place(options: CommonOptions, folder: str) -> str:
    """Return where the environment is on a node, as its shell reads it; `folder`: where the ranks run there.

    Shipped code has it inside, so that both are removed together. Else its name is the digest of what decides its
    content, to which the folder belongs: uv installs a project in place. Nodes with different processors may share a
    home folder.
    """
    digest = hashlib.sha256(b"\0".join([*_read(), (options.uv_sync or "").encode(), folder.encode()]))
    named = f'"$HOME"/.cache/phalanx/uv/{digest.hexdigest()[:16]}-"$(uname -m)"'
    return f"{folder}/.venv" if options.ship == "archive" else named


def lines(options: CommonOptions, folder: str, each_node: str = "") -> Iterator[str]:
    """Return the lines of a script that make the environment and enter it; `each_node` runs a command on all nodes."""
    make = _MAKE % "".join(f" {shlex.quote(word)}" for word in split_words("--uv-sync", options.uv_sync))
    yield "# The environment of uv.lock. One process of a node makes it, others wait for it; later ones find it made."
    yield f"environment={place(options, folder)}"
    yield f'{each_node}sh -c {shlex.quote(make)} "$environment" || exit $?'
    yield 'export PATH="$environment/bin:$PATH"'


def _read() -> list[bytes]:
    """Return the content of the project's files; refuse a project that is not locked, or that has no phalanx."""
    for name in (_PROJECT, _LOCK):
        if not Path(name).is_file():
            raise UsageError(
                f"--uv makes the environment from {_LOCK}, and {Path.cwd()} has no {name}",
                hint="Make one: uv init --bare && uv add phalanx",
            )
    lock = Path(_LOCK).read_bytes()
    try:
        packages = {each["name"] for each in tomllib.loads(lock.decode())["package"]}
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{_LOCK} cannot be read: {error}", hint="Write it again: uv lock") from None
    if "phalanx" not in packages:
        raise UsageError(f"{_LOCK} has no phalanx, which starts the ranks", hint="Add it: uv add phalanx")
    return [Path(_PROJECT).read_bytes(), lock]


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
