"""What targets share: the program to call, scripts, limits, logs that grow; environments by uv, and shipped code."""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import gzip
import hashlib
import io
import os
import re
import shlex
import subprocess
import sys
import tarfile
import time
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from phalanx.config.settings import parse_duration
from phalanx.errors import EXIT_USAGE, UsageError
from phalanx.observe.format import size
from phalanx.recipes import Recipe
from phalanx.recipes.imports import is_import_path
from phalanx.tools.submit.job import ClusterJob
from phalanx.tools.submit.target import CommonOptions, Target

_POLL_SECONDS = 0.5


def program_of(options: CommonOptions) -> str:
    """Return how `phalanx` is called on the nodes: of the image, of uv, of a given environment, or of this one."""
    if options.image is not None or options.uv:
        return "phalanx"
    folder = Path(options.venv) / "bin" if options.venv is not None else Path(sys.executable).parent
    return str(folder / "phalanx")


def shell_join(words: Sequence[str], expressions: Mapping[str, str]) -> str:
    """Quote words for a shell; `expressions`: marks in them to the shell's own text that takes their place.

    A mark begins with a NUL character, which no argument of a command can hold.
    """
    marks = re.compile("|".join(f"({re.escape(mark)})" for mark in expressions))
    split = ([part for part in marks.split(word) if part] or [""] for word in words)
    return " ".join("".join(expressions.get(part) or shlex.quote(part) for part in parts) for parts in split)


def split_words(flag: str, text: str | None) -> list[str]:
    """Return the words of an option that holds options of another program."""
    try:
        return shlex.split(text or "")
    except ValueError as error:
        raise UsageError(f"{flag} {text}: {error}", hint="Close every quotation mark.") from None


def own_limit(job: ClusterJob, options: CommonOptions) -> tuple[str, ...]:
    """Return the flags by which a run ends itself, for targets without their own time limit."""
    seconds = limit_seconds(job, options, 0)
    return () if seconds is None else ("--max-time", str(seconds))


def limit_seconds(job: ClusterJob, options: CommonOptions, save_seconds: int) -> int | None:
    """Return the time limit; refuse one that leaves no time to train, or that ends a run without checkpoints."""
    if (text := options.time_limit) is None:
        return None
    try:
        limit = parse_duration(text)
    except ValueError:
        raise UsageError(f"--time-limit {text}: expected a duration such as 30m, 12h or 2d.") from None
    if limit <= save_seconds + 60:
        saves = f": a run is asked to save {save_seconds} s before the limit, so it would hardly train"
        raise UsageError(
            f"--time-limit {text}{saves if save_seconds else ' leaves hardly any time to train'}",
            hint="Give 10m or more.",
        )
    if job.config.checkpoint_every is None:
        raise UsageError(
            f"--time-limit {text} ends the run, and it saves no checkpoints",
            hint="Add --checkpoint-frequency auto, or a number of steps: --checkpoint-frequency '500 steps'.",
        )
    return round(limit)


def unpack_lines(work: str, each_node: str) -> Iterator[str]:
    """Return the lines of a script that unpack shipped code on every node and enter it."""
    yield f'work="{work}"'
    # Complete at once, since nodes may share the folder. Other users can write to /tmp: a folder of theirs is refused.
    script = (
        'umask 077; new=$(mktemp -d "$0.XXXXXX") && tar -xzf "$1"/code-*.tar.gz -C "$new" || exit 1; '
        'mv -T "$new" "$0" 2>/dev/null || rm -rf "$new"; [ -d "$0" ] && [ -O "$0" ] && [ ! -L "$0" ]'
    )
    yield f'{each_node}bash -c {shlex.quote(script)} "$work" "$PHALANX_JOB_FOLDER" || exit 1'
    yield 'cd "$work" || exit 1'


def rank_log(run_dir: Path, rank: int) -> Path:
    """Return the log of one rank."""
    logs = sorted((run_dir / "logs").rglob(f"rank-{rank}.log"))
    if not logs:
        raise UsageError(
            f"{run_dir / 'logs'} has no log of rank {rank}", hint="See the ranks there are: ls that folder."
        )
    return logs[-1]


def follow_files(find: Callable[[], Sequence[Path]], has_ended: Callable[[], bool] | None) -> Iterator[str]:
    """Return lines of the files that `find` returns; with `has_ended`, wait for more of both until it is true."""
    at = defaultdict[Path, int](int)
    last_check = 0.0
    while True:
        ended = has_ended is None
        if has_ended is not None and time.monotonic() - last_check > 4 * _POLL_SECONDS:
            last_check, ended = time.monotonic(), has_ended()
        for path in find():
            if path.is_file():
                with path.open("rb") as file:
                    file.seek(at[path])
                    for line in file:
                        if line.endswith(b"\n") or ended:
                            at[path] += len(line)
                            yield line.decode(errors="replace").rstrip("\r\n")
        if ended:
            return
        time.sleep(_POLL_SECONDS)


_LOCK, _PROJECT = "uv.lock", "pyproject.toml"
FIND_UV = f"""PATH="$PATH:$HOME/.local/bin:$HOME/.cargo/bin"
if ! command -v uv >/dev/null; then
  echo "uv is not on the PATH of $(uname -n): install it there, or give an environment that has phalanx (--venv)" >&2
  exit {EXIT_USAGE}
fi"""
"""Shell lines that find uv, also where a login shell alone would have its folder on the PATH."""
_MAKE_UV = f"""{FIND_UV}
mkdir -p "$(dirname "$0")" && {{
  # Left by a job that was killed: uv would fail, or take the interpreter behind it for the environment.
  flock 9 && {{ [ -e "$0/pyvenv.cfg" ] || rm -rf "$0"; }} && UV_PROJECT_ENVIRONMENT="$0" uv sync --frozen%s
}} 9>"$0.lock" || exit 1"""
"""uv ends with 2 where an index is out of reach, and schedulers do not try again after 2."""


def check_uv(target: Target[Any]) -> None:
    """Refuse options that contradict --uv, and targets that cannot make environments."""
    options = target.options
    if options.uv_sync is not None and not options.uv:
        raise UsageError(f"--uv-sync {options.uv_sync} without --uv", hint="Add --uv.")
    if options.uv and options.venv is not None:
        raise UsageError(f"--uv makes an environment, and --venv {options.venv} is another", hint="Leave one out.")
    if options.uv and target.lacks_uv:
        raise UsageError(f"--uv with {target.lacks_uv}", hint="Install phalanx there, or put it into the image.")


def check_ship(target: Target[Any], job: ClusterJob) -> None:
    """Ship the files that a command names where nodes cannot see this folder; refuse those that cannot be shipped."""
    options = target.options
    needs = bool(job.files) and not target.sees_folder and options.ship is None
    if needs or options.ship == "archive":
        if target.lacks_ship:
            named = f"{job.files[0]} is on this machine alone" if needs else "--ship archive"
            raise UsageError(
                f"{named}: {target.lacks_ship}",
                hint="Put the code where the ranks run, into the image or on a volume, and write: --ship folder",
            )
        # Nodes that see this machine's file system have what is named by an absolute path.
        elsewhere = [file for file in job.files if not (target.sees_folder and Path(file).is_absolute())]
        if outside := [file for file in elsewhere if not Path(file).resolve().is_relative_to(Path.cwd())]:
            raise UsageError(
                f"{outside[0]} is not in {Path.cwd()}, of which a copy is shipped",
                hint="Give the command in the folder with all the code. Where the ranks have that file: --ship folder",
            )
        target.options = dataclasses.replace(options, ship="archive")


def local_files(namespace: argparse.Namespace, recipe: Recipe | None) -> tuple[str, ...]:
    """Return what a command names that only this machine has: files, and modules of the current folder."""
    files = [namespace.script, *(namespace.config or [])]
    modules = [namespace.module]
    if recipe is not None:
        file = namespace.recipe if Path(namespace.recipe or "").is_file() else recipe.source
        files += [file] if Path(recipe.source).is_absolute() else []
        named = (recipe.source, str(recipe.model["name"]), str(recipe.data["name"]))
        modules += [text.partition(":")[0] for text in named if is_import_path(text)]
    tops = [Path(name.partition(".")[0]) for name in modules if name]
    paths = [path.with_suffix(".py") if path.with_suffix(".py").is_file() else path for path in tops]
    return tuple(dict.fromkeys([*filter(None, files), *(str(path) for path in paths if path.exists())]))


def uv_place(options: CommonOptions, folder: str) -> str:
    """Return where the environment is on a node, as its shell reads it; `folder`: where the ranks run there.

    Shipped code has it inside, so that both are removed together. Else its name is the digest of what decides its
    content, to which the folder belongs: uv installs a project in place. Nodes with different processors may share a
    home folder.
    """
    digest = hashlib.sha256(b"\0".join([*_read_project(), (options.uv_sync or "").encode(), folder.encode()]))
    named = f'"$HOME"/.cache/phalanx/uv/{digest.hexdigest()[:16]}-"$(uname -m)"'
    return f"{folder}/.venv" if options.ship == "archive" else named


def uv_lines(options: CommonOptions, folder: str, each_node: str = "") -> Iterator[str]:
    """Return the lines of a script that make the environment and enter it; `each_node` runs a command on all nodes."""
    make = _MAKE_UV % "".join(f" {shlex.quote(word)}" for word in split_words("--uv-sync", options.uv_sync))
    yield "# The environment of uv.lock. One process of a node makes it, others wait for it; later ones find it made."
    yield f"environment={uv_place(options, folder)}"
    yield f'{each_node}sh -c {shlex.quote(make)} "$environment" || exit $?'
    yield 'export PATH="$environment/bin:$PATH"'


def _read_project() -> list[bytes]:
    """Return the content of the project's files; refuse a project that is not locked, or that has no phalanx."""
    for name in (_PROJECT, _LOCK):
        if not Path(name).is_file():
            raise UsageError(
                f"--uv makes the environment from {_LOCK}, and {Path.cwd()} has no {name}",
                hint="Make one: uv init --bare && uv add phalanx",
            )
    lock = Path(_LOCK).read_bytes()
    try:
        packages = {package["name"] for package in tomllib.loads(lock.decode())["package"]}
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{_LOCK} cannot be read: {error}", hint="Write it again: uv lock") from None
    if "phalanx" not in packages:
        raise UsageError(f"{_LOCK} has no phalanx, which starts the ranks", hint="Add it: uv add phalanx")
    return [Path(_PROJECT).read_bytes(), lock]


LARGEST = 200 * 2**20
"""Bytes of an archive: more is probably data, which is not shipped."""
_NEVER = (".git", "__pycache__", ".venv", "venv", "node_modules", ".mypy_cache", ".ruff_cache")
_SECRETS = (
    *(".env", ".env.*", ".netrc", ".ssh", ".aws", ".kube", ".gnupg"),
    *(".pypirc", ".npmrc", ".git-credentials", ".pgpass", ".boto", ".docker", ".vault-token", ".htpasswd"),
    *("id_rsa", "id_dsa", "id_ecdsa", "id_ed25519", "*.pem", "*.key", "*.p12", "*.pfx", "*.jks"),
)
"""Files and folders that are not shipped even where git has them: others may see the job."""
_OUTPUTS = ("*.onnx", "*.safetensors", "*.pt", "*.pth", "*.ckpt", "*.html")
"""What commands write: no part of the code unless git has it."""


def archive(directory: Path, named: Sequence[str] = ()) -> tuple[str, bytes]:
    """Return the name and content of an archive of a folder's code: `code-<digest>.tar.gz`, equal for equal files.

    `named`: files of the folder that belong to it also where git ignores them.
    """
    files, _ = _chosen(directory, named)
    total = sum(path.lstat().st_size for path in files)
    if total > LARGEST:
        largest = sorted(files, key=lambda path: -path.lstat().st_size)[:3]
        named = ", ".join(str(path.relative_to(directory)) for path in largest)
        raise UsageError(
            f"the code in {directory} is {total / 2**20:,.0f} MB, more than {LARGEST / 2**20:.0f}; largest: {named}",
            hint="Data is not shipped: keep it outside, or list it in .gitignore.",
        )
    content = _packed(directory, files)
    return f"code-{hashlib.sha256(content).hexdigest()[:16]}.tar.gz", content


def archive_line(directory: Path, named: Sequence[str] = ()) -> str:
    """Return what an archive contains, in one line, and what was left out of it that git does not ignore."""
    files, left_out = _chosen(directory, named)
    amount = f"{len(files)} file{'s' * (len(files) != 1)}, {size(sum(path.lstat().st_size for path in files))}"
    line = f"code: {amount}: {_first_of([str(path.relative_to(directory)) for path in files])}"
    return line + (f"; left out: {_first_of(left_out)}" if left_out else "")


def _first_of(names: Sequence[str], most: int = 6) -> str:
    return ", ".join([*names[:most], *["..."] * (len(names) > most)])


def _chosen(directory: Path, named: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Return the files and links to ship, and what is not that git does not ignore: secrets, outputs of commands, links
    that would lead nowhere, submodules that are not checked out.
    """
    also = {path for file in named if (path := (directory / file).resolve()).is_file()}
    also = {path for path in also if path.is_relative_to(directory)}
    candidates = _in_git(directory) or dict.fromkeys(
        (path.relative_to(directory) for path in directory.rglob("*")), False
    )
    files, links, left_out = also, set[Path](), set[str]()
    for name, tracked in candidates.items():
        path = directory / name
        if path in also or (not tracked and (_matches(name, _NEVER) or name.parts[0] == "runs")):  # or a module `runs`
            continue
        if path.is_symlink():
            links.add(path)
        elif path.is_dir() and tracked:
            left_out.add(f"{name} (a submodule that is not checked out: git submodule update --init)")
        elif not path.is_file():
            continue
        elif _matches(name, _SECRETS) or (not tracked and (_matches(name, _OUTPUTS) or _is_rendered(path))):
            left_out.add(str(name))
        else:
            files.add(path)
    # A link to what is shipped, too, is the same on the nodes; data and secrets elsewhere stay where they are.
    base, names = directory.resolve(), [path.relative_to(directory) for path in files]
    shipped = {base / part for name in names for part in (name, *name.parents)}
    for path in links:
        if _target(path) in shipped:
            files.add(path)
        else:
            left_out.add(f"{path.relative_to(directory)} (a link to {os.readlink(path)}, which is not shipped)")
    return sorted(files), sorted(left_out)


def _target(link: Path) -> Path | None:
    """Return the file or folder that a link leads to; None for a link to nothing, or to itself."""
    try:
        return link.resolve(strict=True)
    except (OSError, RuntimeError):
        return None


def _in_git(directory: Path) -> dict[Path, bool]:
    """Return the files that git does not ignore, also of submodules, and whether it knows them; empty without git."""
    command = ["git", "-C", str(directory), "ls-files", "-cot", "--exclude-standard", "-z"]
    try:
        listed = subprocess.run(command, capture_output=True, check=True).stdout.decode()
    except (OSError, subprocess.CalledProcessError):
        return {}
    files: dict[Path, bool] = {}
    for entry in filter(None, listed.split("\0")):
        name, tracked = Path(entry[2:]), entry[0] != "?"
        is_repository = (directory / name / ".git").exists() and not (directory / name).is_symlink()
        inner = _in_git(directory / name) if is_repository else {}
        files |= {name / path: is_tracked and tracked for path, is_tracked in inner.items()} or {name: tracked}
    return files


def _matches(path: Path, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatch(part, pattern) for part in path.parts for pattern in patterns)


def _is_rendered(path: Path) -> bool:
    """Whether a file has objects of Kubernetes, or is the empty one that a shell makes for `--render > job.yaml`."""
    if path.suffix not in (".yaml", ".yml"):
        return False
    with path.open("rb") as file:
        start = file.read(4096)
    return not start or b"apiVersion:" in start


def _packed(directory: Path, files: list[Path]) -> bytes:
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as stream, tarfile.open(fileobj=stream, mode="w") as tar:
        for path in files:
            entry = tarfile.TarInfo(str(path.relative_to(directory)))
            if path.is_symlink():  # relative, so that it leads to the copy
                entry.type, entry.linkname = tarfile.SYMTYPE, os.path.relpath(path.resolve(), path.parent.resolve())
                tar.addfile(entry)
                continue
            entry.size, entry.mode = path.stat().st_size, 0o755 if path.stat().st_mode & 0o100 else 0o644
            with path.open("rb") as file:
                tar.addfile(entry, file)
    return packed.getvalue()
