"""What torch.compile says of its work: when it compiles, how many graphs, why again, where it keeps them.

`tools/private_torch.py` lists the private names. Nothing here imports torch._dynamo before it is called: that takes
two seconds.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from weakref import ReferenceType, ref

from phalanx.errors import first_line

if TYPE_CHECKING:
    from torch import nn


@cache
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


def is_imported() -> bool:
    """Whether something has imported what torch.compile runs on; before that nothing can have been compiled."""
    return "torch._dynamo" in sys.modules


def compiled_graphs() -> int:
    """Return how many graphs torch.compile has made in this process."""
    return int(import_module("torch._dynamo.utils").counters["stats"]["unique_graphs"])


def recompile_reason(since: float) -> str:
    """Return in one line why torch.compile has last compiled something again; empty where it does not say.

    `since`: only of compilations that ended after this time, in seconds since the epoch.
    """
    for each in reversed(import_module("torch._dynamo.utils").get_compilation_metrics()):
        reason = getattr(each, "recompile_reason", None)
        if reason and (each.end_time_us or 0) >= since * 1e6:
            return first_line(str(reason))
    return ""


def own_compile_cache() -> str:
    """Return where torch keeps compiled code unless a variable says otherwise; it writes this into the variable."""
    return str(import_module("torch._inductor.runtime.cache_dir_utils").default_cache_dir())


def keep_activations(share: float) -> Callable[[], None]:
    """Let compiled code keep this share of its activations for backward from now on; return what undoes it."""
    config: Any = import_module("torch._functorch.config")
    before = config.activation_memory_budget
    config.activation_memory_budget = share
    return partial(setattr, config, "activation_memory_budget", before)


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
