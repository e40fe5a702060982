"""The private torch APIs of fake ranks: tensors without memory, and a process group without other ranks.

They are listed in `torch_compat.PRIVATE` with all others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["TorchDispatchMode"]


def preload() -> None:
    """Import what a first step imports, once for the processes that are forked."""
    import torch._dynamo
    import torch.distributed.pipelining  # noqa: F401


def is_fake(tensor: Any) -> bool:
    """Whether a tensor has no values: one of a fake rank."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


def fake_mode() -> Any:
    """Return a mode in which tensors have shapes, dtypes and devices, but no memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def join_fake_group(rank: int, world_size: int) -> None:
    """Make this process a rank of a group whose other ranks do not exist: collectives return at once."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)


def use_real_meshes() -> None:
    """Let device meshes, which read values, compute with real tensors from now on, inside a fake mode too."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.distributed.device_mesh import DeviceMesh

    def outside(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            with unset_fake_temporarily():
                return method(*args, **kwargs)

        return call

    for name in ("__init__", "__getitem__"):
        setattr(DeviceMesh, name, outside(getattr(DeviceMesh, name)))


def pass_shapes(sent: list[Any]) -> None:
    """Answer, for the rest of this process, the questions of pipeline stages to ranks that do not exist.

    A stage asks the one before for the shapes of its inputs: these are the last ones in `sent`, to which each stage
    adds its own. The shapes of gradients are those of the outputs.
    """
    from torch.distributed.pipelining import schedules, stage

    def vote(_: Any, stages: list[Any], *__: Any) -> None:
        for one in stages:
            one._inference_mode = stage.InferenceMode.DYNAMIC

    def receive(own: Any, source: int) -> Any:
        if source < own.stage_index:
            return sent[-1]
        return stage._StageBackwardMeta(backward_metas=stage._derive_grad_metas(own._stage_meta.outputs))

    def send(own: Any, meta: Any, target: int) -> None:
        if target > own.stage_index:
            sent.append(meta)

    answers: list[tuple[Any, str, Any]] = [
        (schedules._PipelineSchedule, "_warmup_p2p", vote),
        (stage.PipelineStage, "_recv_meta", receive),
        (stage.PipelineStage, "_send_meta", send),
    ]
    for owner, name, answer in answers:
        setattr(owner, name, answer)


def group_ranks(argument: Any) -> list[int] | None:
    """Return the ranks of a collective's group from an argument of its operator; None for another argument."""
    if isinstance(argument, torch.ScriptObject):
        try:
            argument = dist.ProcessGroup.unbox(argument)
        except RuntimeError:  # another object: a reduction's options
            return None
    elif isinstance(argument, str):
        try:
            argument = dist.distributed_c10d._resolve_process_group(argument)  # type: ignore[arg-type]
        except (RuntimeError, ValueError):  # another word: the name of a reduction
            return None
    return dist.get_process_group_ranks(argument) if isinstance(argument, dist.ProcessGroup) else None
