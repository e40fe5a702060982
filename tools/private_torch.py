"""Every private torch API that Phalanx uses, and what the installed torch has changed of them.

`python tools/private_torch.py` prints the changes since the newest version in `tests/recorded/private_torch.json`;
`--write` adds the installed version, once each change was looked at. The functions are in `phalanx/torch_compat.py`;
methods that torch calls by a private name stay in their classes.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

FILE = Path(__file__).resolve().parents[1] / "tests" / "recorded" / "private_torch.json"
VERSION = ".".join(torch.__version__.split(".")[:2])
PRIVATE = {
    "torch:_C._current_graph_task_id": "gradient hooks: ring, horovod, compression, verify",
    "torch.autograd:Variable._execution_engine.queue_callback": "the end of backward: ring, horovod, compression",
    "torch:_foreach_copy_": "reducers, local-sgd, diloco",
    "torch:_foreach_add": "local-sgd, diloco",
    "torch:_foreach_add_": "local-sgd, diloco, large-batch optimizers",
    "torch:_foreach_addcmul_": "large-batch optimizers",
    "torch:_foreach_div": "large-batch optimizers",
    "torch:_foreach_div_": "averaged gradients: deepspeed",
    "torch:_foreach_mul_": "gradient clipping, local-sgd, large-batch optimizers",
    "torch:_foreach_sqrt": "large-batch optimizers",
    "torch:_foreach_sub": "local-sgd, diloco",
    "torch:_foreach_lerp_": "averaged weights (ema_decay)",
    "torch:_foreach_norm": "gradient clipping of sharded tensors",
    "torch:Tensor._base": "the losses of captured steps, offloaded activations",
    "torch:Tensor._is_view": "pipeline schedules that split the backward pass",
    "torch:Tensor._version": "ddp, offloaded activations",
    "torch:ops.aten.add.Tensor._schema": "selective activation checkpointing",
    "torch.utils._python_dispatch:TorchDispatchMode": "phalanx plan of a module",
    "torch.utils._pytree:tree_map": "pipeline, context and tensor parallelism, deepspeed, verify",
    "torch.distributed:_broadcast_coalesced": "the start of every run with several ranks",
    "torch.distributed.distributed_c10d:_get_default_group": "the start of every run with several ranks",
    "torch.distributed.distributed_c10d:_get_default_store": "joining a process group of the user's",
    "torch.distributed.distributed_c10d:_world.pg_map": "a second fit() in one process",
    "torch.distributed.distributed_c10d:_new_process_group_helper": "recovery in place",
    "torch._dynamo.callback:callback_handler.register_start_callback": "heartbeats and times while a rank compiles",
    "torch._dynamo.utils:counters": "the number of compiled graphs",
    "torch._dynamo.utils:get_compilation_metrics": "the reason of a recompilation",
    "torch._inductor.runtime.cache_dir_utils:default_cache_dir": "a compile cache that the next run finds",
    "torch._inductor.config:_micro_pipeline_tp": "tensor products that overlap with their communication",
    "torch.distributed._symmetric_memory:_group_name_to_workspace_tensor": "the same, and its memory",
    "torch._C._distributed_c10d:_create_work_from_future": 'the backend "phalanx"',
    "torch._C._distributed_c10d:AllgatherOptions": 'the backend "phalanx"',
    "torch._C._distributed_c10d:ProcessGroup._register_backend": 'the backend "phalanx"',
    "torch._C._distributed_c10d:ProcessGroup._set_default_backend": 'the backend "phalanx"',
    "torch._C._distributed_c10d:ProcessGroupGloo._set_sequence_number_for_group": 'the backend "phalanx"',
    "torch._C._distributed_c10d:ProcessGroupGloo._allgather_base": 'the backend "phalanx"',
    "torch._C._distributed_c10d:ProcessGroupGloo._reduce_scatter_base": 'the backend "phalanx"',
    "torch._C._distributed_c10d:Reducer._push_all_rebuilt_params": "gradient compression under ddp",
    "torch._C._distributed_c10d:Reducer._rebuild_buckets": "gradient compression under ddp",
    "torch._C._distributed_c10d:Reducer._remove_autograd_hooks": "recovery in place under ddp",
    "torch.nn.parallel:DistributedDataParallel._build_params_for_reducer": "gradient compression under ddp",
    "torch.nn.parallel:DistributedDataParallel._get_ddp_logging_data": "exposed communication of ddp",
    "torch._C._distributed_c10d:_dump_fr_trace": "the reports of hangs",
    "torch._C._distributed_c10d:ProcessGroup._get_backend": "the reports of hangs over nccl, recovery with nccl",
    "torch._C._distributed_c10d:Backend.Options._timeout": "the reports of hangs",
    "torch.distributed.distributed_c10d:_world.pg_names": "the reports of hangs",
    "torch.distributed.distributed_c10d:_world.pg_backend_config": "recovery in place with nccl",
    "torch.distributed:Work._source_rank": "the reports of hangs",
    "torch.distributed._functional_collectives:wait_tensor": "exposed communication of fsdp and model parallelism",
    "torch:ops.aten._scaled_dot_product_flash_attention_for_cpu": "context parallelism on CPUs",
    "torch:ops.aten._scaled_dot_product_flash_attention_for_cpu_backward": "context parallelism on CPUs",
    "torch:ops.aten._scaled_dot_product_flash_attention": "context parallelism on GPUs",
    "torch:ops.aten._scaled_dot_product_flash_attention_backward": "context parallelism on GPUs",
    "torch:ops._c10d_functional.all_reduce": "selective activation checkpointing",
    "torch.distributed.fsdp:FSDPModule._get_fsdp_state": "an epoch left between the micro-batches of a step: fsdp",
    "torch.distributed.fsdp._fully_shard._fsdp_param:nn": "lora_base = 'nf4' under fsdp, with torch before 2.13",
    "torch.nn:Module._call_impl": "compile",
    "torch.nn:Module._compiled_call_impl": "compile",
    "torch:_scaled_mm": "mixed_precision = 'fp8'",
    "torch._functorch.config:activation_memory_budget": "activation_checkpointing = 'budget 0.5'",
    "torch._dynamo.eval_frame:OptimizedModule": "models that are given as torch.compile(model)",
    "torch.nn.modules.batchnorm:_BatchNorm": "pipeline parallelism with batch norm",
    "torch.nn:BatchNorm2d._check_input_dim": "sync_batch_norm",
    "torch.nn.modules.dropout:_DropoutNd": "phalanx verify",
    "torch.distributed.tensor.parallel:RowwiseParallel._prepare_output_fn": "tensor parallelism with compile",
    "torch.distributed.tensor.parallel:ParallelStyle._apply": "tensor parallelism",
    "torch.utils.data._utils.collate:default_collate_fn_map": "batches of a plain data set on a GPU",
    "torch.utils.data._utils.worker:_worker_info": "iterable data sets with worker processes",
    "torch.utils.data.dataloader:_MultiProcessingDataLoaderIter._shutdown_workers": "stopping DataLoader workers",
    "torch.utils.data._utils.signal_handling:_error_if_any_worker_fails": "the loader of a worker that was killed",
    "torch.distributed.elastic.rendezvous.utils:_matches_machine_hostname": "several nodes",
    "torch.profiler:_ExperimentalConfig": "profile",
    "torch.autograd:_profiler_enabled": "the warning about a profiler around fit()",
    "torch.cuda.memory:_cuda_endAllocateToPool": "training after a capture (capture) that failed",
    "torch.cuda.memory:_cuda_releasePool": "training after a capture (capture) that failed",
    "torch.cuda.memory:_record_memory_history": "profile = 'memory' on CUDA",
    "torch.cuda.memory:_snapshot": "profile = 'memory' on CUDA",
    "torch._subclasses.fake_tensor:FakeTensorMode": "phalanx plan of a module",
}
"""`module:attribute` of each private API, and what does not work without it."""
OF_OBJECTS = {
    "_buffers": "pipeline parallelism, capture, an optimizer per part of a model",
    "_forward_hooks": "LoRA adapters",
    "_fsdp_param_group": "an epoch left between the micro-batches of a step: fsdp",
    "_iterator": "stopping DataLoader workers",
    "_modules": "pipeline parallelism",
    "_num_samples": "plain data sets of a user's DataLoader",
    "_opt_called": "schedulers of torch's",
    "_orig_mod": "models that are given as torch.compile(model)",
    "_parameters": "capture, an optimizer per part of a model",
    "_per_optimizer_states": "fp16",
    "_schedulers": "schedulers of torch's: ChainedScheduler",
    "_unsharded_param": "an epoch left between the micro-batches of a step: fsdp",
}
"""Private attributes that only instances have: tests/test_torch_compat.py calls what uses them."""


def described(value: Any) -> str:
    """Return how a private name may be used: its arguments, an operator's schema, or its type."""
    if hasattr(value, "_qualified_op_name"):  # an operator, with one schema per overload
        return str(getattr(value, value.overloads()[0])._schema)
    if inspect.isclass(value) or not callable(value):
        return value.__qualname__ if inspect.isclass(value) else type(value).__name__
    try:
        text = str(inspect.signature(value))
    except ValueError:  # of C++: its first line of documentation is the signature, where there is one
        text = (value.__doc__ or "").strip().partition("\n")[0] or "undocumented"
    if text.startswith("Please use"):  # 2.15 has a public name as well
        return "undocumented"
    # Annotations and addresses say nothing about a call; annotations alone changed in most versions.
    text = re.sub(r" at 0x[0-9a-f]+", "", text)
    return re.sub(r": [^,=()\[\]]*(\[[^\]]*\])*[^,=()]*(?=[,=)])| -> .*", "", text)


def is_of_cuda(name: str) -> bool:
    """Whether builds of torch without CUDA lack a name, or have an empty one."""
    return name.startswith("torch.cuda") or "NCCL" in name


def installed() -> dict[str, str]:
    """Return the private names of the installed torch, described; those that it lacks are left out."""
    found = {}
    for name in PRIVATE:
        if is_of_cuda(name) and torch.version.cuda is None:
            continue
        module, _, path = name.partition(":")
        try:
            found[name] = described(attrgetter(path)(import_module(module)))
        except (ImportError, AttributeError):
            continue
    return found


def missing() -> dict[str, str]:
    """Return the private names that the installed torch does not have, and what each breaks."""
    has = installed()
    expected = {name: breaks for name, breaks in PRIVATE.items() if torch.version.cuda or not is_of_cuda(name)}
    return {name: breaks for name, breaks in expected.items() if name not in has}


def read() -> dict[str, dict[str, str]]:
    """Return the versions that were looked at, oldest first, each with its described names."""
    versions: dict[str, dict[str, str]] = json.loads(FILE.read_text())
    return dict(sorted(versions.items(), key=lambda each: tuple(map(int, each[0].split(".")))))


def changes(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """Return a line for each name that differs; those of CUDA only if both builds have it."""
    names = [name for name in PRIVATE if before.get(name) != now.get(name)]
    names = [name for name in names if not is_of_cuda(name) or (name in before and name in now)]
    return [f"{name}: {before.get(name, 'absent')} -> {now.get(name, 'absent')}; for {PRIVATE[name]}" for name in names]


def main() -> None:
    """Print the changes, or note that they were looked at."""
    versions = read() if FILE.exists() else {}
    now = installed()
    if "--write" in sys.argv[1:]:
        FILE.write_text(json.dumps({**versions, VERSION: now}, indent=1, sort_keys=True) + "\n")
        return
    print("\n".join(changes(versions.get(VERSION) or list(versions.values())[-1], now)) or "nothing changed")


if __name__ == "__main__":
    main()
