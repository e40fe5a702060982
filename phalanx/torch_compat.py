"""Every private torch API that Phalanx uses, one function each: the page to read when a new torch breaks something.

`tools/private_torch.py` lists the names, with what breaks without each, and compares them with the versions of torch
that were looked at; `tests/test_torch_compat.py` calls each function. What a launcher does without torch is not here:
`launch/forkserver/preload.py` names the modules that it imports before it forks ranks.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any
from weakref import ReferenceType, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import AllgatherOptions, _create_work_from_future  # type: ignore[attr-defined]
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.errors import first_line

__all__ = ["AllgatherOptions", "TorchDispatchMode", "pytree"]

VERSION: tuple[int, int] = tuple(map(int, torch.__version__.split(".")[:2]))  # type: ignore[assignment]

COALESCED_BYTES = 250 << 20
"""Tensors are broadcast in groups of this size, as DDP does."""


# autograd

call_after_backward: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback
"""Calls a function when the running backward pass has computed all gradients."""


def backward_pass_id() -> int:
    """Return a number that identifies the running backward pass; -1 outside of one."""
    return int(torch._C._current_graph_task_id())


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was written in place."""
    return tensor._version


def base_of(tensor: Tensor) -> Tensor:
    """Return the tensor that a view shows, or the tensor itself."""
    return tensor if tensor._base is None else tensor._base


def is_view(tensor: Tensor) -> bool:
    """Whether a tensor shows part of another one's memory."""
    return tensor._is_view()


# operations on many tensors in one call, and the worker processes of loaders

foreach_add, foreach_add_, foreach_sub = torch._foreach_add, torch._foreach_add_, torch._foreach_sub
foreach_mul_, foreach_div_, foreach_lerp_ = torch._foreach_mul_, torch._foreach_div_, torch._foreach_lerp_
foreach_copy_, foreach_norm = torch._foreach_copy_, torch._foreach_norm
foreach_div, foreach_sqrt, foreach_addcmul_ = torch._foreach_div, torch._foreach_sqrt, torch._foreach_addcmul_
LoaderIterator = torch.utils.data.dataloader._MultiProcessingDataLoaderIter
raise_for_killed_worker = torch.utils.data._utils.signal_handling._error_if_any_worker_fails


def scaled_product(
    first: Tensor, second: Tensor, scales: tuple[Tensor, Tensor], dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """Return first @ second.t() + bias of 8-bit matrices with scales: one number, or one for each row [rows, 1].

    Sums over tokens, for gradients of weights in float32, are added up precisely; the others in the fast way.
    """
    second_scale = scales[1].t() if scales[1].ndim > 0 else scales[1]
    fast = dtype is not torch.float32
    return torch._scaled_mm(first, second.t(), scales[0], second_scale, bias=bias, out_dtype=dtype, use_fast_accum=fast)


# process groups

default_store = dist.distributed_c10d._get_default_store
"""Returns the store of the process group that the user's script initialised."""


def broadcast_coalesced(tensors: Sequence[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Broadcast tensors from the first rank of a group (all ranks where None), many in one message."""
    group = group if group is not None else dist.distributed_c10d._get_default_group()
    dist._broadcast_coalesced(group, list(tensors), COALESCED_BYTES, 0)


def is_alive(group: dist.ProcessGroup) -> bool:
    """Whether torch still knows a group: a script may have destroyed it and initialised another."""
    return group in dist.distributed_c10d._world.pg_map


def all_groups() -> list[Any]:
    """Return every process group of this process."""
    return list(dist.distributed_c10d._world.pg_map)


def around_new_groups(run: Callable[[Callable[[Any], Any], Any, str], Any]) -> None:
    """Let `run(make, store, backend)` make each process group, of new_group too; `make(store)` makes it."""
    original: Any = dist.distributed_c10d._new_process_group_helper

    @functools.wraps(original)
    def make(*args: Any, **kwargs: Any) -> Any:  # size, rank, ranks, backend, store, ...
        if "nccl" in str(args[3]) and kwargs.get("device_id") is None:  # connect now, in the call that can be aborted
            kwargs["device_id"] = torch.device("cuda", torch.cuda.current_device())
        return run(lambda used: original(*args[:4], used, *args[5:], **kwargs), args[4], str(args[3]))

    dist.distributed_c10d._new_process_group_helper = make


@contextlib.contextmanager
def new_communicators() -> Iterator[None]:
    """Give the process groups of the block their own communicators, not parts of the default group's.

    torch splits the default communicator if a device is bound to it. A split cannot be aborted, and in a group that was
    formed after an abort it crashes (SIGSEGV in torch 2.11 with NCCL 2.28).
    """
    if not dist.is_initialized():
        yield
        return
    group = dist.distributed_c10d._get_default_group()
    device, group.bound_device_id = group.bound_device_id, None
    try:
        yield
    finally:
        group.bound_device_id = device


def number_groups_from_zero() -> None:
    """Forget a default group that was not completed: its number is part of names that all ranks must share."""
    dist.distributed_c10d._world.group_count = 0


def load_nccl() -> None:
    """Load NCCL's kernels on this GPU, which its first communicator would do: one of this rank alone, and end that."""
    torch.cuda.nccl.init_rank(1, torch.cuda.nccl.unique_id(), 0)  # type: ignore[no-untyped-call]


def abort_nccl() -> None:
    """Abort the collectives of nccl's groups, where there are any; the groups stay, to be destroyed."""
    # Copied: another thread may be making a group.
    configs: list[tuple[Any, str]] = list(dist.distributed_c10d._world.pg_backend_config.items())
    cuda = torch.device("cuda")
    nccl = [group._get_backend(cuda) for group, config in reversed(configs) if "cuda:nccl" in str(config)]
    # At the same time: to end one communicator waits for all work of the GPU, also for that of the others. (A group of
    # NCCL's calls, as in torch's own abort, does not help: torch aborts each in another thread.)
    threads = [threading.Thread(target=backend.abort, name="phalanx-abort") for backend in nccl]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def attach_gloo(group: Any, gloo: Any) -> None:
    """Make gloo the CPU backend, and the default one, inside a process group written in Python.

    torch 2.14 also takes a subclass of its `Backend`, inside its own group. Up to 2.15 such a backend cannot say
    from which rank `recv` took a message, and `supports_coalescing` of one calls itself without end.
    """
    if VERSION < (2, 14):  # since then groups count by themselves, and the call warns
        gloo._set_sequence_number_for_group()
    kind = dist.ProcessGroup.BackendType.GLOO
    group._set_default_backend(kind)  # torch 2.15 asks each group with a backend for it, to record its calls
    group._register_backend(torch.device("cpu"), kind, gloo)


def gloo_all_gather(gloo: Any, output: Tensor, tensor: Tensor, options: Any = None) -> Any:
    """All-gather into one tensor by gloo."""
    return gloo._allgather_base(output, tensor, options or AllgatherOptions())


def gloo_reduce_scatter(gloo: Any, output: Tensor, tensor: Tensor, options: Any) -> Any:
    """Reduce-scatter from one tensor by gloo."""
    return gloo._reduce_scatter_base(output, tensor, options)


all_gather_flat: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""All-gather into one tensor; torch 2.13 renamed it and warns of the old name."""


def finished_work(tensors: list[Tensor]) -> Any:
    """Return the handle of a collective that is already done."""
    future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
    future.set_result(tensors)
    return _create_work_from_future(future)


def rebuild_buckets(reducer: Any) -> None:
    """Let DDP's reducer take its final buckets now instead of after the first backward pass."""
    reducer._push_all_rebuilt_params()
    reducer._rebuild_buckets()


def remove_ddp_hooks(ddp: Any) -> None:
    """Let DDP take no more gradients: the hooks on its parameters go, which otherwise live as long as it does."""
    ddp.reducer._remove_autograd_hooks()


def ddp_times(ddp: Any) -> tuple[float, float] | None:
    """Return the mean seconds in which DDP communicated and backward waited for it; None before torch timed a step."""
    logged = ddp._get_ddp_logging_data()
    busy, overlap = (float(logged.get(f"avg_backward_{name}_time", 0)) for name in ("comm", "compute_comm_overlap"))
    return (busy / 1e9, max(0.0, busy - overlap) / 1e9) if busy else None


def drop_unreduced(model: Any) -> None:
    """Drop the gradients that an FSDP module has of backward passes without a reduction."""
    group = model._get_fsdp_state()._fsdp_param_group
    for parameter in () if group is None else group.fsdp_params:
        if VERSION < (2, 15):  # the parameter's own gradient since then
            parameter.unsharded_accumulated_grad = None
        if hasattr(parameter, "_unsharded_param"):
            parameter._unsharded_param.grad = None


def let_fsdp_shard_bytes() -> None:
    """Let FSDP shard frozen integers: torch before 2.13 gives each shard a gradient first, and fails."""

    def parameter(data: Tensor, requires_grad: bool | None = None) -> nn.Parameter:
        return nn.Parameter(data, data.is_floating_point() if requires_grad is None else requires_grad)

    if VERSION < (2, 13):
        module: Any = import_module("torch.distributed.fsdp._fully_shard._fsdp_param")
        module.nn = SimpleNamespace(Module=nn.Module, Parameter=parameter)


def is_own_host(host: str) -> bool:
    """Whether a host name or address means this machine, by torchrun's rule."""
    from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname

    return bool(_matches_machine_hostname(host))


# flash attention, which returns the log-sum-exp that ring attention needs


def flash_cpu(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Return the output of flash attention on a CPU and its log-sum-exp."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal)
    return out, lse


def flash_cpu_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value."""
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    gradients: tuple[Tensor, Tensor, Tensor] = backward(gradient, query, key, value, out, lse, 0.0, causal)
    return gradients


def flash_cuda(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Return the output of flash attention on a GPU and its log-sum-exp."""
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal)
    return out, lse


def flash_cuda_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value."""
    unused = torch.empty(0, dtype=torch.int64, device=query.device)  # generator state: there is no dropout
    gradients: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_backward(
        *(tensor.contiguous() for tensor in (gradient, query, key, value, out, lse)),
        None,
        None,
        query.shape[2],
        key.shape[2],
        0.0,
        causal,
        unused,
        unused,
    )
    return gradients


# what torch records of collectives: its flight recorder, groups, timeouts, waits

Record = dict[str, Any]
"""One operation: `profiling_name` ("nccl:all_reduce"), group, numbers, sizes, when it was called, whether it ended."""

source_rank: Callable[[dist.Work], int] = dist.Work._source_rank
"""Returns which rank of its group sent the message that a receive from any rank has brought."""


def _recorders() -> list[Callable[[bool, bool, bool], bytes]]:
    """Return what reads the recorder: (entries, their frames, only those that have not ended) to a pickle."""
    c10d = import_module("torch._C._distributed_c10d")
    # torch 2.11 keeps those of nccl apart.
    return [getattr(c10d, name) for name in ("_dump_fr_trace", "_dump_nccl_trace") if hasattr(c10d, name)]


def flight_records() -> list[Record]:
    """Return the operations that the recorder has kept, the oldest first, with their Python frames."""
    entries = [entry for dump in _recorders() for entry in pickle.loads(dump(True, True, False)).get("entries", [])]
    by_operation = {(str(entry["process_group"]), entry["profiling_name"], entry["op_id"]): entry for entry in entries}
    return list(by_operation.values())


def unfinished_records(backend: str) -> list[Record]:
    """Return the operations of a backend that have not ended, without frames; also all of the messages in batches."""
    entries: list[Record] = pickle.loads(_recorders()[-1](True, False, True)).get("entries", [])
    return [entry for entry in entries if entry["profiling_name"].startswith(f"{backend}:") and not is_done(entry)]


def is_done(record: Mapping[str, Any]) -> bool:
    """Whether an operation has ended; of nccl's, torch's watchdog notes it a moment later."""
    return bool(record["retired"]) or record["state"] == "completed"


def recorded_progress() -> bytes:
    """Return what changes when operations are queued or end; this is quick, and asks CUDA nothing."""
    return _recorders()[-1](False, False, True)


def has_backend(name: str) -> bool:
    """Whether a process group of this process communicates by a backend."""
    return dist.is_initialized() and any(name in kind for kind, _ in list(dist.distributed_c10d._world.pg_map.values()))


def group_timeout(backend: str, group: dist.ProcessGroup | None = None) -> float | None:
    """Return the timeout of a group, or of the default one, in seconds; None where it has another backend."""
    if backend not in str(dist.get_backend(group)):
        return None
    process_group: Any = group if group is not None else dist.distributed_c10d._get_default_group()
    device = torch.device("cuda" if backend == "nccl" else "cpu")
    return float(process_group._get_backend(device).options._timeout.total_seconds())


def group_ranks() -> dict[str, list[int]]:
    """Return the global ranks of every process group of this process, by torch's name of the group."""
    names = dict(dist.distributed_c10d._world.pg_names)
    return {name: dist.get_process_group_ranks(group) for group, name in names.items()}


_COLLECTIVES = (
    "allreduce",
    "allreduce_coalesced",
    "allgather",
    "_allgather_base",
    "allgather_into_tensor_coalesced",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced",
    "alltoall",
    "alltoall_base",
    "broadcast",
    "send",
    "recv",
)


def around_waits(wrap: Callable[[Callable[..., Any]], Callable[..., Any]], *, in_graphs: bool) -> Callable[[], None]:
    """Wrap every place in which Python waits for communication; return what undoes it.

    `in_graphs`: also what torch.compile guards, so that a change would make it compile again.
    """
    places: list[tuple[Any, str]] = [(dist.Work, "wait"), (torch.cuda.Stream, "wait_event")]
    places += [(dist.ProcessGroup, name) for name in _COLLECTIVES if name in vars(dist.ProcessGroup)]
    if in_graphs:
        places.append((import_module("torch.distributed._functional_collectives"), "wait_tensor"))
    # Not by getattr, which returns a method of a C++ class without what makes it a method.
    originals = [(owner, name, vars(owner)[name]) for owner, name in places]
    for owner, name in places:
        setattr(owner, name, wrap(getattr(owner, name)))

    def undo() -> None:
        for owner, name, original in originals:
            setattr(owner, name, original)

    return undo


# modules, optimizers, loaders


def uncompiled(model: nn.Module) -> nn.Module:
    """Return the module that `torch.compile(model)` wraps, or the module itself."""
    inner: nn.Module = getattr(model, "_orig_mod", model)
    return inner


def forward_hooks(model: nn.Module) -> dict[int, Callable[..., Any]]:
    """Return the forward hooks of a module, which may be removed by key."""
    return model._forward_hooks


def direct_buffers(model: nn.Module) -> dict[str, Tensor | None]:
    """Return the buffers of a module without those of its children, which may be replaced by name."""
    return model._buffers


def direct_parameters(model: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the parameters of a module without those of its children."""
    return model._parameters


def direct_modules(model: nn.Module) -> dict[str, nn.Module | None]:
    """Return the children of a module, which may be removed by name."""
    return model._modules


def is_batch_norm(module: nn.Module) -> bool:
    """Whether a module is a batch norm of any dimension."""
    return isinstance(module, torch.nn.modules.batchnorm._BatchNorm)


def is_dropout(module: nn.Module) -> bool:
    """Whether a module is a dropout of any dimension."""
    return isinstance(module, torch.nn.modules.dropout._DropoutNd)


def found_inf(scaler: torch.amp.GradScaler, optimizer_id: int) -> dict[torch.device, Tensor]:
    """Return the overflow flags that a scaler found for an optimizer (by `id`), per device."""
    flags: dict[torch.device, Tensor] = scaler._per_optimizer_states[optimizer_id]["found_inf_per_device"]
    return flags


def forget_found_inf(scaler: torch.amp.GradScaler) -> None:
    """Drop what a scaler has found for the step under way, without an update of its scale."""
    scaler._per_optimizer_states.clear()


SCHEDULED_MARK = "_wrapped_by_lr_sched"
"""The attribute by which torch's schedulers know that they have wrapped an optimizer's step."""


def chained_schedulers(scheduler: torch.optim.lr_scheduler.ChainedScheduler) -> Sequence[Any]:
    """Return the schedulers that a chain steps together."""
    return scheduler._schedulers


def note_step(optimizer: torch.optim.Optimizer) -> None:
    """Mark an optimizer as stepped for torch's schedulers, which warn otherwise."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def shutdown_workers(loader: Any) -> None:
    """Stop the worker processes of a DataLoader now, instead of when it is garbage collected."""
    running = getattr(loader, "_iterator", None)
    if running is not None:
        running._shutdown_workers()


def hide_worker_info() -> None:
    """Let `get_worker_info()` return None in this worker process."""
    torch.utils.data._utils.worker._worker_info = None


def collate_with(stack: Callable[[list[Tensor]], Tensor], samples: list[Any]) -> Any:
    """Return what default_collate makes of samples, with tensors stacked by another function."""
    table = {**torch.utils.data._utils.collate.default_collate_fn_map, Tensor: lambda batch, **_: stack(batch)}
    return torch.utils.data._utils.collate.collate(samples, collate_fn_map=table)


def draws_each_once(sampler: torch.utils.data.RandomSampler) -> bool:
    """Whether a RandomSampler is a plain permutation of its data set."""
    return not sampler.replacement and sampler._num_samples is None


def argument_names(operator: Any) -> list[str]:
    """Return the names of an operator's arguments, in order."""
    return [argument.name for argument in operator._schema.arguments]


def functional_collectives() -> Any:
    """Return the namespace of the collectives that torch.compile and DTensor call."""
    return torch.ops._c10d_functional


# tensors without memory, devices and profiles


def fake_mode() -> Any:
    """Return a mode in which tensors have shapes, dtypes and devices, but no memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def cuda_runtime() -> Any:
    """Return the CUDA runtime's functions, to page-lock memory that torch has not allocated."""
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def end_failed_capture(device: torch.device, pool: Any) -> None:
    """Return allocator and generator to their state outside of a capture that CUDA has made invalid.

    torch ends the capture first, which raises, and leaves both as they are within one: dropout would raise.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    with contextlib.suppress(RuntimeError):  # it was ended: the capture was valid up to the end
        torch._C._cuda_endAllocateToPool(index, pool)
        torch._C._cuda_releasePool(index, pool)
    generator: Any = torch.cuda.default_generators[index]
    generator.graphsafe_set_state(generator.clone_state())


def is_profiling() -> bool:
    """Whether a profiler of torch records this thread."""
    return bool(torch.autograd._profiler_enabled())


def profiler_config(*, all_threads: bool) -> Any:
    """Return settings of the profiler: `all_threads` records those that communicate, too, but no allocations."""
    kind = torch.profiler._ExperimentalConfig
    try:
        return kind(profile_all_threads=all_threads, trace_only=True)  # no Python object per event
    except TypeError:  # before torch 2.13
        return kind(profile_all_threads=all_threads)


def record_allocations(entries: int | None) -> None:
    """Record the last allocations on CUDA devices, at most a number, with their Python stacks; None: stop."""
    if entries is None:
        torch.cuda.memory._record_memory_history(enabled=None)
    else:
        torch.cuda.memory._record_memory_history(max_entries=entries, stacks="python")


def allocations() -> dict[str, Any]:
    """Return what `record_allocations` has recorded: the segments of memory, and the history of each device."""
    snapshot: dict[str, Any] = torch.cuda.memory._snapshot()
    return snapshot


# torch.compile: when it compiles, how many graphs, why again, where it keeps them
# (nothing here imports torch._dynamo before it is called: that takes two seconds)


@functools.cache
def has_triton() -> bool:
    """Whether Triton is installed, in which kernels for GPUs are written; torch.compile needs it for CUDA."""
    return find_spec("triton") is not None


def around_compiles(begin: Callable[[], None], end: Callable[[], None]) -> Callable[[], None]:
    """Call `begin` and `end` around each compilation of torch.compile from now on; return what ends that.

    Nested compilations count once. They are called in the thread that compiles: for a backward pass one of autograd's.
    """
    handler = import_module("torch._dynamo.callback").callback_handler
    first = handler.register_start_callback(lambda *_: begin())
    last = handler.register_end_callback(lambda *_: end())

    def remove() -> None:
        if first in handler.start_callbacks:  # torch._dynamo.reset() removes all of them
            handler.remove_start_callback(first)
            handler.remove_end_callback(last)

    return remove


def is_compiler_loaded() -> bool:
    """Whether something has imported what torch.compile runs on; before that nothing can have been compiled."""
    return "torch._dynamo" in sys.modules


def compiled_graphs() -> int:
    """Return how many graphs torch.compile has made in this process."""
    return int(import_module("torch._dynamo.utils").counters["stats"]["unique_graphs"])


def recompile_reason(since: float) -> str:
    """Return in one line why torch.compile has last compiled something again; empty where it does not say.

    `since`: only of compilations that ended after this time, in seconds since the epoch.
    """
    for compilation in reversed(import_module("torch._dynamo.utils").get_compilation_metrics()):
        reason = getattr(compilation, "recompile_reason", None)
        if reason and (compilation.end_time_us or 0) >= since * 1e6:
            return first_line(str(reason))
    return ""


def default_compile_cache() -> str:
    """Return where torch keeps compiled code unless a variable says otherwise; it writes this into the variable."""
    return str(import_module("torch._inductor.runtime.cache_dir_utils").default_cache_dir())


def keep_activations(share: float) -> Callable[[], None]:
    """Let compiled code keep this share of its activations for backward from now on; return what undoes it."""
    config: Any = import_module("torch._functorch.config")
    before = config.activation_memory_budget
    config.activation_memory_budget = share
    return functools.partial(setattr, config, "activation_memory_budget", before)


_SYMMETRIC: dict[str, ReferenceType[Any]] = {}
"""The groups, by name, whose GPUs read each other's memory: torch keeps the first store of a name for good."""


def share_memory(group: Any) -> None:
    """Let the GPUs of a process group read each other's memory; all its ranks call this. RuntimeError where not."""
    name: str = group.group_name
    if _SYMMETRIC.setdefault(name, ref(group))() is not group:
        raise RuntimeError("a process group of this name was used before")
    memory: Any = import_module("torch.distributed._symmetric_memory")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # "no need to call it": the pass of torch 2.13 still asks for it
        memory.enable_symm_mem_for_group(name)
    memory.get_symm_mem_workspace(name, min_size=1)


def overlap_products(group: Any) -> Callable[[], None]:
    """Let compiled products overlap with the gathers and scatters of a group; return what undoes it.

    The group's memory must be shared. What is compiled while this holds keeps overlapping.
    """
    config: Any = import_module("torch._inductor.config")
    memory: Any = import_module("torch.distributed._symmetric_memory")
    before, config._micro_pipeline_tp = config._micro_pipeline_tp, True

    def undo() -> None:
        config._micro_pipeline_tp = before
        memory._group_name_to_workspace_tensor.pop(group.group_name, None)  # as large as the largest gather

    return undo


def set_compiled_call(model: nn.Module, compiled: Callable[..., Any] | None) -> None:
    """Let calls of a module run a compiled function; None: as written."""
    model._compiled_call_impl = compiled


def uncompiled_call(model: nn.Module) -> Callable[..., Any]:
    """Return a module's call with its hooks, not compiled."""
    return model._call_impl


def uncompiled_name(name: str) -> str:
    """Return the name that a parameter has without `torch.compile` around the model or parts of it."""
    return name.replace("_orig_mod.", "")
