"""expert: the experts of a mixture are on different ranks; rows are sent to them and back by all-to-all.

A model lists its modules of experts in `expert_modules()`. In such a module dim 0 of every parameter counts the
experts, and `forward(rows, counts)` applies each expert to its rows, which lie together.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from phalanx.errors import UsageError
from phalanx.model import ExpertModules, implements
from phalanx.world.splits import uneven_experts


def expert_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of all experts."""
    return [parameter for name in _names(model) for parameter in model.get_submodule(name).parameters(recurse=False)]


def spread_experts(model: nn.Module, mesh: DeviceMesh) -> list[nn.Parameter]:
    """Keep this rank's experts only, and exchange rows around them; return their parameters."""
    for name in _names(model):
        module = model.get_submodule(name)
        for key, parameter in list(module.named_parameters(recurse=False)):
            if (wrong := uneven_experts(name, parameter.shape[0], mesh.size())) is not None:
                raise wrong
            part = parameter.detach().chunk(mesh.size())[mesh.get_local_rank()].clone()
            spread = DTensor.from_local(part, mesh, [Shard(0)], run_check=False)
            setattr(module, key, nn.Parameter(spread, requires_grad=parameter.requires_grad))
        module.forward = partial(_exchanged, module, mesh.get_group())
    return expert_parameters(model)


def _names(model: nn.Module) -> list[str]:
    if not implements(model, ExpertModules):
        raise UsageError(
            f"expert_parallel spreads the experts of a mixture, and {type(model).__name__} has no expert_modules()",
            hint="Train a mixture of experts (the model 'moe'), give the class a method expert_modules() that returns "
            "the names of its modules of experts, or leave expert_parallel out.",
        )
    return model.expert_modules()


def _exchanged(module: nn.Module, group: dist.ProcessGroup, rows: Tensor, counts: Tensor) -> Tensor:
    """Send rows to the ranks of their experts, run these, and return the rows in their order."""
    ranks = group.size()
    sent = counts.view(ranks, -1)  # [rank, its experts]: how many rows go there
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent.contiguous(), group=group)
    outward, inward = (counted.sum(1).tolist() for counted in (sent, received))
    arrived = _AllToAll.apply(rows, outward, inward, group)  # type: ignore[no-untyped-call]
    # Rows are ordered by sending rank; each expert needs its rows of all ranks together.
    expert = torch.arange(received.numel(), device=rows.device).remainder(received.shape[1])
    order = expert.repeat_interleave(received.flatten(), output_size=sum(inward)).argsort(stable=True)
    weights = {
        f"module.{name}": _SharedWeights.apply(parameter.to_local(), ranks)  # type: ignore[no-untyped-call]
        for name, parameter in module.named_parameters()
        if isinstance(parameter, DTensor)
    }
    worked = torch.func.functional_call(_Plain(module), weights, (arrived[order], received.sum(0)))
    home = torch.empty_like(worked).index_copy(0, order, worked)
    back: Tensor = _AllToAll.apply(home, inward, outward, group)  # type: ignore[no-untyped-call]
    return back


class _Plain(nn.Module):
    """A module called by the forward of its class, without the exchange of rows."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, rows: Tensor, counts: Tensor) -> Any:
        return type(self.module).forward(self.module, rows, counts)


class _AllToAll(torch.autograd.Function):
    """Sends rows to other ranks, and their gradients back in backward."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, outward: list[int], inward: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.way = outward, inward, group
        received = rows.new_empty(sum(inward), *rows.shape[1:])
        dist.all_to_all_single(received, rows.contiguous(), inward, outward, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        outward, inward, group = ctx.way
        back: Tensor = _AllToAll.apply(gradients[0], inward, outward, group)  # type: ignore[no-untyped-call]
        return back, None, None, None


class _SharedWeights(torch.autograd.Function):
    """An expert's weights: their gradient is the sum over the rows of all ranks and becomes the mean over ranks."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] / ctx.ranks, None
