"""A shard's state: its pieces, the user's optimizer rebuilt over them, and the update count.

Its file stays readable after a failure at any moment.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import os
import struct
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch

from phalanx.engines.parameter_server.gradients import VALUE, Bundle, MergedGradients, ShardMemory
from phalanx.engines.parameter_server.placement import Piece
from phalanx.engines.parameter_server.protocol import bytes_of
from phalanx.errors import ServerError
from phalanx.host.files import replacing

_GRAPH_CHECKS = ("_cuda_graph_capture_health_check", "_accelerator_graph_capture_health_check")
_BOUND_TO_THE_ORIGINAL = ("step", "zero_grad")
"""Schedulers and the loop set these on an instance; they would step the worker's optimizer."""
_TUPLES = ("betas", "etas", "step_sizes")
"""Settings that torch's optimizers unpack; JSON has lists only."""


def pattern_of(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return an optimizer of the same class and settings without parameters, for `rebuild`.

    The constructor is not called, as its arguments are not known.
    """
    pattern: torch.optim.Optimizer = object.__new__(type(optimizer))
    pattern.__dict__.update({k: v for k, v in optimizer.__dict__.items() if k not in _BOUND_TO_THE_ORIGINAL})
    pattern.state = defaultdict(dict)
    pattern.param_groups = [{**plain_settings(group), "params": []} for group in optimizer.param_groups]
    for check in _GRAPH_CHECKS:
        pattern.__dict__[check] = _skip_graph_check
    return pattern


def rebuild(
    pattern: torch.optim.Optimizer, pieces: Sequence[Piece], parameters: Sequence[torch.Tensor]
) -> torch.optim.Optimizer:
    """Return an optimizer like a pattern over a shard's parameters, without the groups that have no piece here."""
    optimizer: torch.optim.Optimizer = object.__new__(type(pattern))
    optimizer.__dict__.update(pattern.__dict__)
    optimizer.state = defaultdict(dict)
    optimizer.param_groups = []
    for number in groups_of(pieces):
        of_group = [p for piece, p in zip(pieces, parameters, strict=True) if piece.group == number]
        optimizer.param_groups.append({**pattern.param_groups[number], "params": of_group})
    return optimizer


def _skip_graph_check() -> None:
    """Replace torch's check for CUDA graphs before each step: a forked process cannot use CUDA."""


def groups_of(pieces: Sequence[Piece]) -> list[int]:
    """Return the numbers of the worker's parameter groups that have pieces here, in the order of the shard's groups."""
    return sorted({piece.group for piece in pieces})


def plain_settings(group: dict[str, Any]) -> dict[str, Any]:
    """Return a group's settings that can be sent: numbers (also from tensors of one element), flags, strings."""
    plain = {
        name: value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
        for name, value in group.items()
        if name != "params"
    }
    if plain.get("capturable"):
        plain["capturable"] = False  # it is for CUDA graphs, and a shard steps on the CPU
    return {name: value for name, value in plain.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


class ShardState:
    """Parameters of one shard and their optimizer; not thread-safe, `ShardCore` locks it."""

    def __init__(self, pieces: Sequence[Piece], optimizer: torch.optim.Optimizer) -> None:
        self.pieces = tuple(pieces)
        self.memory = ShardMemory(pieces)
        self.parameters = [torch.nn.Parameter(view) for view in self.memory.views]
        self.optimizer = rebuild(optimizer, pieces, self.parameters)
        self.groups = groups_of(pieces)
        self.version = 1
        self.changed = {
            index: torch.ones(piece.shape[0], dtype=torch.int64) for index, piece in enumerate(pieces) if piece.lazy
        }
        """For lazy pieces: the version in which each row changed last."""

    def apply(self, merged: MergedGradients, factor: float, settings: list[dict[str, Any]] | None) -> None:
        """Take one step of the optimizer with the mean gradient times a factor."""
        if settings is not None:
            for group, number in zip(self.optimizer.param_groups, self.groups, strict=True):
                group.update({name: tuple(v) if name in _TUPLES else v for name, v in settings[number].items()})
        merged.scale(factor)
        self.version += 1
        for index, gradient in merged.gradients.items():
            self.parameters[index].grad = gradient
            if index in self.changed:
                rows = gradient.indices()[0] if gradient.is_sparse else slice(None)
                self.changed[index][rows] = self.version
        self.optimizer.step()
        for parameter in self.parameters:
            parameter.grad = None

    def changed_rows(self, since: int) -> dict[int, torch.Tensor]:
        """Return the rows of each lazy piece that changed after a version."""
        return {index: (versions > since).nonzero().flatten() for index, versions in self.changed.items()}

    def bundle(self) -> Bundle:
        """Return the values and the optimizer's states: the memory itself, not copies."""
        content = Bundle()
        for index, parameter in enumerate(self.parameters):
            content.tensors[index, VALUE] = parameter.detach()
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    content.tensors[index, key] = value.detach().contiguous()
                else:
                    content.plain[index, key] = value
        return content

    def load(self, bundle: Bundle) -> None:
        """Replace values and optimizer states of the pieces that the bundle names."""
        for (index, key), tensor in bundle.tensors.items():
            if not 0 <= index < len(self.pieces):
                raise ServerError(f"there is no piece {index} here")
            if key == VALUE:
                if tuple(tensor.shape) != self.pieces[index].shape:
                    raise ServerError(f"{self.pieces[index].name}: {tuple(tensor.shape)} was sent")
                with torch.no_grad():
                    self.parameters[index].copy_(tensor)
                self.optimizer.state.pop(self.parameters[index], None)
        for (index, key), value in {**bundle.tensors, **bundle.plain}.items():
            if key != VALUE:
                self.optimizer.state[self.parameters[index]][key] = copy.copy(value)
        self.version += 1
        for versions in self.changed.values():
            versions.fill_(self.version)


_LENGTH = struct.Struct("!QQ")
_DIGEST = 32


class StateFile:
    """A file that is replaced atomically: written under another name, hashed, flushed to the disk, then renamed."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def save(self, meta: dict[str, Any], bundle: Bundle) -> None:
        """Replace the saved state."""
        with replacing(self._path, flush=True) as file:
            _write(file, meta, bundle)

    def load(self) -> tuple[dict[str, Any], Bundle] | None:
        """Return the last saved state, or None where there is none; ServerError for a damaged one."""
        if not self._path.exists():
            return None
        with self._path.open("rb") as file:
            return _read(file, str(self._path))


class StateSlots:
    """Two unnamed files, written in turns, that a shard inherits and that end with the process that made them.

    After a failure while one is being written, the other one is complete.
    """

    def __init__(self) -> None:
        self._slots: list[BinaryIO] = [tempfile.TemporaryFile() for _ in range(2)]  # noqa: SIM115 - see close
        self._serial = 0

    @property
    def descriptors(self) -> set[int]:
        """The file descriptors that a child must not close."""
        return {slot.fileno() for slot in self._slots}

    def save(self, meta: dict[str, Any], bundle: Bundle) -> None:
        """Write a state over the older one."""
        slot = self._slots[(self._serial + 1) % 2]
        slot.seek(0)
        slot.truncate()
        _write(slot, {**meta, "serial": self._serial + 1}, bundle)
        self._serial += 1

    def load(self) -> tuple[dict[str, Any], Bundle] | None:
        """Return the newest complete state, or None where nothing has been saved."""
        states = []
        for slot in self._slots:
            slot.seek(0)
            with contextlib.suppress(ServerError):  # empty or incomplete: the other one is used
                states.append(_read(slot, "a slot"))
        newest = max(states, key=lambda state: state[0]["serial"], default=None)
        self._serial = 0 if newest is None else newest[0]["serial"]
        return newest

    def close(self) -> None:
        """Close the files, which frees their space."""
        for slot in self._slots:
            slot.close()


def _write(file: BinaryIO, meta: dict[str, Any], bundle: Bundle) -> None:
    head = json.dumps({**meta, **bundle.describe()}).encode()
    buffers = bundle.buffers()
    lengths = _LENGTH.pack(len(head), sum(buffer.nbytes for buffer in buffers))
    parts: list[bytes | memoryview] = [lengths, head, *buffers]
    digest = hashlib.blake2b(digest_size=_DIGEST)
    for part in parts:
        digest.update(part)
        file.write(part)
    file.write(digest.digest())
    file.flush()


def _read(file: BinaryIO, name: str) -> tuple[dict[str, Any], Bundle]:
    digest = hashlib.blake2b(digest_size=_DIGEST)
    lengths = file.read(_LENGTH.size)
    if len(lengths) != _LENGTH.size:
        raise ServerError(f"{name} is cut off")
    head_length, payload = _LENGTH.unpack(lengths)
    if _LENGTH.size + head_length + payload + _DIGEST != os.fstat(file.fileno()).st_size:
        raise ServerError(f"{name} does not have the length in its header")
    head = file.read(head_length)
    meta: dict[str, Any] = json.loads(head)
    bundle = Bundle.allocate(meta, payload)
    digest.update(lengths)
    digest.update(head)
    for tensor in bundle.tensors.values():
        view = bytes_of(tensor)
        file.readinto(view)  # type: ignore[attr-defined]
        digest.update(view)
    if file.read(_DIGEST) != digest.digest():
        raise ServerError(f"{name} is damaged: its hash does not match")
    return meta, bundle
