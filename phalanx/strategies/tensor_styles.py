"""What torch's tensor-parallel styles lack: a gather before several layers, whole modules, lengths that must divide."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import ParallelStyle, RowwiseParallel
from torch.utils import _pytree as pytree

from phalanx.errors import ModelError

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh


class GatherFirstInput(ParallelStyle):
    """Gathers a module's first input along the sequence, once for all column-wise layers inside.

    It stays a DTensor: then backward adds up the layers' gradients first and scatters them once.
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
            time = inputs[0].shape[1]
            if time % ranks:
                raise ModelError(
                    f"a sequence of {time} tokens cannot be cut into tensor_parallel = {ranks} equal slices",
                    hint=f"Use sequences of {time - time % ranks or ranks} tokens, or pad them to "
                    f"{time + ranks - time % ranks} (label -100 does not count).",
                )

        module.register_forward_pre_hook(check)
        split: nn.Module = super()._apply(module, device_mesh)
        return split


class WholeOnEveryRank(ParallelStyle):
    """Keeps a module whole on every rank, which all give it the same inputs."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def enter(_: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            return pytree.tree_map_only(
                torch.Tensor, lambda tensor: DTensor.from_local(tensor, mesh, [Replicate()], run_check=False), inputs
            )

        def leave(_: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
            return pytree.tree_map_only(DTensor, lambda tensor: tensor.to_local(), outputs)

        return distribute_module(module, device_mesh, None, enter, leave)
