"""Paths at URLs (s3://bucket/x, memory://x), over fsspec, with the methods of `pathlib.Path` that the package uses.

Errors of the libraries behind a protocol become OSErrors with a text for the user; those that may pass by themselves
are retried with growing pauses.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PosixPath
from typing import IO, Any, TypeVar

from phalanx.errors import CheckpointError, UsageError, nearest

T = TypeVar("T")

_URL = re.compile(r"^[a-zA-Z][a-zA-Z0-9+.-]*://")
_PAUSES = (0.2, 0.8, 3.0)
"""Seconds between tries; s3fs and botocore have retried the single request before."""
_LASTING = (FileNotFoundError, FileExistsError, PermissionError, NotADirectoryError, IsADirectoryError)
_LASTING_CODES = (errno.EINVAL, errno.ENOSYS, errno.EPERM, errno.EROFS, errno.ENOTSUP)
_COMMON = ("s3://", "gs://", "abfs://", "hdfs://", "sftp://", "http://")
_READ_ONLY = ("http", "https", "github", "data", "zip", "tar", "libarchive", "reference", "jar")
_CREDENTIALS = {
    **dict.fromkeys(("s3", "s3a"), "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"),
    **dict.fromkeys(("gs", "gcs"), "Set GOOGLE_APPLICATION_CREDENTIALS to a key file"),
    **dict.fromkeys(("abfs", "az"), "Set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY"),
}
"""What to set where a protocol finds no credentials, or those of an account without permission."""
_WITH_FOLDERS = ("ssh", "sftp", "hdfs", "arrow_hdfs", "webhdfs", "smb", "ftp", "dbfs")
"""Protocols whose folders must be made; in the others a folder is the beginning of names."""


def is_url(location: str) -> bool:
    """Whether a place that a user gave is a URL, and not a path."""
    return _URL.match(location) is not None


def as_path(location: str | Path) -> Path:
    """Return the path that a user gave, a `RemotePath` for a URL; UsageError for an unknown protocol."""
    if isinstance(location, Path):
        return location
    if not is_url(location):
        return Path(location)
    scheme, _, rest = location.partition("://")
    if scheme in ("file", "local"):
        return Path("/" + rest.lstrip("/"))
    if not rest.strip("/"):
        raise UsageError(f"{location} names no folder", hint=f"Write {scheme}://bucket/folder")
    path = RemotePath(location)
    path.file_system  # noqa: B018  an unknown protocol and a missing package are reported here
    return path


class RemotePath(PosixPath):
    """A path at a URL. It holds the text alone, so it can be sent to another process."""

    __slots__ = ()

    def __str__(self) -> str:
        scheme, _, rest = super().__str__().partition(":")
        return f"{scheme}://{rest.lstrip('/')}"

    @property
    def protocol(self) -> str:
        """The part of the URL before ://."""
        return str(self.parts[0]).rstrip(":")

    @property
    def file_system(self) -> Any:
        """The file system of fsspec, one for each protocol and process."""
        import fsspec

        try:
            # Other ranks and runs write too, so a listing is never taken from a cache.
            return fsspec.filesystem(self.protocol, use_listings_cache=False)
        except ValueError:
            close = nearest(self.protocol, fsspec.available_protocols(), cutoff=0.5)
            guess = f" Did you mean {close}://?" if close else ""
            hint = f"Write one of {', '.join(_COMMON)}, or the path of a folder."
            raise UsageError(f"{self}: unknown protocol '{self.protocol}'.{guess}", hint=hint) from None
        except ImportError as error:
            extra = "phalanx[s3]" if self.protocol in ("s3", "s3a") else None
            hint = f"Run: pip install '{extra}'" if extra else str(error)
            raise UsageError(f"{self} needs a package that is not installed", hint=hint) from None

    @property
    def _key(self) -> str:
        return str(self.file_system._strip_protocol(str(self)))

    def call(self, action: Callable[[Any, str], T], pauses: Sequence[float] = _PAUSES) -> T:
        """Return what `action` (file system, name in it) returns; errors that may pass are retried."""
        for pause in (*pauses, None):
            try:
                return action(self.file_system, self._key)
            except Exception as error:  # every protocol has its own errors
                explained = self.explained(error)
                if pause is None or isinstance(explained, _LASTING) or explained.errno in _LASTING_CODES:
                    raise explained from error
                time.sleep(pause)
        raise AssertionError("the last try returns or raises")

    def explained(self, error: Exception) -> OSError:
        """Return an error of a library as an OSError with a text and this URL."""
        if isinstance(error, UsageError):
            raise error
        kind, text = type(error).__name__, str(error)
        if "Credentials" in kind or "Auth" in kind:
            text = f"there are no credentials for {self.protocol}:// ({text}). {_CREDENTIALS.get(self.protocol, '')}"
            return PermissionError(errno.EACCES, text, str(self))
        if isinstance(error, OSError):
            code = {FileNotFoundError: errno.ENOENT, PermissionError: errno.EACCES}.get(type(error), errno.EIO)
            return type(error)(error.errno or code, error.strerror or text or kind, str(self))
        if isinstance(error, NotImplementedError):
            return OSError(errno.EROFS, f"{self.protocol}:// cannot be written", str(self))
        return OSError(errno.EIO, f"{kind}: {text}", str(self))

    def exists(self, *, follow_symlinks: bool = True) -> bool:
        """Whether there is a file or folder."""
        return self._mode() != 0

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        """Whether it is a file."""
        return stat.S_ISREG(self._mode())

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        """Whether it is a folder, or the beginning of names."""
        return stat.S_ISDIR(self._mode())

    def _mode(self) -> int:
        try:
            return self.stat().st_mode
        except FileNotFoundError:
            return 0

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """Return kind, size and time of the last change (0 where the protocol has none)."""
        info = self.call(lambda files, key: files.info(key))
        mode = stat.S_IFDIR if info["type"] == "directory" else stat.S_IFREG
        changed = info.get("LastModified") or info.get("mtime") or info.get("created") or info.get("updated") or 0.0
        moment = changed.timestamp() if hasattr(changed, "timestamp") else changed
        seconds = float(moment) if isinstance(moment, int | float) else 0.0
        return os.stat_result((mode, 0, 0, 1, 0, 0, info.get("size") or 0, seconds, seconds, seconds))

    def iterdir(self) -> Iterator[RemotePath]:  # type: ignore[override]
        """Yield the entries of a folder."""
        for key in self.call(lambda files, key: files.ls(key, detail=False)):
            name = key.rstrip("/").rsplit("/", 1)[-1]
            if name and key.rstrip("/") != self._key:  # some stores list the folder itself
                yield self / name

    def glob(self, pattern: str, **options: Any) -> Iterator[RemotePath]:  # type: ignore[override]
        """Yield the entries of this folder whose name matches."""
        try:
            return iter([path for path in sorted(self.iterdir()) if path.match(pattern)])
        except FileNotFoundError:
            return iter([])

    def open(self, mode: str = "r", *_: Any, **options: Any) -> IO[Any]:  # type: ignore[override]
        """Open the file by fsspec, mode "xb" for an upload in parts."""
        if mode == "xb":
            return Upload(self)  # type: ignore[return-value]
        return self.call(lambda files, key: files.open(key, mode, **options))

    def read_bytes(self) -> bytes:
        """Return the content."""
        return bytes(self.call(lambda files, key: files.cat_file(key)))

    def read_range(self, start: int, end: int) -> bytes:
        """Return the bytes from `start` up to `end`."""
        return bytes(self.call(lambda files, key: files.cat_file(key, start=start, end=end)))

    def read_text(self, encoding: str | None = None, *_: Any) -> str:
        """Return the content as text."""
        return self.read_bytes().decode(encoding or "utf-8")

    def write_bytes(self, data: Any) -> int:
        """Write the file as a whole."""
        self.prepare()
        self.call(lambda files, key: files.pipe_file(key, bytes(data)))
        return len(data)

    def prepare(self) -> None:
        """Make the parent folder where the protocol has folders; OSError where nothing can be written."""
        if self.protocol in _READ_ONLY:
            raise OSError(errno.EROFS, f"{self.protocol}:// is read-only", str(self))
        if self.protocol in _WITH_FOLDERS:
            self.parent.call(lambda files, key: files.makedirs(key, exist_ok=True))

    def check_writable(self) -> None:
        """Write and remove a small file under this name; a CheckpointError says what is missing."""
        probe = self / f".probe-{os.getpid()}-{secrets.token_hex(3)}"
        try:
            probe.prepare()
            probe.call(lambda files, key: files.pipe_file(key, b"phalanx"), pauses=())
            probe.unlink(missing_ok=True)
        except OSError as error:
            access = _CREDENTIALS.get(self.protocol, "Check the credentials in the environment.")
            hint = {
                errno.EACCES: "" if access in str(error.strerror) else access,
                errno.ENOENT: "The bucket must exist: create it, or correct the name.",
                errno.EROFS: "Give a folder, or a URL that can be written: s3://bucket/folder",
            }.get(error.errno or 0, "Check the name and the network; S3 of another provider needs AWS_ENDPOINT_URL.")
            raise CheckpointError(f"{self} cannot be written: {error.strerror}", hint=hint) from error

    def mkdir(self, *_: Any, **__: Any) -> None:
        """Do nothing: writing a file makes its folder."""

    def unlink(self, missing_ok: bool = False) -> None:
        """Remove a file."""
        try:
            self.call(lambda files, key: files.rm_file(key))
        except FileNotFoundError:
            if not missing_ok:
                raise

    def remove_tree(self) -> None:
        """Remove everything under this name."""
        self.call(lambda files, key: files.rm(key, recursive=True))

    def resolve(self, strict: bool = False) -> RemotePath:
        """Return itself: a URL is absolute."""
        return self

    def absolute(self) -> RemotePath:
        """Return itself."""
        return self


class Upload:
    """A file that is uploaded in parts, and is there only when it is closed."""

    def __init__(self, path: RemotePath) -> None:
        self._path = path
        self._file: Any = path.open("wb")
        self._complete = False

    def write(self, data: Any) -> None:
        """Append bytes; a full part is sent."""
        self._do(lambda: self._file.write(data))

    def close(self) -> None:
        """Send the rest and complete the file."""
        self._do(self._file.close)
        self._complete = True

    def discard(self) -> None:
        """Abort the upload, unless it is complete."""
        if self._complete:
            return
        with contextlib.suppress(Exception):  # what led here is reported; a later save removes the parts
            self._file.discard()
        with contextlib.suppress(AttributeError):  # a file without parts (memory://, sftp://) has no such attribute
            self._file.closed = True  # else its destructor would complete the upload

    def _do(self, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:  # every protocol has its own errors
            raise self._path.explained(error) from error
