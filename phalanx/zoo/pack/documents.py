"""Corpora as documents: texts, JSON lines, parquet and arrow files, cut into parts of about equal size.

A part becomes one shard. Parts depend on the files alone, not on the number of processes: a command that is run again
finds the same ones.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from phalanx.errors import DataError, UsageError, a_type

_KINDS = {".txt": "text", ".md": "text", ".jsonl": "json", ".parquet": "parquet", ".arrow": "arrow"}
_VALIDATION = ("val", "valid", "dev", "test")


@dataclass(frozen=True, slots=True)
class FileRange:
    """A range of one file: bytes of JSON lines, row groups of parquet; other files are read whole."""

    path: str
    kind: str
    start: int
    end: int
    bytes: int
    identity: tuple[int, int]
    """Size and time of the last change of the file."""


@dataclass(frozen=True, slots=True)
class CorpusPart:
    """What one shard is made of."""

    name: str
    split: str
    pieces: tuple[FileRange, ...]

    @property
    def bytes(self) -> int:
        """The size of the input."""
        return sum(piece.bytes for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class DocumentOptions:
    """How documents are found in files."""

    column: str = "text"
    """The key of a JSON line, or the column of a table, that holds the text."""
    paragraphs: bool = False
    """Whether blank lines separate the documents of a text; else a file is a document."""


def plan_parts(inputs: Sequence[str], part_bytes: int) -> list[CorpusPart]:
    """Return the parts of files and folders; names that begin with val, valid, dev or test are for validation."""
    parts: list[CorpusPart] = []
    files = [(root, file) for root in map(Path, inputs) for file in _files(root)]
    for split in ("train", "val"):
        chosen = [file for root, file in files if (split == "val") == _is_validation(root, file)]
        pieces = [piece for file in chosen for piece in _pieces(file, part_bytes)]
        for number, group in enumerate(_grouped(pieces, part_bytes)):
            parts.append(CorpusPart(f"{split}-{number:05d}", split, tuple(group)))
    if not parts:
        raise DataError(
            f"{', '.join(inputs)}: there are no documents to read",
            hint=f"Give files, or folders of files, that end in {', '.join(sorted(_KINDS))}.",
        )
    return parts


def _files(root: Path) -> list[Path]:
    if root.is_file():
        if root.suffix.lower() not in _KINDS:
            raise UsageError(
                f"{root}: cannot read {root.suffix or 'a file without ending'}; allowed: {', '.join(_KINDS)}"
            )
        return [root]
    if not root.is_dir():
        raise UsageError(f"{root}: there is nothing at that path")
    files = (file for file in root.rglob("*") if file.is_file() and file.suffix.lower() in _KINDS)
    return sorted(file for file in files if not any(part.startswith(".") for part in file.relative_to(root).parts))


def _is_validation(root: Path, file: Path) -> bool:
    parts = file.relative_to(root).parts if root.is_dir() else (file.name,)
    return any(part.lower().startswith(_VALIDATION) for part in parts)


def _pieces(file: Path, part_bytes: int) -> list[FileRange]:
    """Cut a file where it can be read from the middle."""
    status = file.stat()
    kind, identity = _KINDS[file.suffix.lower()], (status.st_size, status.st_mtime_ns)
    if kind == "json":
        ranges = [(start, min(start + part_bytes, status.st_size)) for start in range(0, status.st_size, part_bytes)]
        return [FileRange(str(file), kind, start, end, end - start, identity) for start, end in ranges]
    if kind == "parquet":
        sizes = _row_groups(file)
        return [FileRange(str(file), kind, number, number + 1, size, identity) for number, size in enumerate(sizes)]
    return [FileRange(str(file), kind, 0, status.st_size, status.st_size, identity)] if status.st_size else []


def _grouped(pieces: Iterable[FileRange], part_bytes: int) -> Iterator[list[FileRange]]:
    """Put neighbouring pieces together until they are a part's size."""
    group: list[FileRange] = []
    for piece in pieces:
        group.append(piece)
        if sum(file_range.bytes for file_range in group) >= part_bytes:
            yield group
            group = []
    if group:
        yield group


def read_documents(piece: FileRange, options: DocumentOptions) -> Iterator[str]:
    """Yield the texts of a piece; one without text is an empty string."""
    if piece.kind == "text":
        yield from _texts(Path(piece.path), paragraphs=options.paragraphs)
    elif piece.kind == "json":
        yield from _json_lines(piece, options.column)
    else:
        yield from _columns(piece, options.column)


def _texts(path: Path, *, paragraphs: bool) -> Iterator[str]:
    content = path.read_bytes()
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8: byte {error.start} is {content[error.start]:#04x}",
            hint=f"Convert it: iconv -f latin1 -t utf-8 {path} > fixed.txt",
        ) from None
    if not paragraphs:
        yield text
        return
    document: list[str] = []
    for line in [*text.splitlines(keepends=True), ""]:
        if line.strip():
            document.append(line)
        elif document:
            yield "".join(document)
            document = []


def _json_lines(piece: FileRange, column: str) -> Iterator[str]:
    """Yield the texts of the lines that begin in a range of bytes."""
    with open(piece.path, "rb") as file:
        if piece.start:
            file.seek(piece.start - 1)
            file.readline()  # the line that begins before the range; only its end where the range begins with a line
        while (offset := file.tell()) < piece.end:
            line = file.readline()
            if line.strip():
                yield _text_of(line, offset, piece.path, column)


def _text_of(line: bytes, offset: int, path: str, column: str) -> str:
    try:
        row = json.loads(line.strip())
    except ValueError as error:  # also where it is not UTF-8
        reason = getattr(error, "msg", error)
        raise DataError(f"{path}, line {_line_number(path, offset)}: not JSON: {reason}") from None
    if not isinstance(row, dict) or column not in row:
        content = f"its keys are {', '.join(map(str, row))}" if isinstance(row, dict) else f"it is {a_type(row)}"
        raise DataError(
            f"{path}, line {_line_number(path, offset)}: there is no '{column}'; {content}",
            hint="Name the key that holds the text: --column NAME",
        )
    text = row[column]
    if text is not None and not isinstance(text, str):
        raise DataError(f"{path}, line {_line_number(path, offset)}: '{column}' is {text!r:.40}, not a text")
    return text or ""


def _line_number(path: str, offset: int) -> int:
    with open(path, "rb") as file:
        return file.read(offset).count(b"\n") + 1


def _row_groups(file: Path) -> list[int]:
    """Return the size of each row group of a parquet file."""
    metadata = _opened(str(file), "parquet").metadata
    return [metadata.row_group(number).total_byte_size for number in range(metadata.num_row_groups)]


def _opened(path: str, kind: str) -> Any:
    """Return a parquet file, or the stream of an arrow file as the library datasets writes it."""
    try:
        if kind == "parquet":
            return _pyarrow("pyarrow.parquet").ParquetFile(path)
        return _pyarrow("pyarrow.ipc").open_stream(_pyarrow("pyarrow").memory_map(path))
    except (OSError, ValueError) as error:  # pyarrow's own errors are among these
        raise DataError(f"{path} cannot be read as {kind}: {error}") from error


def _columns(piece: FileRange, column: str) -> Iterator[str]:
    """Yield the texts of a column of a table."""
    table = _opened(piece.path, piece.kind)
    names = table.schema_arrow.names if piece.kind == "parquet" else table.schema.names
    if column not in names:
        raise DataError(
            f"{piece.path} has no column '{column}'; its columns are {', '.join(names)}",
            hint="Name the column that holds the text: --column NAME",
        )
    rows = range(piece.start, piece.end)
    for batch in table.iter_batches(row_groups=rows, columns=[column]) if piece.kind == "parquet" else table:
        for text in batch.column(column).to_pylist():
            if text is not None and not isinstance(text, str):
                raise DataError(f"{piece.path}: the column '{column}' holds {text!r:.40}, not texts")
            yield text or ""


def _pyarrow(module: str) -> Any:
    try:
        return import_module(module)
    except ImportError:
        raise UsageError("parquet and arrow files need pyarrow", hint="Run: pip install 'phalanx[data]'") from None
