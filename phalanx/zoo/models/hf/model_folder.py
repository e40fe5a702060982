"""Files of the Hugging Face layout: JSON and sharded safetensors. Never pickle: reading runs no code."""

from __future__ import annotations

import contextlib
import json
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from phalanx.errors import CheckpointError, UsageError

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"


def end_tokens_of(settings: Mapping[str, Any]) -> frozenset[int]:
    """Return the end tokens that config.json or generation_config.json names: a number, a list, or none."""
    tokens = settings.get("eos_token_id")
    return frozenset(token for token in (tokens if isinstance(tokens, list) else [tokens]) if isinstance(token, int))


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"there is no {path.name} in '{path.parent}'.",
            hint=f"A folder in the Hugging Face layout has {CONFIG} and {SINGLE} (or shards and {INDEX}).",
        ) from None
    except (ValueError, OSError) as error:
        raise CheckpointError(f"'{path}' cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"'{path}' does not hold a JSON object.")
    return content


def find_tensors(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor in a folder."""
    if (single := folder / SINGLE).exists():
        with _opened(single) as file:
            return dict.fromkeys(file.keys(), single)
    if (index := folder / INDEX).exists():
        files = {name: folder / Path(file).name for name, file in read_json(index).get("weight_map", {}).items()}
        for shard in sorted(set(files.values())):
            if not shard.exists():
                raise CheckpointError(f"'{shard}' is missing: {INDEX} names it.")
        return files
    pickled = sorted(path.name for path in folder.glob("*.bin"))
    because = f" There is {pickled[0]}, but pickle files are not read: they can run code." if pickled else ""
    raise CheckpointError(
        f"there is neither {SINGLE} nor {INDEX} in '{folder}'.{because}",
        hint="With transformers, model.save_pretrained(folder) writes safetensors." if pickled else "",
    )


def read_shapes(places: Mapping[str, Path]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of tensors without reading their data."""
    shapes = {}
    for path, names in _by_file(places).items():
        with _opened(path) as file:
            for name in names:
                shapes[name] = tuple(file.get_slice(name).get_shape())
    return shapes


def read_tensors(places: Mapping[str, Path], device: str) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor), file by file, so that no file is read twice and one tensor is in memory at a time."""
    for path, names in _by_file(places).items():
        with _opened(path, device) as file:
            for name in names:
                yield name, file.get_tensor(name)


def write_folder(
    folder: Path,
    config: Mapping[str, Any],
    sizes: Mapping[str, int],
    tensor: Callable[[str], Tensor],
    max_shard_bytes: int,
) -> None:
    """Write config and tensors next to the folder, and move them in only when all of them are complete."""
    written = folder.with_name(f".{folder.name}-{uuid.uuid4().hex[:8]}")
    try:
        written.mkdir(parents=True)
        _write_shards(written, sizes, tensor, max_shard_bytes)
        (written / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        _move_in(written, folder)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"'{folder}' could not be written: {error}") from error
    finally:
        shutil.rmtree(written, ignore_errors=True)


def _write_shards(folder: Path, sizes: Mapping[str, int], tensor: Callable[[str], Tensor], limit: int) -> None:
    shards = _split(sizes, limit)
    if len(shards) == 1:
        save_file({name: tensor(name) for name in shards[0]}, folder / SINGLE, {"format": "pt"})
        return
    places: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file({name: tensor(name) for name in names}, folder / file, {"format": "pt"})
        places |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _split(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Cut names into runs of at most `limit` bytes; a larger tensor gets a separate file."""
    if limit < 1:
        raise UsageError(f"max_shard_bytes={limit} must be 1 or more.")
    shards: list[list[str]] = [[]]
    room = limit
    for name, size in sizes.items():
        if size > room and shards[-1]:
            shards.append([])
            room = limit
        shards[-1].append(name)
        room -= size
    return shards


def _move_in(written: Path, folder: Path) -> None:
    if not folder.exists():
        written.rename(folder)
        return
    new = {path.name for path in written.iterdir()}
    # Weights of an earlier save would be loaded instead of the new ones, or together with them.
    stale = [path for path in folder.glob("model*.safetensors*") if path.name not in new]
    for name in sorted(new, key=lambda name: (name == CONFIG, name == INDEX)):
        (written / name).replace(folder / name)
    for path in stale:
        path.unlink()


def _by_file(places: Mapping[str, Path]) -> dict[Path, list[str]]:
    files: dict[Path, list[str]] = {}
    for name, path in places.items():
        files.setdefault(path, []).append(name)
    return files


@contextlib.contextmanager
def _opened(path: Path, device: str = "cpu") -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt", device=device) as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"'{path}' is damaged or not a safetensors file: {error}") from error
