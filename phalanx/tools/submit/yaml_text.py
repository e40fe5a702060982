"""YAML of objects with a comment on each line that a user may change, and a user's overrides merged into them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from phalanx.errors import UsageError, unknown_name

_LINE = re.compile(r"^(?P<indent> *)(?P<item>- )?(?P<key>[^\s:#'\"][^:]*):(?P<value>.*)$")


def dump(objects: Sequence[Mapping[str, Any]], comments: Mapping[str, str], head: str = "") -> str:
    """Return documents as YAML; `comments` has the end of a key's path (`spec.parallelism`) to its comment."""
    yaml, dumper = _yaml()
    texts = [
        yaml.dump(dict(document), Dumper=dumper, sort_keys=False, width=10_000, allow_unicode=True)
        for document in objects
    ]
    lines = [line for text in texts for line in ("---", *_commented(text, comments))]
    return "\n".join([*([f"# {head}"] if head else []), *lines[1 if len(texts) == 1 else 0 :]]) + "\n"


def _commented(text: str, comments: Mapping[str, str]) -> Iterator[str]:
    above: list[tuple[int, str]] = []
    literal = -1  # the indentation of a key whose text follows as it is
    for line in text.splitlines():
        match = _LINE.match(line)
        indent = len(line) - len(line.lstrip())
        if match is None or (literal >= 0 and indent > literal):
            literal = indent if line.strip() in ("- |", "- |-") else literal
            yield line
            continue
        indent += 2 if match["item"] else 0
        literal = indent if match["value"].strip() in ("|", "|-") else -1
        above = [pair for pair in above if pair[0] < indent] + [(indent, match["key"])]
        path = ".".join(key for _, key in above)
        whys = [why for end, why in comments.items() if f".{path}".endswith(f".{end}")]
        yield f"{line:<46} # {whys[0]}" if whys else line


def _yaml() -> tuple[Any, Any]:
    try:
        import yaml
    except ModuleNotFoundError:
        raise UsageError(
            "writing YAML needs the package pyyaml, which is not installed",
            hint="Run: pip install 'phalanx[kubernetes]'",
        ) from None

    class Dumper(yaml.SafeDumper):  # type: ignore[misc]
        """Writes texts of several lines as they are, and repeats what occurs twice instead of naming it."""

        def ignore_aliases(self, data: Any) -> bool:
            return True

    def text(dumper: Any, value: str) -> Any:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

    Dumper.add_representer(str, text)
    return yaml, Dumper


def parse(text: str) -> list[dict[str, Any]]:
    """Return the documents of a text."""
    return [document for document in _yaml()[0].safe_load_all(text) if document is not None]


def load(path: str | Path, flag: str = "--overrides") -> list[dict[str, Any]]:
    """Return the documents of a YAML file; UsageError where it is not one, or not of mappings."""
    yaml, _ = _yaml()
    try:
        documents = parse(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{flag} {path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{flag} {path} is not valid YAML: {' '.join(str(error).split())}") from None
    if wrong := [document for document in documents if not isinstance(document, dict)]:
        raise UsageError(
            f"{flag} {path}: expected keys and values, found {wrong[0]!r}", hint="For example: spec: {suspend: true}"
        )
    return documents


def override(objects: Sequence[dict[str, Any]], path: str | None) -> list[dict[str, Any]]:
    """Merge the documents of a file into the objects: by `kind`, or into the last, the job itself."""
    by_kind = {thing.get("kind", ""): thing for thing in objects}
    for change in load(path) if path is not None else []:
        kind = change.get("kind", objects[-1].get("kind", ""))
        if kind not in by_kind:
            raise UsageError(f"--overrides {path}: {unknown_name('kind', str(kind), by_kind)}")
        by_kind[kind] = merge(by_kind[kind], change)
    return list(by_kind.values())


def merge(value: Any, change: Any) -> Any:
    """Merge mappings, and lists whose items have names by those; other values are replaced, and null removes a key."""
    if isinstance(value, dict) and isinstance(change, dict):
        merged = {key: merge(value.get(key), change[key]) if key in change else value[key] for key in value}
        merged |= {key: item for key, item in change.items() if key not in value}
        return {key: item for key, item in merged.items() if item is not None}
    if isinstance(value, list) and isinstance(change, list) and all(_name(item) for item in [*value, *change]):
        named = {_name(item): item for item in change}
        items = [merge(item, named.pop(_name(item), {})) for item in value]
        return [*items, *named.values()]
    return change


def _name(item: Any) -> str:
    return str(item.get("name", "")) if isinstance(item, dict) else ""
