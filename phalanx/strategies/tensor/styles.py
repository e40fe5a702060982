"""Parallel styles of tensor parallelism that torch does not have."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, RowwiseParallel

from phalanx.torch_compat import pytree
from phalanx.world.splits import uneven_slices

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement


class GatherFirstInput(ParallelStyle):
    """Gathers a module's first input along the sequence, once for all column-wise layers inside.

    It stays a DTensor, so that backward adds up the layers' gradients first and scatters them once.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            slices = DTensor.from_local(inputs[0], device_mesh, [Shard(1)], run_check=False)
            return (slices.redistribute(placements=[Replicate()]), *inputs[1:])

        module.register_forward_pre_hook(gather)
        return module


class TokenEmbedding(RowwiseParallel):
    """Splits an embedding by vocabulary; its vectors are scattered along the sequence, which must divide."""

    def __init__(self) -> None:
        super().__init__(input_layouts=Replicate(), output_layouts=Shard(1))

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        ranks = device_mesh.size()

        def check(_: nn.Module, inputs: tuple[Any, ...]) -> None:
            if (wrong := uneven_slices(inputs[0].shape[1], ranks)) is not None:
                raise wrong

        module.register_forward_pre_hook(check)
        split: nn.Module = super()._apply(module, device_mesh)
        return split


class WholeOnEveryRank(ParallelStyle):
    """Keeps a module whole on every rank; all ranks call it with the same inputs."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def enter(_: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            return pytree.tree_map_only(
                torch.Tensor, lambda tensor: DTensor.from_local(tensor, mesh, [Replicate()], run_check=False), inputs
            )

        def leave(_: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
            return pytree.tree_map_only(DTensor, lambda tensor: tensor.to_local(), outputs)

        return distribute_module(module, device_mesh, None, enter, leave)


class _Transposed(ParallelStyle):
    """A layer with a transposed weight; subclasses define the placements of weight, bias, input and output."""

    weight: Placement
    bias: Placement
    enters: Placement
    leaves: Placement

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def partition(_: str, layer: nn.Module, mesh: DeviceMesh) -> None:
            _distribute(layer, mesh, {"weight": self.weight, "bias": self.bias}, self.src_data_rank)

        def enter(_: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            return (DTensor.from_local(inputs[0], mesh, [self.enters], run_check=False), *inputs[1:])

        def leave(_: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
            return outputs.redistribute(placements=[self.leaves]).to_local()

        return distribute_module(module, device_mesh, partition, enter, leave)


class TransposedColwise(_Transposed):
    """Split by output features: whole inputs in, this rank's features out."""

    weight, bias, enters, leaves = Shard(1), Shard(0), Replicate(), Shard(-1)


class TransposedRowwise(_Transposed):
    """Split by input features: this rank's features in, the sum over the ranks out."""

    weight, bias, enters, leaves = Shard(0), Replicate(), Shard(-1), Replicate()


class FusedColumns(ParallelStyle):
    """An attention with one layer for query, key and value, so that a rank's columns are not contiguous.

    The weights are stored as plain slices, which any layout can load, and gathered for the multiplication, in which
    each rank uses the columns of its heads. `width`: the attention's attribute with the features of one part.
    """

    def __init__(self, layer: str, *, parts: int, width: str) -> None:
        super().__init__()
        self.layer = layer
        self.parts = parts
        self.width = width

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        fused = module.get_submodule(self.layer)
        _distribute(fused, device_mesh, {"weight": Shard(1), "bias": Shard(0)}, self.src_data_rank)
        fused.forward = partial(_own_columns, fused, self.parts, device_mesh)
        setattr(module, self.width, getattr(module, self.width) // device_mesh.size())
        return module


def _own_columns(layer: nn.Module, parts: int, mesh: DeviceMesh, inputs: Tensor) -> Tensor:
    """Multiply whole inputs by this rank's share of each part's columns."""
    weight, bias = (_mine(layer.get_parameter(name), parts, mesh) for name in ("weight", "bias"))
    whole = DTensor.from_local(inputs, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])
    return whole @ weight + bias


def _mine(parameter: nn.Parameter, parts: int, mesh: DeviceMesh) -> Tensor:
    """Gather a parameter and take this rank's share of each part of its last dim."""
    assert isinstance(parameter, DTensor), "split by the style"
    whole = parameter.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
    share = whole.unflatten(-1, (parts, mesh.size(), -1))[..., mesh.get_local_rank(), :]  # type: ignore[no-untyped-call]
    return torch.flatten(share, -2)


def _distribute(module: nn.Module, mesh: DeviceMesh, placements: dict[str, Placement], source: int | None) -> None:
    for name, placement in placements.items():
        parameter = module.get_parameter(name)
        split = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=source)
        module.register_parameter(name, nn.Parameter(split, requires_grad=parameter.requires_grad))
