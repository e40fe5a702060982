"""Parameters that a strategy replaced, so that an optimizer made before can be given the new ones."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from phalanx.errors import UsageError

if TYPE_CHECKING:
    import torch
    from torch import nn


class Replaced:
    """Old parameters and their replacements. Old ones are held weakly: they may take a whole model's memory."""

    def __init__(self) -> None:
        self._successors: dict[int, tuple[weakref.ref[nn.Parameter], nn.Parameter | None]] = {}

    def note(self, before: dict[str, nn.Parameter], after: dict[str, nn.Parameter]) -> None:
        """Note the replacement of each parameter, under any of its names; None: it is on another rank."""
        still_here = {id(parameter) for parameter in after.values()}
        for name, old in before.items():
            if id(old) not in still_here and (name in after or id(old) not in self._successors):
                self._successors[id(old)] = (weakref.ref(old), after.get(name))

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Replace the parameters of an optimizer that was made before its model was sharded."""
        for group in optimizer.param_groups:
            moved = [self._successor(optimizer, parameter) for parameter in group["params"]]
            group["params"] = [parameter for parameter in moved if parameter is not None]

    def _successor(self, optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> nn.Parameter | None:
        old, new = self._successors.get(id(parameter), (None, parameter))
        if old is None or old() is not parameter:
            return parameter
        if parameter in optimizer.state:
            raise UsageError(
                "the optimizer has taken steps already, and its parameters are shared out over the ranks now",
                hint="Prepare the model and the optimizer together, before the first step.",
            )
        return new
