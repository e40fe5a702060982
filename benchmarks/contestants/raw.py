"""The baseline: the loop of a PyTorch tutorial. Several ranks: DDP and DistributedSampler; one: neither."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

if TYPE_CHECKING:
    from workloads import Task


def run(task: Task) -> None:
    """Train; in a process group only when there are several ranks."""
    if task.world_size > 1:
        run_in_ddp(task)
    else:
        _train(task, task.model.to(task.device), sampler=None)


def run_on_tensors(task: Task) -> None:
    """Train on the same samples, held as a TensorDataset."""
    task.dataset = task.tensors
    run(task)


def run_on_our_backend(task: Task) -> None:
    """Train in torch's DDP, with `init_process_group("phalanx")`."""
    import phalanx.comm

    phalanx.comm.register_backend()
    run_in_ddp(task, "phalanx")


def run_in_ddp(task: Task, backend: str | None = None) -> None:
    """Train in a process group, also of one rank."""
    on_gpu = task.device == "cuda"
    dist.init_process_group(backend or ("nccl" if on_gpu else "gloo"))
    model = DistributedDataParallel(
        task.model.to(task.device), device_ids=[torch.cuda.current_device()] if on_gpu else None
    )
    _train(task, model, DistributedSampler(task.dataset))
    del model  # before its group, or the reducer may hang in tear-down
    dist.destroy_process_group()


def run_in_fsdp(task: Task) -> None:
    """Train with `fully_shard` around every block, as its tutorial does."""
    on_gpu = task.device == "cuda"
    dist.init_process_group("nccl" if on_gpu else "gloo")
    model = task.model.to(task.device)
    mesh = init_device_mesh(task.device, (dist.get_world_size(),))
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if task.workload.bf16 else None)
    for layer in model.gpt.layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    _train(task, model, DistributedSampler(task.dataset))
    dist.destroy_process_group()


def _train(task: Task, model: torch.nn.Module, sampler: DistributedSampler[object] | None) -> None:
    workload = task.workload
    loader = task.loader() if sampler is None else task.loader(sampler=sampler, shuffle=False)
    optimizer = task.optimizer()
    if workload.compile:
        model.compile()
    autocast = torch.autocast(task.device, torch.bfloat16) if workload.bf16 else nullcontext()
    model.train()
    for step, (inputs, targets) in enumerate(loader, start=1):
        inputs = inputs.to(task.device, non_blocking=True)
        targets = targets.to(task.device, non_blocking=True)
        with autocast:
            loss = model(inputs, targets)
        task.clock.note(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == task.steps:
            break
