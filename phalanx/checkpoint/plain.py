"""State that is not in the data files (random generators, numbers), in a form that loads without running code.

`torch.load(weights_only=True)` accepts tensors and plain containers. NumPy arrays, of which the state of its random
generator consists, are stored as tagged tensors.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from phalanx.errors import CheckpointError

_ARRAY = "__phalanx_ndarray__"
_PLAIN = (type(None), bool, int, float, complex, str)


def to_plain(value: Any, where: str = "rank_state") -> Any:
    """Encode `value`, or raise a CheckpointError that names the part that cannot be stored."""
    if type(value) in _PLAIN or isinstance(value, torch.Tensor):
        return value
    if isinstance(value, dict):
        for key in value:
            if type(key) not in (bool, int, float, str) or key == _ARRAY:
                raise CheckpointError(f"{where} has the key {key!r}; keys must be strings or numbers")
        return {key: to_plain(item, f"{where}[{key!r}]") for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(to_plain(item, f"{where}[{index}]") for index, item in enumerate(value))
    return _from_numpy(value, where)


def from_plain(value: Any) -> Any:
    """Decode what `to_plain` returned."""
    if isinstance(value, dict):
        if _ARRAY in value:
            raw = value[_ARRAY].numpy().tobytes()
            return np.frombuffer(raw, dtype=np.dtype(value["dtype"])).reshape(value["shape"]).copy()
        return {key: from_plain(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(from_plain(item) for item in value)
    return value


_PAIRS, _TUPLE = "__phalanx_pairs__", "__phalanx_tuple__"


def to_json(value: Any, where: str) -> Any:
    """Return a copy of `value` of JSON's types, from which `from_json` makes it again: also keys that are not texts."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        items = [to_json(item, f"{where}[{index}]") for index, item in enumerate(value)]
        return items if isinstance(value, list) else {_TUPLE: items}
    if isinstance(value, dict):
        items = [[to_json(key, f"a key of {where}"), to_json(value[key], f"{where}[{key!r}]")] for key in value]
        plain = all(isinstance(key, str) and key not in (_PAIRS, _TUPLE) for key in value)
        return dict(items) if plain else {_PAIRS: items}
    raise CheckpointError(
        f"{where} cannot be stored as JSON: it is a {type(value).__module__}.{type(value).__qualname__}",
        hint="Use numbers, texts, lists, tuples and dicts of them: value.item() or value.tolist() of an array.",
    )


def from_json(value: Any) -> Any:
    """Decode what `to_json` returned."""
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    if _TUPLE in value:
        return tuple(from_json(value[_TUPLE]))
    pairs = value.get(_PAIRS, value.items())
    return {from_json(key): from_json(item) for key, item in pairs}


def _from_numpy(value: Any, where: str) -> Any:
    if isinstance(value, np.generic):
        return to_plain(value.item(), where)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        raw = torch.from_numpy(np.frombuffer(value.tobytes(), dtype=np.uint8).copy())
        return {_ARRAY: raw, "dtype": value.dtype.str, "shape": tuple(value.shape)}
    raise CheckpointError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint cannot hold",
        hint="Use numbers, strings, tensors, NumPy arrays, and lists, tuples and dicts of them.",
    )


def rank_file_name(rank: int) -> str:
    """Return the name of the file with a rank's state."""
    return f"rank-{rank:05d}.pt"


def rank_content(values: dict[str, Any], rank_state: Any) -> dict[str, Any]:
    """Return what a rank's state file holds, copied: `values` by name, and the state of the rank itself."""
    plain = {name: to_plain(value, name) for name, value in values.items()}
    copied: dict[str, Any] = _copied({"objects": plain, "state": to_plain(rank_state)})
    return copied


def _copied(value: Any) -> Any:
    """Copy every tensor of a plain value to the CPU."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_copied(item) for item in value)
    return value
