"""What a shard holds: its pieces, the optimizer over them, and the count of updates."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

from phalanx.comm.server.bundle import VALUE, Bundle
from phalanx.comm.server.memory import ShardMemory
from phalanx.comm.server.optimizers import groups_of, rebuild
from phalanx.errors import ServerError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from phalanx.comm.server.contribution import Merged
    from phalanx.comm.server.placement import Piece

_TUPLES = ("betas", "etas", "step_sizes")
"""Settings that torch's optimizers unpack; JSON has lists only."""


class ShardState:
    """Parameters of one shard and their optimizer. Not safe for threads: the shard's lock guards it."""

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
        """For pieces of which only changed rows travel: the version in which each row changed last."""

    def apply(self, merged: Merged, factor: float, settings: list[dict[str, Any]] | None) -> None:
        """Take one step of the optimizer with the mean of what was merged, times a factor."""
        if settings is not None:
            self._set_groups(settings)
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

    def _set_groups(self, settings: list[dict[str, Any]]) -> None:
        for place, number in enumerate(self.groups):
            values = {name: tuple(v) if name in _TUPLES else v for name, v in settings[number].items()}
            self.optimizer.param_groups[place].update(values)

    def changed_rows(self, since: int) -> dict[int, torch.Tensor]:
        """Return, for each piece of which only rows travel, those that changed after a version."""
        return {index: (versions > since).nonzero().flatten() for index, versions in self.changed.items()}

    def bundle(self) -> Bundle:
        """Return the values and the optimizer's states: the memory itself, not copies."""
        found = Bundle()
        for index, parameter in enumerate(self.parameters):
            found.tensors[index, VALUE] = parameter.detach()
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    found.tensors[index, key] = value.detach().contiguous()
                else:
                    found.plain[index, key] = value
        return found

    def load(self, bundle: Bundle) -> None:
        """Take over values and optimizer states; what a bundle does not name stays, states of what it names go."""
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
